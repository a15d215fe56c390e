"""Measures configs, records each attempt before anything else happens with it, and repeats nothing finished."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from autotune.cluster.gang import GangResult
from autotune.cluster.runner import Runner, SingleRunner
from autotune.errors import InfrastructureError
from autotune.estimate import Forecast
from autotune.history import History
from autotune.job import Job
from autotune.numerics import deviation
from autotune.report.text import gib
from autotune.rows import GIB, Attempt, Study, attempt_from_row, composed_beside, history_row, predicted_oom_row
from autotune.stages import ENDURANCE, OF_A_RUN, PROFILED_STAGES, SCALE, SIDE_BY_SIDE, endurance_timeout_s, is_composed
from autotune.trainer.order import TIMED_SHARE, make_order
from trials.files import write_whole
from trials.outcome import INFRASTRUCTURE, NOT_OF_THE_CONFIG, Outcome
from trials.record import COMPOSED_WARMUP_STEPS, TRAINER, Knobs, Measure, TrialSpec

MET_BY_NOTHING = 1e-9
"""A relative confidence interval that no trial reaches."""
MAX_RETRIES = 2
"""Attempts after the first, for outcomes that say nothing about the config."""

OUT_OF_TIME = "the time given for the measuring was over"
LEAST_TIMEOUT_S = 1.0

_LOGS = re.compile(r"trial-(\d{4,6})")
Key = tuple[str, Knobs, int | None]
"""Stage, config and round: what is measured once in a run."""


class Listener(Protocol):
    """What the screen is told."""

    def message(self, text: str) -> None: ...

    def baseline_known(self, knobs: Knobs) -> None: ...

    def trial_started(self, spec: TrialSpec, remaining_s: float | None) -> None: ...

    def trial_ended(self, attempt: Attempt, best: Attempt | None) -> None: ...


def make_spec(
    job: Job, runner: SingleRunner, knobs: Knobs | None, stage: str, trial: int, round_number: int | None = None
) -> TrialSpec:
    """The order for one trial of `job`; without knobs, for its survey."""
    measure = job.measure
    return TrialSpec(
        trial=trial,
        stage=stage,
        workload=job.workload,
        model=job.model.factory_arguments() if job.model is not None else {},
        seq_len=job.seq_len or 0,
        data=job.data.model_dump() if job.data is not None else {"source": TRAINER},
        global_batch_size=job.global_batch_size * runner.world_size // job.batch.target_world_size,
        precision=job.training.precision,
        optimizer=job.training.optimizer.model_dump(mode="json"),
        world_size=runner.world_size,
        device=runner.device,
        seed=job.seed,
        measure=Measure(measure.warmup_steps, measure.min_steps, measure.max_steps, measure.rel_ci),
        knobs=knobs,
        round=round_number,
        memory_limit_gib=job.cluster.memory_limit_gib,
        process_group_timeout_s=measure.trial_timeout_s,
        timeout_s=measure.trial_timeout_s,
        composed=knobs is not None and job.trainer is None and is_composed(measure, knobs, stage),
        trainer=make_order(job, knobs, runner.world_size) if job.trainer is not None and knobs is not None else None,
        compile_timeout_s=measure.compile_timeout_s,
        import_paths=(job.model.import_path,) if job.model is not None and job.model.import_path else (),
        matmul_micro_batch_size=job.baseline.micro_batch_size if knobs is None and job.cluster.calibrate_peak else None,
        profile="breakdown" if stage in PROFILED_STAGES and job.trainer is None else "",
    )


class TimeUpError(InfrastructureError):
    """The time given for the measuring ended in the middle of an attempt, of which nothing is known."""


@dataclass(frozen=True)
class _Flight:
    """An attempt that is under way."""

    spec: TrialSpec
    timeout_s: float
    last_attempt: int
    """After which an outcome that says nothing about the config ends the run."""
    folder: Path
    began: float
    """By the runner's clock."""
    began_at: float
    """Seconds since the epoch."""


@dataclass
class Measurer:
    """Runs trials for one study. What an earlier life of the run has finished is answered from the history."""

    study: Study
    out: Path
    runner: Runner
    listener: Listener
    forecast: Forecast = field(default_factory=lambda: Forecast({}, is_rough=True))
    """Of the trials still to come."""
    rate_to_beat: float | None = None
    """Tokens/s per rank of the best config so far: a trial of the exploration that is faster is profiled."""
    predict: Callable[[Knobs], dict[str, float]] = lambda _: {}
    """The history's columns of what was predicted of a config."""
    beside: Callable[[Knobs], dict[str, Any]] = lambda _: {}
    """The history's columns of what a config is measured for."""
    keep_traces: bool = False
    """Of the profiled step, for Perfetto, in each trial's folder."""
    ends_at: float | None = None
    """By the runner's monotonic clock: no attempt goes on beyond it."""
    reference: Knobs | None = None
    """The config whose losses all others must reproduce; None: what runs as the stage `baseline`."""
    _finished: dict[Key, Attempt] = field(default_factory=dict)
    _unfinished: dict[Key, tuple[int, int]] = field(default_factory=dict)
    """Trial number and next attempt of what was interrupted."""
    predicted_oom: dict[Knobs, None] = field(default_factory=dict)
    """What has a row already that says so, in order."""
    _next_trial: int = 0
    _flights: dict[int, _Flight] = field(default_factory=dict)
    """By trial number."""
    _again: list[tuple[TrialSpec, int]] = field(default_factory=list)
    """Attempts to be made once a slot is free, with the last that the trial may have."""
    _hardware_flops: dict[str, float] = field(default_factory=dict)
    """By checkpointing mode, before what the attention kernel adds."""
    _tracked_bytes: dict[Knobs, int] = field(default_factory=dict)
    recalled_s: float = 0.0
    recalled_trials: frozenset[int] = frozenset()
    """Of the run's earlier life."""
    """While attempts of the run's earlier lives were under way, one or several."""
    _composed_step_s: dict[Knobs, float] = field(default_factory=dict)
    """A step's time as it was put together from parts, to be seen beside whole steps."""
    _reference_losses: list[float] = field(default_factory=list)
    _warned: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._history = History(self.out / "history")

    def recall(self, stages: Container[str] = OF_A_RUN) -> list[str]:
        """Takes in the history of the run's earlier life, and the orders that have no row in it.

        Args:
            stages: that are gone on with; a scaling is on the present number of ranks.

        Returns:
            A line on each file and row that says nothing of this study: unreadable, of another study, hostile.
        """
        rows, skipped = self._history.rows()
        spans: list[tuple[float, float]] = []
        for row in rows:
            try:
                attempt = attempt_from_row(row, self.study.limits)
            except (ValueError, TypeError) as error:
                skipped.append(f"trial {row['trial']}: not an attempt of fsdp-autotune: {error}")
                continue
            if not self._goes_on(attempt.stage, row["world_size"], stages):
                continue
            if row["study_id"] != self.study.study_id:
                skipped.append(f"trial {row['trial']}: of another study, {row['study_id']}")
                continue
            if attempt.outcome is Outcome.PREDICTED_OOM:
                self.predicted_oom[attempt.knobs] = None
                continue
            if row["started_at"] is not None and row["ended_at"] is not None:
                spans.append((row["started_at"].timestamp(), row["ended_at"].timestamp()))
            key = (attempt.stage, attempt.knobs, row["round"])
            if attempt.outcome in NOT_OF_THE_CONFIG:
                self._unfinished[key] = (attempt.trial, row["attempt"] + 1)
            else:
                self._unfinished.pop(key, None)
                self._finished[key] = attempt
                self._learn(attempt)
        self.recalled_s = covered_s(spans)
        self.recalled_trials = frozenset(attempt.trial for attempt in self._finished.values())
        recorded = {row["trial"] for row in rows}
        for path in sorted((self.out / "logs").glob("trial-*/spec.json")):
            try:
                self._recall_order(path, recorded, stages)
            except (ValueError, TypeError, KeyError, OSError) as error:
                skipped.append(f"{path.parent.name}/{path.name}: not an order of fsdp-autotune: {error}")
        self.leave_numbers_in_use()
        return skipped

    def leave_numbers_in_use(self) -> None:
        """No later trial may overwrite one that has a file, be it one that was skipped."""
        logs = (_LOGS.fullmatch(path.name) for path in (self.out / "logs").glob("trial-*"))
        in_use = [int(found[1]) for found in logs if found]
        last = self._history.last_trial()
        self._next_trial = max(in_use if last is None else [*in_use, last], default=-1) + 1

    def _goes_on(self, stage: str, world_size: int, stages: Container[str]) -> bool:
        return stage in stages and (stage != SCALE or world_size == self.study.world_size)

    def _recall_order(self, path: Path, recorded: set[int], stages: Container[str]) -> None:
        spec = TrialSpec.from_json(path.read_text(encoding="utf-8"))
        if path.parent.name != f"trial-{spec.trial:04d}":
            raise ValueError(f"it is of trial {spec.trial}")
        if spec.trial not in recorded and spec.knobs is not None and self._goes_on(spec.stage, spec.world_size, stages):
            self._unfinished[spec.stage, spec.knobs, spec.round] = (spec.trial, 0)

    def begun(self, stage: str) -> list[Knobs]:
        """Configs of a stage that an earlier life finished, or was interrupted in, in the order it began them."""
        finished = [(attempt.trial, key[1]) for key, attempt in self._finished.items() if key[0] == stage]
        interrupted = [(trial, key[1]) for key, (trial, _) in self._unfinished.items() if key[0] == stage]
        return [knobs for _, knobs in sorted(finished + interrupted, key=_trial)]

    def has(self, stage: str, knobs: Knobs, round_number: int | None) -> bool:
        return (stage, knobs, round_number) in self._finished

    def measure(self, knobs: Knobs, stage: str, round_number: int | None = None, anew: bool = False) -> Attempt:
        """Measures one config, with nothing beside it; tries again what says nothing about it.

        Args:
            anew: measure even if an earlier life of the run has (half a pair is no pair).

        Raises:
            InfrastructureError: it failed for reasons that are not the config's, every time.
        """
        ended: list[Attempt] = []
        self._measure(iter([(stage, knobs, round_number)]), ended.append, anew)
        return ended[0]

    def measure_side_by_side(
        self, proposals: Iterator[Knobs | None], stage: str, take_in: Callable[[Attempt], None]
    ) -> None:
        """Measures configs on all slots of the runner, one a slot.

        Args:
            proposals: the next one is asked for when a slot is free for it; None: again once a trial has ended.
            take_in: called with each attempt as it ends, before anything else is asked for.

        Raises:
            InfrastructureError: a trial failed for reasons that are not the config's, every time; no slot is left.
        """
        keys = (None if knobs is None else (stage, knobs, None) for knobs in proposals)
        self._measure(keys, take_in, anew=False)

    @property
    def is_under_way(self) -> bool:
        """Whether a trial runs, or is to be tried again."""
        return bool(self._flights or self._again)

    def _measure(self, keys: Iterator[Key | None], take_in: Callable[[Attempt], None], anew: bool) -> None:
        try:
            while True:
                self._start_what_can(keys, take_in, anew)
                if not self._flights:
                    return
                attempt = self._land()
                if attempt is not None:
                    take_in(attempt)
        except BaseException:
            self._record_interrupted()
            raise

    def _start_what_can(self, keys: Iterator[Key | None], take_in: Callable[[Attempt], None], anew: bool) -> None:
        """Starts trials as long as a slot is free: first those that are tried again, then what comes next."""
        num_slots = self.runner.num_slots
        while self.runner.is_free():
            if self._again:
                self._start(*self._again.pop(0))
                continue
            key = next(keys, None)
            if key is None:
                break
            if key in self._finished and not anew:
                self.forecast.count(key[0])
                take_in(self._finished[key])
            else:
                self._start(*self._order(key))
        if self.runner.num_slots < num_slots:
            self.listener.message(f"  no nodes are left for more: {self.runner.num_slots} at once from here on")

    def _order(self, key: Key) -> tuple[TrialSpec, int]:
        stage, knobs, round_number = key
        trial, first = self._unfinished.pop(key, (self._next_trial, 0))
        self._next_trial = max(self._next_trial, trial + 1)
        spec = make_spec(self.study.job, self.runner, knobs, stage, trial, round_number)
        if spec.trainer is not None and self.study.job.model is not None:
            expect = spec.trainer["expect"] | {"num_parameters": self.study.model.num_params}
            spec = replace(spec, trainer=spec.trainer | {"expect": expect})
        profile = "trace" if spec.profile and self.keep_traces else spec.profile
        if stage == ENDURANCE:
            spec = self._enduring(spec)
        return replace(spec, attempt=first, profile=profile), first + MAX_RETRIES

    def _enduring(self, spec: TrialSpec) -> TrialSpec:
        section = self.study.job.measure
        steps, root = section.endurance_steps, section.checkpoint_dir
        name = f"trial-{spec.trial:04d}"
        folder = (
            Path(root) / f"autotune-{self.study.study_id}-{name}" if root else self.out / "logs" / name / "checkpoint"
        )
        measure = spec.measure
        if spec.trainer is not None:  # what it saves and evaluates is its own, and not run
            timeout_s = endurance_timeout_s(section)
            longer = {"timed_steps": steps, "max_s": TIMED_SHARE * timeout_s}
            return replace(spec, trainer=spec.trainer | longer, timeout_s=timeout_s)
        return replace(
            spec,
            # Its throughput is a by-product, and not what ends it: the steps do, or the time of a config of slow ones.
            measure=replace(measure, min_steps=min(measure.min_steps, steps), max_steps=steps, rel_ci=MET_BY_NOTHING),
            timeout_s=endurance_timeout_s(section),
            checkpoint_dir=str(folder),
        )

    def _start(self, spec: TrialSpec, last_attempt: int) -> None:
        knobs = spec.knobs
        assert knobs is not None
        timeout_s = self._timeout_s(spec)
        spec = replace(
            spec,
            hardware_flops_per_token=self._hardware_flops.get(knobs.activation_checkpointing),
            tracked_bytes=self._tracked_bytes.get(knobs),
            profile_above=self.rate_to_beat if spec.stage == SIDE_BY_SIDE else None,
            # A peer's wait for a stuck rank must not end before the trial's own deadline does.
            process_group_timeout_s=timeout_s,
        )
        folder = self.out / "logs" / f"trial-{spec.trial:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "spec.json", spec.to_json())
        self.listener.trial_started(spec, self.forecast.left_s())
        clock = self.runner.clock
        self._flights[spec.trial] = _Flight(spec, timeout_s, last_attempt, folder, clock.monotonic(), clock.time())
        self.runner.start(spec, folder, timeout_s)

    def _land(self) -> Attempt | None:
        """Waits for an attempt to end, and records it; None if the trial is to be tried again.

        Raises:
            TimeUpError: `ends_at` came first.
            InfrastructureError: it was the last attempt, and it too says nothing about the config.
        """
        spec, result = self.runner.next_ended()
        flight = self._flights.pop(spec.trial)
        if result.outcome is Outcome.OK:
            self.forecast.learn(spec.stage, self.runner.clock.monotonic() - flight.began)
        for warning in result.warnings:
            self._warn_once(warning)
        if result.outcome is Outcome.TIMEOUT and flight.timeout_s < self._own_timeout_s(spec):
            self._record(flight, replace(result, outcome=Outcome.INTERRUPTED, reason=OUT_OF_TIME, failed_rank=None))
            raise TimeUpError(OUT_OF_TIME)
        attempt = self._record(flight, self._compared(spec, result))
        if attempt.outcome in INFRASTRUCTURE:
            self._try_again(flight, attempt)
            return None
        self.forecast.count(spec.stage)
        self._finished[spec.stage, attempt.knobs, spec.round] = attempt
        self._learn(attempt)
        return attempt

    def _timeout_s(self, spec: TrialSpec) -> float:
        own_s = self._own_timeout_s(spec)
        if self.ends_at is None:
            return own_s
        return min(own_s, max(LEAST_TIMEOUT_S, self.ends_at - self.runner.clock.monotonic()))

    def _own_timeout_s(self, spec: TrialSpec) -> float:
        measure = self.study.job.measure
        compile_s = measure.compile_timeout_s if spec.knobs is not None and spec.knobs.compile else 0.0
        if spec.stage != ENDURANCE:
            return measure.trial_timeout_s + compile_s
        # Blocks are compiled once more for the evaluation.
        return endurance_timeout_s(measure) + 2 * compile_s

    def _compared(self, spec: TrialSpec, result: GangResult) -> GangResult:
        """A config that does not train as the baseline does is wrong, however fast it is."""
        if result.outcome is not Outcome.OK or not self._reference_losses or self.study.model.is_random:
            return result
        # Before the loader's queue is drained, all configs train on the same samples.
        losses = result.reports[0].losses[: spec.num_warmup_steps + 1]
        problem = deviation(losses, self._reference_losses, spec.precision)
        return replace(result, outcome=Outcome.WRONG_NUMERICS, reason=problem) if problem else result

    def _try_again(self, flight: _Flight, attempt: Attempt) -> None:
        spec, why = flight.spec, f"trial {attempt.trial} ended in {attempt.outcome}"
        if spec.attempt == flight.last_attempt:
            raise InfrastructureError(
                f"{why} {MAX_RETRIES + 1} times: {attempt.reason}", "the history holds all that was measured"
            )
        self.listener.message(f"  {why}, and is tried again: {attempt.reason.splitlines()[0][:120]}")
        self._again.append((replace(spec, attempt=spec.attempt + 1), flight.last_attempt))

    def _record_interrupted(self) -> None:
        flights, self._flights = list(self._flights.values()), {}
        now_s = self.runner.clock.time()
        for flight in flights:
            result = GangResult(Outcome.INTERRUPTED, "the run was interrupted", None, {}, [], flight.began_at, now_s)
            self._record(flight, result)

    def _record(self, flight: _Flight, result: GangResult) -> Attempt:
        if flight.spec.checkpoint_dir is not None:
            shutil.rmtree(flight.spec.checkpoint_dir, ignore_errors=True)  # what killed ranks left
        row = history_row(flight.spec, result, self.study, str(flight.folder.relative_to(self.out)))
        assert flight.spec.knobs is not None
        row |= composed_beside(row, self._composed_step_s.get(flight.spec.knobs))
        row |= self.predict(flight.spec.knobs) | self.beside(flight.spec.knobs)
        self._history.append(row)
        return attempt_from_row(row, self.study.limits)

    def record_predicted_oom(self, knobs: Knobs) -> None:
        """A row, without an attempt, of a config that the search proposed and that surely does not fit."""
        if knobs in self.predicted_oom:
            return
        self.predicted_oom[knobs] = None
        predicted, now_s = self.predict(knobs), self.runner.clock.time()
        self._history.append(predicted_oom_row(knobs, self._next_trial, predicted, now_s, self.study))
        before = (
            f" ({gib(predicted['predicted_gib'])} predicted, before what the trials have corrected)"
            if predicted
            else ""
        )
        self.listener.message(f"  trial {self._next_trial} is not run: it surely does not fit{before}")
        self._next_trial += 1

    def finished_stages(self) -> list[str]:
        """Of each trial that has been measured."""
        return [stage for stage, _, _ in self._finished]

    def _learn(self, attempt: Attempt) -> None:
        is_reference = attempt.knobs == self.reference if self.reference else attempt.stage == "baseline"
        if is_reference and attempt.outcome is Outcome.OK:
            # Of a composed trial only the first steps are whole; a scaling's baseline may be one.
            num_whole = min(self.study.job.measure.warmup_steps, COMPOSED_WARMUP_STEPS) + 1
            losses = list(attempt.row.get("losses") or [])
            self._reference_losses = losses[:num_whole] if attempt.is_composed else losses
        hardware, allocated = attempt.row.get("hardware_flops_per_token"), attempt.row.get("allocated_gib")
        if attempt.is_composed and attempt.outcome is Outcome.OK:
            self._composed_step_s[attempt.knobs] = attempt.row["step_time_s"]
        if hardware is not None:
            of_the_kernel = attempt.row.get("attention_recompute_flops_per_token") or 0.0
            self._hardware_flops[attempt.knobs.activation_checkpointing] = hardware - of_the_kernel
        if allocated is not None:
            self._tracked_bytes[attempt.knobs] = round(allocated * GIB)

    def _warn_once(self, warning: str) -> None:
        if warning not in self._warned:
            self._warned.add(warning)
            self.listener.message(f"  {warning}")


def covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one span (begin, end) lies."""
    total_s, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        total_s += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total_s


def _trial(item: tuple[int, Knobs]) -> int:
    return item[0]
