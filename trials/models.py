"""The built-in decoder: pre-norm, RMSNorm, RoPE, grouped-query attention, SwiGLU; the shape of Llama and Qwen."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trials.outcome import Outcome, TrialError
from trials.shapes import PRESETS, DecoderConfig
from trials.workload import AttentionShape, default_init_parameter


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return normed


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        batch, seq_len, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, seq_len, self.num_heads, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, seq_len, self.num_kv_heads, self.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, seq_len, self.num_kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, rope), rotate(k, rope)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.num_kv_heads != self.num_heads)
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """RoPE on (batch, heads, seq_len, head_dim) with `rope` = (2, max_seq_len, head_dim): cosines, signed sines."""
    cos, sin = rope[:, : x.shape[2]].to(x.dtype)
    rotated: Tensor = x * cos + torch.roll(x, x.shape[-1] // 2, dims=-1) * sin
    return rotated


class Block(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.hidden_size)
        self.gate_proj = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.down_proj = nn.Linear(config.ffn_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope)
        y = self.ffn_norm(x)
        out: Tensor = x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))
        return out


class Decoder(nn.Module):
    rope: Tensor

    def __init__(self, config: DecoderConfig, seq_len: int) -> None:
        super().__init__()
        self.config, self.seq_len = config, seq_len
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        self.register_buffer("rope", torch.empty(2, seq_len, config.head_dim), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, seq_len, vocab_size) of `tokens` (batch, seq_len)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.rope)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def fill_rope(self) -> None:
        head_dim = self.config.head_dim
        inverse = self.config.rope_theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = torch.outer(torch.arange(self.seq_len, dtype=torch.float64), inverse)
        sines = torch.cat((-angles.sin(), angles.sin()), dim=1)
        cosines = torch.cat((angles.cos(), angles.cos()), dim=1)
        self.rope.copy_(torch.stack((cosines, sines)))


class DecoderWorkload:
    """The built-in decoder trained to predict the next token.

    Args:
        seq_len: tokens per sequence.
        preset: a name in `PRESETS`; or `config`: the fields of `DecoderConfig`.

    Raises:
        TrialError: outcome `invalid`; the shape is none.
    """

    def __init__(
        self, seq_len: int, preset: str | None = None, config: dict[str, int | bool | float] | None = None
    ) -> None:
        if (preset is None) == (config is None):
            raise TrialError(Outcome.INVALID, "model: give either a preset or a config")
        if preset is not None and preset not in PRESETS:
            raise TrialError(Outcome.INVALID, f"model.preset = {preset!r}: known presets are {sorted(PRESETS)}")
        try:
            self.config = PRESETS[preset] if preset else DecoderConfig(**(config or {}))  # type: ignore[arg-type]
        except TypeError as error:
            raise TrialError(Outcome.INVALID, f"model.config: {error}") from error
        shape = self.config
        if (shape.head_size is None and shape.hidden_size % shape.num_heads) or shape.num_heads % shape.num_kv_heads:
            raise TrialError(
                Outcome.INVALID,
                f"model.config: hidden_size = {shape.hidden_size} must divide by num_heads = {shape.num_heads} (or give"
                f" head_size), and num_heads by num_kv_heads = {shape.num_kv_heads}",
            )
        if shape.head_dim % 2:
            raise TrialError(
                Outcome.INVALID,
                f"model.config: a head of {shape.head_dim} numbers; RoPE turns pairs, so it must be even",
            )
        self.seq_len = seq_len
        self.vocab_size = self.config.vocab_size

    def build_model(self) -> Decoder:
        return Decoder(self.config, self.seq_len)

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        assert isinstance(model, Decoder)
        return list(model.layers)

    def attention_shapes(self) -> Sequence[AttentionShape]:
        return [AttentionShape(self.config.num_heads, self.config.head_dim)] * self.config.num_layers

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def init_parameter(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        return default_init_parameter(name, shape, generator)

    def init_buffers(self, model: nn.Module) -> None:
        assert isinstance(model, Decoder)
        model.fill_rope()
