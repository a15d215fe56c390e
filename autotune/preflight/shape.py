"""The sizes of a model that the closed forms need: from its config alone, or from what the survey found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.job_model import Model
from trials.conventions import PALM_MATMUL, PALM_MATMUL_CAUSAL
from trials.shapes import PRESETS, DecoderConfig

FUSED, EAGER, EAGER_HF = "fused", "eager", "eager_hf"
"""How a norm runs: one kernel; torch's own steps in fp32 (RMSNorm on a CPU); transformers' steps in fp32."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder of blocks that are alike, each with attention and a feed-forward; all of it is trained."""

    num_blocks: int
    block_params: int
    """Of one block, all experts included."""
    embedding_params: int
    """Look-up tables: of tokens, and of positions if those are learned."""
    head_params: int
    """Of the head's own matrix; 0 where it uses the embedding's."""
    matmul_params: int
    """Weights that one token is multiplied by, in all blocks and the head: N of the FLOP formula."""
    hidden_size: int
    vocab_size: int
    seq_len: int
    num_heads: int
    q_size: int
    """Query heads x width of one: outputs of the query projection."""
    kv_size: int
    """Key heads x width of one."""
    ffn_size: int
    """Width of the feed-forward of one token: that of one expert x experts a token."""
    gated: bool = True
    """SwiGLU: a gate beside the up projection."""
    qk_norm: bool = False
    rms_norm: str = FUSED
    """Of the model on a GPU; `FUSED` stands for LayerNorm too, which has one kernel everywhere."""
    norm_is_eager_on_cpu: bool = True
    """torch has no CPU kernel of RMSNorm."""
    has_rope: bool = True
    """A table of rotations goes through all blocks as an argument, and is cast for each."""
    final_norm_params: int = 0

    @property
    def root_params(self) -> int:
        """What is in no block: embedding, head and last norm."""
        return self.embedding_params + self.head_params + self.final_norm_params

    @property
    def num_params(self) -> int:
        return self.num_blocks * self.block_params + self.root_params

    @property
    def head_size(self) -> int:
        return self.q_size // self.num_heads

    def block_mib(self, precision: str) -> tuple[float, ...]:
        """Unsharded MiB of each block in the dtype that is gathered, as the survey finds them."""
        bytes_each = 2 if precision == "bf16" else 4
        return (self.block_params * bytes_each / 2**20,) * self.num_blocks

    def flops_per_token(self) -> float:
        """6N + 12 L (heads x head_dim) s: the convention of `trials.conventions.PALM_MATMUL`."""
        scores = self.num_blocks * self.q_size * self.seq_len
        return PALM_MATMUL.per_weight * self.matmul_params + PALM_MATMUL.per_score * scores


def of_model(model: Model) -> ModelShape | None:
    """The shape that the job's own words give; None where only building the model would tell.

    Raises:
        TrialError: outcome `invalid`; transformers makes nothing of the config.
    """
    if model.workload == "decoder":
        config = PRESETS[model.preset] if model.preset else DecoderConfig(**(model.config or {}))
        return of_decoder(config, model.seq_len)
    if model.workload == "hf":
        return of_hf(model.config or {}, model.seq_len)
    return None


def of_surveyed(model: Model, found: Mapping[str, Any], precision: str) -> ModelShape | None:
    """Of a job's model that was surveyed: by its own words, else by what the survey counted.

    Args:
        found: what `trials.survey.survey_model` gives; `model` in study.yaml.
    """
    return of_model(model) or of_survey(found, precision, model.seq_len)


def of_decoder(config: DecoderConfig, seq_len: int) -> ModelShape:
    """Of the built-in decoder, to the parameter."""
    hidden, head_dim = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    matrices = 2 * hidden * (q_size + kv_size) + 3 * hidden * config.ffn_size
    small = 2 * hidden + config.qkv_bias * (q_size + 2 * kv_size) + config.qk_norm * 2 * head_dim
    table = config.vocab_size * hidden
    return ModelShape(
        num_blocks=config.num_layers,
        block_params=matrices + small,
        embedding_params=table,
        head_params=0 if config.tie_embeddings else table,
        matmul_params=config.num_layers * matrices + table,
        hidden_size=hidden,
        vocab_size=config.vocab_size,
        seq_len=seq_len,
        num_heads=config.num_heads,
        q_size=q_size,
        kv_size=kv_size,
        ffn_size=config.ffn_size,
        qk_norm=config.qk_norm,
        final_norm_params=hidden,
    )


LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "mixtral")
"""Architectures of transformers whose parameters are counted here; tests build each and compare."""


def of_hf(values: dict[str, Any], seq_len: int) -> ModelShape | None:
    """Of a transformers config; None for an architecture that is not counted here.

    Raises:
        TrialError: outcome `invalid`; transformers makes nothing of the config.
    """
    model_type = values.get("model_type")
    if model_type not in (*LLAMA_LIKE, "gpt2"):
        return None
    from trials.hf import make_config

    config = make_config(values)
    return _of_gpt2(config, seq_len) if model_type == "gpt2" else _of_llama_like(config, seq_len)


def _of_llama_like(config: Any, seq_len: int) -> ModelShape:
    hidden, heads, ffn = config.hidden_size, config.num_attention_heads, config.intermediate_size
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    q_size, kv_size = heads * head_dim, config.num_key_value_heads * head_dim
    qk_norm = config.model_type == "qwen3"
    on_output = getattr(config, "attention_bias", False)
    on_qkv = on_output or config.model_type == "qwen2"
    biases = on_qkv * (q_size + 2 * kv_size) + on_output * hidden
    if getattr(config, "mlp_bias", False):
        biases += 2 * ffn + hidden
    attention, expert = 2 * hidden * (q_size + kv_size), 3 * hidden * ffn
    experts, used = getattr(config, "num_local_experts", 1), getattr(config, "num_experts_per_tok", 1)
    router = hidden * experts if experts > 1 else 0
    table = config.vocab_size * hidden
    layers = config.num_hidden_layers
    return ModelShape(
        num_blocks=layers,
        block_params=attention + experts * expert + router + 2 * hidden + biases + qk_norm * 2 * head_dim,
        embedding_params=table,
        head_params=0 if config.tie_word_embeddings else table,
        matmul_params=layers * (attention + used * expert + router) + table,
        hidden_size=hidden,
        vocab_size=config.vocab_size,
        seq_len=seq_len,
        num_heads=heads,
        q_size=q_size,
        kv_size=kv_size,
        ffn_size=used * ffn,
        qk_norm=qk_norm,
        rms_norm=EAGER_HF,
        has_rope=False,  # one cast for all blocks
        final_norm_params=hidden,
    )


def _of_gpt2(config: Any, seq_len: int) -> ModelShape:
    hidden, ffn = config.n_embd, config.n_inner or 4 * config.n_embd
    matrices = 4 * hidden * hidden + 2 * hidden * ffn
    table = config.vocab_size * hidden
    return ModelShape(
        num_blocks=config.n_layer,
        block_params=matrices + 4 * hidden + 4 * hidden + ffn + hidden,  # two norms; biases
        embedding_params=table + config.n_positions * hidden,
        head_params=0 if config.tie_word_embeddings else table,
        matmul_params=config.n_layer * matrices + table,
        hidden_size=hidden,
        vocab_size=config.vocab_size,
        seq_len=seq_len,
        num_heads=config.n_head,
        q_size=hidden,
        kv_size=hidden,
        ffn_size=ffn,
        gated=False,
        norm_is_eager_on_cpu=False,
        has_rope=False,
        final_norm_params=2 * hidden,
    )


NEARLY_WHOLE = 0.02
"""A vocabulary that comes out of a division must be a whole number to this."""


def of_survey(found: Mapping[str, Any], precision: str, seq_len: int) -> ModelShape | None:
    """Of a workload that the survey built: as far as its counts tell, with heads as wide as the residual stream.

    Args:
        found: what `trials.survey.survey_model` gives.

    Returns:
        None unless the model is dense, trained as a whole, and its attention is known: then its memory and time are
        not those of a plain decoder.
    """
    if found.get("flops_convention") != PALM_MATMUL.name or found.get("flops_per_token_causal") is None:
        return None
    blocks, sizes = int(found["num_blocks"]), found["block_mib"]
    if max(sizes) > min(sizes) * 1.01:
        return None
    block_params = round(sizes[0] * 2**20 / (2 if precision == "bf16" else 4))
    root = int(found["num_params"]) - blocks * block_params
    scores = found["flops_per_token"] - found["flops_per_token_causal"]
    hidden = round(scores / (PALM_MATMUL.per_score - PALM_MATMUL_CAUSAL.per_score) / seq_len / blocks)
    head = int(found["num_matmul_params"]) - blocks * block_params  # less than it is by norms and biases
    if hidden < 1 or head < 1 or block_params <= 4 * hidden**2:
        return None
    tied = root < 1.5 * head
    table = root if tied else root // 2
    vocab = table // hidden
    if vocab < 1 or abs(head / table - 1) > max(NEARLY_WHOLE, 20 * blocks * hidden / table):
        return None
    head_size = next((size for size in (128, 64, 32, 16) if hidden % size == 0), hidden)
    return ModelShape(
        num_blocks=blocks,
        block_params=block_params,
        embedding_params=root if tied else root - table,
        head_params=0 if tied else table,
        matmul_params=int(found["num_matmul_params"]),
        hidden_size=hidden,
        vocab_size=vocab,
        seq_len=seq_len,
        num_heads=hidden // head_size,
        q_size=hidden,
        kv_size=hidden,
        ffn_size=max(1, (block_params - 4 * hidden**2) // (2 * hidden)),
        gated=False,
        norm_is_eager_on_cpu=False,
        has_rope=False,
    )
