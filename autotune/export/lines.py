"""Lines for the user's script that more than one exporter gives."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from autotune.export.base import Best
from trials.record import ENGINE_KNOBS, Knobs, checkpoint_stride


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

_BACKEND = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION", "math": "MATH"}
SCRIPTED: dict[str, Callable[[Any], str]] = {
    "keep_last_units": lambda n: f"`for unit in units[-{n}:]: unit.set_reshard_after_forward(False)`.",
    "reshard_group_size": lambda n: (
        f"`unit.set_reshard_after_forward({n})` for each unit, or the same argument of fully_shard."
    ),
    "forward_prefetch_units": lambda n: (
        f"`for i, unit in enumerate([model, *units]): unit.set_modules_to_forward_prefetch(units[i : i + {n}])`."
    ),
    "backward_prefetch_units": lambda n: (
        f"`for i, unit in enumerate(units): unit.set_modules_to_backward_prefetch(units[max(0, i - {n}) : i][::-1])`."
    ),
    "replicate_degree": lambda n: (
        f'`mesh = init_device_mesh("cuda", ({n}, world_size // {n}), mesh_dim_names=("replicate", "shard"))`; FSDP1 '
        "takes it as device_mesh, with sharding_strategy HYBRID_SHARD, or _HYBRID_SHARD_ZERO2 without resharding."
    ),
    "cpu_offload": lambda _: "`fully_shard(..., offload_policy=CPUOffloadPolicy())` for each unit and the model.",
    "compile": lambda _: "`for block in layers: block.compile()`, after checkpointing and before sharding.",
    "attention_backend": lambda name: (
        f"`with torch.nn.attention.sdpa_kernel(SDPBackend.{_BACKEND[name]}):` around forward and backward."
    ),
    "fused_optimizer": lambda _: "`torch.optim.AdamW(..., fused=True)`.",
}
"""Knobs that few trainers have a key for, and the line to write instead."""
_PLAIN_DEFAULTS = {"compile": False, "attention_backend": "auto", "fused_optimizer": False}


def scripted(knobs: Knobs, but: Collection[str] = ()) -> dict[str, str]:
    """The knobs among SCRIPTED that are other than torch's default, each with its line.

    Args:
        but: those that the trainer has keys for.
    """
    found = {}
    for name, line in SCRIPTED.items():
        value, default = getattr(knobs, name), ENGINE_KNOBS[name].default if name in ENGINE_KNOBS else None
        if name not in but and value not in (None, default, _PLAIN_DEFAULTS.get(name)):
            found[name] = line(value)
    return found
