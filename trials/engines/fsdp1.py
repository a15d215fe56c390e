"""FSDP1: torch's `FullyShardedDataParallel`, one unit for each group of consecutive blocks, the rest in the root's.

A unit of several blocks needs a module of its own around them, which changes the names of their parameters, and so of
checkpoints; FSDP2 does without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp._flat_param import HandleShardingStrategy

from trials.engines.base import MIB, Plan, one_of
from trials.initial import Materialiser, fill_buffers
from trials.outcome import Outcome, TrialError
from trials.record import ENGINE_KNOBS, unit_cap_mb

PREFETCH = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}
_PREFETCH_NAMES = {value: name for name, value in PREFETCH.items()}
STRATEGIES = {True: ShardingStrategy.FULL_SHARD, False: ShardingStrategy.SHARD_GRAD_OP}
HYBRID_STRATEGIES = {True: ShardingStrategy.HYBRID_SHARD, False: ShardingStrategy._HYBRID_SHARD_ZERO2}
"""By reshard_after_forward, where the model is replicated."""
RESHARDS = {
    HandleShardingStrategy.FULL_SHARD: True,
    HandleShardingStrategy.HYBRID_SHARD: True,
    HandleShardingStrategy.SHARD_GRAD_OP: False,
    HandleShardingStrategy._HYBRID_SHARD_ZERO2: False,
    HandleShardingStrategy.NO_SHARD: False,  # what torch makes of either on one rank
}

FSDP2_KNOBS = tuple(name for name, knob in ENGINE_KNOBS.items() if "fsdp1" not in knob.engines)


class Fsdp1:
    """Each unit is materialised, initialised and sharded before the next: only one is ever whole on a rank."""

    def __init__(self, plan: Plan) -> None:
        self.blocks = plan.blocks
        fill_buffers(plan.model, plan.workload, plan.device)  # while the model is still as its author knows it
        materialise = Materialiser(plan.model, plan.workload, plan.device, plan.seed)
        wrap = _Wrapper(plan)
        groups = plan.units
        grouped = max(len(blocks) for blocks in groups) > 1
        if grouped and not getattr(plan.workload, "blocks_take_the_same", True):
            raise TrialError(
                Outcome.INVALID,
                "fsdp1 with several blocks a unit hands each of them the same arguments, and this model's blocks take "
                "different ones (full and sliding attention in turn). Use fsdp2, or one block a unit",
            )
        units: list[nn.Module] = []
        for blocks in groups:
            unit = BlockGroup(blocks) if grouped else blocks[0]
            materialise(unit)
            units.append(wrap(unit))
        _put_back(plan, materialise.names, units)
        materialise(plan.model)
        self.module: nn.Module = wrap(plan.model)
        self._probe = _unit_of(self.module, self.blocks[0])

    @contextmanager
    def micro_step(self, *, last: bool, sync: bool) -> Iterator[None]:
        held_back = not (last or sync) and isinstance(self.module, FullyShardedDataParallel)
        with FullyShardedDataParallel.no_sync(self.module) if held_back else nullcontext():  # type: ignore[arg-type]
            yield

    def reduces_gradients(self) -> bool:
        return self._probe is None or self._probe._sync_gradients

    def read(self) -> dict[str, Any]:
        return read(self.module, self.blocks)


def read(module: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, Any]:
    """The knobs that sharding decides, from the live module and its blocks; `engine` is `none` if it is another's."""
    units = list(dict.fromkeys(_unit_of(module, block) for block in blocks))
    if not isinstance(module, FullyShardedDataParallel) or None in units or module in units:
        return {"engine": "none"}
    found = [unit for unit in units if unit is not None and unit._handle is not None]
    everywhere = [module, *found]
    members = [sum(block in set(unit.modules()) for block in blocks) for unit in found]
    return {
        "engine": "fsdp1",
        "reshard_after_forward": one_of({RESHARDS.get(unit._handle._sharding_strategy, "mixed") for unit in found}),
        "blocks_per_unit": max(members),
        "bucket_cap_mb": unit_cap_mb([_unsharded_mib(unit) for unit in found], [1] * len(found)),
        "replicate_degree": one_of({_replicate_degree(unit) for unit in found}),
        "reduce_dtype": one_of(
            {"bf16" if unit.mixed_precision.reduce_dtype is torch.bfloat16 else "fp32" for unit in found}
        ),
        **dict.fromkeys(FSDP2_KNOBS),
        "limit_all_gathers": one_of({unit.limit_all_gathers for unit in everywhere}),
        "backward_prefetch": one_of({_PREFETCH_NAMES[unit.backward_prefetch] for unit in everywhere}),
        "forward_prefetch": one_of({unit.forward_prefetch for unit in everywhere}),
    }


class BlockGroup(nn.Module):
    """Consecutive blocks in one module, since FSDP1 gathers and frees at the borders of a module's forward."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden, *args, **kwargs)
            if not isinstance(hidden, Tensor):
                raise TrialError(
                    Outcome.INVALID,
                    "fsdp1 with several blocks a unit: a block must return one tensor, which the next takes first; "
                    f"{type(block).__name__} returned {type(hidden).__name__}. Use fsdp2, or one block a unit",
                )
        return hidden


class _Wrapper:
    """FSDP1 around one module after the other, all with the same options."""

    def __init__(self, plan: Plan) -> None:
        knobs, mesh = plan.knobs, plan.sharding_mesh
        assert knobs.backward_prefetch is not None
        strategies = STRATEGIES if mesh.ndim == 1 else HYBRID_STRATEGIES
        precision = MixedPrecision(
            param_dtype=plan.param_dtype,
            reduce_dtype=plan.gradient_dtype,
            cast_forward_inputs=True,  # at every unit, as FSDP2 does
        )
        self._options: dict[str, Any] = {
            "sharding_strategy": strategies[bool(knobs.reshard_after_forward)],
            "mixed_precision": precision if plan.precision == "bf16" else None,
            "device_id": plan.device,
            "use_orig_params": True,
            "limit_all_gathers": knobs.limit_all_gathers,
            "backward_prefetch": PREFETCH[knobs.backward_prefetch],
            "forward_prefetch": knobs.forward_prefetch,
            # The replicas' groups are torch's to make; a plain mesh has its group already.
            **({"process_group": mesh.get_group()} if mesh.ndim == 1 else {"device_mesh": mesh}),
        }

    def __call__(self, module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(module, **self._options)


def _put_back(plan: Plan, names: dict[nn.Module, str], units: Sequence[nn.Module]) -> None:
    """Puts the units where their blocks were in the model.

    Raises:
        TrialError: outcome `invalid`; blocks that shall share a unit are not all there is in one list.
    """
    paths = [names[block] for block in plan.blocks]
    if len(units) == len(paths):
        for path, unit in zip(paths, units, strict=True):
            plan.model.set_submodule(path, unit)
        return
    parents = {path.rpartition(".")[0] for path in paths}
    holder = plan.model.get_submodule(parents.pop())
    if parents or not isinstance(holder, nn.ModuleList) or len(holder) != len(paths):
        raise TrialError(
            Outcome.INVALID,
            f"fsdp1 with {plan.knobs.blocks_per_unit} blocks a unit needs the blocks to be all of one nn.ModuleList; "
            "use fsdp2, or one block a unit",
        )
    holder._modules.clear()
    holder.extend(units)


def _unit_of(root: nn.Module, block: nn.Module) -> Any:
    """The innermost FSDP1 module around `block`; None if there is none."""
    around = [unit for unit in FullyShardedDataParallel.fsdp_modules(root) if any(m is block for m in unit.modules())]
    return around[-1] if around else None


def _replicate_degree(unit: FullyShardedDataParallel) -> int:
    return dist.get_world_size(unit._inter_node_pg) if unit.sharding_strategy in HYBRID_STRATEGIES.values() else 1


def _unsharded_mib(unit: FullyShardedDataParallel) -> float:
    """Of the weights that one all-gather brings, without FSDP1's alignment padding."""
    handle = unit._handle
    assert handle is not None
    assert handle._fwd_bwd_param_dtype is not None
    return sum(handle.flat_param._numels) * handle._fwd_bwd_param_dtype.itemsize / MIB
