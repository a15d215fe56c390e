"""Useful work per token by published conventions: arithmetic alone, for the ranks and the driver.

MFU counts the FLOPs that the model needs, never recomputation; HFU counts what runs. Every figure carries the name
of its convention, since published figures differ by up to 1.7 times through the convention alone.
"""

from __future__ import annotations

from dataclasses import dataclass


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
"""torch's FlopCounterMode, without checkpointing: for a model that the formula is not for (frozen weights, experts, of
which those count that a token uses), or that does not tell its attention shapes."""

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


def keeps_no_scores(attention_backend: str) -> bool:
    """Whether attention by this kernel computes its scores again in its backward.

    Args:
        attention_backend: the kernel that was seen, several joined by `+`; `auto` where none could be, as in compiled
            blocks, which is torch's choice: fused wherever it can.
    """
    return set(attention_backend.split("+")) <= {"flash", "efficient", "cudnn", "auto"}


def tflops_per_s(tokens_per_s: float, flops_each_token: float) -> float:
    return tokens_per_s * flops_each_token / 1e12


def utilisation(tokens_per_s: float, flops_each_token: float, peak_tflops_per_s: float) -> float:
    """MFU or HFU, a fraction, per rank: by which of the two FLOP counts it is given."""
    return tflops_per_s(tokens_per_s, flops_each_token) / peak_tflops_per_s
