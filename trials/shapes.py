"""Shapes of the built-in decoder: plain numbers, known to the job file and to the ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DecoderConfig:
    """`model.config` of a job."""

    vocab_size: int
    """At least 256 for text as bytes."""
    hidden_size: int
    """Width of the residual stream; divides by num_heads, unless head_size is given."""
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
    head_size: int | None = None
    """Width of one head; left out, hidden_size / num_heads."""
    qkv_bias: bool = False
    """Biases on queries, keys and values, as Qwen2 has them."""
    qk_norm: bool = False
    """RMSNorm over each head of queries and keys, as Qwen3 has it."""

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden_size // self.num_heads


def _llama(
    hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int = 128_256, tied: bool = False
) -> DecoderConfig:
    theta = 10_000.0 if vocab == 32_000 else 500_000.0
    return DecoderConfig(vocab, hidden, layers, heads, kv_heads, ffn, tied, theta)


def _qwen2(
    hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int = 152_064, tied: bool = False
) -> DecoderConfig:
    return DecoderConfig(vocab, hidden, layers, heads, kv_heads, ffn, tied, 1e6, qkv_bias=True)


def _qwen3(hidden: int, layers: int, heads: int, ffn: int, tied: bool = False) -> DecoderConfig:
    return DecoderConfig(151_936, hidden, layers, heads, 8, ffn, tied, 1e6, head_size=128, qk_norm=True)


PRESETS: dict[str, DecoderConfig] = {
    # Bytes as tokens: 3.1 million parameters.
    "tiny": DecoderConfig(vocab_size=256, hidden_size=256, num_layers=4, num_heads=8, num_kv_heads=4, ffn_size=704),
    # Sizes by the config.json beside each model's published weights. What changes no shape is not reproduced: norm
    # epsilons, and the stretched RoPE frequencies of Llama 3.1 and 3.2.
    "llama2-7b": _llama(4096, 32, 32, 32, 11_008, vocab=32_000),
    "llama2-13b": _llama(5120, 40, 40, 40, 13_824, vocab=32_000),
    "llama2-70b": _llama(8192, 80, 64, 8, 28_672, vocab=32_000),
    "llama3-8b": _llama(4096, 32, 32, 8, 14_336),
    "llama3-70b": _llama(8192, 80, 64, 8, 28_672),
    "llama3.1-405b": _llama(16_384, 126, 128, 8, 53_248),
    "llama3.2-1b": _llama(2048, 16, 32, 8, 8192, tied=True),
    "llama3.2-3b": _llama(3072, 28, 24, 8, 8192, tied=True),
    "qwen2.5-0.5b": _qwen2(896, 24, 14, 2, 4864, vocab=151_936, tied=True),
    "qwen2.5-1.5b": _qwen2(1536, 28, 12, 2, 8960, vocab=151_936, tied=True),
    "qwen2.5-3b": _qwen2(2048, 36, 16, 2, 11_008, vocab=151_936, tied=True),
    "qwen2.5-7b": _qwen2(3584, 28, 28, 4, 18_944),
    "qwen2.5-14b": _qwen2(5120, 48, 40, 8, 13_824),
    "qwen2.5-32b": _qwen2(5120, 64, 40, 8, 27_648),
    "qwen2.5-72b": _qwen2(8192, 80, 64, 8, 29_568),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12_288),
    "qwen3-14b": _qwen3(5120, 40, 40, 17_408),
    "qwen3-32b": _qwen3(5120, 64, 64, 25_600),
}
