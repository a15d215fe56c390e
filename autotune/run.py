"""The run from beginning to end: survey -> baseline -> explore -> finalists -> fresh rounds -> best.yaml."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import yaml

from autotune.best import Evidence, best_content, write_best
from autotune.cluster.gang import GangResult
from autotune.cluster.runner import Runner
from autotune.errors import InfrastructureError, NothingFitsError, UserError
from autotune.hardware import peak_for
from autotune.history import History
from autotune.job import Job
from autotune.rows import GIB, Attempt, Limits, ModelFacts, Study, judge
from autotune.search.study import Search
from autotune.space import Facts, SearchSpace
from autotune.verdict import Verdict, compare
from trials.outcome import INFRASTRUCTURE, OUT_OF_MEMORY, Outcome
from trials.record import Knobs, Measure, TrialSpec

MIN_ROUNDS = 3
"""Pairs that a verdict needs at least."""
MAX_RETRIES = 2
"""Attempts after the first, for outcomes that say nothing about the config."""
ASSUMED_MFU = 0.5
"""Of the first estimate of a trial's time, before anything has been measured."""
OVERHEAD_S = 2.5
"""Seconds a trial spends outside its steps, for the estimate; tests/benchmarks measures it."""


class Listener(Protocol):
    """What the screen is told."""

    def message(self, text: str) -> None: ...

    def baseline_known(self, knobs: Knobs, num_configs: int) -> None: ...

    def trial_started(self, spec: TrialSpec, remaining_s: float | None) -> None: ...

    def trial_ended(self, attempt: Attempt, best: Attempt | None) -> None: ...


@dataclass
class RunResult:
    """How a run ended."""

    out: Path
    baseline: Attempt
    best: Attempt
    """The config to use: the winner, or the baseline."""
    verdict: Verdict | None
    """None if nothing was measured beside the baseline: no other config fits."""
    baseline_rate: float
    best_rate: float
    """Tokens/s per rank of each, geometric means over the fresh rounds."""
    num_out_of_memory: int
    num_trials: int
    elapsed_s: float


@dataclass
class Run:
    """One study, against a runner. `go` does it all.

    Args:
        out: made by `prepare_folder`.
    """

    job: Job
    out: Path
    runner: Runner
    listener: Listener
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._started = self.clock()
        self._history = History(self.out / "history")
        self._next_trial = 0
        self._hardware_flops: dict[str, float] = {}  # by checkpointing mode
        self._tracked_bytes: dict[Knobs, int] = {}
        self._attempts: list[Attempt] = []
        self._best: Attempt | None = None
        self._failed_again: set[Knobs] = set()
        self._warned: set[str] = set()
        self._mean_trial_s: float | None = None
        self._trials_left = self._planned_trials()

    def _planned_trials(self) -> int:
        measure = self.job.measure
        return 1 + self.job.budget.trials + measure.num_finalists + 1 + 2 * measure.rounds

    # --- the stages -------------------------------------------------------------------------------------------

    def go(self) -> RunResult:
        """Runs every stage.

        Raises:
            UserError: the workload or its data are wrong.
            InfrastructureError: the survey or the baseline failed for reasons that are not the config's.
            NothingFitsError: no config that was tried fits the memory limit.
        """
        self._survey()
        reference = self._measure_baseline()
        self._explore()
        return self._decide(reference)

    def _survey(self) -> None:
        spec = self._spec(None, "survey")
        folder = self._log_folder("survey")
        result = self.runner.run(spec, folder, self.job.measure.trial_timeout_s)
        if result.outcome is Outcome.INVALID:
            raise UserError(result.reason, f"the traceback is in {folder}/rank-{result.failed_rank}.log")
        if result.outcome is not Outcome.OK:
            raise InfrastructureError(
                f"the survey of model and machine failed ({result.outcome}): {result.reason}", f"see {folder}"
            )
        self._take_survey(result)

    def _take_survey(self, result: GangResult) -> None:
        found = result.reports[0].survey
        assert found is not None
        probes = [r.survey.get("cpu_peak_tflops_per_s") for r in result.reports.values() if r.survey]
        cpu_probe = sum(p for p in probes if p) / len(probes) if all(probes) else None
        device_name = result.reports[0].device_name
        peak = peak_for(
            device_name,
            self.job.training.precision,
            sm_count=found.get("sm_count"),
            given_tflops_per_s=self.job.cluster.peak_tflops_per_s,
            cpu_probe_tflops_per_s=cpu_probe,
        )
        self.space = SearchSpace(
            self.job,
            Facts(self.runner.device, found["num_blocks"], tuple(found["block_mib"]), found["cpus_allowed"]),
        )
        limits_gib = (self.job.cluster.memory_limit_gib, found.get("device_memory_gib"))
        self.study = Study(
            study_id=uuid.uuid4().hex[:12],
            job=self.job,
            model=ModelFacts(**{name: found[name] for name in ModelFacts.__dataclass_fields__}),
            peak=peak,
            limits=Limits(
                self.runner.device,
                min((gib for gib in limits_gib if gib is not None), default=None),
                self.job.cluster.memory_headroom,
            ),
            space_hash=self.space.hash,
            world_size=self.runner.world_size,
        )
        self.search = Search(self.space, self.job.sampler, self.job.seed, self.out / "logs" / "optuna.log")
        self._write_study(device_name, found)
        self.listener.message(self._describe(device_name, found))
        self.listener.message(f"  estimate: {self._estimate()}")

    def _describe(self, device_name: str, found: dict[str, Any]) -> str:
        peak, limits, model = self.study.peak, self.study.limits, self.study.model
        known = f"{peak.tflops_per_s:.3g} TFLOP/s per rank ({peak.source})" if peak.tflops_per_s else peak.source
        flops = f"{model.flops_per_token / 1e6:.1f} MFLOP per token" if model.flops_per_token else "FLOPs not known"
        limit = f"{limits.limit_gib:.3g} GiB per rank" if limits.limit_gib else "none"
        batch = self.job.global_batch_size
        return (
            f"  model: {model.num_params / 1e6:.1f} M parameters, {found['num_blocks']} blocks, "
            f"{flops} [{model.flops_convention}]\n"
            f"  global batch: {batch} sequences = {batch * self.job.model.seq_len:,} tokens per optimizer step\n"
            f"  device: {device_name}, {self.runner.world_size} ranks; peak: {known}\n"
            f"  memory limit: {limit}, {limits.headroom:.0%} of it kept free"
        )

    def _estimate(self) -> str:
        measure = self.job.measure
        flops = self.study.model.flops_per_token
        if self.study.peak.tflops_per_s is None or flops is None:
            return "known once the baseline has run"
        tokens = self.job.global_batch_size // self.job.batch.target_world_size * self.job.model.seq_len
        step_s = tokens * flops / (ASSUMED_MFU * self.study.peak.tflops_per_s * 1e12)
        steps = measure.warmup_steps + (measure.min_steps + measure.max_steps) / 2
        self._mean_trial_s = OVERHEAD_S + steps * step_s
        total_s = self._planned_trials() * self._mean_trial_s
        return (
            f"about {total_s / 60:.0f} min for {self._planned_trials()} runs of a trial "
            f"({step_s:.2g} s a step, assuming half the peak); refined as trials end"
        )

    def _measure_baseline(self) -> Attempt:
        knobs = self.space.baseline
        self.listener.baseline_known(knobs, sum(1 for _ in self.space.configs()))
        attempt = self._trial(knobs, "baseline")
        if attempt.outcome in OUT_OF_MEMORY:
            careful = self._careful()
            if careful != knobs:
                self.listener.message("  the baseline ran out of memory: the careful default becomes the reference")
                attempt = self._trial(careful, "baseline")
            if attempt.outcome in OUT_OF_MEMORY:
                raise self._nothing_fits(attempt)
        if attempt.outcome is not Outcome.OK:
            raise InfrastructureError(
                f"the baseline failed ({attempt.outcome}): {attempt.reason}",
                f"nothing else was tried; its output is in {self.out / attempt.row['log_path']}",
            )
        if not attempt.is_feasible:
            self.listener.message("  the baseline leaves less memory free than cluster.memory_headroom asks for")
        return attempt

    def _careful(self) -> Knobs:
        """What takes least memory: one sequence at a time, everything recomputed, nothing kept gathered."""
        return self.space.canonical(
            replace(
                self.space.baseline,
                micro_batch_size=1,
                grad_accum_steps=self.space.pairs[1],
                sync_each_micro_batch=True,
                reshard_after_forward=True,
                bucket_cap_mb=max(self.space.facts.block_mib),
                activation_checkpointing="full",
            )
        )

    def _nothing_fits(self, attempt: Attempt) -> NothingFitsError:
        return NothingFitsError(
            f"cluster.memory_limit_gib = {self.study.limits.limit_gib}: even the config that takes least ran out of "
            f"memory: {attempt.reason.splitlines()[0]}",
            "raise the limit, use more ranks, or shorten model.seq_len",
        )

    def _explore(self) -> None:
        for _ in range(self.job.budget.trials):
            if self._out_of_time():
                self.listener.message("  budget.minutes is used up: on to the finalists")
                break
            knobs = self.search.ask()
            if knobs is None:
                self.listener.message("  every config worth a trial has been tried")
                break
            self._trial(knobs, "explore")

    def _out_of_time(self) -> bool:
        minutes = self.job.budget.minutes
        return minutes is not None and self.clock() - self._started > 60 * minutes

    def _decide(self, reference: Attempt) -> RunResult:
        measure = self.job.measure
        self._trials_left = measure.num_finalists + 1 + 2 * measure.rounds
        for candidate in self._finalists(reference):
            ours, theirs = self._rounds(candidate, reference)
            if len(ours) >= MIN_ROUNDS:
                return self._conclude(reference, candidate, ours, theirs)
            self.listener.message("  that config failed when run again: on to the next finalist")
        return self._conclude(reference, None, [], [])

    def _finalists(self, reference: Attempt) -> list[Attempt]:
        """The fastest configs that fit, run once more beside the reference; those still faster, best first."""
        fitting = [a for a in self._attempts if a.is_feasible and a.knobs != reference.knobs]
        chosen = sorted(fitting, key=_rate, reverse=True)[: self.job.measure.num_finalists]
        scores: list[tuple[float, Attempt]] = []
        for first in [*chosen, reference] if chosen else []:
            again = self._trial(first.knobs, "finalist")
            if again.outcome is Outcome.OK:
                scores.append((_geometric_mean([_rate(first), _rate(again)]), first))
        to_beat = next((score for score, attempt in scores if attempt is reference), _rate(reference))
        faster = [(score, attempt) for score, attempt in scores if score > to_beat]
        return [attempt for _, attempt in sorted(faster, key=lambda pair: pair[0], reverse=True)]

    def _rounds(self, candidate: Attempt, reference: Attempt) -> tuple[list[float], list[float]]:
        """Fresh throughputs of both, paired by round; the pairs so far if the candidate fails when run again.

        Memory is not judged again: near the limit it is noisy, and a config that ran has fitted.
        """
        ours: list[float] = []
        theirs: list[float] = []
        for number in range(self.job.measure.rounds):
            # Alternate who goes first, so that what drifts steadily favours neither.
            pair = (candidate, reference) if number % 2 == 0 else (reference, candidate)
            again = {attempt.knobs: self._trial(attempt.knobs, "round", number) for attempt in pair}
            if again[candidate.knobs].outcome is not Outcome.OK:
                return [], []
            if again[reference.knobs].outcome is Outcome.OK:
                ours.append(_rate(again[candidate.knobs]))
                theirs.append(_rate(again[reference.knobs]))
        return ours, theirs

    def _conclude(
        self, reference: Attempt, candidate: Attempt | None, ours: list[float], theirs: list[float]
    ) -> RunResult:
        verdict = compare(ours, theirs) if candidate is not None else None
        wins = verdict is not None and verdict.is_win
        best = candidate if wins and candidate is not None else reference
        baseline_rate = _geometric_mean(theirs) if theirs else _rate(reference)
        best_rate = _geometric_mean(ours) if wins else baseline_rate
        result = RunResult(
            out=self.out,
            baseline=reference,
            best=best,
            verdict=verdict,
            baseline_rate=baseline_rate,
            best_rate=best_rate,
            num_out_of_memory=sum(a.outcome in OUT_OF_MEMORY for a in self._attempts),
            num_trials=len(self._attempts),
            elapsed_s=self.clock() - self._started,
        )
        self._write_best(best, reference, best_rate, baseline_rate, verdict, complete=True)
        return result

    # --- one trial --------------------------------------------------------------------------------------------

    def _trial(self, knobs: Knobs, stage: str, round_number: int | None = None) -> Attempt:
        """Measures a config; tries again what says nothing about it. Recorded before anything else happens."""
        spec = self._spec(knobs, stage)
        for number in range(MAX_RETRIES + 1):
            attempt = self._attempt(replace(spec, attempt=number), round_number)
            if attempt.outcome not in INFRASTRUCTURE:
                break
        if stage in ("baseline", "explore"):
            self.search.tell(knobs, attempt.told)
            self._attempts.append(attempt)
            if attempt.is_feasible and (self._best is None or _rate(attempt) > _rate(self._best)):
                self._best = attempt
                self._write_best(attempt, self._attempts[0], complete=False)
        elif attempt.outcome is not Outcome.OK:
            self._failed_again.add(knobs)
        for warning in attempt.warnings:
            self._warn_once(warning)
        self._trials_left -= 1
        self.listener.trial_ended(attempt, self._best)
        if attempt.outcome in INFRASTRUCTURE:
            raise InfrastructureError(
                f"trial {spec.trial} ended in {attempt.outcome} {MAX_RETRIES + 1} times: {attempt.reason}",
                "the history holds all that was measured",
            )
        return attempt

    def _warn_once(self, warning: str) -> None:
        if warning not in self._warned:
            self._warned.add(warning)
            self.listener.message(f"  {warning}")

    def _attempt(self, spec: TrialSpec, round_number: int | None) -> Attempt:
        self.listener.trial_started(spec, self._remaining_s())
        folder = self._log_folder(f"trial-{spec.trial:04d}")
        began, wall_began = self.clock(), time.time()
        try:
            result = self.runner.run(spec, folder, self.job.measure.trial_timeout_s)
        except KeyboardInterrupt:
            result = GangResult(Outcome.INTERRUPTED, "the run was interrupted", None, {}, [], wall_began, time.time())
            self._record(spec, result, folder, round_number)
            raise
        attempt = self._record(spec, result, folder, round_number)
        self._note_time(self.clock() - began)
        hardware, allocated = attempt.row.get("hardware_flops_per_token"), attempt.row.get("allocated_gib")
        if hardware is not None:
            self._hardware_flops[attempt.knobs.activation_checkpointing] = hardware
        if allocated is not None:
            self._tracked_bytes[attempt.knobs] = round(allocated * GIB)
        return attempt

    def _record(self, spec: TrialSpec, result: GangResult, folder: Path, round_number: int | None) -> Attempt:
        log_path = str(folder.relative_to(self.out))
        attempt = judge(spec, result, self.study, log_path, round_number)
        self._history.append(attempt.row)
        return attempt

    def _spec(self, knobs: Knobs | None, stage: str) -> TrialSpec:
        job, measure = self.job, self.job.measure
        number = self._next_trial if knobs is not None else -1
        self._next_trial += knobs is not None
        ranks = self.runner.world_size
        return TrialSpec(
            trial=number,
            stage=stage,
            workload=job.model.workload,
            model=job.model.factory_arguments(),
            seq_len=job.model.seq_len,
            data=job.data.model_dump(),
            global_batch_size=job.global_batch_size // job.batch.target_world_size * ranks,
            precision=job.training.precision,
            reduce_dtype=job.reduce_dtype,
            optimizer=job.training.optimizer.model_dump(mode="json"),
            world_size=ranks,
            device=self.runner.device,
            seed=job.seed,
            measure=Measure(measure.warmup_steps, measure.min_steps, measure.max_steps, measure.rel_ci),
            knobs=knobs,
            memory_limit_gib=job.cluster.memory_limit_gib,
            process_group_timeout_s=measure.trial_timeout_s,
            import_paths=(job.model.import_path,) if job.model.import_path else (),
            hardware_flops_per_token=self._hardware_flops.get(knobs.activation_checkpointing) if knobs else None,
            tracked_bytes=self._tracked_bytes.get(knobs) if knobs else None,
        )

    def _log_folder(self, name: str) -> Path:
        folder = self.out / "logs" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _note_time(self, seconds: float) -> None:
        before = self._mean_trial_s
        self._mean_trial_s = seconds if before is None else 0.7 * before + 0.3 * seconds

    def _remaining_s(self) -> float | None:
        return None if self._mean_trial_s is None else self._mean_trial_s * max(self._trials_left, 0)

    # --- what is written --------------------------------------------------------------------------------------

    def _write_study(self, device_name: str, found: dict[str, Any]) -> None:
        content = {
            "study_id": self.study.study_id,
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "space_hash": self.space.hash,
            "candidates": {name: list(values) for name, values in self.space.candidates.items()},
            "micro_batch_and_accumulation": [list(pair) for pair in self.space.pairs.items()],
            "baseline": self.space.baseline.to_dict(),
            "device_name": device_name,
            "world_size": self.runner.world_size,
            "peak": asdict(self.study.peak),
            "model": found,
        }
        (self.out / "study.yaml").write_text(yaml.safe_dump(content, sort_keys=False))

    def _write_best(
        self,
        best: Attempt,
        baseline: Attempt,
        best_rate: float | None = None,
        baseline_rate: float | None = None,
        verdict: Verdict | None = None,
        *,
        complete: bool,
    ) -> None:
        fallback = self._fallback(best)
        content = best_content(
            self.study,
            best=Evidence(best, best_rate),
            baseline=Evidence(baseline, baseline_rate),
            fallback=Evidence(fallback) if fallback else None,
            verdict=verdict,
            complete=complete,
        )
        write_best(self.out / "best.yaml", content)

    def _fallback(self, best: Attempt) -> Attempt | None:
        """The fastest config that takes less memory than the best: for the day the best does not fit."""
        smaller = [
            a
            for a in self._attempts
            if a.is_feasible
            and a.knobs not in self._failed_again
            and a.memory_gib is not None
            and a.memory_gib < (best.memory_gib or 0.0)
        ]
        return max(smaller, key=_rate, default=None)


def _rate(attempt: Attempt) -> float:
    assert attempt.tokens_per_s_per_rank is not None
    return attempt.tokens_per_s_per_rank


def _geometric_mean(values: list[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))
