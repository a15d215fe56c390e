"""The search: asks Optuna for the next config worth a trial, and tells it what came of it.

The study lives in memory; the history is the truth. Out of memory is a constraint that is violated, not a bad value
and not a failure: the sampler learns where the edge is, and nothing is invented.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna

from autotune.logs import send_to_file
from autotune.search.feasible import dominating_oom
from autotune.search.samplers import make_sampler
from autotune.space import SearchSpace
from trials.outcome import INFRASTRUCTURE, OUT_OF_MEMORY, Outcome
from trials.record import Knobs

CONSTRAINT = "memory_over_limit"
"""Greater than 0 where a config does not fit, in units of the limit."""
PRIOR = "prior"
"""User attribute of trials that an earlier run has made: their values are estimates."""
MAX_FREE_ASKS = 15
"""Answers in a row that need no trial, before a config is drawn from those that do."""


@dataclass(frozen=True)
class Told:
    """What is known of a config."""

    outcome: Outcome
    tokens_per_s_per_rank: float | None
    memory_over_limit: float
    """Used memory / (1 - headroom) / limit, minus 1; positive if it does not fit."""


class Search:
    """Ask and tell over a resolved space.

    Args:
        log: Optuna's own messages go there.
    """

    def __init__(self, space: SearchSpace, sampler: str, seed: int, log: Path) -> None:
        send_to_file("optuna", log)
        self.space = space
        self._study = optuna.create_study(direction="maximize", sampler=make_sampler(sampler, seed))
        self._random = random.Random(seed)
        self._known: dict[Knobs, Told] = {}
        self._asked: dict[Knobs, optuna.Trial] = {}

    @property
    def known(self) -> dict[Knobs, Told]:
        return dict(self._known)

    def ask(self) -> Knobs | None:
        """A config that is worth a trial; None once there is none left."""
        for _ in range(MAX_FREE_ASKS):
            trial = self._study.ask()
            knobs = self.space.suggest(trial)
            answer = self._answer_without_trial(knobs)
            if answer is None and knobs not in self._asked:
                self._asked[knobs] = trial
                return knobs
            if answer is None:
                self._study.tell(trial, state=optuna.trial.TrialState.FAIL)  # being measured right now
            else:
                self._tell(trial, answer)
        return self._draw_untried()

    def _draw_untried(self) -> Knobs | None:
        untried = [
            knobs
            for knobs in self.space.configs()
            if self._answer_without_trial(knobs) is None and knobs not in self._asked
        ]
        if not untried:
            return None
        knobs = self._random.choice(untried)
        self._study.enqueue_trial(self.space.params(knobs))
        trial = self._study.ask()
        drawn = self.space.suggest(trial)
        assert drawn == knobs
        self._asked[knobs] = trial
        return knobs

    def _answer_without_trial(self, knobs: Knobs) -> Told | None:
        if knobs in self._known:
            return self._known[knobs]
        # A host's memory goes to loader workers, which dominance does not compare.
        out_of_memory = [k for k, told in self._known.items() if told.outcome is Outcome.OOM_DEVICE]
        cause = dominating_oom(knobs, out_of_memory)
        return self._known[cause] if cause is not None else None

    def tell(self, knobs: Knobs, told: Told) -> None:
        """Takes in what a trial found; of a config that was asked for, or of any other (the baseline)."""
        if told.outcome not in INFRASTRUCTURE:
            self._known[knobs] = told
        trial = self._asked.pop(knobs, None)
        if trial is not None:
            self._tell(trial, told)
        elif self.space.contains(knobs):
            self._add(knobs, told)

    def prior(self, knobs: Knobs, told: Told) -> None:
        """Takes in what an earlier run found of a config of this space: the sampler learns it, and it stays untried."""
        self._add(knobs, told, {PRIOR: True})

    def propose(self, knobs: Knobs) -> None:
        """Has a config of this space asked for before the sampler draws its own."""
        self._study.enqueue_trial(self.space.params(knobs))

    def _tell(self, trial: optuna.Trial, told: Told) -> None:
        state, value = _state_and_value(told)
        if state is not optuna.trial.TrialState.FAIL:
            trial.set_constraint(CONSTRAINT, told.memory_over_limit)
        if state is optuna.trial.TrialState.COMPLETE:
            self._study.tell(trial, value)
        else:
            self._study.tell(trial, state=state)

    def _add(self, knobs: Knobs, told: Told, user_attrs: dict[str, Any] | None = None) -> None:
        state, value = _state_and_value(told)
        constraints = {} if state is optuna.trial.TrialState.FAIL else {CONSTRAINT: told.memory_over_limit}
        self._study.add_trial(
            optuna.trial.create_trial(
                state=state,
                value=value,
                params=self.space.params(knobs),
                distributions=self.space.distributions(knobs),
                constraints=constraints,
                user_attrs=user_attrs,
            )
        )


def _state_and_value(told: Told) -> tuple[optuna.trial.TrialState, float | None]:
    """Optuna's view of an outcome: FAIL teaches samplers nothing, PRUNED only its constraint."""
    if told.outcome is Outcome.OK:
        assert told.tokens_per_s_per_rank is not None
        assert math.isfinite(told.memory_over_limit)
        return optuna.trial.TrialState.COMPLETE, told.tokens_per_s_per_rank
    if told.outcome in OUT_OF_MEMORY:
        return optuna.trial.TrialState.PRUNED, None
    return optuna.trial.TrialState.FAIL, None
