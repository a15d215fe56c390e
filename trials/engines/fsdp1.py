"""FSDP1: torch's `FullyShardedDataParallel`, one unit for each group of consecutive blocks, the rest in the root's.

A unit of several blocks needs a module of its own around them, which changes the names of their parameters, and so of
checkpoints; FSDP2 does without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp._flat_param import HandleShardingStrategy

from trials.engines.base import MIB, Plan, one_of
from trials.initial import full_value
from trials.outcome import Outcome, TrialError
from trials.record import group_blocks, unit_cap_mb

PREFETCH = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}
_PREFETCH_NAMES = {value: name for name, value in PREFETCH.items()}
RESHARDS = {
    HandleShardingStrategy.FULL_SHARD: True,
    HandleShardingStrategy.SHARD_GRAD_OP: False,
    HandleShardingStrategy.NO_SHARD: False,  # what torch makes of either on one rank
}


class Fsdp1:
    """Each unit is materialised, initialised and sharded before the next: only one is ever whole on a rank."""

    def __init__(self, plan: Plan) -> None:
        self.blocks = plan.blocks
        _fill_buffers(plan)  # while the model is still as its author knows it
        materialise = _Materialiser(plan)
        sizes = group_blocks(plan.block_mib, plan.knobs.bucket_cap_mb)
        if max(sizes) > 1 and not getattr(plan.workload, "blocks_take_the_same", True):
            raise TrialError(
                Outcome.INVALID,
                "fsdp1 with several blocks a unit hands each of them the same arguments, and this model's blocks take "
                "different ones (full and sliding attention in turn). Use fsdp2, or one block a unit",
            )
        units: list[nn.Module] = []
        first = 0
        for size in sizes:
            blocks = plan.blocks[first : first + size]
            unit = BlockGroup(blocks) if max(sizes) > 1 else blocks[0]
            materialise(unit)
            units.append(_wrap(unit, plan))
            first += size
        _put_back(plan, materialise.names, sizes, units)
        materialise(plan.model)
        self.module: nn.Module = _wrap(plan.model, plan)
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


def _wrap(module: nn.Module, plan: Plan) -> FullyShardedDataParallel:
    knobs = plan.knobs
    assert knobs.backward_prefetch is not None
    precision = MixedPrecision(
        param_dtype=plan.param_dtype,
        reduce_dtype=plan.gradient_dtype,
        cast_forward_inputs=True,  # at every unit, as FSDP2 does
    )
    return FullyShardedDataParallel(
        module,
        process_group=plan.mesh.get_group(),
        sharding_strategy=ShardingStrategy.FULL_SHARD
        if knobs.reshard_after_forward
        else ShardingStrategy.SHARD_GRAD_OP,
        mixed_precision=precision if plan.precision == "bf16" else None,
        device_id=plan.device,
        use_orig_params=True,
        limit_all_gathers=bool(knobs.limit_all_gathers),
        backward_prefetch=PREFETCH[knobs.backward_prefetch],
        forward_prefetch=bool(knobs.forward_prefetch),
    )


class _Materialiser:
    """Moves parameters from `meta` to the device, with their first values; tied ones stay tied."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.names = {module: name for name, module in plan.model.named_modules()}
        self._done: set[nn.Parameter] = set()

    def __call__(self, unit: nn.Module) -> None:
        """Of all modules in `unit`.

        Raises:
            TrialError: outcome `invalid`; a parameter is tied to one of another unit, which FSDP1 cannot have.
        """
        made: dict[nn.Parameter, nn.Parameter] = {}
        for module in unit.modules():
            for leaf, parameter in module._parameters.items():
                if parameter is None or not parameter.is_meta:
                    continue
                name = f"{self.names[module]}.{leaf}".lstrip(".")
                if parameter in self._done:
                    raise TrialError(
                        Outcome.INVALID, f"fsdp1: {name} is tied to a parameter of another FSDP unit; use fsdp2"
                    )
                if parameter not in made:
                    made[parameter] = self._value(name, parameter)
                module._parameters[leaf] = made[parameter]
        self._done |= made.keys()

    def _value(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        full = full_value(self._plan.workload, self._plan.seed, name, parameter.shape)
        return nn.Parameter(full.to(self._plan.device, parameter.dtype), requires_grad=parameter.requires_grad)


def _fill_buffers(plan: Plan) -> None:
    for module in plan.model.modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[leaf] = torch.empty_like(buffer, device=plan.device)
    with torch.no_grad():
        plan.workload.init_buffers(plan.model)


def _put_back(plan: Plan, names: dict[nn.Module, str], sizes: Sequence[int], units: Sequence[nn.Module]) -> None:
    """Puts the units where their blocks were in the model.

    Raises:
        TrialError: outcome `invalid`; blocks that shall share a unit are not all there is in one list.
    """
    paths = [names[block] for block in plan.blocks]
    if max(sizes) == 1:
        for path, unit in zip(paths, units, strict=True):
            parent, _, leaf = path.rpartition(".")
            setattr(plan.model.get_submodule(parent), leaf, unit)
        return
    parents = {path.rpartition(".")[0] for path in paths}
    holder = plan.model.get_submodule(parents.pop())
    if parents or not isinstance(holder, nn.ModuleList) or len(holder) != len(paths):
        raise TrialError(
            Outcome.INVALID,
            f"fsdp1 with {max(sizes)} blocks a unit needs the blocks to be all of one nn.ModuleList; "
            "use fsdp2, or one block a unit",
        )
    holder._modules.clear()
    holder.extend(units)


def _unit_of(root: nn.Module, block: nn.Module) -> Any:
    """The innermost FSDP1 module around `block`; None if there is none."""
    around = [unit for unit in FullyShardedDataParallel.fsdp_modules(root) if any(m is block for m in unit.modules())]
    return around[-1] if around else None


def _unsharded_mib(unit: FullyShardedDataParallel) -> float:
    """Of the weights that one all-gather brings, without FSDP1's alignment padding."""
    handle = unit._handle
    assert handle is not None
    assert handle._fwd_bwd_param_dtype is not None
    return sum(handle.flat_param._numels) * handle._fwd_bwd_param_dtype.itemsize / MIB
