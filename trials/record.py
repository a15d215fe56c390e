"""What the driver asks of a trial and what a rank answers: plain dataclasses, JSON both ways."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PYTHON_STDLIB = "python-stdlib"
"""`data.source` for the text that every machine has: this interpreter's own library source."""
SYNTHETIC = "synthetic"
"""`data.source` for random tokens; the loader is then not measured."""

ENGINES = ("fsdp2", "fsdp1")
BACKWARD_PREFETCH = ("pre", "post", "none")
_KNOB_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "bool": (bool,),
    "float": (int, float),
    "str": (str,),
    "int | None": (int, type(None)),
    "bool | None": (bool, type(None)),
    "str | None": (str, type(None)),
}


@dataclass(frozen=True)
class Knobs:
    """The settings of one trial, as the engine is really given them; README, "Knobs", says what each does.

    A knob that the engine has not is None.
    """

    micro_batch_size: int
    """Sequences per rank and micro-step."""
    grad_accum_steps: int
    """Micro-steps per optimizer step; always derived from the global batch, never sampled."""
    sync_each_micro_batch: bool
    """True: gradients are reduce-scattered after every micro-step. False: only after the last one."""
    reshard_after_forward: bool
    """True: a unit's weights are freed after its forward and gathered again for its backward (FSDP1: FULL_SHARD).
    False: they stay until its backward (FSDP1: SHARD_GRAD_OP)."""
    bucket_cap_mb: float
    """MiB of unsharded weights, in the parameter dtype, that one FSDP unit of consecutive blocks may hold."""
    blocks_per_unit: int
    """Blocks that `bucket_cap_mb` puts in one FSDP unit; recorded, so that equal caps are seen to be equal."""
    activation_checkpointing: str
    """`none`, `full`, `every_K` (every K-th block is checkpointed) or `selective_op` (matmuls and SDPA are kept)."""
    num_workers: int
    """DataLoader worker processes per rank."""
    prefetch_factor: int | None
    """Batches each worker keeps ready; None without workers."""
    engine: str = "fsdp2"
    """`fsdp2` (torch's fully_shard) or `fsdp1` (FullyShardedDataParallel)."""
    limit_all_gathers: bool | None = None
    """FSDP1 alone. True: the CPU thread waits before it queues a third all-gather. It frees nothing by itself."""
    backward_prefetch: str | None = None
    """FSDP1 alone. The next unit's weights are gathered before (`pre`) or after (`post`) the present unit's gradients
    are computed, or when they are needed (`none`)."""
    forward_prefetch: bool | None = None
    """FSDP1 alone. True: the next unit's all-gather is queued before the present unit's forward."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Knobs:
        """Knobs from a file that anybody may have written.

        Raises:
            TypeError: a knob that is missing or unknown.
            ValueError: a value that is none of the knob's.
        """
        knobs = Knobs(**values)
        for field_ in dataclasses.fields(Knobs):
            value, wanted = values.get(field_.name, field_.default), _KNOB_TYPES[str(field_.type)]
            if type(value) not in wanted:
                raise ValueError(f"{field_.name} = {value!r}: expected {field_.type}")
        checkpoint_stride(knobs.activation_checkpointing)
        if knobs.engine not in ENGINES:
            raise ValueError(f"engine = {knobs.engine!r}: known are {ENGINES}")
        if knobs.backward_prefetch not in (*BACKWARD_PREFETCH, None):
            raise ValueError(f"backward_prefetch = {knobs.backward_prefetch!r}: known are {BACKWARD_PREFETCH}")
        given = [name for name in FSDP1_KNOBS if getattr(knobs, name) is not None]
        if given != (list(FSDP1_KNOBS) if knobs.engine == "fsdp1" else []):
            raise ValueError(f"{', '.join(FSDP1_KNOBS)}: fsdp1 has all three and no other engine any; given: {given}")
        return knobs


FSDP1_KNOBS = ("limit_all_gathers", "backward_prefetch", "forward_prefetch")
KNOB_NAMES: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(Knobs))


def checkpoint_stride(mode: str) -> int | None:
    """K of `every_K`, else None.

    Raises:
        ValueError: `mode` is no activation checkpointing mode.
    """
    if mode in ("none", "full", "selective_op"):
        return None
    prefix, _, stride = mode.partition("_")
    if prefix == "every" and stride.isdigit() and int(stride) >= 2:
        return int(stride)
    raise ValueError(f"activation_checkpointing = {mode!r}: expected none, full, selective_op, or every_K with K >= 2")


def group_blocks(block_mib: Sequence[float], cap_mib: float) -> list[int]:
    """How many consecutive blocks each FSDP unit takes, so that none exceeds the cap; a unit has at least one block.

    Args:
        block_mib: unsharded MiB of each block, in order of execution.
        cap_mib: `bucket_cap_mb`.
    """
    units: list[int] = []
    filled = 0.0
    for size in block_mib:
        if units and filled + size <= cap_mib:
            units[-1] += 1
            filled += size
        else:
            units.append(1)
            filled = size
    return units


def unit_cap_mb(block_mib: Sequence[float], units: Sequence[int]) -> float:
    """The smallest cap, in whole hundredths of a MiB, that groups blocks into `units`: the size of the largest."""
    starts = [sum(units[:i]) for i in range(len(units))]
    largest = max(sum(block_mib[start : start + size]) for start, size in zip(starts, units, strict=True))
    return math.ceil(largest * 100) / 100


@dataclass(frozen=True)
class Measure:
    """How long a trial is measured."""

    warmup_steps: int = 2
    """Optimizer steps before the clock starts."""
    min_steps: int = 6
    """Timed optimizer steps at least."""
    max_steps: int = 40
    """Timed optimizer steps at most."""
    rel_ci: float = 0.03
    """Stop once the 95 % interval of the mean block time is within +- this fraction."""
    block_s: float = 0.5
    """Target length of one timed block, seconds; a block is always whole optimizer steps."""


@dataclass(frozen=True)
class TrialSpec:
    """One attempt, as the driver asks for it; the same frozen JSON reaches every rank."""

    trial: int
    stage: str
    """baseline, explore, finalist, round; `survey` for the first job, which measures no config."""
    workload: str
    """`decoder`, or `package.module:factory`."""
    model: dict[str, Any]
    """Keyword arguments of the workload's factory."""
    seq_len: int
    data: dict[str, Any]
    global_batch_size: int
    """Sequences per optimizer step over the ranks of this trial."""
    precision: str
    """`fp32`, or `bf16` (bf16 compute and gathers, fp32 master weights)."""
    reduce_dtype: str
    """`fp32` or `bf16`: of the gradient reduction."""
    optimizer: dict[str, Any]
    world_size: int
    device: str
    """`cpu` or `cuda`."""
    seed: int
    measure: Measure
    knobs: Knobs | None
    round: int | None = None
    """Number of the interleaved round, in stage `round`."""
    attempt: int = 0
    memory_limit_gib: float | None = None
    """Limit per rank: of the CUDA caching allocator, or on CPU of the data segment's growth (RLIMIT_DATA)."""
    process_group_timeout_s: float = 120.0
    import_paths: tuple[str, ...] = ()
    """Folders where `package.module:factory` is looked for, after everything else."""
    hardware_flops_per_token: float | None = None
    """Already counted for this model and checkpointing mode; None asks rank 0 to count."""
    tracked_bytes: int | None = None
    """Already tracked for this config (MemTracker's peak repeats exactly); None asks each CPU rank to track."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> TrialSpec:
        values = json.loads(text)
        values["measure"] = Measure(**values["measure"])
        values["import_paths"] = tuple(values["import_paths"])
        if values["knobs"] is not None:
            values["knobs"] = Knobs.from_dict(values["knobs"])
        return TrialSpec(**values)

    def digest(self) -> str:
        """Names what is measured: equal digests measure the same thing, whatever the trial, stage or attempt."""
        values = dataclasses.asdict(self)
        for label in ("trial", "stage", "round", "attempt", "import_paths"):
            del values[label]
        for known_already in ("hardware_flops_per_token", "tracked_bytes"):
            del values[known_already]
        return digest(values)


def digest(values: Any) -> str:
    """First 16 hex digits of the SHA-256 of `values` as canonical JSON."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


@dataclass
class RankReport:
    """What one rank found; written as JSON by the rank itself, just before it leaves."""

    rank: int
    started_at: float = 0.0
    """When the rank's own code began, seconds since the epoch."""
    outcome: str = "crashed"
    reason: str = ""
    phase: str = "start"
    """What the rank was doing: start, process_group, data, build, warmup, drain, timed, memory, flops, done."""
    error_type: str = ""
    error: str = ""
    """Traceback, if the rank failed."""
    phase_s: dict[str, float] = field(default_factory=dict)
    """Seconds spent in each phase."""
    applied: dict[str, Any] | None = None
    """The knobs as read back from the live objects."""
    micro_batch_tokens: int = 0
    num_steps: int = 0
    block_times_s: list[float] = field(default_factory=list)
    """Seconds per optimizer step of each timed block, slowest rank."""
    block_steps: list[int] = field(default_factory=list)
    """Optimizer steps in each timed block."""
    own_step_times_s: list[float] = field(default_factory=list)
    """Seconds of each timed optimizer step on this rank alone; on CUDA the time to queue it, not to run it."""
    data_wait_s: float = 0.0
    """Seconds this rank waited for batches inside the timed blocks."""
    drift: float = 0.0
    """Second half of the timed blocks over the first half, minus 1."""
    losses: list[float] = field(default_factory=list)
    """Mean loss over all ranks of each optimizer step, from the first update on."""
    allocated_bytes: int | None = None
    """Peak of live tensors; None if it could not be tracked."""
    reserved_bytes: int = 0
    alloc_retries: int = 0
    warnings: list[str] = field(default_factory=list)
    """What could not be found out beside the measurement, for people."""
    hardware_flops_per_token: float | None = None
    host: str = ""
    device_name: str = ""
    torch_version: str = ""
    driver_version: str = ""
    nccl_version: str = ""
    survey: dict[str, Any] | None = None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> RankReport:
        return RankReport(**json.loads(text))
