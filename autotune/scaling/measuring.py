"""Measures a scaling: each config on each number of ranks, in interleaved repeats."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.estimate import Forecast, Gang, Guess, Stage, trial_s
from autotune.job import Job
from autotune.measuring import Listener, Measurer
from autotune.preflight.closed_form import closed_form
from autotune.report.text import SIMULATED, count, duration
from autotune.scaling.points import STRONG
from autotune.scaling.rounds import num_rows_in, rounds
from autotune.scaling.sizes import Opener
from autotune.scaling.subject import BASELINE, CURVES, Target, refuse_what_never_divides, spelt, target
from autotune.stages import SCALE
from autotune.survey import Survey, survey_from_content
from trials.outcome import Outcome
from trials.record import Knobs

REPEATS = 3


def targets(job: Job, contenders: dict[str, Knobs], ranks: Sequence[int], modes: Sequence[str]) -> list[Target]:
    """What is measured on each number of ranks, in each mode: best and baseline, and on the most ranks all others.

    Raises:
        UserError: a number of ranks that no config divides over, or that does not fill whole nodes.
    """
    found = []
    for world_size in sorted(set(ranks)):
        ranked = world_size == max(ranks)
        for mode in modes:
            here = contenders if ranked and mode == modes[0] else {r: k for r, k in contenders.items() if r in CURVES}
            found.append(target(job, here, world_size, mode))
    refuse_what_never_divides(found)
    # On the real run's number of ranks both modes have one batch.
    return [one for one in found if one.mode == modes[0] or one.world_size != job.batch.target_world_size]


@dataclass
class Scale:
    """One scaling.

    Args:
        folder: of the run whose history the rows are added to.
        content: of its study.yaml.
        opened: opens a runner for each job.
        rates: tokens/s per rank of configs that are known already, by role; for the estimate.
        rows: of the history, so far.
    """

    folder: Path
    content: dict[str, Any]
    targets: Sequence[Target]
    opened: Opener
    listener: Listener
    repeats: int
    rates: dict[str, float]
    rows: Sequence[dict[str, Any]]
    _failed: set[tuple[int, Knobs]] = field(default_factory=set)
    _surveys: dict[tuple[int, str], Survey] = field(default_factory=dict)
    _measurers: dict[tuple[int, str], tuple[Measurer, dict[Knobs, str]]] = field(default_factory=dict)

    def go(self) -> None:
        """Measures what the history does not have yet.

        Raises:
            UserError: the cluster has less than that.
            InfrastructureError: ranks or nodes failed, every time.
        """
        forecast: Forecast | None = None
        sizes = sorted({one.world_size for one in self.targets}, reverse=True)
        # From the most ranks to the fewest and back, so that what drifts steadily favours none; and a cluster that has
        # not so many is found out at once.
        places = {(one.world_size, one.job.global_batch_size) for one in self.targets}
        numbers = rounds(self.rows, places, self.repeats)
        num_measured = num_rows_in(self.rows, places, numbers)
        visits = [(size, number) for number in numbers for size in sizes[:: 1 if number % 2 == 0 else -1]]
        for world_size, group in itertools.groupby(visits, key=lambda visit: visit[0]):
            here = [one for one in self.targets if one.world_size == world_size]
            with self.opened(here[0].job) as runner:
                forecast = forecast or self._forecast(runner, num_measured)
                for _, number in group:
                    for one in here:
                        self._measure(one, runner, number, forecast)

    def _survey(self, one: Target, runner: Any) -> Survey:
        key = (one.world_size, one.mode)
        if key not in self._surveys:
            self._surveys[key] = survey_from_content(one.job, runner, self.content)
        return self._surveys[key]

    def _measurer(self, one: Target, runner: Any, forecast: Forecast) -> tuple[Measurer, dict[Knobs, str]]:
        """On the slots that are open now, with the role of each config."""
        key = (one.world_size, one.mode)
        if key not in self._measurers:
            survey = self._survey(one, runner)
            contenders = spelt(one, survey.space.canonical)
            roles = {knobs: role for role, knobs in contenders.items()}
            measurer = Measurer(
                survey.study,
                self.folder,
                runner,
                self.listener,
                forecast,
                beside=lambda knobs: {"role": roles[knobs]},
                reference=contenders.get(BASELINE),
            )
            measurer.recall({SCALE})
            self._measurers[key] = measurer, roles
        measurer, roles = self._measurers[key]
        measurer.runner = runner
        measurer.leave_numbers_in_use()  # those that the others have given meanwhile
        return measurer, roles

    def _measure(self, one: Target, runner: Any, number: int, forecast: Forecast) -> None:
        measurer, roles = self._measurer(one, runner, forecast)
        # The baseline first in the first round: the others must reproduce its losses.
        ordered = sorted(roles, key=lambda knobs: roles[knobs] != BASELINE)
        self.listener.baseline_known(ordered[0])
        for knobs in ordered[:: 1 if number % 2 == 0 else -1]:
            if (one.world_size, knobs) in self._failed:
                continue
            attempt = measurer.measure(knobs, SCALE, number)
            self.listener.trial_ended(attempt, None)
            if attempt.outcome is not Outcome.OK:
                self._failed.add((one.world_size, knobs))
                self.listener.message(
                    f"  {roles[knobs]} on {count(one.world_size, 'rank')} ended in {attempt.outcome}: no point there"
                )

    def _forecast(self, runner: Any, num_measured: int) -> Forecast:
        """And says what it takes.

        Args:
            num_measured: trials that the history has.
        """
        num_trials = self.repeats * sum(len(one.contenders) for one in self.targets)
        seconds = [self._trial_s(one, role, runner) for one in self.targets for role in one.contenders]
        known = [each for each in seconds if each is not None]
        for one in self.targets:
            for role, why in one.problems.items():
                self.listener.message(f"  no {one.mode} point of {role} on {count(one.world_size, 'rank')}: {why}")
        share_left = 1 - min(num_measured, num_trials) / num_trials
        is_known = share_left and len(known) == len(seconds)
        took = f", about {duration(share_left * self.repeats * sum(known))}" if is_known else ""
        before = f", {num_measured} of them measured before" if num_measured else ""
        if runner.simulated:
            self.listener.message(f"  SIMULATED, nothing is measured: {runner.simulated}")
        clock = f" {SIMULATED}" if runner.simulated else ""
        ranks = ", ".join(str(n) for n in sorted({one.world_size for one in self.targets}))
        self.listener.message(
            f"scaling on {ranks} ranks: {count(self.repeats, 'repeat')}, {num_trials} trials{before}{took}{clock}"
        )
        return Forecast({SCALE: Stage(num_trials, num_trials, statistics.fmean(known) if known else 1.0)}, not known)

    def _trial_s(self, one: Target, role: str, runner: Any) -> float | None:
        """Seconds of a trial: by the rate that its config had in the run, else as it is predicted."""
        knobs, model = one.contenders[role], self.content["model"]
        rate, seq_len = self.rates.get(role), one.job.seq_len
        if rate is not None and seq_len is not None:
            step_s = knobs.micro_batch_size * knobs.grad_accum_steps * seq_len / rate
        else:
            survey = self._survey_of_any(runner)
            predictor = closed_form(
                one.job, survey.shape, runner.device, survey.device_name, one.world_size, survey.study.peak.tflops_per_s
            )
            found = predictor.predict(knobs)
            if found is None:
                return None
            step_s = found.step_s / survey.cpu_share
        gang = Gang(runner.device, one.world_size, 1)
        return trial_s(one.job.measure, SCALE, Guess(knobs, step_s), gang, model.get("num_params") or 0)

    def _survey_of_any(self, runner: Any) -> Survey:
        one = next(one for one in self.targets if one.world_size == runner.world_size)
        return self._survey(one, runner)


def modes_of(mode: str) -> tuple[str, ...]:
    """Of `strong`, `weak` or `both`; the first is the one that configs are ranked in."""
    return (STRONG, "weak") if mode == "both" else (mode,)
