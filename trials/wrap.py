"""Knobs -> a sharded model, and back: what was really applied, read from the live objects."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from trials.outcome import Outcome, TrialError
from trials.record import Knobs, checkpoint_stride, group_blocks, unit_cap_mb
from trials.workload import Workload

MIB = 2**20
_WRAPPED = "_checkpoint_wrapped_module."

aten = torch.ops.aten
# Outputs that selective_op keeps: every matmul (bmm is what SDPA becomes on `meta`), and SDPA on each device.
KEPT_OPS: frozenset[Any] = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)


def _keep_matmuls(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_matmuls)  # type: ignore[no-untyped-call]


def block_names(model: nn.Module, blocks: Sequence[nn.Module]) -> list[str]:
    """Names of `blocks` inside `model`.

    Raises:
        TrialError: outcome `invalid`; there are no blocks, or one is not part of the model.
    """
    if not blocks:
        raise TrialError(Outcome.INVALID, "the workload's blocks() found none: nothing to shard or checkpoint")
    names = {module: name for name, module in model.named_modules()}
    missing = [type(block).__name__ for block in blocks if block not in names]
    if missing:
        raise TrialError(Outcome.INVALID, f"the workload's blocks() are not modules of its model: {missing}")
    return [names[block] for block in blocks]


def block_mib(blocks: Sequence[nn.Module], precision: str) -> list[float]:
    """Unsharded MiB of each block's weights in the dtype that is all-gathered. Call before sharding."""
    bytes_each = 2 if precision == "bf16" else 4
    return [sum(p.numel() for p in block.parameters()) * bytes_each / MIB for block in blocks]


def apply_checkpointing(model: nn.Module, names: Sequence[str], mode: str) -> None:
    """Replaces the blocks that `mode` checkpoints by non-reentrant checkpoint wrappers around them."""
    stride = checkpoint_stride(mode)
    kwargs: dict[str, Any] = {"context_fn": selective_contexts} if mode == "selective_op" else {}
    for index, name in enumerate(names):
        if mode == "none" or (stride and index % stride):
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        leaf = name.rpartition(".")[2]
        setattr(parent, leaf, checkpoint_wrapper(model.get_submodule(name), **kwargs))


def mixed_precision(precision: str, reduce_dtype: str) -> MixedPrecisionPolicy:
    """FSDP2's policy for `precision` (`fp32`, or `bf16` over fp32 master weights) and the gradients' reduction."""
    if precision == "fp32":
        return MixedPrecisionPolicy()
    reduce = torch.bfloat16 if reduce_dtype == "bf16" else torch.float32
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)


def shard(
    model: nn.Module,
    names: Sequence[str],
    sizes_mib: Sequence[float],
    knobs: Knobs,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
) -> None:
    """Shards `model` (on `meta`) by FSDP2: one unit for each group of consecutive blocks, the rest in the root's.

    The root keeps torch's default (its weights stay gathered between forward and backward), as trainers have it.
    """
    blocks = [model.get_submodule(name) for name in names]
    first = 0
    for size in group_blocks(sizes_mib, knobs.bucket_cap_mb):
        unit = blocks[first : first + size]
        fully_shard(unit, mesh=mesh, reshard_after_forward=knobs.reshard_after_forward, mp_policy=policy)
        first += size
    fully_shard(model, mesh=mesh, mp_policy=policy)


def initialise(model: nn.Module, workload: Workload, device: str, seed: int) -> None:
    """Gives every parameter its value, each from a generator seeded by its name, on its full shape, then sharded.

    So the weights do not depend on the number of ranks or on how the model is wrapped.
    """
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full_name = name.replace(_WRAPPED, "")
            full = workload.init_parameter(full_name, parameter.shape, _generator(seed, full_name))
            if isinstance(parameter, DTensor):
                parameter.to_local().copy_(_local_shard(full, parameter))
            else:
                parameter.copy_(full)
        workload.init_buffers(model)


def _local_shard(full: Tensor, parameter: DTensor) -> Tensor:
    """This rank's part of `full`, cut on the host: the whole of a large table need not fit on the device."""
    for dim_of_mesh, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            parts = torch.chunk(full, parameter.device_mesh.size(dim_of_mesh), dim=placement.dim)
            index = parameter.device_mesh.get_local_rank(dim_of_mesh)
            # torch.chunk may make fewer parts than ranks: the last ranks then hold nothing.
            full = parts[index] if index < len(parts) else full.narrow(placement.dim, 0, 0)
    return full


def _generator(seed: int, name: str) -> torch.Generator:
    number = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7])
    return torch.Generator().manual_seed(number)


def param_groups(module: nn.Module) -> list[FSDPParamGroup]:
    """FSDP2's own record of the unit that `module` belongs to; empty if it is not sharded."""
    return list(module._get_fsdp_state()._fsdp_param_groups) if isinstance(module, FSDPModule) else []


def read_wrapping(model: nn.Module, names: Sequence[str]) -> dict[str, Any]:
    """The knobs that wrapping decides, read back from the live model: what it has, not what it was asked for."""
    blocks = [model.get_submodule(name) for name in names]
    groups = [param_groups(block) for block in blocks]
    if not isinstance(model, FSDPModule) or not all(groups):
        return {"engine": "none"}
    units, sizes_mib = _read_units([group[0] for group in groups])
    reshard = {group[0]._reshard_after_forward for group in groups}
    return {
        "engine": "fsdp2",
        "reshard_after_forward": reshard.pop() if len(reshard) == 1 else "mixed",
        "blocks_per_unit": max(units),
        "bucket_cap_mb": unit_cap_mb(sizes_mib, [1] * len(sizes_mib)),
        "activation_checkpointing": _read_checkpointing(blocks),
    }


def _read_units(groups: Sequence[FSDPParamGroup]) -> tuple[list[int], list[float]]:
    """Blocks in each unit, and the unit's unsharded MiB in the dtype that is all-gathered."""
    units: list[int] = []
    sizes_mib: list[float] = []
    for index, group in enumerate(groups):
        if index and group is groups[index - 1]:
            units[-1] += 1
            continue
        units.append(1)
        dtypes = [p.param_dtype or p.orig_dtype for p in group.fsdp_params]
        sizes_mib.append(
            sum(p._orig_size.numel() * dtype.itemsize for p, dtype in zip(group.fsdp_params, dtypes, strict=True)) / MIB
        )
    return units, sizes_mib


def _read_checkpointing(blocks: Sequence[nn.Module]) -> str:
    wrapped = [isinstance(block, CheckpointWrapper) for block in blocks]
    if not any(wrapped):
        return "none"
    selective = {_context_fn(block) is selective_contexts for block in blocks if isinstance(block, CheckpointWrapper)}
    if selective == {True} and all(wrapped):
        return "selective_op"
    if selective != {False}:
        return "mixed"
    if all(wrapped):
        return "full"
    stride = wrapped[1:].index(True) + 1 if any(wrapped[1:]) else len(wrapped)
    return f"every_{stride}" if wrapped == [i % stride == 0 for i in range(len(wrapped))] else "mixed"


def _context_fn(block: CheckpointWrapper) -> Callable[..., Any] | None:
    return block.checkpoint_fn.keywords.get("context_fn") if isinstance(block.checkpoint_fn, partial) else None


def compare(asked: Knobs, applied: dict[str, Any]) -> None:
    """Raises unless every knob was applied as asked.

    Raises:
        TrialError: outcome `misapplied`, with each difference.
    """
    wanted = asked.to_dict()
    different = [
        f"{name}: asked {wanted[name]!r}, applied {applied.get(name)!r}"
        for name in wanted
        if applied.get(name) != wanted[name]
    ]
    if different:
        raise TrialError(Outcome.MISAPPLIED, "; ".join(different))
