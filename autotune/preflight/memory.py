"""Peak memory of a rank in closed form: what is alive at the few moments of a step that can be the fullest.

Weights, gradients and buffers follow torch's engines as they are written (2.13: torch/distributed/fsdp,
torch/nn/parallel/distributed.py). Bytes; tens of microseconds a config.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autotune.preflight.activations import MASTER, Activations, Setting, activations
from autotune.preflight.shape import ModelShape
from trials.record import Knobs, checkpoint_stride

TERMS = (
    "weights",
    "optimizer_states",
    "gradients",
    "gathered_weights",
    "unit_gradients",
    "reduce_buffers",
    "activations",
    "recomputed_block",
    "backward_temporaries",
    "logits_and_loss",
    "optimizer_temporaries",
    "inputs",
)
Terms = dict[str, float]
CPU_HEAP_BYTES = 32 * 2**20
GLOO_COPIES = 4
"""Of a unit's reduction. Both measured on two ranks, with models of 1 to 3 million parameters."""


@dataclass(frozen=True)
class Peak:
    """Where a step takes most."""

    moment: str
    terms: Terms
    """Bytes by name; a subset of TERMS, which add up to `allocated`."""
    allocated: float
    """Live tensors."""
    reserved: float
    """What the caching allocator takes from the device, or on a CPU the data segment's growth."""


def peak(shape: ModelShape, setting: Setting, knobs: Knobs, acts: Activations | None = None) -> Peak:
    """The fullest moment of an optimizer step that is not the first.

    Args:
        acts: of another stack, whose activations are not those of `activations`.
    """
    step = _Step(shape, setting, knobs, acts or activations(shape, setting, knobs))
    moments = list(step.moments())
    name, terms = max(moments, key=lambda moment: sum(moment[1].values()))
    return Peak(name, terms, sum(terms.values()), step.reserved(moments))


class _Step:
    """One config's sizes in bytes."""

    def __init__(self, shape: ModelShape, setting: Setting, knobs: Knobs, acts: Activations) -> None:
        self.shape, self.knobs, self.on_cpu = shape, knobs, setting.device == "cpu"
        self.is_ddp, self.is_fsdp1 = knobs.engine == "ddp", knobs.engine == "fsdp1"
        self.compute = setting.compute_bytes
        self.reduce = 2 if knobs.reduce_dtype == "bf16" else MASTER
        self.shards = 1 if self.is_ddp else setting.world_size // (knobs.replicate_degree or 1)
        self.acts = acts
        self.blocks_per_unit = 1 if self.is_ddp else min(knobs.blocks_per_unit or 1, shape.num_blocks)
        self.num_units = -(-shape.num_blocks // self.blocks_per_unit)
        self.unit_params = self.blocks_per_unit * shape.block_params
        self.held_back = knobs.grad_accum_steps > 1 and not knobs.sync_each_micro_batch
        self.stride = checkpoint_stride(knobs.activation_checkpointing)
        self.offloaded = bool(knobs.cpu_offload)

    # --- always there -----------------------------------------------------------------------------------------

    def states(self) -> Terms:
        sharded = 0.0 if self.offloaded else MASTER * self.shape.num_params / self.shards
        return {"weights": sharded, "optimizer_states": 2 * sharded, "inputs": self.acts.inputs}

    def gradients(self, reduced_params: float) -> float:
        """What is held of gradients, once those of `reduced_params` are reduced in the last micro-step."""
        params = self.shape.num_params
        if self.is_ddp:
            # Buckets are there from the start; gradients held back are not yet in them.
            return MASTER * (params + (params - reduced_params) * self.held_back)
        sharded = 0.0 if self.offloaded else MASTER / self.shards
        if self.held_back:
            # FSDP1 keeps them in the dtype of compute, FSDP2 in that of the reduction.
            whole = self.compute if self.is_fsdp1 else self.reduce
            return whole * (params - reduced_params) + sharded * reduced_params
        return sharded * (params if self.knobs.grad_accum_steps > 1 else reduced_params)

    # --- weights beyond the shards ----------------------------------------------------------------------------

    def root(self) -> float:
        """FSDP: gathered from the first layer of the forward to the last of the backward."""
        return (
            0.0 if self.is_ddp or (self.shards == 1 and self.is_fsdp1) else float(self.compute * self.shape.root_params)
        )

    def is_kept(self, unit: int) -> bool:
        """Whether a unit's weights stay gathered after its forward."""
        return not self.knobs.reshard_after_forward or unit >= self.num_units - (self.knobs.keep_last_units or 0)

    def unit_bytes(self) -> float:
        return float(self.compute * self.unit_params)

    def kept(self, num_units: int) -> float:
        """What the first `num_units` units keep between their forward and their backward."""
        if self.is_ddp:
            return self.casts(num_units)
        kept = num_units if not self.knobs.reshard_after_forward else 0
        if self.knobs.reshard_after_forward:
            kept = max(0, num_units - (self.num_units - (self.knobs.keep_last_units or 0)))
        spread = self.knobs.reshard_group_size
        parts = (num_units - kept) / spread if spread else 0.0
        return self.unit_bytes() * (kept + parts)

    def casts(self, num_blocks: int) -> float:
        """DDP: bf16 copies of weights that autocast made and the backward needs; checkpointed blocks make them anew."""
        if self.compute == MASTER:
            return 0.0
        saved = sum(not self.is_checkpointed(block) for block in range(num_blocks))
        return float(self.compute * (saved * self.shape.block_params + self.shape.hidden_size * self.shape.vocab_size))

    def own(self, block: int) -> float:
        """Weights that a block's backward is computed with."""
        if not self.is_ddp:
            return self.unit_bytes()
        recast = self.compute != MASTER and self.is_checkpointed(block)
        return float(self.compute * self.shape.block_params * recast)

    def ahead(self, unit: int) -> float:
        """All-gathers that are queued before `unit`'s backward, each in one flat buffer."""
        if self.is_ddp:
            return 0.0
        return self.unit_bytes() * sum(not self.is_kept(u) for u in range(max(0, unit - self.depth), unit))

    @property
    def depth(self) -> int:
        """Units whose all-gather is queued ahead in backward."""
        if self.is_fsdp1:
            return int(self.knobs.backward_prefetch == "pre")
        return self.knobs.backward_prefetch_units or 1

    # --- activations ------------------------------------------------------------------------------------------

    def is_checkpointed(self, block: int) -> bool:
        mode = self.knobs.activation_checkpointing
        return mode in ("full", "selective_op") or (self.stride is not None and block % self.stride == 0)

    def saved(self, num_blocks: int) -> float:
        """By the forward of the first blocks."""
        acts, mode = self.acts, self.knobs.activation_checkpointing
        if mode == "selective_op":
            return num_blocks * acts.kept_ops
        checkpointed = num_blocks if mode == "full" else -(-num_blocks // self.stride) if self.stride else 0
        return checkpointed * acts.block_input + (num_blocks - checkpointed) * acts.whole

    def recomputed(self, block: int) -> float:
        acts = self.acts
        if not self.is_checkpointed(block):
            return 0.0
        if self.knobs.activation_checkpointing == "selective_op":
            return max(0.0, acts.kept_ops_again)
        return acts.again if self.shape.num_blocks > 1 else acts.whole - acts.block_input

    # --- the moments ------------------------------------------------------------------------------------------

    def moments(self) -> Iterator[tuple[str, Terms]]:
        last = self.num_units - 1
        # What grows and shrinks from unit to unit does so evenly: the ends, and the first with prefetches whole.
        units = {last, max(0, last - 1), min(self.depth, last), 0}
        for unit in {last, max(0, last - self.forward_depth)}:
            yield f"forward of unit {unit + 1}", self._forward(unit)
        if self.knobs.engine == "fsdp2":
            yield f"gathering of unit {last + 1}", self._gathering()
        yield "loss", self._all() | {"logits_and_loss": self.acts.loss + self.acts.head}
        yield "forward's end", self._forward_end()
        yield "head's backward", self._head_backward()
        for unit in units:
            yield from self._unit_backward(unit)
        if not self.is_ddp:
            yield from self._root_reduction()
        yield "optimizer", self._optimizer()

    def _all(self) -> Terms:
        """Between forward and backward of the last micro-step."""
        return self.states() | {
            "gradients": self.gradients(0),
            "gathered_weights": self.root() + self.kept(self.num_units),
            "reduce_buffers": self.in_flight(),
            "activations": self.saved(self.shape.num_blocks),
        }

    def in_flight(self) -> float:
        """FSDP2: of the root's reduction in the micro-step before; let go when the last unit's takes its place."""
        reduced_before = self.knobs.grad_accum_steps > 1 and not self.held_back
        return float(self.reduce * self.shape.root_params * (reduced_before and self.knobs.engine == "fsdp2"))

    def _forward(self, unit: int) -> Terms:
        """Of the unit's last block. The flat buffer of its all-gather is let go by the next one's."""
        block = min((unit + 1) * self.blocks_per_unit, self.shape.num_blocks) - 1
        ahead = 0 if self.is_ddp else min(self.forward_depth, self.num_units - 1 - unit)
        flat = self.knobs.engine == "fsdp2"
        own = 0 if self.is_ddp or not (self.knobs.reshard_after_forward and not self.is_kept(unit)) else 1
        return self._all() | {
            "gathered_weights": self.root() + self.kept(unit + 1) + self.unit_bytes() * (own + flat + ahead),
            "activations": self.saved(block + 1),
            "recomputed_block": self.acts.forward if self.is_checkpointed(block) else 0.0,
        }

    def _gathering(self) -> Terms:
        """Of the last unit in forward: its flat buffer, its weights that are copied out of it, and the one before's."""
        last = self.num_units - 1
        flats = 2 if last else 1
        return self._all() | {
            "gathered_weights": self.root() + self.kept(last) + self.unit_bytes() * (1 + flats),
            "activations": self.saved(last * self.blocks_per_unit),
        }

    @property
    def forward_depth(self) -> int:
        if self.is_fsdp1:
            return int(bool(self.knobs.forward_prefetch))
        return self.knobs.forward_prefetch_units or 0

    def _forward_end(self) -> Terms:
        """FSDP2 still has the flat buffer of the last all-gather, autocast its copies of all weights."""
        everything = self._all()
        if self.is_ddp:
            copies = 0.0 if self.compute == MASTER else float(self.compute * self.shape.num_params)
            everything["gathered_weights"] = copies
        elif not self.is_fsdp1:
            everything["gathered_weights"] += self.unit_bytes()
        return everything | {"logits_and_loss": self.acts.head + self.acts.logits}

    def _head_grad(self) -> float:
        """The root's gradients wait for the end of the backward; held back, they are in those already."""
        is_tied = self.shape.head_params == 0  # then it also waits for the embedding's
        if (self.is_ddp or self.adds_in_place) and not is_tied:
            return 0.0
        return float(self.compute * self.shape.hidden_size * self.shape.vocab_size)

    @property
    def adds_in_place(self) -> bool:
        """Whether a new gradient goes right into the one that is held back: both are of one dtype."""
        return self.held_back and (self.is_fsdp1 or self.compute == self.reduce)

    def _head_backward(self) -> Terms:
        everything = self._all()
        last = self.num_units - 1
        everything["gathered_weights"] += 0.0 if self.is_ddp or self.is_kept(last) else self.unit_bytes()
        head = self.acts.head + max(self.acts.logits + self.acts.hidden, self.acts.norm_backward)
        return everything | {"unit_gradients": self._head_grad(), "logits_and_loss": head}

    def _unit_backward(self, unit: int) -> Iterator[tuple[str, Terms]]:
        shape, size = self.shape, self.blocks_per_unit
        first_block, end = unit * size, min((unit + 1) * size, shape.num_blocks)
        later = (shape.num_blocks - end) * shape.block_params
        reduce_before = self.reduce * self.unit_params if end < shape.num_blocks else self.in_flight()
        common = self.states() | {"gradients": self.gradients(later)}
        others = self.root() + self.kept(unit + self.is_ddp) + self.ahead(unit)
        block_grads = 0.0 if self.is_ddp or self.adds_in_place else self.compute * shape.block_params
        down_grad = block_grads and self.compute * shape.hidden_size * shape.ffn_size
        for block in {end - 1, first_block}:
            done = end - 1 - block
            yield (
                f"backward of block {block + 1}",
                common
                | {
                    "gathered_weights": others + self.own(block),
                    "unit_gradients": self._head_grad() + done * block_grads + down_grad,
                    "reduce_buffers": 0.0 if self.is_ddp else reduce_before,
                    "activations": self.saved(block + 1),
                    "recomputed_block": self.recomputed(block),
                    "backward_temporaries": self.acts.backward,
                },
            )
        if self.is_ddp:
            return
        around = {
            "gathered_weights": others,
            "activations": self.saved(first_block),
            "backward_temporaries": self.acts.hidden,
        }
        params = (end - first_block) * shape.block_params
        for name, terms in self._reduction(later, params):
            terms["unit_gradients"] = terms.get("unit_gradients", 0.0) + self._head_grad()
            yield f"{name} of unit {unit + 1}", around | terms

    def _reduction(self, reduced_before: int, params: int) -> Iterator[tuple[str, Terms]]:
        """Gradients are copied into one buffer, and freed; then that is reduced. gloo copies it once more."""
        whole = float(self.reduce * params)
        yield (
            "copying for reduction",
            self.states()
            | {
                "gradients": self.gradients(reduced_before),
                # What was held back is reduced as it is.
                "unit_gradients": 0.0 if self.held_back else float(self.compute * params),
                "reduce_buffers": whole,
            },
        )
        output = whole / self.shards
        if self.reduce == MASTER:  # the output becomes the gradient
            output *= self.knobs.grad_accum_steps > 1 and not self.held_back
        yield (
            "reduction",
            self.states()
            | {
                "gradients": self.gradients(reduced_before + params),
                "reduce_buffers": whole * (1 + self.on_cpu) + output,
            },
        )

    def _root_reduction(self) -> Iterator[tuple[str, Terms]]:
        in_blocks = self.shape.num_blocks * self.shape.block_params
        for name, terms in self._reduction(in_blocks, self.shape.root_params):
            yield f"{name} of the root", terms

    def _optimizer(self) -> Terms:
        shape = self.shape
        if self.offloaded or self.knobs.fused_optimizer:
            temporaries = 0.0
        elif self.on_cpu:  # one tensor after the other
            temporaries = 2.0 * MASTER * shape.hidden_size * max(shape.vocab_size, shape.ffn_size) / self.shards
        else:  # all tensors in one call: the roots of the second moments
            temporaries = 1.0 * MASTER * shape.num_params / self.shards
        return self.states() | {
            "gradients": self.gradients(shape.num_params),
            "optimizer_temporaries": temporaries,
        }

    def reserved(self, moments: Sequence[tuple[str, Terms]]) -> float:
        """The allocator never gives back to another stream what one of them had: pools add up, each at its own peak.

        On a CPU, what the data segment grows by: the heap's fragments and gloo's copies come on top of the tensors.
        """
        live = max(sum(terms.values()) for _, terms in moments)
        if self.on_cpu:
            return live + CPU_HEAP_BYTES + GLOO_COPIES * self.reduce * self.unit_params
        if self.is_ddp:
            return live
        sharded = 0.0 if self.offloaded else MASTER * self.shape.num_params / self.shards
        on_compute_stream = max(sum(terms.values()) - min(terms["gradients"], sharded) for _, terms in moments)
        gathers = self.root() + self.unit_bytes()
        if self.knobs.limit_all_gathers is False:  # the CPU may run ahead with the gathers of all blocks
            gathers = self.root() + self.compute * self.shape.num_blocks * self.shape.block_params
        return on_compute_stream + gathers + sharded
