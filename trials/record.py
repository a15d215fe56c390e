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

TRAINER = "trainer"
"""Stands for workload and data where the user's own command has them."""

ENGINES = ("fsdp2", "fsdp1", "ddp")
BACKWARD_PREFETCH = ("pre", "post", "none")
ATTENTION_BACKENDS = ("auto", "flash", "efficient", "cudnn", "math")
_KNOB_TYPES: dict[str, tuple[type, ...]] = {
    "Custom | None": (tuple, type(None)),
    "int": (int,),
    "bool": (bool,),
    "float": (int, float),
    "str": (str,),
    "int | None": (int, type(None)),
    "bool | None": (bool, type(None)),
    "str | None": (str, type(None)),
}


@dataclass(frozen=True)
class EngineKnob:
    """A knob that not every engine has."""

    engines: tuple[str, ...]
    default: Any
    """torch's own, or what leaves torch alone."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    values: tuple[Any, ...] | None = None
    """All there are, if they are few."""


ENGINE_KNOBS: dict[str, EngineKnob] = {
    "reshard_after_forward": EngineKnob(("fsdp2", "fsdp1"), True),
    "keep_last_units": EngineKnob(("fsdp2",), 0),
    "reshard_group_size": EngineKnob(("fsdp2",), 0),
    "forward_prefetch_units": EngineKnob(("fsdp2",), 0),
    "backward_prefetch_units": EngineKnob(("fsdp2",), 0),
    "replicate_degree": EngineKnob(("fsdp2", "fsdp1"), 1),
    "reduce_dtype": EngineKnob(("fsdp2", "fsdp1"), "fp32", values=("fp32", "bf16")),
    "cpu_offload": EngineKnob(("fsdp2",), False, devices=("cuda",)),
    "limit_all_gathers": EngineKnob(("fsdp1",), True),
    "backward_prefetch": EngineKnob(("fsdp1",), "pre", values=BACKWARD_PREFETCH),
    "forward_prefetch": EngineKnob(("fsdp1",), False),
}


Custom = tuple[tuple[str, str], ...]
"""Names and values of a user's own knobs, as text, in the order of their names."""


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
    reshard_after_forward: bool | None
    """True: a unit's weights are freed after its forward and gathered again for its backward (FSDP1: FULL_SHARD).
    False: they stay until its backward (FSDP1: SHARD_GRAD_OP)."""
    bucket_cap_mb: float
    """MiB of unsharded weights, in the parameter dtype, that one FSDP unit of consecutive blocks may hold; under DDP,
    MiB of gradients in one all-reduce."""
    blocks_per_unit: int | None
    """Blocks that `bucket_cap_mb` puts in one FSDP unit; recorded, so that equal caps are seen to be equal."""
    activation_checkpointing: str
    """`none`, `full`, `every_K` (every K-th block is checkpointed) or `selective_op` (matmuls and SDPA are kept)."""
    num_workers: int
    """DataLoader worker processes per rank."""
    prefetch_factor: int | None
    """Batches each worker keeps ready; None without workers."""
    engine: str = "fsdp2"
    """`fsdp2` (torch's fully_shard), `fsdp1` (FullyShardedDataParallel) or `ddp` (DistributedDataParallel)."""
    keep_last_units: int | None = None
    """FSDP2. Of the units that are freed after forward, so many of the last are kept: the backward needs them first."""
    reshard_group_size: int | None = None
    """FSDP2. After forward, weights are spread over so many ranks, so that gathers stay inside a node; 0: over all."""
    forward_prefetch_units: int | None = None
    """FSDP2. Units whose all-gather is queued ahead in forward; 0: torch's own order."""
    backward_prefetch_units: int | None = None
    """FSDP2. Units whose all-gather is queued ahead in backward; 0: torch's own, which is one."""
    replicate_degree: int | None = None
    """Copies of the sharded model (HSDP): weights are sharded over world size / this many ranks. 1: plain FSDP."""
    reduce_dtype: str | None = None
    """`fp32` or `bf16`, of the gradient reduction under bf16 precision."""
    cpu_offload: bool | None = None
    """FSDP2 on CUDA. Weights, gradients and the optimizer live in pinned host memory."""
    limit_all_gathers: bool | None = None
    """FSDP1. True: the CPU thread waits before it queues a third all-gather. It frees nothing by itself."""
    backward_prefetch: str | None = None
    """FSDP1. The next unit's weights are gathered before (`pre`) or after (`post`) the present unit's gradients are
    computed, or when they are needed (`none`)."""
    forward_prefetch: bool | None = None
    """FSDP1. True: the next unit's all-gather is queued before the present unit's forward."""
    compile: bool = False
    """torch.compile of each block."""
    attention_backend: str = "auto"
    """Of scaled_dot_product_attention: torch's choice, or only flash, efficient, cudnn or math."""
    fused_optimizer: bool = False
    """One kernel for the whole AdamW update."""
    custom: Custom | None = None
    """Of a user's own trainer: the knobs that only it knows. None: the ranks are ours."""

    def __post_init__(self) -> None:
        """A knob that the engine has not is None; one that it has and that was not given is torch's default."""
        for name, knob in ENGINE_KNOBS.items():
            if self.engine not in knob.engines:
                object.__setattr__(self, name, None)
            elif getattr(self, name) is None:
                object.__setattr__(self, name, knob.default)
        if self.engine == "ddp":
            object.__setattr__(self, "blocks_per_unit", None)

    @property
    def model_parallel_ranks(self) -> int:
        """Ranks that work on the same sequences: tp x cp x pp, of a user's own knobs by these names."""
        return math.prod(int(value) for name, value in self.custom or () if name in MODEL_PARALLEL)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"custom": None if self.custom is None else dict(self.custom)}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Knobs:
        """Knobs from a file that anybody may have written. Of a user's own trainer, what it decides itself is null.

        Raises:
            TypeError: a knob that is missing or unknown.
            ValueError: a value that is none of the knob's.
        """
        custom = values.get("custom")
        if custom is not None:
            _check_custom(custom)
            values = values | {name: usual for name, usual in UNTOUCHED.items() if values.get(name) is None}
            values = values | {"custom": tuple(sorted(custom.items()))}
        knobs = Knobs(**values)
        for field_ in dataclasses.fields(Knobs):
            value, wanted = values.get(field_.name, field_.default), _KNOB_TYPES[str(field_.type)]
            if type(value) not in wanted:
                raise ValueError(f"{field_.name} = {value!r}: expected {field_.type}")
        checkpoint_stride(knobs.activation_checkpointing)
        if knobs.engine not in ENGINES:
            raise ValueError(f"engine = {knobs.engine!r}: known are {ENGINES}")
        if knobs.attention_backend not in ATTENTION_BACKENDS:
            raise ValueError(f"attention_backend = {knobs.attention_backend!r}: known are {ATTENTION_BACKENDS}")
        for name, knob in ENGINE_KNOBS.items():
            given, kept = values.get(name), getattr(knobs, name)
            if given is not None and kept is None:
                raise ValueError(f"{name} = {given!r}: {knobs.engine} has no such knob")
            if knob.values is not None and kept not in (*knob.values, None):
                raise ValueError(f"{name} = {kept!r}: known are {knob.values}")
        if knobs.blocks_per_unit is None and knobs.engine != "ddp":
            raise ValueError("blocks_per_unit is missing")
        return knobs


def _check_custom(custom: Any) -> None:
    if not isinstance(custom, dict) or not all(isinstance(text, str) for pair in custom.items() for text in pair):
        raise ValueError(f"custom = {custom!r}: expected names and values as text")
    for name in MODEL_PARALLEL:
        if name in custom and not (custom[name].isdecimal() and int(custom[name])):
            raise ValueError(f"custom.{name} = {custom[name]!r}: expected a number of ranks")


MODEL_PARALLEL = ("tp", "cp", "pp")
"""A user's own knobs of these names (tensor, context, pipeline parallel) part the ranks of one data-parallel rank."""
UNTOUCHED: dict[str, Any] = {
    "sync_each_micro_batch": True,
    "bucket_cap_mb": 1.0,
    "blocks_per_unit": 1,
    "activation_checkpointing": "none",
    "num_workers": 0,
    "compile": False,
    "attention_backend": "auto",
    "fused_optimizer": False,
}
"""What stands for knobs that a user's own trainer decides itself; files have null in their place."""
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


WHOLE, COMPOSED = "whole", "composed"
"""How a trial's steps were timed: as they are, or put together from parts."""
COMPOSED_WARMUP_STEPS = 1
SHORT_MICRO_STEPS = 4
"""Of a step that stands for one of long accumulation: the first, two middle ones, the last."""


@dataclass(frozen=True)
class TrialSpec:
    """One attempt, as the driver asks for it; the same frozen JSON reaches every rank."""

    trial: int
    stage: str
    """baseline, explore, finalist, round, endurance; `survey` for the first job, which measures no config; `doctor` for
    one that also looks at the machine."""
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
    timeout_s: float = 600.0
    """Of the whole trial, compiling aside; the driver ends it then, so the rank sees to it that it has ended before."""
    composed: bool = False
    """Time short steps, and put a whole step's time together from their parts (`trials.composed`)."""
    compile_timeout_s: float = 300.0
    """For the first step of a trial with compiled blocks."""
    import_paths: tuple[str, ...] = ()
    """Folders where `package.module:factory` is looked for, after everything else."""
    hardware_flops_per_token: float | None = None
    """Already counted for this model and checkpointing mode; None asks rank 0 to count. What the attention kernel adds
    the survey has counted."""
    tracked_bytes: int | None = None
    """Already tracked for this config (MemTracker's peak repeats exactly); None asks each CPU rank to track."""
    matmul_micro_batch_size: int | None = None
    """In a survey: measure the rate of the matmuls of a micro-batch of so many sequences, too."""
    profile: str = ""
    """After the timed blocks: nothing, `breakdown` (where the time of a step goes), or `trace` (the chrome trace
    too, as trace-rank-N.json.gz in the trial's folder)."""
    profile_above: float | None = None
    """Tokens/s per rank: the profile is for a config that was measured faster. None: for any."""
    trainer: dict[str, Any] | None = None
    """The user's own command, instead of workload and data: the fields of `trials.command.Command`."""
    checkpoint_dir: str | None = None
    """Of an endurance run: after the timed blocks the config evaluates, and saves and loads a checkpoint there."""

    @property
    def num_warmup_steps(self) -> int:
        """Whole optimizer steps between the first one and the clock; a composed trial has as few as show the first
        update's effect and all memory of a whole step."""
        return min(self.measure.warmup_steps, COMPOSED_WARMUP_STEPS) if self.composed else self.measure.warmup_steps

    def _to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"knobs": None if self.knobs is None else self.knobs.to_dict()}

    def to_json(self) -> str:
        return json.dumps(self._to_dict(), sort_keys=True)

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
        values = self._to_dict()
        for label in ("trial", "stage", "round", "attempt", "import_paths", "checkpoint_dir"):
            del values[label]
        for beside_the_measurement in BESIDE_THE_MEASUREMENT:
            del values[beside_the_measurement]
        return digest(values)


BESIDE_THE_MEASUREMENT = (
    "hardware_flops_per_token",
    "tracked_bytes",
    "matmul_micro_batch_size",
    "profile",
    "profile_above",
)
"""Of a TrialSpec: what else is found out, which changes nothing in what is measured."""


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
    """What the rank was doing: start, data, process_group, build, first_step (or compile), warmup, drain, timed,
    memory, profile, flops, done; of an endurance run evaluate, save, step_after_save, load and step_after_load after
    timed; without a config: node, survey, matmul_rate, bandwidth, process_group."""
    error_type: str = ""
    error: str = ""
    """Traceback, if the rank failed."""
    phase_s: dict[str, float] = field(default_factory=dict)
    """Seconds spent in each phase."""
    applied: dict[str, Any] | None = None
    """The knobs as read back from the live objects."""
    micro_batch_tokens: int = 0
    tokens_per_step: float | None = None
    """Of a user's own trainer: tokens of the timed window / its steps, mean over ranks. None: micro-batch x
    accumulation."""
    probe_log: str | None = None
    """Of a user's own trainer: what the probe wrote on this rank."""
    num_trainable_params: int | None = None
    """Of a user's own trainer, over all ranks."""
    num_steps: int = 0
    block_times_s: list[float] = field(default_factory=list)
    """Seconds per optimizer step of each timed block, slowest rank."""
    block_steps: list[int] = field(default_factory=list)
    """Optimizer steps in each timed block."""
    own_step_times_s: list[float] = field(default_factory=list)
    """Seconds of each timed optimizer step on this rank alone; on CUDA of its stream, not of the host."""
    timing: str = WHOLE
    """`whole`, or `composed`: the above are of short steps, each as the whole one that it stands for."""
    step_parts_s: dict[str, float] | None = None
    """Seconds of a composed step on this rank: first, middle, last (micro-steps), optimizer, data; they sum to it."""
    loader_sustained: bool = True
    """The loader's queue was emptied before the clock started, and the timed steps took three times what it holds. If
    not, the throughput may be the queue's, not the loader's."""
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
    """By checkpointing mode; without what a fused attention kernel computes again in its backward."""
    breakdown: dict[str, Any] | None = None
    """Of the profiled step: the fields of `trials.breakdown.Breakdown`."""
    endurance: dict[str, Any] | None = None
    """Of an endurance run: what `trials.endurance.Endurance` found."""
    host: str = ""
    device_name: str = ""
    torch_version: str = ""
    attention_backend: str = ""
    """The kernel that was seen: flash, efficient, cudnn, math (scores written out), none; empty if not looked at."""
    driver_version: str = ""
    nccl_version: str = ""
    survey: dict[str, Any] | None = None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> RankReport:
        return RankReport(**json.loads(text))
