"""Time of an optimizer step by a roofline: to put configs in order, not to be believed in seconds.

Work over rates, with efficiencies that depend on size; collectives by the bytes of a unit, and what of them is hidden.
The constants are fitted to published runs (tests/benchmarks/prediction.py, which also says how far they carry).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autotune.preflight.activations import MASTER, Activations, Setting, activations
from autotune.preflight.shape import ModelShape
from trials.record import Knobs, checkpoint_stride


@dataclass(frozen=True)
class Rates:
    """What one rank has, by its datasheet."""

    tflops_per_s: float
    """Dense, in the dtype of compute."""
    memory_gb_per_s: float
    link_gb_per_s: float
    """To the other ranks of its node, in one direction."""
    network_gb_per_s: float
    """Its share of what its node has to other nodes, in one direction."""
    ranks_per_node: int


CPU = Rates(tflops_per_s=0.1, memory_gb_per_s=10.0, link_gb_per_s=1.0, network_gb_per_s=1.0, ranks_per_node=64)
"""One thread of a server's CPU, with two AVX2 FMAs a cycle at 3 GHz, and gloo over its memory: orders of magnitude, for
order only. A run probes the first."""
NETWORK_GB_PER_S = 25.0
"""Assumed where nothing is known: one 200 Gb/s adapter a GPU."""


@dataclass(frozen=True)
class Constants:
    """Fitted; each a share of the datasheet's rate unless a unit is given."""

    matmul: float = 0.911
    peak_power: float = 0.168
    """Matmuls' share falls with the peak to this power, from an A100's on: power and memory do not keep pace."""
    half_hidden: float = 376.0
    """Width at which matmuls reach half of `matmul`."""
    half_tokens: float = 968.0
    """The same of a micro-batch's tokens."""
    attention: float = 0.324
    """Of the causal half, in fused kernels."""
    attention_power: float = 0.513
    """As `peak_power`, of attention."""
    memory: float = 0.657
    network: float = 0.475
    """Links and adapters alike."""
    block_overhead_s: float = 3.4e-4
    """A block's forward and backward, whatever its size: launches, hooks, waits of collectives."""
    block_jitter_s: float = 2.14e-5
    """The same for each doubling of the world beyond a node."""
    doubling: float = 0.0118
    """Share of a step lost at each doubling of the world beyond 8 ranks."""


FITTED = Constants()
A100_TFLOPS_PER_S = 312.0
LATENCY_S = 2e-5
"""Of a collective, for each doubling of its ranks."""
OVERLAP = 3.0
"""Compute c and communication k that overlap take (c^p + k^p)^(1/p): by published runs, p = 3 is closer than the
larger of the two or their sum (9.9 % at most, 14.4 % and 15.3 %)."""
LOAD_S_PER_TOKEN = 1e-6
"""CPU time of one worker: text that a BPE tokenizer encodes. Not fitted."""
LOADER_OVERLAP = 0.02
"""Share of the loading that workers do not hide, each further doubling of workers halves it."""


def step_terms(
    shape: ModelShape,
    setting: Setting,
    knobs: Knobs,
    rates: Rates,
    constants: Constants = FITTED,
    acts: Activations | None = None,
) -> dict[str, float]:
    """Seconds of one optimizer step, by what takes them, but for the loader; hidden time is in none.

    Args:
        acts: where they are known already.
    """
    return _StepTime(shape, setting, knobs, rates, constants, acts or activations(shape, setting, knobs)).terms()


def loader_wait_s(shape: ModelShape, knobs: Knobs, busy_s: float) -> float:
    """Seconds of one optimizer step, busy for `busy_s`, in which a rank waits for batches."""
    accumulation, workers = knobs.grad_accum_steps, knobs.num_workers
    load = LOAD_S_PER_TOKEN * knobs.micro_batch_size * shape.seq_len
    if workers == 0:
        return accumulation * load
    starved = max(0.0, load / workers - busy_s / accumulation)
    return accumulation * (starved + LOADER_OVERLAP * load / workers / (knobs.prefetch_factor or 1))


class _StepTime:
    def __init__(
        self,
        shape: ModelShape,
        setting: Setting,
        knobs: Knobs,
        rates: Rates,
        constants: Constants,
        acts: Activations,
    ) -> None:
        self.shape, self.setting, self.knobs, self.rates, self.constants = shape, setting, knobs, rates, constants
        self.tokens = knobs.micro_batch_size * shape.seq_len
        self.compute = setting.compute_bytes
        self.reduce = 2 if knobs.reduce_dtype == "bf16" else MASTER
        self.is_ddp = knobs.engine == "ddp"
        self.ranks = setting.world_size if self.is_ddp else setting.world_size // (knobs.replicate_degree or 1)
        self.blocks = 1 if self.is_ddp else min(knobs.blocks_per_unit or 1, shape.num_blocks)
        self.num_units = -(-shape.num_blocks // self.blocks)
        self.acts = acts
        peak = rates.tflops_per_s * 1e12
        filled = self.tokens / (self.tokens + constants.half_tokens)
        wide = shape.hidden_size / (shape.hidden_size + constants.half_hidden)
        beyond = rates.tflops_per_s / A100_TFLOPS_PER_S
        self.matmul_rate = peak * beyond**-constants.peak_power * constants.matmul * filled * wide
        self.attention_rate = (
            peak
            * beyond**-constants.attention_power
            * constants.attention
            * (0.3 if knobs.attention_backend == "math" else 1.0)
        )
        self.memory_rate = rates.memory_gb_per_s * 1e9 * constants.memory

    # --- one block, seconds -----------------------------------------------------------------------------------

    def block(self) -> tuple[float, float, float]:
        """Matmuls, attention and elementwise operators of a forward."""
        shape = self.shape
        in_blocks = shape.matmul_params - shape.hidden_size * shape.vocab_size
        matmul = 2 * in_blocks / shape.num_blocks * self.tokens / self.matmul_rate
        causal = 2 * self.tokens * shape.seq_len * shape.q_size / self.attention_rate
        # Each saved tensor is written once and read about once.
        elementwise = 2 * self.acts.whole / self.memory_rate
        return matmul, causal, elementwise

    def recompute(self) -> float:
        """Of a mean block."""
        matmul, attention, elementwise = self.block()
        mode = self.knobs.activation_checkpointing
        stride = checkpoint_stride(mode)
        if mode == "selective_op":
            return elementwise
        whole = matmul + attention + elementwise
        return whole if mode == "full" else whole / stride if stride else 0.0

    # --- collectives, seconds ---------------------------------------------------------------------------------

    def collective(self, num_bytes: float, ranks: int) -> float:
        """An all-gather or a reduce-scatter of so many whole bytes."""
        if ranks < 2:
            return 0.0
        rates = self.rates
        rate = rates.link_gb_per_s
        if ranks > rates.ranks_per_node:  # what a node takes in, over the adapters of all its ranks
            rate = min(rate, rates.network_gb_per_s * rates.ranks_per_node)
        moved = num_bytes * (ranks - 1) / ranks
        return moved / (rate * 1e9 * self.constants.network) + LATENCY_S * math.log2(ranks)

    def gather(self, params: float, ranks: int | None = None) -> float:
        loaded = self.compute * params / self.ranks / (PCIE_GB_PER_S * 1e9) if self.knobs.cpu_offload else 0.0
        return self.collective(self.compute * params, ranks or self.ranks) + loaded

    def reduction(self, params: float) -> float:
        if self.is_ddp:  # an all-reduce is one of each
            return 2 * self.collective(MASTER * params, self.ranks)
        seconds = self.collective(self.reduce * params, self.ranks)
        if (self.knobs.replicate_degree or 1) > 1:
            seconds += 2 * self.collective(self.reduce * params / self.ranks, self.knobs.replicate_degree or 1)
        if self.knobs.cpu_offload:
            seconds += MASTER * params / self.ranks / (PCIE_GB_PER_S * 1e9)
        return seconds

    # --- the step ---------------------------------------------------------------------------------------------

    def terms(self) -> dict[str, float]:
        knobs, shape, constants = self.knobs, self.shape, self.constants
        accumulation, layers = knobs.grad_accum_steps, shape.num_blocks
        matmul, attention, elementwise = self.block()
        forward = layers * (matmul + attention + elementwise)
        backward = layers * (2 * matmul + 2.5 * attention + 2 * elementwise)
        head = 6 * shape.hidden_size * shape.vocab_size * self.tokens / self.matmul_rate
        loss = 2 * self.acts.loss / self.memory_rate
        doublings = max(0.0, math.log2(self.setting.world_size / self.rates.ranks_per_node))
        overhead = layers * (constants.block_overhead_s + constants.block_jitter_s * doublings)
        if knobs.compile:
            overhead *= 0.5
        again = layers * self.recompute()
        synced = 1 if not knobs.sync_each_micro_batch else accumulation
        exposed = self.exposed(forward, backward + again, synced)
        every_micro_step = {
            "matmuls": layers * 3 * matmul + head,
            "attention": layers * 3.5 * attention,
            "elementwise": layers * 3 * elementwise + loss,
            "recompute": again,
            "overhead": overhead,
        }
        terms = {name: seconds * accumulation for name, seconds in every_micro_step.items()}
        terms["exposed_communication"] = exposed
        terms["optimizer"] = self.optimizer()
        busy = sum(terms.values())
        terms["stragglers"] = busy * constants.doubling * max(0.0, math.log2(self.setting.world_size / 8))
        return terms

    def exposed(self, forward: float, backward: float, synced: int) -> float:
        """Communication of a step that compute does not hide."""
        knobs, shape = self.knobs, self.shape
        accumulation = knobs.grad_accum_steps
        if self.ranks == 1 and not knobs.cpu_offload:
            return 0.0
        unit_params = shape.block_params * shape.num_blocks / self.num_units
        if self.is_ddp:
            num_buckets = max(1.0, MASTER * shape.num_params / 2**20 / knobs.bucket_cap_mb)
            bucket = shape.num_params / num_buckets
            return synced * _beyond(backward, self.reduction(bucket) * num_buckets)
        gather, reduce = self.gather(unit_params), self.reduction(unit_params)
        again = self.gather(unit_params, knobs.reshard_group_size or None)
        kept = self.num_units if not knobs.reshard_after_forward else min(knobs.keep_last_units or 0, self.num_units)
        in_forward, in_backward = self.num_units * gather, (self.num_units - kept) * again
        # FSDP1 without early gathers waits for each.
        late = knobs.engine == "fsdp1" and knobs.backward_prefetch != "pre"
        hidden_backward = 0.0 if late else in_backward
        reductions = self.num_units * reduce
        root = self.gather(shape.root_params)
        first = gather  # nothing to hide it behind
        plain = _beyond(forward, in_forward) + first + root + (in_backward if late else 0.0)
        without = plain + _beyond(backward, hidden_backward)
        with_reduction = plain + _beyond(backward, hidden_backward + reductions) + self.reduction(shape.root_params)
        return synced * with_reduction + (accumulation - synced) * without

    def optimizer(self) -> float:
        params = self.shape.num_params / (1 if self.is_ddp else self.ranks)
        # Reads weight, gradient and two moments, writes three of them; step by step, each is read and written again.
        moved = MASTER * params * (7 if self.knobs.fused_optimizer else 14)
        if self.knobs.cpu_offload:
            return moved / (HOST_GB_PER_S * 1e9)
        return moved / self.memory_rate


PCIE_GB_PER_S = 20.0
HOST_GB_PER_S = 20.0
"""Of a rank's share of its host's memory. Both of offloading, and assumed."""


def _beyond(compute: float, communication: float) -> float:
    """What overlapped communication adds to compute."""
    if communication <= 0:
        return 0.0
    return float((compute**OVERLAP + communication**OVERLAP) ** (1 / OVERLAP) - compute)
