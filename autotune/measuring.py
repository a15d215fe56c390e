"""Measures configs one by one, records each attempt before anything else happens, and repeats nothing finished."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from autotune.cluster.gang import GangResult
from autotune.cluster.runner import Runner
from autotune.errors import InfrastructureError
from autotune.history import History
from autotune.job import Job
from autotune.rows import GIB, Attempt, Study, attempt_from_row, history_row
from trials.files import write_whole
from trials.outcome import INFRASTRUCTURE, Outcome
from trials.record import Knobs, Measure, TrialSpec

MAX_RETRIES = 2
"""Attempts after the first, for outcomes that say nothing about the config."""

PROFILED_STAGES = frozenset({"baseline", "finalist"})
"""Few trials, and whose bottleneck people ask for. The rounds that decide stay free of it."""

Key = tuple[str, Knobs, int | None]
"""Stage, config and round: what is measured once in a run."""


class Listener(Protocol):
    """What the screen is told."""

    def message(self, text: str) -> None: ...

    def baseline_known(self, knobs: Knobs, num_configs: int) -> None: ...

    def trial_started(self, spec: TrialSpec, remaining_s: float | None) -> None: ...

    def trial_ended(self, attempt: Attempt, best: Attempt | None) -> None: ...


def make_spec(
    job: Job, runner: Runner, knobs: Knobs | None, stage: str, trial: int, round_number: int | None = None
) -> TrialSpec:
    """The order for one trial of `job`; without knobs, for its survey."""
    measure = job.measure
    return TrialSpec(
        trial=trial,
        stage=stage,
        workload=job.model.workload,
        model=job.model.factory_arguments(),
        seq_len=job.model.seq_len,
        data=job.data.model_dump(),
        global_batch_size=job.global_batch_size // job.batch.target_world_size * runner.world_size,
        precision=job.training.precision,
        reduce_dtype=job.reduce_dtype,
        optimizer=job.training.optimizer.model_dump(mode="json"),
        world_size=runner.world_size,
        device=runner.device,
        seed=job.seed,
        measure=Measure(measure.warmup_steps, measure.min_steps, measure.max_steps, measure.rel_ci),
        knobs=knobs,
        round=round_number,
        memory_limit_gib=job.cluster.memory_limit_gib,
        process_group_timeout_s=measure.trial_timeout_s,
        import_paths=(job.model.import_path,) if job.model.import_path else (),
        profile="breakdown" if stage in PROFILED_STAGES else "",
    )


@dataclass
class Measurer:
    """Runs trials for one study. What an earlier life of the run has finished is answered from the history."""

    study: Study
    out: Path
    runner: Runner
    listener: Listener
    clock: Callable[[], float] = time.monotonic
    mean_trial_s: float | None = None
    trials_left: int = 0
    _finished: dict[Key, Attempt] = field(default_factory=dict)
    _unfinished: dict[Key, tuple[int, int]] = field(default_factory=dict)
    """Trial number and next attempt of what was interrupted."""
    _next_trial: int = 0
    _hardware_flops: dict[str, float] = field(default_factory=dict)
    """By checkpointing mode."""
    _tracked_bytes: dict[Knobs, int] = field(default_factory=dict)
    _warned: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._history = History(self.out / "history")

    def recall(self) -> list[str]:
        """Takes in the history of the run's earlier life, and the orders that have no row in it.

        Returns:
            A line on each file of the history that could not be read.
        """
        rows, skipped = self._history.rows()
        for row in rows:
            attempt = attempt_from_row(row, self.study.limits)
            key = (attempt.stage, attempt.knobs, row["round"])
            self._next_trial = max(self._next_trial, attempt.trial + 1)
            if attempt.outcome in INFRASTRUCTURE:
                self._unfinished[key] = (attempt.trial, row["attempt"] + 1)
            else:
                self._unfinished.pop(key, None)
                self._finished[key] = attempt
                self._learn(attempt)
        recorded = {row["trial"] for row in rows}
        for path in sorted((self.out / "logs").glob("trial-*/spec.json")):
            spec = TrialSpec.from_json(path.read_text())
            if spec.trial not in recorded and spec.knobs is not None:
                self._unfinished[spec.stage, spec.knobs, spec.round] = (spec.trial, 0)
                self._next_trial = max(self._next_trial, spec.trial + 1)
        return skipped

    def begun(self, stage: str) -> list[Knobs]:
        """Configs of a stage that an earlier life finished, in order, and then those it was interrupted in."""
        finished = [(attempt.trial, key[1]) for key, attempt in self._finished.items() if key[0] == stage]
        interrupted = [(trial, key[1]) for key, (trial, _) in self._unfinished.items() if key[0] == stage]
        return [knobs for _, knobs in sorted(finished, key=_trial)] + [
            knobs for _, knobs in sorted(interrupted, key=_trial)
        ]

    def has(self, stage: str, knobs: Knobs, round_number: int | None) -> bool:
        return (stage, knobs, round_number) in self._finished

    def measure(self, knobs: Knobs, stage: str, round_number: int | None = None, anew: bool = False) -> Attempt:
        """Measures a config; tries again what says nothing about it.

        Args:
            anew: measure even if an earlier life of the run has (half a pair is no pair).

        Raises:
            InfrastructureError: it failed for reasons that are not the config's, every time.
        """
        key = (stage, knobs, round_number)
        if key in self._finished and not anew:
            self.trials_left -= 1
            return self._finished[key]
        trial, first = self._unfinished.pop(key, (self._next_trial, 0))
        self._next_trial = max(self._next_trial, trial + 1)
        spec = make_spec(self.study.job, self.runner, knobs, stage, trial, round_number)
        for number in range(first, first + MAX_RETRIES + 1):
            attempt = self._attempt(replace(spec, attempt=number))
            if attempt.outcome not in INFRASTRUCTURE:
                break
        self.trials_left -= 1
        if attempt.outcome in INFRASTRUCTURE:
            raise InfrastructureError(
                f"trial {trial} ended in {attempt.outcome} {MAX_RETRIES + 1} times: {attempt.reason}",
                "the history holds all that was measured",
            )
        self._finished[key] = attempt
        self._learn(attempt)
        return attempt

    @property
    def num_finished(self) -> int:
        return len(self._finished)

    def remaining_s(self) -> float | None:
        """Estimate for the trials that are left, from those that have ended."""
        return None if self.mean_trial_s is None else self.mean_trial_s * max(self.trials_left, 0)

    def _attempt(self, spec: TrialSpec) -> Attempt:
        knobs = spec.knobs
        assert knobs is not None
        spec = replace(
            spec,
            hardware_flops_per_token=self._hardware_flops.get(knobs.activation_checkpointing),
            tracked_bytes=self._tracked_bytes.get(knobs),
        )
        folder = self.out / "logs" / f"trial-{spec.trial:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "spec.json", spec.to_json())
        self.listener.trial_started(spec, self.remaining_s())
        began, wall_began = self.clock(), time.time()
        try:
            result = self.runner.run(spec, folder, self.study.job.measure.trial_timeout_s)
        except KeyboardInterrupt:
            result = GangResult(Outcome.INTERRUPTED, "the run was interrupted", None, {}, [], wall_began, time.time())
            self._record(spec, result, folder)
            raise
        self._note_time(self.clock() - began)
        for warning in result.warnings:
            self._warn_once(warning)
        return self._record(spec, result, folder)

    def _record(self, spec: TrialSpec, result: GangResult, folder: Path) -> Attempt:
        row = history_row(spec, result, self.study, str(folder.relative_to(self.out)))
        self._history.append(row)
        return attempt_from_row(row, self.study.limits)

    def _learn(self, attempt: Attempt) -> None:
        hardware, allocated = attempt.row.get("hardware_flops_per_token"), attempt.row.get("allocated_gib")
        if hardware is not None:
            self._hardware_flops[attempt.knobs.activation_checkpointing] = hardware
        if allocated is not None:
            self._tracked_bytes[attempt.knobs] = round(allocated * GIB)

    def _note_time(self, seconds: float) -> None:
        before = self.mean_trial_s
        self.mean_trial_s = seconds if before is None else 0.7 * before + 0.3 * seconds

    def _warn_once(self, warning: str) -> None:
        if warning not in self._warned:
            self._warned.add(warning)
            self.listener.message(f"  {warning}")


def _trial(item: tuple[int, Knobs]) -> int:
    return item[0]
