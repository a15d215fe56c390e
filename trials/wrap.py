"""Knobs -> a checkpointed and sharded model, and back: what was really applied, read from the live objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from trials.engines import SHARD, Plan, ShardedModel
from trials.engines.base import MIB, one_of
from trials.outcome import Outcome, TrialError
from trials.record import Knobs, checkpoint_stride
from trials.workload import Workload

aten = torch.ops.aten
# Outputs that selective_op keeps: every matmul (bmm is what SDPA becomes on `meta`), and SDPA on each device.
KEPT_OPS: frozenset[Any] = frozenset(
    getattr(aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_grouped_mm",  # experts'
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    if hasattr(aten, name)  # not every torch that ranks may run on has all
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


def build(
    workload: Workload,
    knobs: Knobs,
    precision: str,
    mesh: DeviceMesh,
    device: torch.device,
    seed: int,
) -> ShardedModel:
    """The workload's model: checkpointed, its blocks compiled if asked, sharded by the engine, and initialised.

    Raises:
        TrialError: outcome `invalid`; the model has no blocks, nothing to train, or not what the engine needs.
    """
    with torch.device("meta"):
        model = workload.build_model()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TrialError(Outcome.INVALID, "the workload's model has no trainable parameter: nothing to train")
    blocks = workload.blocks(model)
    names = block_names(model, blocks)
    sizes_mib = block_mib(blocks, precision)
    apply_checkpointing(model, names, knobs.activation_checkpointing)
    wrapped = [model.get_submodule(name) for name in names]
    if knobs.compile:
        for block in wrapped:
            block.compile()
    plan = Plan(model, wrapped, sizes_mib, knobs, precision, mesh, device, workload, seed)
    return SHARD[knobs.engine](plan)


def read_back(model: ShardedModel) -> dict[str, Any]:
    """The knobs that wrapping decides, read from the live model: what it has, not what it was asked for."""
    found = model.read()
    if found["engine"] == "none":
        return found
    return found | {
        "activation_checkpointing": read_checkpointing(model.blocks),
        "compile": one_of({block._compiled_call_impl is not None for block in model.blocks}),
        "custom": None,  # knobs of a user's own trainer, which this is not
    }


def read_checkpointing(blocks: Sequence[nn.Module]) -> str:
    """The mode that the blocks' wrappers amount to; `mixed` if none does."""
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
