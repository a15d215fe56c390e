"""A rough predictor for tests: right in order of size, wrong in form, and knows nothing of half of the knobs."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.preflight.prediction import Prediction
from trials.record import Knobs, checkpoint_stride
from trials.shapes import PRESETS

KEPT = {"none": 34.0, "selective_op": 16.0, "full": 2.0}
"""Bytes of activations per token, hidden unit and block, bf16."""
RECOMPUTED = {"none": 0.0, "selective_op": 0.4, "full": 1.0}


@dataclass(frozen=True)
class Rough:
    """Of a decoder on GPUs."""

    preset: str
    seq_len: int
    world_size: int
    flops_per_s: float = 450e12
    link_bytes_per_s: float = 40e9

    def predict(self, knobs: Knobs) -> Prediction:
        shape = PRESETS[self.preset]
        head = shape.hidden_size // shape.num_heads
        attention = 2 * shape.hidden_size * (shape.hidden_size + head * (shape.num_kv_heads or shape.num_heads))
        block = attention + 3 * shape.hidden_size * shape.ffn_size
        params = block * shape.num_layers + 2 * shape.vocab_size * shape.hidden_size
        stride = checkpoint_stride(knobs.activation_checkpointing)
        mode = knobs.activation_checkpointing if stride is None else "full"
        share = 1.0 if stride is None else 1 / stride
        kept = share * KEPT[mode] + (1 - share) * KEPT["none"]
        tokens = knobs.micro_batch_size * self.seq_len
        gathered = 2 * params if not knobs.reshard_after_forward else 4 * block * (knobs.blocks_per_unit or 1)
        whole = 4 * params if knobs.grad_accum_steps > 1 and not knobs.sync_each_micro_batch else 0
        terms = {
            "states": 16 * params / self.world_size,
            "activations": kept * tokens * shape.hidden_size * shape.num_layers * (0.8 if knobs.compile else 1),
            "logits": 12 * tokens * shape.vocab_size,
            "gathered": gathered,
            "gradients": whole,
        }
        terms = {name: size / 2**30 for name, size in terms.items()}
        again = share * RECOMPUTED[mode]
        matmuls_s = (6 + 2 * again) * params * tokens * knobs.grad_accum_steps / self.flops_per_s
        matmuls_s *= 0.9 if knobs.compile else 1.0
        gathers = 2 if knobs.reshard_after_forward else 1
        reductions = 2 * (knobs.grad_accum_steps if knobs.sync_each_micro_batch else 1)
        wire_s = 2 * params * (gathers * knobs.grad_accum_steps + reductions) / self.link_bytes_per_s
        hidden_s = 0.75 * min(matmuls_s, wire_s)
        return Prediction(
            memory_terms=terms,
            allocated_gib=sum(terms.values()),
            reserved_gib=1.06 * sum(terms.values()),
            time_terms={"matmuls": matmuls_s, "wire": wire_s - hidden_s},
            step_s=matmuls_s + wire_s - hidden_s,
        )
