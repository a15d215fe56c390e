"""Bytes that a micro-batch of a decoder leaves alive: what autograd saves, by checkpointing mode, and the loss.

As torch 2.13 saves them for the blocks of `trials.models`; a test compares with autograd's own list.
"""

from __future__ import annotations

from dataclasses import dataclass

from autotune.preflight.shape import EAGER, EAGER_HF, FUSED, ModelShape
from trials.record import Knobs

MASTER = 4
"""Bytes of a master weight, of its gradient once reduced, and of each of AdamW's two moments: all in fp32."""
MATH = "math"


@dataclass(frozen=True)
class Setting:
    """What the knobs do not say."""

    world_size: int
    precision: str
    """`fp32`, or `bf16` over fp32 master weights."""
    device: str
    """`cpu` or `cuda`."""

    @property
    def compute_bytes(self) -> int:
        return 2 if self.precision == "bf16" else 4


@dataclass(frozen=True)
class Activations:
    """Bytes that a micro-batch leaves alive."""

    whole: float
    """Of one block without checkpointing: all that autograd saves."""
    kept_ops: float
    """Of one block under selective_op: its input, and the outputs of matmuls and attention."""
    again: float
    """Of one block that is recomputed under full checkpointing, its input not included."""
    kept_ops_again: float
    """The same under selective_op: beside the whole, only the last matmul's output is left, which nothing asks for;
    the other kept outputs are let go as the block is recomputed."""
    block_input: float
    """Of one block under full checkpointing."""
    inputs: float
    """Tokens, and the table of rotations."""
    hidden: float
    """One copy of the residual stream."""
    forward: float
    """Inside a block's forward where it takes most, if it is checkpointed; its input not included."""
    backward: float
    """Gradients inside a block where they take most, beyond what has been freed by then."""
    head: float
    """The last norm and the head's input."""
    norm_backward: float
    """Gradients inside a norm."""
    logits: float
    """One copy of the logits in the dtype of compute."""
    loss: float
    """All that the cross-entropy in fp32 holds where it is fullest, logits included."""


def activations(shape: ModelShape, setting: Setting, knobs: Knobs) -> Activations:
    """What one micro-batch keeps; compiled blocks run norms and elementwise operators in few kernels."""
    fused, math_attention = knobs.compile, knobs.attention_backend == MATH
    tokens, size = knobs.micro_batch_size * shape.seq_len, setting.compute_bytes
    hidden, q, kv, ffn = shape.hidden_size, shape.q_size, shape.kv_size, shape.ffn_size
    norm = _Norm(shape, setting, fused)
    # Under DDP's autocast, the residual stream is as its fp32 weights make it.
    stream = MASTER if knobs.engine == "ddp" else size
    qkv_out = q + 2 * kv
    scores = 4.0 * shape.num_heads  # the softmax's row sums, in fp32
    if math_attention:
        # The softmax; K and V repeated for each query head.
        scores = float(size * (shape.num_heads * shape.seq_len + 2 * (q - kv)))
    attention = norm(hidden) + size * (2 * q + 2 * kv) + scores
    if shape.qk_norm:
        attention += norm(q) + norm(kv) - size * (q + kv)  # what goes into the norm comes on top of what leaves it
    # Gated: gate, its activation, up, their product. Else: in and out of the activation.
    elementwise = (3 if fused else 4) * ffn if shape.gated else 2 * ffn
    feed_forward = norm(hidden) + size * elementwise
    per_token = attention + feed_forward
    rope, table = 0.0, 2.0 * MASTER * shape.seq_len * shape.head_size * shape.has_rope
    if shape.has_rope and size != MASTER:
        rope = 2.0 * shape.seq_len * shape.head_size * size
    matmul_outs = size * (qkv_out + q + 2 * hidden + (2 if shape.gated else 1) * ffn) + scores
    block_input = stream * hidden * tokens + rope
    # At the feed-forward's product: the gradients of the product and of both its factors, and of the residual stream.
    gradients: float = stream * hidden + size * (2 if shape.gated else 1) * ffn
    if math_attention:  # at the softmax: its gradient and the scores'; the feed-forward has been freed
        gradients = max(gradients, 2.0 * size * (shape.num_heads * shape.seq_len + hidden) - feed_forward)
    logits = float(shape.vocab_size * tokens * size)
    # log-softmax, its own gradient and that of the logits, each in fp32; compiled blocks leave the loss alone.
    loss = 3.0 * MASTER * shape.vocab_size * tokens
    whole = per_token * tokens + rope
    # The first norm saves the block's input itself, or a copy in fp32.
    is_shared = stream == MASTER or not norm.is_eager
    return Activations(
        whole=whole,
        kept_ops=matmul_outs * tokens + block_input,
        again=whole - rope - stream * hidden * tokens * is_shared,
        kept_ops_again=whole - matmul_outs * tokens - rope + (size - stream * is_shared) * hidden * tokens,
        block_input=block_input,
        inputs=8.0 * (tokens + knobs.micro_batch_size) + table,
        hidden=stream * hidden * tokens,
        forward=size * (2 * hidden + (3 if shape.gated else 2) * ffn) * tokens,
        backward=gradients * tokens,
        head=norm(hidden) * tokens,
        norm_backward=(4 * MASTER if norm.is_eager else 2 * size) * hidden * tokens,
        logits=logits,
        loss=loss,
    )


class _Norm:
    """Bytes a token that a norm of some width saves, its output included (the next matmul's input)."""

    def __init__(self, shape: ModelShape, setting: Setting, fused: bool) -> None:
        kind = EAGER if setting.device == "cpu" and shape.norm_is_eager_on_cpu else shape.rms_norm
        if shape.rms_norm == EAGER_HF:
            kind = EAGER_HF
        size = setting.compute_bytes
        self.is_eager = not (fused or kind == FUSED)
        if fused or kind == FUSED:
            self._per_channel = 2 * size  # in, out
        elif size == MASTER:
            self._per_channel = 3 * size  # in, normalised, out
        else:
            # In as fp32 and out as bf16; between them the normalised in fp32, or with transformers in bf16.
            self._per_channel = 10 if kind == EAGER else 8

    def __call__(self, width: int) -> float:
        return self._per_channel * width + 4.0
