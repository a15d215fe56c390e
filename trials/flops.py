"""FLOPs per token of a model: what it needs, and what the hardware executes under checkpointing."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from trials.conventions import COUNTED, PALM_MATMUL, flops_per_token
from trials.workload import AttentionShape, Workload
from trials.wrap import apply_checkpointing, block_names


def matmul_params(model: nn.Module) -> int:
    """Weights used in matmuls: every nn.Linear's (a tied head once); no embedding table, norm or bias."""
    weights = {module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    return sum(weight.numel() for weight in weights)


FORMULA_TOLERANCE = 0.01
"""A formula further than this from the count has missed a matmul (a head by F.linear, a Conv1D): the count stands."""


@dataclass(frozen=True)
class ModelFlops:
    per_token: float | None
    """None: neither a formula nor a count is to be had, and then there is no MFU."""
    per_token_causal: float | None
    """The same with half the attention; None when the attention is not known."""
    convention: str


def model_flops(workload: Workload, model: nn.Module, seq_len: int) -> ModelFlops:
    """Useful FLOPs per token of `model` (unsharded, may be on `meta`): by the formula where a count agrees with it."""
    counted = _count_or_none(workload, seq_len)
    shapes = workload.attention_shapes()
    if shapes is None:
        return ModelFlops(counted, None, COUNTED if counted is not None else "not known")
    full, causal = (_by_formula(model, shapes, seq_len, key) for key in ("6N+12Lds", "6N+6Lds"))
    if counted is not None and abs(full / counted - 1) > FORMULA_TOLERANCE:
        return ModelFlops(counted, counted - (full - causal), COUNTED)
    return ModelFlops(full, causal, PALM_MATMUL.name)


def _count_or_none(workload: Workload, seq_len: int) -> float | None:
    try:
        return counted_flops_per_token(workload, seq_len, "none")
    except Exception:  # noqa: BLE001 (a user's loss may do what `meta` cannot: .item(), a custom kernel)
        traceback.print_exc()
        return None


def _by_formula(model: nn.Module, shapes: Sequence[AttentionShape], seq_len: int, convention: str) -> float:
    d_attn = sum(shape.num_heads * shape.head_dim for shape in shapes)  # over all layers, so num_layers is 1
    return flops_per_token(matmul_params(model), 1, d_attn, seq_len, convention)


def counted_flops_per_token(workload: Workload, seq_len: int, activation_checkpointing: str) -> float:
    """FLOPs per token that a forward and a backward execute, counted on `meta` with the real checkpoint wrappers.

    On `meta` SDPA decomposes into bmm, so attention counts 12 there on every device, and HFU without checkpointing
    equals MFU. Takes no memory and no accelerator.
    """
    with torch.device("meta"):
        model = workload.build_model()
        tokens = torch.zeros(1, seq_len + 1, dtype=torch.int64)
    apply_checkpointing(model, block_names(model, workload.blocks(model)), activation_checkpointing)
    with FlopCounterMode(display=False) as counter:
        workload.loss(model, tokens).backward()  # type: ignore[no-untyped-call]
    return float(counter.get_total_flops()) / seq_len
