"""The run from beginning to end: survey, baseline, explore, finalists, fresh rounds, endurance, best.yaml."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.best import Evidence, best_content, is_settled, read_confirmed, write_best
from autotune.cluster.runner import Runner
from autotune.diagnose import diagnose
from autotune.endurance import NOT_RUN, PASSED, endurance_content, status_of
from autotune.errors import InfrastructureError, UserError
from autotune.job import Job
from autotune.kept_warm_starts import open_warm_starts
from autotune.measuring import Listener, Measurer
from autotune.outlook import make_outlook
from autotune.preflight.closed_form import closed_form
from autotune.preflight.prediction import Predictor
from autotune.refusals import budget_without_trials, nothing_else_fits, nothing_fits, refuse_an_empty_space
from autotune.report.text import finding_line
from autotune.rows import Attempt
from autotune.search.stopping import Stopping
from autotune.search.study import Search
from autotune.stages import ENDURANCE, SIDE_BY_SIDE
from autotune.survey import FILE_NAME as STUDY_FILE
from autotune.survey import Survey, load_survey, note_stop, take_survey
from autotune.verdict import MIN_ROUNDS, Verdict, compare
from autotune.warm_start import Priors
from trials.outcome import NOT_OF_THE_CONFIG, OF_THE_WORKLOAD, OUT_OF_MEMORY, Outcome
from trials.record import ENGINE_KNOBS, Knobs

NUM_PROPOSED_FIRST = 3
"""Configs of a warm start that are measured before the search goes its own way."""


PEAKS = ("allocated_gib", "reserved_gib")


@dataclass
class RunResult:
    """How a run ended."""

    baseline: Attempt
    best: Attempt
    """The config to use: the winner, or the baseline."""
    verdict: Verdict | None
    """None if nothing was measured beside the baseline: no other config fits."""
    num_out_of_memory: int
    num_trials: int
    elapsed_s: float


@dataclass
class Run:
    """One study, against a runner. `go` does it all.

    Args:
        out: made by `prepare_folder`.
        resume: take up the run that is in `out`; nothing that it finished is run again.
        warm_start: folders of earlier runs whose histories the search is told; a run that is resumed keeps its own.
        other_model: take them also if they measured another model.
    """

    job: Job
    out: Path
    runner: Runner
    listener: Listener
    resume: bool = False
    warm_start: Sequence[Path] = ()
    other_model: bool = False

    def __post_init__(self) -> None:
        self._started = self.runner.clock.monotonic()
        self._attempts: list[Attempt] = []
        self._best: Attempt | None = None
        self._failed_again: set[Knobs] = set()
        self._has_too_few_pairs = False
        """Of runs of a candidate and the baseline, since the baseline failed."""
        self._endurance: Attempt | None = None
        """Of the config that best.yaml names."""
        self._failed_endurance: list[Attempt] = []
        self._priors: list[Priors] = []
        self._profiled: dict[Knobs, Attempt] = {}
        """The latest profiled trial of each config that has one."""
        self._peaks: dict[Knobs, dict[str, float]] = {}
        """The most memory that each config took in any of its runs, by the history's column."""
        self._is_settled = self.resume and is_settled(self.out)
        """It had ended, and nothing new has been measured since: what is read again changes nothing in best.yaml."""

    # --- the stages -------------------------------------------------------------------------------------------

    def go(self) -> RunResult:
        """Runs every stage.

        Raises:
            UserError: the workload or its data are wrong; the space holds nothing but the baseline; the baseline alone
                takes the whole budget; a run that is resumed had another space; a warm start
                has no history, is of another model, or is not the one that a resumed run began with.
            InfrastructureError: the survey or the baseline failed for reasons that are not the config's.
            NothingFitsError: not even the baseline fits in memory, or surely nothing beside it.
        """
        self._prepare()
        reference = self._measure_baseline()
        self._refuse_a_budget_without_trials()
        self._tell_priors(reference)
        self._explore()
        return self._decide(reference)

    def _prepare(self) -> None:
        self._confirmed = read_confirmed(self.out) if self.resume else None
        known = self.resume and (self.out / STUDY_FILE).exists()
        if not known:
            self.listener.message("  survey: the ranks look at model, data and machine")
        survey = (load_survey if known else take_survey)(self.job, self.runner, self.out)
        self.study, self.space = survey.study, survey.space
        self.listener.message(survey.describe())
        refuse_an_empty_space(self.space)
        self._warm_starts = open_warm_starts(
            self.out, self.study, self.warm_start, self.other_model, self.listener.message
        )
        predictor = self._predictor(survey)
        self.outlook = make_outlook(survey, self.runner.num_slots, predictor)
        self.measurer = Measurer(self.study, self.out, self.runner, self.listener, self.outlook.forecast())
        for line in self.measurer.recall() if self.resume else []:
            self.listener.message(f"  skipped {line}")
        for line in self.outlook.describe(self.measurer.finished_stages()):
            self.listener.message(f"  {line}")
        limits = self.study.limits
        self.search = Search(
            self.space,
            self.job.sampler,
            self.job.seed,
            self.out / "logs" / "optuna.log",
            predictor=predictor,
            limit_gib=limits.limit_gib,
            headroom=limits.headroom,
            num_parallel=self.runner.num_slots,
            num_begun=len(self.measurer.begun(SIDE_BY_SIDE)),
            say=self.listener.message,
        )
        self.measurer.predict = self.search.predicted_columns
        self.stopping = Stopping(self.job.budget, self.runner.world_size * self.runner.num_slots)

    def _predictor(self, survey: Survey) -> Predictor:
        study, peak = self.study, self.study.peak.tflops_per_s
        return closed_form(self.job, survey.shape, self.runner.device, survey.device_name, study.world_size, peak)

    def _measure_baseline(self) -> Attempt:
        knobs = self.space.baseline
        self.listener.baseline_known(knobs)
        self.listener.message(f"  space: {self.space.num_configs:,} distinct configs")
        attempt = self._trial(knobs, "baseline")
        if attempt.outcome in OUT_OF_MEMORY:
            careful = self._careful()
            if careful != knobs:
                self.listener.message("  the baseline ran out of memory: the careful default becomes the reference")
                attempt = self._trial(careful, "baseline")
            if attempt.outcome in OUT_OF_MEMORY:
                raise nothing_fits(self.study, attempt)
        if attempt.outcome is not Outcome.OK:
            kind = UserError if attempt.outcome in OF_THE_WORKLOAD else InfrastructureError
            raise kind(
                f"the baseline failed ({attempt.outcome}): {attempt.reason}",
                f"nothing else was tried; its output is in {self.out / 'logs' / f'trial-{attempt.trial:04d}'}",
            )
        if not attempt.is_feasible:
            self.listener.message("  the baseline leaves less memory free than cluster.memory_headroom asks for")
        return attempt

    @property
    def _baseline_gave_way(self) -> bool:
        """Whether it is the careful default that all is compared with: it fits, which is worth knowing in itself."""
        told = self.search.known.get(self.space.baseline)
        return told is not None and told.outcome in OUT_OF_MEMORY

    def _careful(self) -> Knobs:
        """What takes least memory: sharded, one sequence at a time, everything recomputed, nothing kept gathered."""
        base = self.space.baseline
        torchs_own: dict[str, Any] = dict.fromkeys(ENGINE_KNOBS) | {"cpu_offload": base.cpu_offload}
        sharding = [engine for engine in (base.engine, *self.job.training.engines) if engine != "ddp"]
        careful = torchs_own | {
            "engine": sharding[0] if sharding else "ddp",
            "micro_batch_size": 1,
            "grad_accum_steps": self.space.accumulation(replace(base, micro_batch_size=1)),
            "sync_each_micro_batch": True,
            "bucket_cap_mb": max(self.space.facts.block_mib) if sharding else base.bucket_cap_mb,
            "blocks_per_unit": 1,
            "activation_checkpointing": "full",
        }
        own = set() if self.job.trainer is None else careful.keys() - self.job.handed
        own -= {"grad_accum_steps"} if "micro_batch_size" in self.job.handed else set()
        return self.space.canonical(replace(base, **{name: careful[name] for name in careful.keys() - own}))

    def _refuse_a_budget_without_trials(self) -> None:
        used_up = self.stopping.reason(0, self._elapsed_s())
        if used_up is not None and not self.measurer.begun(SIDE_BY_SIDE):
            num_trials, trial_s = self.job.budget.trials, self.measurer.forecast.trial_s(SIDE_BY_SIDE) or 0.0
            raise budget_without_trials(
                used_up, self._elapsed_s(), num_trials, trial_s * num_trials / self.runner.num_slots
            )

    def _tell_priors(self, reference: Attempt) -> None:
        """What earlier runs found, in this run's units; the fastest that fit are proposed first."""
        self._priors = [warm_start.priors(self.space, reference) for warm_start in self._warm_starts]
        for one in self._priors:
            self.listener.message(one.describe())
        told = [(prior.knobs, prior.told(_rate(reference))) for one in self._priors for prior in one.priors]
        for knobs, found in told:
            self.search.prior(knobs, found)
        fitting = [(f.tokens_per_s_per_rank or 0.0, knobs) for knobs, f in told if f.memory_over_limit <= 0]
        faster = [(rate, knobs) for rate, knobs in fitting if rate > _rate(reference)]
        ranked = dict.fromkeys(knobs for _, knobs in sorted(faster, key=lambda pair: pair[0], reverse=True))
        self.search.propose(list(ranked), NUM_PROPOSED_FIRST)

    def _explore(self) -> None:
        """Trials side by side, one a slot; the search is told of each as it ends, and then asked for the next.

        They rank configs roughly, since slots are not alike: what is compared runs alone later, on one slot.
        """
        self.measurer.measure_side_by_side(self._proposals(), SIDE_BY_SIDE, self._take_in)

    def _proposals(self) -> Iterator[Knobs | None]:
        """What an earlier life began, and then what the search asks for; None where it asks for nothing for now."""
        begun, num_proposed = self._take_up(), 0
        for knobs in itertools.chain(begun, self._asked()):
            self._record_rejected()
            yield knobs
            num_proposed += knobs is not None
            if num_proposed < len(begun):
                continue  # what an earlier life explored counts, whatever the budget is now
            reason = self.stopping.reason(num_proposed, self._elapsed_s())
            if reason is not None:
                return self._end_search(reason)
        self._record_rejected()
        if not num_proposed and not self._baseline_gave_way:
            raise nothing_else_fits(self.study, self.space)
        return self._end_search("every config worth a trial has been tried")

    def _asked(self) -> Iterator[Knobs | None]:
        """Until nothing is left: what a trial under way finds may yet open what is believed not to fit."""
        while (knobs := self.search.ask()) is not None or self.measurer.is_under_way:
            yield knobs

    def _end_search(self, reason: str) -> None:
        self.listener.message(f"  the search ends: {reason}")
        note_stop(self.out, reason)

    def _record_rejected(self) -> None:
        for knobs in self.search.take_rejected():
            self.measurer.record_predicted_oom(knobs)

    def _take_up(self) -> list[Knobs]:
        """What an earlier life explored: what it finished, and then what is to be run again.

        A history that was tampered with has no config run that the job has not.
        """
        begun, rejected = self.measurer.begun(SIDE_BY_SIDE), list(self.measurer.predicted_oom)
        known = [knobs for knobs in begun if self.space.contains(knobs)]
        if len(known) < len(begun):
            self.listener.message("  skipped configs of the history that are not in the space")
        for knobs in known:
            self.search.take_up(knobs)
        for knobs in rejected:
            if self.space.contains(knobs) and knobs not in known:
                self.search.take_up_rejected(knobs)
        return sorted(known, key=lambda knobs: not self.measurer.has(SIDE_BY_SIDE, knobs, None))

    def _elapsed_s(self) -> float:
        """Of this life, and of what earlier ones measured."""
        return self.runner.clock.monotonic() - self._started + self.measurer.recalled_s

    def _decide(self, reference: Attempt) -> RunResult:
        self.measurer.forecast.end(SIDE_BY_SIDE)
        for index, candidate in enumerate(self._finalists(reference)):
            ours, theirs = self._rounds(candidate, reference, index * self.job.measure.rounds)
            if len(ours) < MIN_ROUNDS:
                self.listener.message(f"  {self._why_no_pairs(candidate, len(ours))}: on to the next finalist")
            elif not compare(ours, theirs).is_win or self._endures(candidate):
                return self._conclude(reference, candidate, ours, theirs)
        return self._conclude(reference, None, [], [])

    def _why_no_pairs(self, candidate: Attempt, num_pairs: int) -> str:
        if candidate.knobs in self._failed_again:
            return f"the config of trial {candidate.trial} failed when run again"
        self._has_too_few_pairs = True
        return f"the baseline failed when run again: {num_pairs} of {self.job.measure.rounds} pairs are left, too few"

    def _endures(self, winner: Attempt) -> bool:
        """Whether the winner also runs longer, evaluates, saves and loads; or nothing is known against it."""
        if not self.job.measure.endurance:
            return True
        attempt = self._trial(winner.knobs, ENDURANCE)
        if status_of(attempt) in (PASSED, NOT_RUN):
            self._endurance = attempt
            return True
        self._failed_endurance.append(attempt)
        self.listener.message("  that config failed its endurance run: on to the next finalist")
        return False

    def _finalists(self, reference: Attempt) -> list[Attempt]:
        """The fastest configs that fit, run once more beside the reference; those still faster, best first."""
        fitting = [a for a in self._attempts if a.is_feasible and a.knobs != reference.knobs]
        chosen = sorted(fitting, key=_rate, reverse=True)[: self.job.measure.num_finalists]
        scores: list[tuple[float, Attempt]] = []
        for first in [*chosen, reference] if chosen else []:
            again = self._trial(first.knobs, "finalist")
            if again.outcome is Outcome.OK:
                # What was put together from parts is no match for whole steps: those alone count.
                runs = [again] if first.is_composed else [first, again]
                scores.append((_geometric_mean([_rate(run) for run in runs]), first))
        to_beat = next((score for score, attempt in scores if attempt is reference), _rate(reference))
        faster = [(score, attempt) for score, attempt in scores if score > to_beat]
        return [attempt for _, attempt in sorted(faster, key=lambda pair: pair[0], reverse=True)]

    def _rounds(self, candidate: Attempt, reference: Attempt, first: int) -> tuple[list[float], list[float]]:
        """Fresh throughputs of both, paired by round; the pairs so far if the candidate fails when run again.

        Memory is not judged again: near the limit it is noisy, and a config that ran has fitted.

        Args:
            first: number of the first round; each candidate has rounds of its own, also when the run is resumed.
        """
        ours: list[float] = []
        theirs: list[float] = []
        for number in range(self.job.measure.rounds):
            # Alternate who goes first, so that what drifts steadily favours neither.
            pair = (candidate, reference) if number % 2 == 0 else (reference, candidate)
            again = self._pair(pair, first + number)
            if again[candidate.knobs].outcome is not Outcome.OK:
                return [], []
            if again[reference.knobs].outcome is Outcome.OK:
                ours.append(_rate(again[candidate.knobs]))
                theirs.append(_rate(again[reference.knobs]))
        return ours, theirs

    def _pair(self, pair: tuple[Attempt, Attempt], number: int) -> dict[Knobs, Attempt]:
        """One run of each, one right after the other on one slot; half a pair is none."""
        anew = not all(self.measurer.has("round", attempt.knobs, number) for attempt in pair)
        while True:
            num_lost = self.runner.num_lost
            again = {attempt.knobs: self._trial(attempt.knobs, "round", number, anew) for attempt in pair}
            if self.runner.num_lost == num_lost:
                return again
            self.listener.message(f"  a slot was lost in round {number + 1}: its pair is measured again, on one slot")
            anew = True

    def _conclude(
        self, reference: Attempt, candidate: Attempt | None, ours: list[float], theirs: list[float]
    ) -> RunResult:
        verdict = compare(ours, theirs) if candidate is not None else None
        wins = verdict is not None and verdict.is_win
        best = candidate if wins and candidate is not None else reference
        baseline_rate = _geometric_mean(theirs) if theirs else None  # it has run in no round
        best_rate = _geometric_mean(ours) if wins else baseline_rate
        self._write_best(best, reference, best_rate, baseline_rate, verdict, candidate, complete=True)
        return RunResult(
            baseline=reference,
            best=best,
            verdict=verdict,
            num_out_of_memory=sum(a.outcome in OUT_OF_MEMORY for a in self._attempts),
            num_trials=len(self._attempts),
            elapsed_s=self._elapsed_s(),
        )

    # --- one trial, and what is written of it -----------------------------------------------------------------

    def _trial(self, knobs: Knobs, stage: str, round_number: int | None = None, anew: bool = False) -> Attempt:
        attempt = self.measurer.measure(knobs, stage, round_number, anew)
        self._take_in(attempt)
        return attempt

    def _take_in(self, attempt: Attempt) -> None:
        if attempt.outcome is Outcome.MISAPPLIED and self.job.trainer is not None:
            raise UserError(
                f"trial {attempt.trial} ({attempt.stage}) did not do what was asked of it, and so would others: "
                f"{attempt.reason}",
                f"its output and what its ranks showed are in {self.out / attempt.row['log_path']}",
            )
        if attempt.row.get("frac_compute") is not None:
            self._profiled[attempt.knobs] = attempt
        self._note_memory(attempt)
        self._unsettle(attempt)
        if attempt.stage in ("baseline", "explore"):
            self.search.tell(attempt.knobs, attempt.told)
            if attempt.stage == SIDE_BY_SIDE:
                self.stopping.count(attempt.tokens_per_s_per_rank if attempt.is_feasible else None)
            self._attempts.append(attempt)
            if attempt.is_feasible and (self._best is None or _rate(attempt) > _rate(self._best)):
                self._best = attempt
                self.measurer.rate_to_beat = _rate(attempt)
                if not self._is_settled:
                    self._write_best(attempt, self._first_ok(), complete=False)
        elif attempt.outcome is not Outcome.OK and attempt.outcome not in NOT_OF_THE_CONFIG:
            self._failed_again.add(attempt.knobs)
        self.listener.trial_ended(attempt, self._best)
        if attempt is self._best:
            for finding in diagnose(attempt.row, self.study.limits)[:1]:
                self.listener.message(f"  what bounds the best so far: {finding_line(finding.to_dict())}")

    def _note_memory(self, attempt: Attempt) -> None:
        if attempt.outcome is not Outcome.OK:
            return
        peaks = self._peaks.setdefault(attempt.knobs, {})
        for name in PEAKS:
            if attempt.row.get(name) is not None:
                peaks[name] = max(peaks.get(name, 0.0), attempt.row[name])

    def _unsettle(self, attempt: Attempt) -> None:
        """A run that had ended goes on, with the first attempt that it did not have."""
        if self._is_settled and attempt.trial not in self.measurer.recalled_trials:
            self._is_settled = False
            if self._best is not None:
                self._write_best(self._best, self._first_ok(), complete=False)

    def _first_ok(self) -> Attempt:
        return next(one for one in self._attempts if one.outcome is Outcome.OK)

    def _write_best(
        self,
        best: Attempt,
        baseline: Attempt,
        best_rate: float | None = None,
        baseline_rate: float | None = None,
        verdict: Verdict | None = None,
        candidate: Attempt | None = None,
        *,
        complete: bool,
    ) -> None:
        fallback = self._fallback(best)
        content = best_content(
            self.study,
            best=self._evidence(best, best_rate),
            baseline=self._evidence(baseline, baseline_rate),
            fallback=self._evidence(fallback) if fallback else None,
            verdict=verdict,
            candidate=candidate.knobs if candidate else None,
            no_verdict=self._no_verdict(complete),
            endurance=endurance_content(
                self._endurance, self._why_no_endurance(complete), self._failed_endurance, self.job.seq_len
            ),
            warm_start=[one.to_dict() for one in self._priors],
            complete=complete,
            written_at_s=self.runner.clock.time(),
        )
        if self._confirmed is not None:
            content["confirmed"] = self._confirmed  # of earlier, and it says of which settings
        write_best(self.out / "best.yaml", content)

    def _evidence(self, attempt: Attempt, rate: float | None = None) -> Evidence:
        knobs = attempt.knobs
        return Evidence(attempt, rate, self._profiled.get(knobs), self._peaks.get(knobs, {}))

    def _no_verdict(self, complete: bool) -> str:
        if not complete:
            return "not yet: the run has not ended"
        if self._has_too_few_pairs:
            return "the baseline itself failed when it was run again, so nothing can be compared with it"
        if self._failed_endurance or self._failed_again:
            return "every faster config failed when it was run again or longer: keep your baseline"
        others = [attempt for attempt in self._attempts if attempt.stage == SIDE_BY_SIDE]
        if others and all(attempt.outcome in OUT_OF_MEMORY for attempt in others):
            return "all that was tried beside the baseline ran out of memory: keep your baseline"
        return "no config that fits was faster: keep your baseline"

    def _why_no_endurance(self, complete: bool) -> str:
        if not self.job.measure.endurance:
            return "measure.endurance = false"
        return "the baseline is kept, which trains already" if complete else "not yet: the run has not ended"

    def _fallback(self, best: Attempt) -> Attempt | None:
        """For the day the best does not fit: the fastest other config that takes less memory, or if there is none that
        fits at all."""
        others = [
            a
            for a in self._attempts
            if a.is_feasible
            and a.knobs not in self._failed_again
            and a.memory_gib is not None
            and a.knobs != best.knobs
        ]
        smaller = [a for a in others if (a.memory_gib or 0.0) < (best.memory_gib or 0.0)]
        return max(smaller or others, key=_rate, default=None)


def _rate(attempt: Attempt) -> float:
    assert attempt.tokens_per_s_per_rank is not None
    return attempt.tokens_per_s_per_rank


def _geometric_mean(values: list[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))
