"""Measures a waterfall: each change by itself, then on top of each other in order of gain, in interleaved repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.afterwards import history_rows, mean_trial_s
from autotune.errors import InfrastructureError, UserError
from autotune.estimate import Forecast, Stage
from autotune.job import Job
from autotune.measuring import Listener, Measurer
from autotune.report.text import SIMULATED, count, duration
from autotune.stages import OF_A_RUN, WATERFALL
from autotune.survey import load_survey
from autotune.waterfall.changes import Path as ChangePath
from autotune.waterfall.changes import path
from autotune.waterfall.steps import Waterfall, by_gain, waterfall
from trials.outcome import Outcome
from trials.record import Knobs

REPEATS = 3
"""Of each config, by itself or on top of others; all of them together make the interval."""


def refuse_without_winner(folder: Path, baseline: Knobs, winner: Knobs) -> None:
    """Refuses a run that kept its baseline.

    Raises:
        UserError: there is nothing between baseline and winner.
    """
    if winner == baseline:
        raise UserError(
            f"{folder}: nothing beat the baseline, which is kept: there is no gain to take apart",
            "a larger space or budget may find one",
        )


def measure_waterfall(
    job: Job, folder: Path, baseline: Knobs, winner: Knobs, runner: Any, listener: Listener, repeats: int
) -> Waterfall:
    """Measures what its history does not have yet.

    Args:
        folder: of the run that has ended, whose job `job` is.
        repeats: rounds of the changes by themselves, and as many of those on top of each other.

    Raises:
        UserError: the run has no winner; the cluster or the space is another one than the run's.
        InfrastructureError: baseline or winner does not run any more, or ranks failed.
    """
    refuse_without_winner(folder, baseline, winner)
    survey = load_survey(job, runner, folder)
    found = path(baseline, winner, survey.space.completed)
    trial_s = mean_trial_s(history_rows(folder))
    most = num_trials(len(found.changes), repeats)
    forecast = Forecast({WATERFALL: Stage(most, most, trial_s or 1.0)}, is_rough=trial_s is None)
    measurer = Measurer(survey.study, folder, runner, listener, forecast)
    for line in measurer.recall(OF_A_RUN | {WATERFALL}):
        listener.message(f"  skipped {line}")
    listener.message(
        f"waterfall of {count(len(found.changes), 'change')} ({', '.join(found.changes)}): {count(repeats, 'repeat')}, "
        f"{most} trials"
        + (f", about {duration(most * trial_s)}" if trial_s else "")
        + (f" {SIMULATED}" if survey.study.simulated else "")
    )
    listener.baseline_known(baseline)
    _Walk(found, measurer, repeats).go()
    made = waterfall(history_rows(folder), baseline.to_dict(), winner.to_dict())
    assert made is not None, "baseline and winner ran"
    return made


def num_trials(num_changes: int, repeats: int) -> int:
    """Trials of a waterfall, if all its configs run."""
    if num_changes < 3:  # the first on top of others is one by itself, the last the winner
        return repeats * (num_changes + 2 if num_changes > 1 else 2)
    return repeats * (num_changes + 2 + num_changes + 1)


@dataclass
class _Walk:
    found: ChangePath
    measurer: Measurer
    repeats: int
    _rows: list[dict[str, Any]] = field(default_factory=list)
    _failed: set[Knobs] = field(default_factory=set)

    def go(self) -> None:
        changes = self.found.changes
        singles = [(change,) for change in changes] if len(changes) > 1 else []
        # Rounds of both kinds have numbers of their own, so that more of them can be added later.
        self._rounds([(), changes, *singles], parity=0)
        if len(changes) > 2:
            order = by_gain(self._rows, changes)
            self._rounds([tuple(order[:number]) for number in range(len(order) + 1)], parity=1)

    def _rounds(self, configs: Sequence[tuple[str, ...]], parity: int) -> None:
        by_knobs: dict[Knobs, tuple[str, ...]] = {}
        for config in configs:
            by_knobs.setdefault(self.found.config(config), config)
        self.measurer.beside = lambda knobs: {"changes": list(by_knobs[knobs])}
        for number in range(self.repeats):
            # Forth and back, so that what drifts steadily favours none.
            for knobs in list(by_knobs)[:: 1 if number % 2 == 0 else -1]:
                if knobs not in self._failed:
                    self._measure(knobs, 2 * number + parity)

    def _measure(self, knobs: Knobs, number: int) -> None:
        attempt = self.measurer.measure(knobs, WATERFALL, number)
        self._rows.append(attempt.row)
        self.measurer.listener.trial_ended(attempt, None)
        if attempt.outcome is Outcome.OK:
            return
        if knobs in (self.found.baseline, self.found.winner):
            which = "baseline" if knobs == self.found.baseline else "winner"
            raise InfrastructureError(
                f"the {which} itself ended in {attempt.outcome} when it was run again: {attempt.reason}",
                f"its output is in {self.measurer.out / attempt.row['log_path']}; is the machine as it was?",
            )
        self._failed.add(knobs)
