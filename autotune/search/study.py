"""The search: asks Optuna for the next config worth a trial, and tells it what came of it.

The study lives in memory; the history is the truth. Out of memory is a constraint that is violated, not a bad value
and not a failure: the sampler learns where the edge is, and nothing is invented.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.trial import TrialState

from autotune.logs import send_to_file
from autotune.preflight.guarded import Guarded
from autotune.preflight.prediction import Prediction, Predictor
from autotune.search.correct import Fit, Zone, step_time
from autotune.search.feasible import dominating_oom
from autotune.search.observed import (
    ALLOCATOR_FULL,
    ANSWERED,
    CONSTRAINT,
    DATA_WAIT,
    FOR_GOOD,
    FOR_NOW,
    OUTCOME,
    PRIOR,
    RESERVED,
    Observed,
    observe,
)
from autotune.search.pool import Pool
from autotune.search.residual.acquisition import SAFE
from autotune.search.residual.kernel import Tables
from autotune.search.samplers import FITS_COMPLETE_ONLY, FLAT, KNOWS_WHAT_FITS, WITHOUT_STATE, make_sampler
from autotune.search.seeds import NUM_SEEDS, seeds
from autotune.space import SearchSpace
from trials.outcome import INFRASTRUCTURE, OUT_OF_MEMORY, Outcome
from trials.record import Knobs

MAX_FREE_ASKS = 15
"""Answers in a row that need no trial, before a config is drawn from those that do."""
MAX_FREE_ASKS_OF = {"gp": 2}
"""Of samplers that take a second for each, and ask again for what they were answered."""


@dataclass(frozen=True)
class Told:
    """What is known of a config."""

    outcome: Outcome
    tokens_per_s_per_rank: float | None
    memory_over_limit: float
    """Used memory / (1 - headroom) / limit, minus 1; positive if it does not fit."""
    data_wait_share: float | None = None
    """Of the timed steps, spent waiting for batches on the rank that waited longest."""
    reserved_share: float | None = None
    """On CUDA, of the limit: what the allocator took."""
    allocator_was_full: bool = False
    """It had to empty its cache and try again: more was wanted than there is, how much more is not known."""


class Search:
    """Ask and tell over a resolved space.

    Args:
        log: Optuna's own messages go there.
        predictor: what configs will take; None: the search learns from its trials alone.
        limit_gib: memory per rank; None: not known, everything is taken to fit.
        headroom: share of it that a config must leave free.
        num_parallel: trials that run at once.
        num_begun: trials that an earlier life of the study began, to be taken up: a sampler that draws on from its
            seed gets another, else it would draw again what it drew at first.
        say: told, once, if predictions fail.
    """

    def __init__(
        self,
        space: SearchSpace,
        sampler: str,
        seed: int,
        log: Path,
        *,
        predictor: Predictor | None = None,
        limit_gib: float | None = None,
        headroom: float = 0.0,
        num_parallel: int = 1,
        num_begun: int = 0,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        send_to_file("optuna", log)
        self.space = space
        self._predictor = Guarded(predictor, say) if predictor is not None else None
        self._pool = Pool(space, self._predictor, limit_gib, headroom, seed)
        self._sampler, self._seed = sampler, seed
        own_seed = seed if sampler in WITHOUT_STATE else seed + num_begun
        self._study = optuna.create_study(direction="maximize", sampler=make_sampler(sampler, own_seed, self._pool))
        self._known: dict[Knobs, Told] = {}
        self._out_of_memory: list[Knobs] = []
        """On the device: a host's memory goes to loader workers, which dominance does not compare."""
        self._closed: set[int] = set()
        """Of the pool, some of what needs no trial: so that it is looked at once."""
        self._asked: dict[Knobs, optuna.Trial] = {}
        self._num_parallel = num_parallel
        self._proposed: list[Knobs] = []
        self._rejected: dict[Knobs, None] = {}
        self._reported: set[Knobs] = set()

    @property
    def known(self) -> dict[Knobs, Told]:
        return dict(self._known)

    def prediction(self, knobs: Knobs) -> Prediction | None:
        """What was predicted of a config before anything was learned."""
        return self._predictor.predict(knobs) if self._predictor is not None else None

    def predicted_columns(self, knobs: Knobs) -> dict[str, float]:
        """The same, as the history has it; memory on the scale that the limit judges."""
        found = self.prediction(knobs)
        if found is None:
            return {}
        return {"predicted_gib": self._pool.judged_gib(found), "predicted_step_time_s": found.step_s}

    def take_rejected(self) -> list[Knobs]:
        """Configs that were proposed since the last call, and were not tried since they surely do not fit."""
        new = [knobs for knobs in self._rejected if knobs not in self._reported]
        self._reported.update(new)
        return new

    def count_zones(self) -> dict[Zone, int]:
        """Configs that are looked at, by how surely they fit as it is believed now; roughly."""
        fit = self._fit()
        safe, possible = fit.roughly() >= SAFE, fit.may_fit()
        num_safe, num_possible = int(safe.sum()), int((safe | possible).sum())
        return {
            Zone.SAFE: num_safe,
            Zone.RISKY: num_possible - num_safe,
            Zone.SURE_OOM: len(self._pool) - num_possible,
        }

    def ask(self) -> Knobs | None:
        """A config that is worth a trial; None once there is none left."""
        for knobs in self._planned:
            if self._is_open(knobs):
                return self._enqueue(knobs)
        fit = self._fit()
        for _ in range(MAX_FREE_ASKS_OF.get(self._sampler, MAX_FREE_ASKS)):
            trial = self._study.ask()
            if self._sampler in WITHOUT_STATE and not trial.relative_params:
                self._study.tell(trial, state=TrialState.FAIL)  # it has nothing left to propose
                break
            knobs = self._suggest(trial)
            answer, for_how_long = self._answer_without_trial(knobs), FOR_GOOD
            if answer is None:
                answer, for_how_long = self._answer_by_prediction(knobs, fit)
            if answer is None and knobs not in self._asked:
                self._asked[knobs] = trial
                return knobs
            if answer is None:
                self._study.tell(trial, state=TrialState.FAIL)  # being measured right now
            else:
                trial.set_user_attr(ANSWERED, for_how_long)
                self._tell(trial, answer)
        return self._draw_untried(fit)

    def take_up(self, knobs: Knobs) -> None:
        """Takes a config that an earlier life of the study asked for as asked for; tell what came of it.

        In the order of that life, after what it knew before it asked (`prior`, `propose`, the baseline's `tell`): then
        a sampler without a state goes on as if there had been no interruption.
        """
        _ = self._planned  # by what was known before the first trial
        self._enqueue(knobs)

    def take_up_rejected(self, knobs: Knobs) -> None:
        """Leaves out a config that an earlier life of the study left out, since it surely did not fit."""
        self._rejected[knobs] = None
        self._reported.add(knobs)
        index = self._pool.add([knobs])
        self._add(knobs, self._predicted_oom(int(index[0]), self._fit()), {ANSWERED: FOR_GOOD})

    def _suggest(self, trial: optuna.trial.BaseTrial) -> Knobs:
        return self.space.suggest_flat(trial) if self._sampler in FLAT else self.space.suggest(trial)

    def _params(self, knobs: Knobs) -> dict[str, Any]:
        return self.space.flat_params(knobs) if self._sampler in FLAT else self.space.params(knobs)

    def _enqueue(self, knobs: Knobs) -> Knobs:
        self._study.enqueue_trial(self._params(knobs))
        trial = self._study.ask()
        drawn = self._suggest(trial)
        assert drawn == knobs
        self._asked[knobs] = trial
        return knobs

    @functools.cached_property
    def _planned(self) -> Iterator[Knobs]:
        """What comes before the sampler's own proposals."""
        observed = self._observed()
        fit, speed = Fit(self._pool, self._tables, observed), step_time(self._pool, self._tables, observed)
        first = seeds(self._pool, fit, speed, self._is_open, max(NUM_SEEDS, self._num_parallel))
        return iter([*self._proposed, *first])

    @functools.cached_property
    def _tables(self) -> Tables:
        return Tables(self.space)

    def _observed(self) -> Observed:
        return observe(self._study.get_trials(deepcopy=False), self._pool)

    def _fit(self) -> Fit:
        return Fit(self._pool, self._tables, self._observed())

    def _is_open(self, knobs: Knobs) -> bool:
        return self._answer_without_trial(knobs) is None and knobs not in self._asked

    def _draw_untried(self, fit: Fit) -> Knobs | None:
        """At random from what may fit; what may well not, only after all the rest."""
        p_fit, possible = fit.roughly(), fit.may_fit()
        possible[list(self._closed)] = False
        rng = np.random.default_rng((self._seed, len(self._known) + len(self._asked)))
        order = rng.permutation(np.flatnonzero(possible))
        for index in order[np.argsort(p_fit[order] < SAFE, kind="stable")]:
            knobs = self._pool.configs[index]
            if self._is_open(knobs):
                return self._enqueue(knobs)
            if knobs not in self._asked:
                self._closed.add(int(index))
        return None

    def _answer_without_trial(self, knobs: Knobs) -> Told | None:
        if knobs in self._known:
            return self._known[knobs]
        cause = dominating_oom(knobs, self._out_of_memory)
        return self._known[cause] if cause is not None else None

    def _answer_by_prediction(self, knobs: Knobs, fit: Fit) -> tuple[Told | None, str]:
        """An out-of-memory, of a config that surely does not fit, or for now of one that may well not."""
        index = int(self._pool.add([knobs])[0])
        zone = fit.zone(index)
        if zone is Zone.SURE_OOM:
            self._rejected[knobs] = None
            return self._predicted_oom(index, fit), FOR_GOOD
        if zone is Zone.SAFE or self._pool.always_allowed[index] or self._sampler in KNOWS_WHAT_FITS:
            return None, FOR_NOW
        return self._predicted_oom(index, fit), FOR_NOW

    def _predicted_oom(self, index: int, fit: Fit) -> Told:
        over = math.expm1(float(fit.log_fill(np.array([index]))[0]))
        return Told(Outcome.OOM_DEVICE, None, max(over, 1e-6))

    def tell(self, knobs: Knobs, told: Told) -> None:
        """Takes in what a trial found; of a config that was asked for, or of any other (the baseline)."""
        if told.outcome not in INFRASTRUCTURE:
            self._known[knobs] = told
        if told.outcome is Outcome.OOM_DEVICE:
            self._out_of_memory.append(knobs)
        trial = self._asked.pop(knobs, None)
        if trial is not None:
            self._tell(trial, told)
        elif self.space.contains(knobs):
            self._add(knobs, told)

    def prior(self, knobs: Knobs, told: Told) -> None:
        """Takes in what an earlier run found of a config of this space: the sampler learns it, and it stays untried."""
        self._add(knobs, told, {PRIOR: True})

    def propose(self, configs: Sequence[Knobs], at_most: int) -> None:
        """Has some configs of this space asked for before all others; call it before the first `ask`.

        Of `configs`, in their order, those that are believed to fit: they may come from where there was more memory.
        """
        fit = self._fit()
        indices = self._pool.add(configs)
        believed = [
            knobs
            for knobs, index in zip(configs, indices, strict=True)
            if self._pool.always_allowed[index] or fit.zone(int(index)) is Zone.SAFE
        ]
        self._proposed = believed[:at_most]

    def _tell(self, trial: optuna.Trial, told: Told) -> None:
        state, value = self._state_and_value(told)
        for name, attribute in _attributes(told).items():
            trial.set_user_attr(name, attribute)
        if state is not TrialState.FAIL:
            trial.set_constraint(CONSTRAINT, told.memory_over_limit)
        if state is TrialState.COMPLETE:
            self._study.tell(trial, value)
        else:
            self._study.tell(trial, state=state)

    def _add(self, knobs: Knobs, told: Told, user_attrs: dict[str, Any] | None = None) -> None:
        state, value = self._state_and_value(told)
        constraints = {} if state is TrialState.FAIL else {CONSTRAINT: told.memory_over_limit}
        params = self._params(knobs)
        self._study.add_trial(
            optuna.trial.create_trial(
                state=state,
                value=value,
                params=params,
                distributions={name: self.space.all_distributions[name] for name in params},
                constraints=constraints,
                user_attrs=_attributes(told) | (user_attrs or {}),
            )
        )

    def _state_and_value(self, told: Told) -> tuple[TrialState, float | None]:
        """Optuna's view of an outcome: FAIL teaches samplers nothing, PRUNED only its constraint."""
        if told.outcome is Outcome.OK:
            assert told.tokens_per_s_per_rank is not None
            assert math.isfinite(told.memory_over_limit)
            return TrialState.COMPLETE, told.tokens_per_s_per_rank
        if told.outcome not in OUT_OF_MEMORY:
            return TrialState.FAIL, None
        fitting = [
            known.tokens_per_s_per_rank
            for known in self._known.values()
            if known.tokens_per_s_per_rank is not None and known.memory_over_limit <= 0
        ]
        if self._sampler in FITS_COMPLETE_ONLY and fitting:
            return TrialState.COMPLETE, min(fitting)
        return TrialState.PRUNED, None


def _attributes(told: Told) -> dict[str, Any]:
    """For the samplers, and for whoever looks at the study by other means."""
    attributes = {
        OUTCOME: told.outcome.value,
        DATA_WAIT: told.data_wait_share,
        RESERVED: told.reserved_share,
        ALLOCATOR_FULL: told.allocator_was_full or None,
    }
    return {name: attribute for name, attribute in attributes.items() if attribute is not None}
