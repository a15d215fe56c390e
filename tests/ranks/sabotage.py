"""Workload factories that break something in the rank they run in, before it loads data or builds its model.

A spec names one as `sabotage:decoder`, with this folder in `import_paths`; all else in the rank is real.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, FSDPModule, ShardingStrategy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from trials import attention, data, rank, wrap
from trials.data import loader
from trials.engines import base, ddp, fsdp1, fsdp2
from trials.models import DecoderWorkload
from trials.step import Stepper

FULL_QUEUE_BATCH_S = 0.1
"""For one batch of a slow loader: more than a micro-step of the tiny model takes."""


def decoder(knob: str, only_rank: int | None = None, **model: Any) -> DecoderWorkload:
    """The built-in decoder, on ranks where `knob` does not do what it should."""
    if only_rank in (None, int(os.environ["RANK"])):
        SABOTAGES[knob]()
    return DecoderWorkload(**model)


class HungryDecoder(DecoderWorkload):
    """On one rank each forward also takes `extra_mib` of memory, in the real allocator."""

    def __init__(self, rank: int, extra_mib: int, **model: Any) -> None:
        super().__init__(**model)
        self._extra = extra_mib * 2**20 // 4 if int(os.environ["RANK"]) == rank else 0

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        return super().loss(model, tokens) + torch.zeros(self._extra).sum()


def _half_micro_batches() -> None:
    whole = data.MicroBatchSampler.__iter__
    data.MicroBatchSampler.__iter__ = lambda self: (indices[::2] for indices in whole(self))


def _one_micro_step_only() -> None:
    step = Stepper.step
    Stepper.step = lambda self, *_: step(self, 1)


def _sync_is_never_held_back() -> None:
    FSDPModule.set_requires_gradient_sync = lambda *_, **__: None


def _sync_is_held_back() -> None:
    sync = FSDPModule.set_requires_gradient_sync
    last: list[FSDPModule] = []
    FSDPModule.set_is_last_backward = lambda self, is_last: last.append(self) if is_last else sync(self, False)


def _reshard_is_ignored() -> None:
    _change_fully_shard(lambda kwargs: {**kwargs, "reshard_after_forward": not kwargs["reshard_after_forward"]})


def _reshard_differs_between_units() -> None:
    flips = iter([True] + [False] * 100)
    _change_fully_shard(
        lambda kwargs: {**kwargs, "reshard_after_forward": next(flips) != kwargs["reshard_after_forward"]}
    )


def _change_fully_shard(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    shard = fsdp2.fully_shard
    fsdp2.fully_shard = lambda module, **kwargs: shard(
        module, **(change(kwargs) if "reshard_after_forward" in kwargs else kwargs)
    )


def _one_block_a_unit() -> None:
    base.group_blocks = lambda sizes, _cap: [1] * len(sizes)


def _no_checkpointing() -> None:
    wrap.checkpoint_wrapper = lambda module, **_: module


def _everything_is_recomputed() -> None:
    wrapper = wrap.checkpoint_wrapper
    wrap.checkpoint_wrapper = lambda module, **_: wrapper(module)


def _checkpointing_misses_a_block() -> None:
    wrapper, calls = wrap.checkpoint_wrapper, iter(range(100))
    wrap.checkpoint_wrapper = lambda module, **kwargs: module if next(calls) == 1 else wrapper(module, **kwargs)


def _change_loader(**changes: Any) -> None:
    loader.DataLoader = lambda *args, **kwargs: DataLoader(*args, **{**kwargs, **changes})


def _change_fsdp1(**changes: Any) -> None:
    sharded = fsdp1.FullyShardedDataParallel

    class Changed(sharded):  # type: ignore[misc, valid-type]
        def __init__(self, module: nn.Module, **kwargs: Any) -> None:
            super().__init__(module, **{**kwargs, **changes})

    fsdp1.FullyShardedDataParallel = Changed


def _no_sync_is_ignored() -> None:
    fsdp1.FullyShardedDataParallel.no_sync = lambda _: nullcontext()


def _fsdp1_is_not_applied() -> None:
    fsdp1._Wrapper.__call__ = lambda _self, module: module


def _change_ddp(**changes: Any) -> None:
    whole = ddp.DistributedDataParallel

    class Changed(whole):  # type: ignore[misc, valid-type]
        def __init__(self, module: nn.Module, **kwargs: Any) -> None:
            super().__init__(module, **{**kwargs, **changes})

    ddp.DistributedDataParallel = Changed


def _ddp_is_not_applied() -> None:
    class Nothing(ddp.DistributedDataParallel):
        def __new__(cls, module: nn.Module, **_: Any) -> nn.Module:  # type: ignore[misc]
            return module

    ddp.DistributedDataParallel = Nothing


def _optimizer_is_not_fused() -> None:
    make = rank.make_optimizer
    rank.make_optimizer = lambda model, options, _fused: make(model, options)


def _attention_is_torchs_choice() -> None:
    attention.only = lambda _backend: nullcontext()


def _nothing_is_compiled() -> None:
    nn.Module.compile = lambda _self: None


def _no_prefetch() -> None:
    fsdp2._prefetch = lambda *_: None


def _no_replicas() -> None:
    base.Plan.sharding_mesh = property(lambda plan: plan.mesh)


def _reduced_in_fp32() -> None:
    base.Plan.gradient_dtype = property(lambda _: torch.float32)


def _slow_collate(samples: list[Tensor]) -> Tensor:
    time.sleep(0.3)
    return torch.stack(samples)


def _collate_slowly(samples: list[Tensor]) -> Tensor:
    time.sleep(FULL_QUEUE_BATCH_S)
    return torch.stack(samples)


def _slow_loader_behind_a_full_queue() -> None:
    """The loader gets the time to fill its queue just before that is drained."""
    _change_loader(collate_fn=_collate_slowly)
    drain, filled = Stepper.drain, []

    def fill_and_drain(self: Stepper, num_batches: int, *rest: Any) -> bool:
        if not filled:
            filled.append(time.sleep(1.5 * num_batches * FULL_QUEUE_BATCH_S))
        return drain(self, num_batches, *rest)

    Stepper.drain = fill_and_drain


class _NoHostReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits for a value inside a micro-step"
        return func(*args, **(kwargs or {}))


def _host_reads_are_refused() -> None:
    """In micro-steps; the update of a CPU optimizer reads its own counter, which lives on the host everywhere."""
    micro_step = fsdp2.Fsdp2.micro_step

    @contextmanager
    def watched(self: fsdp2.Fsdp2, **kwargs: bool) -> Iterator[None]:
        with micro_step(self, **kwargs), _NoHostReads():
            yield

    fsdp2.Fsdp2.micro_step = watched


def _a_host_read_is_made() -> None:
    _host_reads_are_refused()
    loss = DecoderWorkload.loss

    def read(self: DecoderWorkload, model: nn.Module, tokens: Tensor) -> Tensor:
        found = loss(self, model, tokens)
        found.item()
        return found

    DecoderWorkload.loss = read


def _slow_compute() -> None:
    loss = DecoderWorkload.loss
    weights = torch.ones(1024, 1024)

    def slow(self: DecoderWorkload, model: nn.Module, tokens: Tensor) -> Tensor:
        for _ in range(8):
            weights @ weights
        return loss(self, model, tokens)

    DecoderWorkload.loss = slow


def _no_fsdp() -> None:
    fsdp2.fully_shard = lambda module, **_: module


SABOTAGES: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "micro_batch_size": _half_micro_batches,
    "grad_accum_steps": _one_micro_step_only,
    "sync_never_held_back": _sync_is_never_held_back,
    "sync_held_back": _sync_is_held_back,
    "reshard_ignored": _reshard_is_ignored,
    "reshard_mixed": _reshard_differs_between_units,
    "grouping": _one_block_a_unit,
    "no_checkpointing": _no_checkpointing,
    "no_selective": _everything_is_recomputed,
    "block_missed": _checkpointing_misses_a_block,
    "num_workers": lambda: _change_loader(num_workers=1),
    "prefetch_factor": lambda: _change_loader(prefetch_factor=3),
    "slow_loader": lambda: _change_loader(collate_fn=_slow_collate),
    "slow_loader_of_one_process": lambda: _change_loader(collate_fn=_collate_slowly),
    "full_queue": _slow_loader_behind_a_full_queue,
    "host_reads_refused": _host_reads_are_refused,
    "host_read": _a_host_read_is_made,
    "slow_compute": _slow_compute,
    "engine": _no_fsdp,
    "fsdp1_sharding": lambda: _change_fsdp1(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "fsdp1_limit_all_gathers": lambda: _change_fsdp1(limit_all_gathers=True),
    "fsdp1_backward_prefetch": lambda: _change_fsdp1(backward_prefetch=BackwardPrefetch.BACKWARD_PRE),
    "fsdp1_forward_prefetch": lambda: _change_fsdp1(forward_prefetch=False),
    "fsdp1_no_sync": _no_sync_is_ignored,
    "ddp_engine": _ddp_is_not_applied,
    "ddp_bucket_cap": lambda: _change_ddp(bucket_cap_mb=25),
    "fused_optimizer": _optimizer_is_not_fused,
    "attention_backend": _attention_is_torchs_choice,
    "compile": _nothing_is_compiled,
    "prefetch": _no_prefetch,
    "replicate_degree": _no_replicas,
    "reduce_dtype": _reduced_in_fp32,
    "fsdp1_engine": _fsdp1_is_not_applied,
}
