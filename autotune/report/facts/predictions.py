"""What was predicted of the trials, against what they measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.report.facts.trials import Trial, comparable


@dataclass(frozen=True)
class Accuracy:
    """Of predicted / measured - 1."""

    num_trials: int
    median_error: float | None
    """With its sign: below 0, too little was predicted."""
    median_absolute_error: float | None
    worst_absolute_error: float | None


@dataclass(frozen=True)
class Predictions:
    """Each made before its trial, corrected by the trials before it."""

    memory: Accuracy
    step_time: Accuracy


def predictions(told: list[Trial]) -> Predictions:
    ran = comparable(told)
    return Predictions(
        memory=_accuracy([(one.predicted_memory_gib, one.memory_gib) for one in ran]),
        step_time=_accuracy([(one.predicted_step_time_s, one.step_time_s) for one in ran]),
    )


def _accuracy(pairs: Sequence[tuple[float | None, float | None]]) -> Accuracy:
    errors = [predicted / measured - 1 for predicted, measured in pairs if predicted is not None and measured]
    if not errors:
        return Accuracy(0, None, None, None)
    sizes = [abs(error) for error in errors]
    return Accuracy(len(errors), statistics.median(errors), statistics.median(sizes), max(sizes))
