"""Useful work per token, and what the hardware really executes.

MFU counts the FLOPs that the model needs, never recomputation; HFU counts what runs. Every figure carries the name
of its convention, since published figures differ by up to 1.7 times through the convention alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from trials.wrap import apply_checkpointing, block_names
from trials.workload import AttentionShape, Workload


@dataclass(frozen=True)
class Convention:
    """FLOPs per token = per_weight x N + per_score x num_layers x (heads x head_dim) x seq_len."""

    name: str
    per_weight: int
    """6 = forward and backward of one multiply-add per weight; 8 adds a whole second forward."""
    per_score: int
    """12 = scores and values, forward and backward, every position against every other; 6 halves it for causality."""


PALM_MATMUL = Convention("palm-matmul,full-attn", 6, 12)
"""Ours, torchtitan's and PaLM's (arXiv 2204.02311, appendix B), with N = the weights used in matmuls."""
PALM_MATMUL_CAUSAL = Convention("palm-matmul,causal-attn", 6, 6)
"""Megatron-LM's and MaxText's: attention halved, since a causal kernel may skip the masked half."""
COUNTED = "counted-on-meta,full-attn"
"""For a workload that does not tell its attention shapes: torch's FlopCounterMode, without checkpointing."""

CONVENTIONS: dict[str, Convention] = {
    "6N+12Lds": PALM_MATMUL,
    "6N+6Lds": PALM_MATMUL_CAUSAL,
    "8N+16Lds": Convention("full-recompute,full-attn", 8, 16),
}
"""Short names used in published tables. 8N+16Lds is the rule of thumb for HFU under full checkpointing; it overstates
what runs, since the head and each block's last matmul are not run again."""


def flops_per_token(
    num_params: float, num_layers: int, d_attn: int, seq_len: int, convention: str = "6N+12Lds"
) -> float:
    """FLOPs per trained token.

    Args:
        num_params: N, by the convention's own way of counting weights.
        d_attn: heads x head_dim.
        convention: a key of `CONVENTIONS`.

    Raises:
        ValueError: unknown convention.
    """
    if convention not in CONVENTIONS:
        raise ValueError(f"convention = {convention!r}: known are {sorted(CONVENTIONS)}")
    chosen = CONVENTIONS[convention]
    return chosen.per_weight * num_params + chosen.per_score * num_layers * d_attn * seq_len


def tflops_per_s(tokens_per_s: float, flops_each_token: float) -> float:
    return tokens_per_s * flops_each_token / 1e12


def utilisation(tokens_per_s: float, flops_each_token: float, peak_tflops_per_s: float) -> float:
    """MFU or HFU, a fraction, per rank: by which of the two FLOP counts it is given."""
    return tflops_per_s(tokens_per_s, flops_each_token) / peak_tflops_per_s


def matmul_params(model: nn.Module) -> int:
    """Weights used in matmuls: every nn.Linear's (a tied head once); no embedding table, norm or bias."""
    weights = {module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    return sum(weight.numel() for weight in weights)


@dataclass(frozen=True)
class ModelFlops:
    per_token: float
    per_token_causal: float | None
    """The same with half the attention; None when the attention is not known."""
    convention: str


def model_flops(workload: Workload, model: nn.Module, seq_len: int) -> ModelFlops:
    """Useful FLOPs per token of `model` (unsharded, may be on `meta`)."""
    shapes = workload.attention_shapes()
    if shapes is None:
        return ModelFlops(counted_flops_per_token(workload, seq_len, "none"), None, COUNTED)
    full, causal = (_by_formula(model, shapes, seq_len, key) for key in ("6N+12Lds", "6N+6Lds"))
    return ModelFlops(full, causal, PALM_MATMUL.name)


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
    return counter.get_total_flops() / seq_len
