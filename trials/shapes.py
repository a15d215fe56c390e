"""Shapes of the built-in decoder: plain numbers, known to the job file and to the ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DecoderConfig:
    """`model.config` of a job."""

    vocab_size: int
    """At least 256 for text as bytes."""
    hidden_size: int
    """Width of the residual stream; divides by num_heads."""
    num_layers: int
    num_heads: int
    """Query heads; divides by num_kv_heads."""
    num_kv_heads: int
    """Key and value heads; num_heads for plain attention, fewer for grouped-query attention."""
    ffn_size: int
    """Width of the SwiGLU feed-forward."""
    tie_embeddings: bool = False
    """Whether the head uses the embedding's weights."""
    rope_theta: float = 10_000.0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


PRESETS: dict[str, DecoderConfig] = {
    # Bytes as tokens: 3.1 million parameters.
    "tiny": DecoderConfig(vocab_size=256, hidden_size=256, num_layers=4, num_heads=8, num_kv_heads=4, ffn_size=704),
}
