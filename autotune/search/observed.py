"""What a study's trials have found so far, by index into the pool: read from Optuna's trials anew each time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import optuna

from autotune.search.pool import Floats, Indices, Pool
from trials.outcome import INFRASTRUCTURE, OUT_OF_MEMORY, Outcome

CONSTRAINT = "memory_over_limit"
"""Greater than 0 where a config does not fit, in units of the usable memory."""
OUTCOME, DATA_WAIT, ANSWERED = "outcome", "data_wait_share", "answered_without_trial"
RESERVED, ALLOCATOR_FULL = "reserved_share", "allocator_was_full"
"""User attributes of Optuna's trials."""
FOR_NOW, FOR_GOOD = "for now", "for good"
"""Values of ANSWERED. What may well not fit is left out for now: what is learned later may show that it does."""
PRIOR = "prior"
"""Another: an earlier run's trial. Its figures are estimates, and its config is still to be measured here."""


@dataclass
class Observed:
    """What is known of configs, each figure with the configs that it is known of."""

    ran: list[int] = field(default_factory=list)
    log_step: list[float] = field(default_factory=list)
    """Log of 1 / throughput of each that ran: of its step time but for a constant."""
    fits: list[bool] = field(default_factory=list)
    """Whether each that ran left as much memory free as it must."""
    data_wait: list[float | None] = field(default_factory=list)
    """Share of its step that each that ran waited for data."""
    measured: list[int] = field(default_factory=list)
    log_fill: list[float] = field(default_factory=list)
    """Log of used / usable memory of each whose memory was measured."""
    too_large: list[int] = field(default_factory=list)
    log_fill_above: list[float] = field(default_factory=list)
    """What each that found no memory, or not at once, would at least have taken."""
    out_of_memory: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    tried: set[int] = field(default_factory=set)
    """In this study, be it that they failed or are running."""
    settled: set[int] = field(default_factory=set)
    """Not to be proposed: tried, or answered for good without a trial."""

    @property
    def num_tried(self) -> int:
        """The same after a resume, when Optuna's own numbers are others."""
        return len(self.tried)


def observe(trials: Iterable[optuna.trial.FrozenTrial], pool: Pool) -> Observed:
    """Takes in finished and running trials; those that have no params yet say nothing."""
    found = Observed()
    for trial in trials:
        if set(trial.params) == set() and pool.space.searched:
            continue
        index = pool.index_of_trial(trial)
        outcome = trial.user_attrs.get(OUTCOME)
        if outcome is not None and Outcome(outcome) in INFRASTRUCTURE:
            continue
        answered = trial.user_attrs.get(ANSWERED)
        if answered:
            if answered != FOR_NOW:
                found.settled.add(index)
            continue
        if not trial.user_attrs.get(PRIOR):
            found.settled.add(index)
            found.tried.add(index)
        if not trial.state.is_finished():
            found.running.append(index)
        over = trial.constraints.get(CONSTRAINT)
        if outcome is not None and over is not None:
            _take_in(found, index, Outcome(outcome), over, trial)
    return found


def _take_in(found: Observed, index: int, outcome: Outcome, over: float, trial: optuna.trial.FrozenTrial) -> None:
    if outcome in OUT_OF_MEMORY:
        # A host's memory is another one.
        if outcome is Outcome.OOM_DEVICE:
            found.out_of_memory.append(index)
            found.too_large.append(index)
            found.log_fill_above.append(math.log1p(over))
    elif trial.user_attrs.get(ALLOCATOR_FULL):
        # Its time is that of an allocator that begins anew, and says nothing about the settings.
        found.too_large.append(index)
        found.log_fill_above.append(0.0)
    elif outcome is Outcome.OK and trial.value is not None:
        found.ran.append(index)
        found.log_step.append(-math.log(trial.value))
        found.fits.append(over <= 0)
        found.data_wait.append(trial.user_attrs.get(DATA_WAIT))
        if over > -1:
            found.measured.append(index)
            found.log_fill.append(math.log(max(1 + over, trial.user_attrs.get(RESERVED, 0.0))))


def most_telling(indices: list[int], values: list[float], at_most: int) -> tuple[Indices, Floats]:
    """All points, or of more than `at_most` the lowest half and the latest half."""
    places = list(range(len(indices)))
    if len(places) > at_most:
        lowest = sorted(places, key=lambda place: values[place])[: at_most // 2]
        latest = [place for place in reversed(places) if place not in set(lowest)]
        places = sorted([*lowest, *latest[: at_most - len(lowest)]])
    return (
        np.array([indices[place] for place in places], dtype=np.intp),
        np.array([values[place] for place in places], dtype=np.float64),
    )
