"""Lines for the user's script that more than one exporter gives."""

from __future__ import annotations

from autotune.export.base import Best
from trials.record import checkpoint_stride


def checkpoint_loop(mode: str) -> str:
    """Wraps the blocks that `mode` checkpoints; `layers` is the model's list of blocks."""
    stride = checkpoint_stride(mode)
    blocks = f"range(0, len(layers), {stride})" if stride else "range(len(layers))"
    context = ", context_fn=selective_contexts" if mode == "selective_op" else ""
    return f"for i in {blocks}: layers[i] = checkpoint_wrapper(layers[i]{context})"


def partial_checkpointing(mode: str) -> str:
    """The same, as a sentence says it."""
    source = ", with selective_contexts from the plain export" if mode == "selective_op" else ""
    return f"`{checkpoint_loop(mode)}`{source}"


def mixed_precision(best: Best) -> str:
    """The engine's dtypes, as measured in bf16."""
    name = "MixedPrecision" if best.knobs.engine == "fsdp1" else "MixedPrecisionPolicy"
    reduce_dtype = "bfloat16" if best.reduce_dtype == "bf16" else "float32"
    return f"{name}(param_dtype=torch.bfloat16, reduce_dtype=torch.{reduce_dtype})"


def shard_groups(best: Best) -> str:
    """FSDP2: makes units of several blocks."""
    knobs = best.knobs
    size = knobs.blocks_per_unit
    policy = f", mp_policy={mixed_precision(best)}" if best.precision == "bf16" else ""
    options = f"reshard_after_forward={knobs.reshard_after_forward}{policy}"
    return f"for i in range(0, len(layers), {size}): fully_shard(list(layers[i : i + {size}]), {options})"


JOIN_GROUPS = "autotune_best.join_blocks(model, list(layers), autotune_best.group_blocks(layers))"
"""FSDP1: makes modules of several blocks, which a wrap policy can then find by their class, BlockGroup."""
