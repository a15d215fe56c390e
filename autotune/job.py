"""The job file: what to tune, on what, for how long. Frozen models; reading files is `load_job`'s alone."""

from __future__ import annotations

import functools
import math
import re
from typing import Annotated, Literal, Self

import yaml
from pydantic import Field, field_validator, model_validator

from autotune.errors import nearest
from autotune.export import EXPORTERS
from autotune.job_model import Data, Model
from autotune.job_space import ABSENT_KNOBS, Baseline, Engine, Space
from autotune.section import NotNegative, Positive, Section
from autotune.trainer.handed import check_blocks, check_handed, check_ranks, handed, model_parallel_ranks
from autotune.trainer.section import Trainer
from trials.record import (
    ENGINE_KNOBS,
    KNOB_NAMES,
    SHORT_MICRO_STEPS,
    TRAINER,
)


class Batch(Section):
    global_batch_size: Positive | None = None
    """Sequences per optimizer step over all ranks."""
    global_batch_tokens: Positive | None = None
    """Or the same in tokens."""
    target_world_size: Positive
    """Ranks of the real run; micro-batch x accumulation x this = global batch, exactly."""

    @model_validator(mode="after")
    def _one_unit(self) -> Self:
        if (self.global_batch_size is None) == (self.global_batch_tokens is None):
            raise ValueError("give either global_batch_size (sequences) or global_batch_tokens")
        return self


class Optimizer(Section):
    name: Literal["adamw"] = "adamw"
    lr: Annotated[float, Field(ge=0)] = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0)] = 0.1


class Training(Section):
    engines: Annotated[tuple[Engine, ...], Field(min_length=1)] = ("fsdp2",)
    """The engines to try: fsdp2 (torch's fully_shard), fsdp1 (FullyShardedDataParallel), ddp (the whole model on every
    rank)."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """bf16: compute and gathers in bf16, master weights in fp32."""
    reduce_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Of the gradient reduction. auto: what export_for's trainer does, else fp32."""
    optimizer: Optimizer = Optimizer()

    @model_validator(mode="after")
    def _each_engine_once(self) -> Self:
        if len(set(self.engines)) != len(self.engines):
            raise ValueError(f"engines = {list(self.engines)}: the same engine twice")
        return self


class Cluster(Section):
    address: str = "local"
    """`local` starts Ray on this machine; `auto` or HOST:PORT joins a running cluster, from one of its nodes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    nodes_per_trial: Positive = 1
    """Nodes that each trial runs on; they are reserved whole for the length of the study."""
    ranks_per_node: Positive
    """Ranks on each node; fewer than its devices is allowed. World size = nodes_per_trial x ranks_per_node."""
    parallel_trials: Positive = 1
    """Trials that run at once while exploring, each on nodes of its own; what is compared runs alone, on one slot."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Ray node labels, name to value, that each of a trial's nodes must carry (`ray start --labels`)."""
    memory_limit_gib: Annotated[float, Field(gt=0)] | None = None
    """Per rank. On CUDA the caching allocator's cap (default: all memory); on CPU the data segment's growth."""
    memory_headroom: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the limit that a config must leave free to count as fitting."""
    python: str | None = None
    """The interpreter of the ranks, with their torch; default: the one that runs autotune. In it, or in the container
    of command_prefix, fsdp-autotune need not be installed."""
    command_prefix: tuple[str, ...] = ()
    """Put before every rank's command, e.g. [apptainer, exec, --nv, image.sif]."""
    launcher: Literal["auto", "fork", "exec"] = "auto"
    """`fork`: CPU ranks from a process that has torch loaded; `exec`: a fresh interpreter a rank. auto: by device."""
    device_name: str | None = None
    """The GPU as torch names it, for `autotune plan`, which asks no machine; trials go by what they find."""
    peak_tflops_per_s: Annotated[float, Field(gt=0)] | None = None
    """Dense peak of one rank in the training dtype; default: the device table, on CPU a probe."""
    calibrate_peak: bool = False
    """Before the first trial, measure the rate that a rank reaches in the matmuls of the baseline's micro-batch. It is
    recorded beside the peak, with the share of it that each trial reaches; MFU stays against the peak."""

    def limit_gib(self, device_memory_gib: float | None) -> float | None:
        """What a rank may take: the job's limit or the device's memory, whichever is less; None if none is known."""
        known = [gib for gib in (self.memory_limit_gib, device_memory_gib) if gib is not None]
        return min(known, default=None)

    @property
    def world_size(self) -> int:
        """Ranks of one trial."""
        return self.nodes_per_trial * self.ranks_per_node

    @model_validator(mode="after")
    def _cpu_launcher(self) -> Self:
        if self.launcher == "fork" and self.device == "cuda":
            raise ValueError("launcher fork is for CPU ranks: a fork cannot carry CUDA")
        return self

    @model_validator(mode="after")
    def _address_form(self) -> Self:
        if self.address not in ("local", "auto") and not re.fullmatch(r"[^\s:/]+:\d{1,5}", self.address):
            raise ValueError(
                f"address = {self.address!r}: expected local, auto or HOST:PORT of the cluster's head "
                "(`ray start` and `ray status` show it); autotune runs on a node of the cluster, not through ray://"
            )
        return self

    @model_validator(mode="after")
    def _one_machine_is_one_node(self) -> Self:
        if self.address != "local":
            return self
        if self.nodes_per_trial > 1:
            raise ValueError(
                f"nodes_per_trial = {self.nodes_per_trial} with address = local: one machine is one node; start Ray on "
                "every node (`ray start`) and give address: auto, or raise ranks_per_node instead"
            )
        if self.parallel_trials > 1:
            raise ValueError(
                f"parallel_trials = {self.parallel_trials} with address = local: trials that share a machine slow each "
                "other down, and their times say nothing; start Ray on every node and give address: auto"
            )
        if self.labels:
            raise ValueError(
                f"labels = {self.labels} with address = local: a Ray that is started here has no labelled nodes; "
                "remove labels, or give the address of a running cluster"
            )
        return self


class Budget(Section):
    """The first limit reached ends the search; finalists are measured all the same."""

    trials: Positive = 24
    minutes: Annotated[float, Field(gt=0)] | None = None
    gpu_hours: Annotated[float, Field(gt=0)] | None = None
    """Hours times the ranks of all trials at once, idle ones too: they are reserved. On a CPU, rank-hours."""
    patience: NotNegative = 10
    """Trials in a row without a gain of 0.5 % that end the search, once there have been 16; 0: never."""


class MeasureSettings(Section):
    warmup_steps: Positive = 3
    min_steps: Positive = 8
    max_steps: Positive = 40
    rel_ci: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """A trial ends once the 95 % interval of its mean block time is within +- this fraction."""
    compose_above: NotNegative = 8
    """With more grad_accum_steps than this, trials of the search run short steps and put a whole step's time together
    from their parts; finalists and rounds run whole steps always."""
    compile_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """For the first step of a trial with compiled blocks, on top of trial_timeout_s."""
    trial_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    rounds: Annotated[int, Field(ge=3)] = 7
    """Fresh interleaved runs of the chosen config and of the baseline; the reported gain comes from these alone."""
    num_finalists: Positive = 3
    endurance: bool = True
    """After the rounds the winner runs longer, evaluates, and saves and loads a checkpoint; if it fails, the next."""
    endurance_steps: Positive = 100
    """Timed optimizer steps of the endurance run."""
    checkpoint_dir: str | None = None
    """Where the endurance run's checkpoint lies while it runs; default: the run's folder. All nodes must share it."""

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.min_steps > self.max_steps:
            raise ValueError(f"min_steps = {self.min_steps} is more than max_steps = {self.max_steps}")
        if self.compose_above < SHORT_MICRO_STEPS:
            raise ValueError(
                f"compose_above = {self.compose_above}: a short step has {SHORT_MICRO_STEPS} micro-steps itself; "
                f"give {SHORT_MICRO_STEPS} or more"
            )
        return self

    @property
    def num_deciding_trials(self) -> int:
        """After the exploration: finalists and baseline, rounds of both, the winner's endurance run."""
        return self.num_finalists + 1 + 2 * self.rounds + self.endurance


class Job(Section):
    """A whole job, as `autotune init` writes it."""

    model: Model | None = None
    """Beside `trainer`, what is known of its model: FLOPs and predictions come from it."""
    data: Data | None = None
    trainer: Trainer | None = None
    """Instead of model and data: your own command."""
    batch: Batch
    cluster: Cluster
    training: Training = Training()
    space: Space
    baseline: Baseline = Baseline()
    budget: Budget = Budget()
    measure: MeasureSettings = MeasureSettings()
    sampler: Literal["residual", "gp", "tpe", "random"] = "residual"
    export_for: str | None = None
    """A trainer that `autotune export --to` knows: pins, before the search, the knobs that it decides itself."""
    seed: Annotated[int, Field(ge=0)] = 0
    output: str = "runs/latest"

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step over all ranks of the real run."""
        if self.batch.global_batch_size is not None:
            return self.batch.global_batch_size
        assert self.batch.global_batch_tokens is not None
        assert self.seq_len is not None
        return self.batch.global_batch_tokens // self.seq_len

    @property
    def seq_len(self) -> int | None:
        """Tokens per sequence; None: only a user's own trainer knows."""
        if self.model is not None:
            return self.model.seq_len
        return self.trainer.tokens if self.trainer and isinstance(self.trainer.tokens, int) else None

    @property
    def built_in(self) -> tuple[Model, Data]:
        """Model and data of a job whose ranks are ours."""
        assert self.model is not None
        assert self.data is not None
        return self.model, self.data

    @property
    def workload(self) -> str:
        """Of what is trained, for the ranks: a name that they know, or `trainer`."""
        return TRAINER if self.model is None else self.model.workload

    @property
    def batch_text(self) -> str:
        """For people: of an optimizer step over all ranks."""
        tokens = "" if self.seq_len is None else f" = {self.global_batch_size * self.seq_len:,} tokens"
        return f"{self.global_batch_size} sequences{tokens} per optimizer step"

    @property
    def has_loader(self) -> bool:
        """Whether batches come from a loader that can be tuned."""
        if self.trainer is not None:
            return "num_workers" in self.handed
        return self.data is not None and not self.data.is_synthetic

    @property
    def loader_measured(self) -> bool:
        """Whether throughput has a real loader's cost in it."""
        return self.trainer is not None or self.has_loader

    @functools.cached_property
    def handed(self) -> frozenset[str]:
        """Knobs that reach the ranks: all, or of a user's own trainer those that its command takes."""
        return frozenset(KNOB_NAMES) if self.trainer is None else handed(self.trainer)

    @property
    def reduce_dtype(self) -> Literal["fp32", "bf16"]:
        """Of the gradient reduction: as asked, or as the trainer that is exported for does it."""
        if self.training.reduce_dtype != "auto":
            return self.training.reduce_dtype
        own = self._bf16_reduces_in
        return own if own is not None and self.training.precision == "bf16" else "fp32"

    @property
    def _bf16_reduces_in(self) -> Literal["fp32", "bf16"] | None:
        """What export_for's trainer reduces gradients in under bf16, if it decides that itself."""
        return EXPORTERS[self.export_for].bf16_reduces_in if self.export_for is not None else None

    @field_validator("export_for")
    @classmethod
    def _known_trainer(cls, value: str | None) -> str | None:
        if value is not None and value not in EXPORTERS:
            raise ValueError(f"{value!r}: no such trainer; {nearest(value, EXPORTERS)}")
        return value

    @model_validator(mode="after")
    def _model_and_data_or_trainer(self) -> Self:
        if self.trainer is None:
            missing = [name for name in ("model", "data") if getattr(self, name) is None]
            if missing:
                raise ValueError(
                    f"{' and '.join(missing)}: missing\n    hint: `autotune init` shows every key; to tune your own "
                    "training command instead, give `trainer`"
                )
            return self
        if self.data is not None:
            raise ValueError("data: your trainer reads its own\n    hint: remove it, or remove trainer")
        if self.model is None and self.batch.global_batch_tokens is not None and self.trainer.tokens == "auto":
            raise ValueError(
                "batch.global_batch_tokens: how many sequences that is depends on their length\n    hint: give "
                "trainer.tokens (tokens per sequence), or global_batch_size in sequences"
            )
        check_handed(self.trainer, self.space, self.baseline, self.training.engines)
        if self.model is None:
            check_blocks(self.space, self.baseline)
        return self

    @model_validator(mode="after")
    def _knobs_of_the_engines(self) -> Self:
        engines = self.training.engines
        baseline_engine = self.baseline.engine or engines[0]
        for name, knob in ENGINE_KNOBS.items():
            wrong = []
            if getattr(self.space, name, None) and not set(knob.engines) & set(engines):
                wrong.append(f"space.{name}")
            field = Baseline.model_fields.get(name)
            given = field is not None and getattr(self.baseline, name) != field.default
            if given and not set(knob.engines) & {baseline_engine, *engines}:
                wrong.append(f"baseline.{name}")
            if wrong:
                explained = f"; {ABSENT_KNOBS[name]}" if name in ABSENT_KNOBS else ""
                raise ValueError(
                    f"{' and '.join(wrong)}: {' and '.join(engines)} {'has' if len(engines) == 1 else 'have'} no such "
                    f"knob{explained}\n    hint: remove it, or add {' or '.join(knob.engines)} to training.engines"
                )
        return self

    @model_validator(mode="after")
    def _what_can_be_exported(self) -> Self:
        if self.export_for is None:
            return self
        has = EXPORTERS[self.export_for].engines
        lacks = [engine for engine in self.training.engines if engine not in has]
        if lacks:
            raise ValueError(
                f"export_for = {self.export_for}: it has {' and '.join(has)}, so settings of {' and '.join(lacks)} "
                f"(training.engines) cannot be handed to it\n    hint: remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _reduction(self) -> Self:
        asked, precision = self.training.reduce_dtype, self.training.precision
        if asked == "bf16" and precision == "fp32":
            raise ValueError("training.reduce_dtype = bf16 needs training.precision = bf16")
        if asked == "bf16" and set(self.training.engines) == {"ddp"}:
            raise ValueError("training.reduce_dtype = bf16: ddp reduces gradients in fp32; leave it at auto")
        own = self._bf16_reduces_in
        if precision == "bf16" and own is not None and asked not in ("auto", own):
            raise ValueError(
                f"training.reduce_dtype = {asked}: {self.export_for}'s bf16 reduces gradients in {own} "
                f"(export_for = {self.export_for}); leave it at auto"
            )
        return self

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        tokens, seq_len, ranks = (
            self.batch.global_batch_tokens,
            self.seq_len,
            self.batch.target_world_size,
        )
        if tokens is not None and seq_len is not None and tokens % seq_len:
            raise ValueError(
                f"batch.global_batch_tokens = {tokens} is no multiple of model.seq_len = {seq_len}; "
                f"nearest: {tokens // seq_len * seq_len} or {(tokens // seq_len + 1) * seq_len}"
            )
        if self.trainer is not None:
            check_ranks(self.trainer, ranks, self.cluster.world_size, self.global_batch_size)
        elif self.global_batch_size % ranks:
            raise ValueError(
                f"batch.global_batch_size = {self.global_batch_size} is no multiple of "
                f"batch.target_world_size = {ranks}; nothing is rounded"
            )
        return self

    @model_validator(mode="after")
    def _micro_batches_divide(self) -> Self:
        parted = model_parallel_ranks(self.trainer) if self.trainer is not None else [1]
        # What divides the batches of all of them divides their greatest common divisor.
        per_rank = math.gcd(*(self.global_batch_size * ranks // self.batch.target_world_size for ranks in parted))
        searched = self.space.micro_batch_size
        asked: dict[str, tuple[int, ...]] = {
            "baseline.micro_batch_size": (self.baseline.micro_batch_size,),
            "space.micro_batch_size": searched if isinstance(searched, tuple) else (),
        }
        wrong = [f"{key} = {size}" for key, sizes in asked.items() for size in sizes if per_rank % size]
        if wrong:
            raise ValueError(
                f"{' and '.join(wrong)}: the per-rank batch is {per_rank} sequences (global batch / ranks), and "
                f"accumulation is whole; divisors: {', '.join(str(size) for size in divisors(per_rank))}"
            )
        return self

    def to_yaml(self) -> str:
        text: str = yaml.safe_dump(self.model_dump(mode="json", exclude_none=True), sort_keys=False)
        return text


def divisors(number: int) -> list[int]:
    """All of them, from 1 to `number`."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})
