"""What a config truly does on the modelled cluster: the mechanisms put together, and the hidden effects on top."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autotune.job import Job
from autotune.simulate.cluster import SimulatedCluster
from autotune.simulate.hidden import Hidden
from autotune.simulate.kernels import CHECKPOINT_S, LAUNCH_S, MODE_S, NUM_MATMULS, NUM_OTHERS, Kernels
from autotune.simulate.machine import machine_of, shape_of
from autotune.simulate.memory import FP32, Peaks, walk
from autotune.simulate.network import Network
from autotune.simulate.timeline import Order, Span, UnitTimes, micro_step
from trials.record import KNOB_NAMES, PYTHON_STDLIB, Knobs, checkpoint_stride

GIB = 2**30
CONTEXT_BYTES = 0.9 * GIB
"""CUDA's, cuBLAS' workspaces and NCCL's buffers on one node, outside of the allocator."""
NCCL_BYTES_PER_NODE = 4 * 2**20
RANK_SD = 0.006
"""Of one rank's compute from step to step: all wait for the slowest of many."""
RETRY_COST = 0.06
"""Of a step, for each time the allocator empties its cache and begins anew."""
RETRY_BYTES = 0.5 * GIB
"""That each of them gains."""
MAX_COUNTED_RETRIES = 10
LOST_AT_LEAST = 0.3
"""Of the fragments, those that an empty cache does not bring back."""
PCIE_BYTES_PER_S, HOST_BYTES_PER_S = 22e9, 18e9
"""Of one rank: its copies to the host, and the optimizer there."""
BATCH_S, TOKEN_S, READ_TOKEN_S = 4e-4, 1.6e-6, 0.04e-6
"""Of one loader process: to collate a batch, to tokenise a token of text, to read one that is stored."""
BYTE_TOKEN_S = 0.12e-6
HICCUP = 0.35
"""How much longer a slow batch takes than the mean, which a queue must outlast."""
HOOK_S = {"fsdp2": 160e-6, "fsdp1": 240e-6, "ddp": 15e-6}


@dataclass(frozen=True)
class Truth:
    """A config without noise."""

    step_s: float
    """One optimizer step; of a config that does not fit, what it would take."""
    tokens_per_s_per_rank: float
    allocated_gib: float
    reserved_gib: float
    capacity_gib: float
    """What the allocator may take."""
    retries: int
    """Of the allocator, each step."""
    needed_gib: float
    """What the allocator must have, even with an empty cache; more than `capacity_gib` is out of memory."""
    phase: str
    """Where memory peaks."""
    parts: dict[str, float]
    """Seconds of a step by trials.breakdown.FRACTIONS; they add up to `step_s`."""
    comm_s: float
    """Collectives in flight, hidden or not."""
    matmul_share: float
    """Of compute."""

    @property
    def out_of_memory(self) -> bool:
        return self.needed_gib > self.capacity_gib


@dataclass(frozen=True)
class Judged:
    """What the allocator makes of a config, or of many."""

    needed: Any
    """Bytes that it must have, even with an empty cache."""
    reserved: Any
    """Bytes, at the peak."""
    retries: Any
    """Times that it empties its cache, each step."""
    retry_cost: Any
    """Of a step's time."""


def judge(allocated: Any, pools: Any, fragments: Any, capacity: float) -> Judged:
    """All arguments in bytes, but `fragments`, a share; numbers, or arrays of one shape."""
    # An emptied cache leaves less in pieces, but some is always lost.
    needed = allocated * (1 + LOST_AT_LEAST * fragments)
    wanted = np.maximum(pools, allocated) * (1 + fragments)
    retries = np.maximum(0, np.ceil((wanted - capacity) / RETRY_BYTES))
    return Judged(needed, np.minimum(wanted, capacity), retries, RETRY_COST * np.minimum(retries, MAX_COUNTED_RETRIES))


class World:
    """One job on one cluster.

    Args:
        job: validated; its model must be the built-in decoder.
        cluster: with the seed of the hidden effects.

    Raises:
        UserError: a model or device that is not known.
    """

    def __init__(self, job: Job, cluster: SimulatedCluster) -> None:
        self.job, self.cluster = job, cluster
        self.shape, self.machine = shape_of(job), machine_of(cluster, job)
        self.world_size = job.cluster.world_size
        self.kernels = Kernels(self.machine, self.shape)
        self.network = Network(self.machine, self.world_size)
        self.hidden = Hidden(cluster.seed, cluster.effects)
        self._spans: dict[tuple[object, ...], tuple[Span, Span, Span]] = {}
        self._peaks: dict[tuple[object, ...], Peaks] = {}

    @property
    def capacity_bytes(self) -> float:
        """What the allocator may take: the device less what lives outside of it, or the job's limit."""
        outside = CONTEXT_BYTES + NCCL_BYTES_PER_NODE * self.job.cluster.nodes_per_trial
        free = self.machine.memory_bytes - outside
        limit = self.job.cluster.memory_limit_gib
        return free if limit is None else min(free, limit * GIB)

    def truth(self, knobs: Knobs, slowness: float = 1.0) -> Truth:
        """What the config does on average.

        Args:
            slowness: of compute on the slowest of the slot's nodes; 1 is the best there is.
        """
        peaks, factor = self.peaks(knobs), self.hidden.memory_factor(knobs)
        parts, comm_s, matmul_share = self.step_parts(knobs, slowness)
        slower = self.hidden.time_factor(knobs)
        parts = {name: seconds * slower for name, seconds in parts.items()}
        judged = judge(
            peaks.allocated * factor, peaks.pools * factor, self.hidden.fragments(knobs), self.capacity_bytes
        )
        retries = int(judged.retries)
        parts["idle"] += float(judged.retry_cost) * sum(parts.values())
        step_s = sum(parts.values())
        tokens = knobs.micro_batch_size * knobs.grad_accum_steps * self.shape.seq_len
        return Truth(
            step_s=step_s,
            tokens_per_s_per_rank=tokens / step_s,
            allocated_gib=peaks.allocated * factor / GIB,
            reserved_gib=float(judged.reserved) / GIB,
            capacity_gib=self.capacity_bytes / GIB,
            retries=retries,
            needed_gib=float(judged.needed) / GIB,
            phase="build" if peaks.static * factor > self.capacity_bytes else peaks.phase,
            parts=parts,
            comm_s=comm_s * slower,
            matmul_share=matmul_share,
        )

    def peaks(self, knobs: Knobs) -> Peaks:
        """Of memory, before the hidden effects."""
        key = _memory_key(knobs)
        if key not in self._peaks:
            self._peaks[key] = walk(self.shape, knobs, self.world_size)
        return self._peaks[key]

    # --- time -------------------------------------------------------------------------------------------------

    def step_parts(self, knobs: Knobs, slowness: float = 1.0) -> tuple[dict[str, float], float, float]:
        """By the mechanisms alone: seconds of one optimizer step by part, seconds of collectives, and the share of
        matmuls in compute."""
        first, inner, last = self._micro_steps(knobs)
        count = knobs.grad_accum_steps
        spans = [last] if count == 1 else [first, last]
        counts = [1] * len(spans)
        if count > 2:
            spans, counts = [first, inner, last], [1, count - 2, 1]

        def total(name: str) -> float:
            return float(sum(n * getattr(span, name) for n, span in zip(counts, spans, strict=True)))

        compute_s = total("compute_s")
        # The gang goes at the pace of its slowest rank.
        late_s = compute_s * (slowness * (1 + RANK_SD * math.sqrt(2 * math.log(self.world_size))) - 1)
        idle_s = total("idle_s")
        micro_s = (total("total_s") + late_s) / count
        data_wait_s = self._data_wait_s(knobs, micro_s, total("host_s") / count) * count
        optimizer_s, copy_s = self._optimizer_s(knobs)
        parts = {
            "compute": compute_s + late_s,
            "exposed_comm": total("exposed_s"),
            "exposed_copy": copy_s,
            "data_wait": data_wait_s,
            "optimizer": optimizer_s,
            "idle": idle_s,
        }
        cost = self.kernels.block(knobs.micro_batch_size, knobs.compile, knobs.attention_backend)
        return parts, total("comm_s"), cost.matmul_share

    def micro_step_times(self, knobs: Knobs) -> tuple[float, float, float]:
        """Seconds of the first, an inner and the last micro-step, by the mechanisms alone."""
        first, inner, last = self._micro_steps(knobs)
        return first.total_s, inner.total_s, last.total_s

    def _micro_steps(self, knobs: Knobs) -> tuple[Span, Span, Span]:
        """The first, an inner and the last of an optimizer step."""
        key = (*_time_key(knobs), self._host(knobs))
        if key not in self._spans:
            units, root, order = self._units(knobs), self._root(knobs), self._order(knobs)
            keeps = knobs.engine == "fsdp1" and not knobs.reshard_after_forward and not knobs.sync_each_micro_batch
            several = knobs.grad_accum_steps > 1
            run = functools.partial(micro_step, units, root, order)
            last = run(gathers=not (keeps and several))
            # Gradients that are held back in fp32 are added up by one more pass.
            first = run(reduces=False) if several and not knobs.sync_each_micro_batch else run()
            inner = run(gathers=not keeps, reduces=False) if several and not knobs.sync_each_micro_batch else last
            if several and not knobs.sync_each_micro_batch:
                adding_s = self.kernels.stream_s(3 * FP32 * self.shape.num_params, len(units))
                inner = replace(inner, total_s=inner.total_s + adding_s, compute_s=inner.compute_s + adding_s)
            self._spans[key] = (first, inner, last)
        return self._spans[key]

    def _order(self, knobs: Knobs) -> Order:
        if knobs.engine == "fsdp1":
            prefetch = knobs.backward_prefetch
            return Order(
                self._host(knobs) * HOOK_S["fsdp1"],
                forward_ahead=1 if knobs.limit_all_gathers else self.shape.num_layers,
                forward_early=int(bool(knobs.forward_prefetch)),
                backward_ahead=0 if prefetch == "none" else 1,
                backward_late=prefetch == "post",
                blocks_host=bool(knobs.limit_all_gathers),
            )
        return Order(
            self._host(knobs) * HOOK_S[knobs.engine],
            forward_ahead=max(1, knobs.forward_prefetch_units or 0),
            forward_early=knobs.forward_prefetch_units or 0,
            backward_ahead=max(1, knobs.backward_prefetch_units or 0),
        )

    def _host(self, knobs: Knobs) -> float:
        """How much slower the training thread issues because loader workers want its CPUs."""
        # Beside it run NCCL's thread, autograd's and the memory pinner's.
        return max(1.0, (knobs.num_workers + 3) / self.machine.cpus_per_rank)

    def _units(self, knobs: Knobs) -> list[UnitTimes]:
        shape = self.shape
        modes = _recomputed(shape.num_layers, knobs.activation_checkpointing)
        if knobs.engine == "ddp":
            return self._ddp_buckets(knobs, modes)
        size = knobs.blocks_per_unit or 1
        ranges = [range(start, min(start + size, shape.num_layers)) for start in range(0, shape.num_layers, size)]
        last_kept = len(ranges) - (knobs.keep_last_units or 0)
        alike: dict[tuple[tuple[str, ...], bool], UnitTimes] = {}
        units = []
        for index, blocks in enumerate(ranges):
            kind = (tuple(modes[blocks.start : blocks.stop]), not knobs.reshard_after_forward or index >= last_kept)
            if kind not in alike:
                alike[kind] = self._unit(knobs, *kind)
            units.append(alike[kind])
        return units

    def _unit(self, knobs: Knobs, modes: Sequence[str], keeps: bool) -> UnitTimes:
        shape, kernels = self.shape, self.kernels
        params = len(modes) * shape.block_params
        num_bytes = params * shape.bytes_each
        regather_s = 0.0 if keeps else self._gather_s(knobs, num_bytes, knobs.reshard_group_size or 0)
        reduce_bytes = 2 if knobs.reduce_dtype == "bf16" else FP32
        fsdp2 = knobs.engine == "fsdp2"
        forward_s, backward_s, host_s, host_back_s = self._blocks(knobs, modes)
        return UnitTimes(
            forward_s,
            backward_s,
            host_s,
            host_back_s,
            gather_s=self._gather_s(knobs, num_bytes),
            regather_s=regather_s,
            reduce_s=self._reduce_s(knobs, params),
            # FSDP1's weights are views into what was gathered.
            copy_out_s=kernels.stream_s(2 * num_bytes, 2) if fsdp2 else 0.0,
            copy_in_s=kernels.stream_s((shape.bytes_each + reduce_bytes) * params, 2 if fsdp2 else 4),
            replicate_s=self._replicate_s(knobs, params),
        )

    def _blocks(self, knobs: Knobs, modes: Sequence[str]) -> tuple[float, float, float, float]:
        """Forward and backward of some blocks: on the GPU, and on the CPU."""
        cost = self.kernels.block(knobs.micro_batch_size, knobs.compile, knobs.attention_backend)
        slow = self._host(knobs)
        forward_s = backward_s = host_s = host_back_s = 0.0
        for mode in modes:
            forward_s += cost.forward_s
            backward_s += cost.backward_s
            launches_s, back_s = cost.forward_host_s, cost.backward_host_s
            if mode == "full":
                backward_s += cost.forward_s
                back_s += launches_s + CHECKPOINT_S
            elif mode == "selective_op":
                backward_s += cost.pointwise_s
                # The mode sees every operator, also those whose result it has.
                watched_s = 0.0 if knobs.compile else MODE_S * (NUM_MATMULS + 1 + NUM_OTHERS[False])
                launches_s += watched_s
                back_s += cost.forward_host_s + watched_s + CHECKPOINT_S
            host_s += launches_s
            host_back_s += back_s
        return forward_s, backward_s, slow * host_s, slow * host_back_s

    def _root(self, knobs: Knobs) -> UnitTimes:
        shape = self.shape
        forward_s, backward_s = self.kernels.head(knobs.micro_batch_size)
        if knobs.engine == "ddp":
            return UnitTimes(forward_s, backward_s, 8 * LAUNCH_S, 16 * LAUNCH_S, reduce_s=self._reduce_s(knobs, 0))
        return UnitTimes(
            forward_s,
            backward_s,
            8 * LAUNCH_S,
            16 * LAUNCH_S,
            gather_s=self._gather_s(knobs, shape.root_bytes),
            reduce_s=self._reduce_s(knobs, shape.root_params),
            copy_out_s=self.kernels.stream_s(2 * shape.root_bytes, 2),
            copy_in_s=self.kernels.stream_s(6 * shape.root_params, 2),
            replicate_s=self._replicate_s(knobs, shape.root_params),
        )

    def _ddp_buckets(self, knobs: Knobs, modes: Sequence[str]) -> list[UnitTimes]:
        """A block each; its gradients in as many all-reduces as the cap makes of them."""
        grad_bytes = FP32 * self.shape.block_params
        cap = knobs.bucket_cap_mb * 2**20
        group = self.network.neighbours(self.world_size)
        whole, rest = divmod(grad_bytes, cap)
        reduce_s = whole * self.network.all_reduce_s(cap, group) + self.network.all_reduce_s(rest, group)
        units = []
        for mode in modes:
            forward_s, backward_s, host_s, host_back_s = self._blocks(knobs, [mode])
            units.append(UnitTimes(forward_s, backward_s, host_s, host_back_s, reduce_s=reduce_s))
        return units

    def _shards(self, knobs: Knobs) -> int:
        return self.world_size // (knobs.replicate_degree or 1)

    def _gather_s(self, knobs: Knobs, num_bytes: float, num_ranks: int = 0) -> float:
        shards = self._shards(knobs)
        seconds = self.network.gather_s(num_bytes, self.network.neighbours(num_ranks or shards))
        if knobs.cpu_offload:
            seconds += num_bytes / shards / PCIE_BYTES_PER_S
        return seconds

    def _reduce_s(self, knobs: Knobs, num_params: float) -> float:
        if knobs.engine == "ddp":
            params = num_params or self.shape.root_params
            return self.network.all_reduce_s(FP32 * params, self.network.neighbours(self.world_size))
        each = 2 if knobs.reduce_dtype == "bf16" else FP32
        shards = self._shards(knobs)
        seconds = self.network.gather_s(each * num_params, self.network.neighbours(shards))
        return seconds + (each * num_params / shards / PCIE_BYTES_PER_S if knobs.cpu_offload else 0.0)

    def _replicate_s(self, knobs: Knobs, num_params: float) -> float:
        copies = knobs.replicate_degree or 1
        if copies == 1:
            return 0.0
        each = 2 if knobs.reduce_dtype == "bf16" else FP32
        shards = self._shards(knobs)
        return self.network.all_reduce_s(each * num_params / shards, self.network.across(copies, shards))

    def _optimizer_s(self, knobs: Knobs) -> tuple[float, float]:
        """The update, and copies that nothing hides."""
        own = self.shape.num_params / (1 if knobs.engine == "ddp" else self._shards(knobs))
        if knobs.cpu_offload:
            passes = 7 if knobs.fused_optimizer else 11
            return FP32 * passes * own / HOST_BYTES_PER_S, FP32 * own / PCIE_BYTES_PER_S
        return self.kernels.optimizer_s(own, knobs.fused_optimizer), 0.0

    # --- data -------------------------------------------------------------------------------------------------

    def loader_batch_s(self, knobs: Knobs) -> float:
        """Between two micro-batches of all loader processes of a rank together; there is at least one."""
        return self._host(knobs) * self._batch_s(knobs.micro_batch_size) / knobs.num_workers

    def _batch_s(self, micro_batch_size: int) -> float:
        """Of one loader process, for one micro-batch."""
        _, data = self.job.built_in
        if data.is_synthetic:
            return 0.0
        stored = data.format in ("bin", "npy")
        token_s = READ_TOKEN_S if stored else BYTE_TOKEN_S if data.tokenizer in (None, "byte") else TOKEN_S
        if data.source == PYTHON_STDLIB and data.tokenizer in (None, "byte"):
            token_s = BYTE_TOKEN_S
        return BATCH_S + micro_batch_size * self.shape.seq_len * token_s

    def _data_wait_s(self, knobs: Knobs, micro_s: float, host_s: float) -> float:
        """Of one micro-step."""
        batch_s = self._batch_s(knobs.micro_batch_size)
        if knobs.num_workers == 0:
            # The training thread loads between its launches; what the GPU still has queued hides it.
            return max(0.0, batch_s + host_s - micro_s) + 0.25 * min(batch_s, micro_s)
        crowded = self._host(knobs)
        late_s = max(0.0, crowded * batch_s / knobs.num_workers - micro_s)
        queued = knobs.num_workers * (knobs.prefetch_factor or 1)
        # A queue that is filled faster than it is emptied outlasts slow batches, the longer it is.
        load = min(1.0, crowded * batch_s / knobs.num_workers / micro_s)
        slow_batches_s: float = HICCUP * batch_s * load ** max(1.0, queued / 2) / knobs.num_workers
        return late_s + slow_batches_s


def _recomputed(num_layers: int, mode: str) -> list[str]:
    stride = checkpoint_stride(mode)
    if stride is None:
        return [mode] * num_layers
    return ["none" if index % stride else "full" for index in range(num_layers)]


_BESIDE_TIME = {"num_workers", "prefetch_factor", "fused_optimizer", "bucket_cap_mb", "grad_accum_steps"}
_BESIDE_MEMORY = {"num_workers", "prefetch_factor", "bucket_cap_mb", "grad_accum_steps"}
_of_time = operator.attrgetter(*(name for name in KNOB_NAMES if name not in _BESIDE_TIME))
_of_memory = operator.attrgetter(*(name for name in KNOB_NAMES if name not in _BESIDE_MEMORY))


def _time_key(knobs: Knobs) -> tuple[object, ...]:
    """What the micro-steps depend on, beside how crowded the CPUs are."""
    cap = knobs.bucket_cap_mb if knobs.engine == "ddp" else None
    return (*_of_time(knobs), cap, knobs.grad_accum_steps > 1)


def _memory_key(knobs: Knobs) -> tuple[object, ...]:
    return (*_of_memory(knobs), knobs.grad_accum_steps > 1)
