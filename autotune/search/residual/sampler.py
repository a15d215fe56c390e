"""The `residual` sampler: expected improvement x probability of fitting over the valid configs of the space."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from autotune.search.correct import Corrected, Fit, step_time
from autotune.search.feasible import dominating_oom
from autotune.search.observed import Observed, observe
from autotune.search.pool import Floats, Indices, Mask, Pool
from autotune.search.residual.acquisition import SAFE, optimistic, worth
from autotune.search.residual.kernel import Tables

NUM_BEST, NUM_RANDOM, NUM_NEAR = 500, 250, 350
"""Candidates that are scored: the fastest as believed, any, and those near the best measured."""
NEAR = 2
"""Knobs in which those may differ."""
EXPLORE_FROM, EXPLORE_EVERY = 6, 4
"""Every fourth proposal from the sixth on goes where little is known."""
MAX_CLIMB = 8
"""Steps from the best candidate to a better neighbour."""
WORKERS = "num_workers"
NO_WAIT, SOME_WAIT = 0.004, 0.01
"""Shares of a step spent waiting for data: below the first a loader keeps up, above the second it does not."""

Score = Callable[[Indices], Floats]


class ResidualSampler(BaseSampler):
    """Learns log(measured / predicted) of step time and memory from the study's trials, each time anew.

    It keeps no state, so that a study that is told of its trials again goes on as if it had not been interrupted.
    Nothing is proposed twice, and nothing that takes no less memory than a config that ran out of it.

    Args:
        pool: the configs to choose from, with their predictions.
        seed: of the candidates that are drawn; with the number of configs tried it decides everything that is random.
    """

    def __init__(self, pool: Pool, seed: int) -> None:
        self._pool = pool
        self._seed = seed
        self._tables = Tables(pool.space)
        self._fallback = optuna.samplers.RandomSampler(seed=seed)

    def reseed_rng(self) -> None:
        self._fallback.reseed_rng()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        # What was enqueued is drawn already.
        return {} if "fixed_params" in trial.system_attrs else dict(self._pool.space.all_distributions)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The knobs of the chosen config that have an effect; none once nothing is left."""
        if not search_space:
            return {}
        trials = [other for other in study.get_trials(deepcopy=False) if other.number != trial.number]
        observed = observe(trials, self._pool)
        chosen = self.choose(observed, np.random.default_rng((self._seed, observed.num_tried)))
        return {} if chosen is None else self._pool.space.params(self._pool.configs[chosen])

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._fallback.sample_independent(study, trial, param_name, param_distribution)

    def choose(self, observed: Observed, rng: np.random.Generator) -> int | None:
        """Index of the config to try next; None if none is left that may fit."""
        choice = _Choice(self._pool, self._tables, observed)
        candidates = choice.candidates(rng)
        if not len(candidates):
            return None
        number = observed.num_tried + 1
        explores = number >= EXPLORE_FROM and (number - EXPLORE_FROM) % EXPLORE_EVERY == 0
        return choice.best_of(candidates, choice.optimism if explores else choice.worth)


class _Choice:
    """One proposal: what is believed now, and the candidates ranked by it."""

    def __init__(self, pool: Pool, tables: Tables, observed: Observed) -> None:
        self._pool = pool
        self._observed = observed
        self._fit = Fit(pool, tables, observed)
        self._step_time: Corrected = step_time(pool, tables, observed)
        self._out_of_memory = [pool.configs[index] for index in observed.out_of_memory]
        self._enough_workers = _enough_workers(pool, observed)
        fitting = np.array([i for i, fits in zip(observed.ran, observed.fits, strict=True) if fits], dtype=np.intp)
        self._speeds = -self._step_time.mean(fitting)
        self._incumbent = int(fitting[np.argmax(self._speeds)]) if len(fitting) else None

    def candidates(self, rng: np.random.Generator) -> Indices:
        """Configs worth a closer look; without those that are settled, or surely do not fit."""
        if self._incumbent is not None:
            self._pool.neighbours(self._incumbent)  # which join a pool that holds a part of the space
        p_fit = self._fit.roughly()
        open_ones = np.flatnonzero(self._is_open(np.arange(len(self._pool))) & self._fit.may_fit())
        # Of those that fit, the fastest as believed; the others after them.
        order = self._step_time.mean()[open_ones] + np.where(p_fit[open_ones] < SAFE, 1e3, 0.0)
        chosen = [_smallest(open_ones, order, NUM_BEST)]
        chosen.append(rng.choice(open_ones, size=min(NUM_RANDOM, len(open_ones)), replace=False))
        if self._incumbent is not None:
            near = open_ones[self._num_different(self._incumbent)[open_ones] <= NEAR]
            chosen.append(rng.choice(near, size=min(NUM_NEAR, len(near)), replace=False))
        return np.unique(np.concatenate(chosen))

    def _is_open(self, indices: Indices) -> Mask:
        """Which of the configs may be proposed, memory aside."""
        settled = np.isin(indices, np.fromiter(self._observed.settled, dtype=np.intp))
        open_ = ~settled
        if self._enough_workers is not None:
            row = self._pool.space.searched.index(WORKERS)
            open_ &= self._pool.levels[row, indices] <= self._enough_workers
        return open_

    def _num_different(self, index: int) -> Indices:
        """Knobs in which each config of the pool differs from one; of those that have an effect in both."""
        number = np.zeros(len(self._pool), dtype=np.intp)
        for name, levels in zip(self._pool.space.searched, self._pool.levels, strict=True):
            without_effect = len(self._pool.space.candidates[name])
            if levels[index] != without_effect:
                number += (levels != levels[index]) & (levels != without_effect)
        return number

    def worth(self, indices: Indices) -> Floats:
        """Expected improvement over the best measured, as believed without its noise, x P(fit)."""
        mean, sd = -self._step_time.mean(indices), self._step_time.sd(indices)
        best = float(self._speeds.max()) if len(self._speeds) else float(np.max(mean))
        return worth(mean, sd, best, self._fit.probability(indices))

    def optimism(self, indices: Indices) -> Floats:
        return optimistic(-self._step_time.mean(indices), self._step_time.sd(indices), self._fit.probability(indices))

    def best_of(self, candidates: Indices, score: Score) -> int | None:
        """The best candidate that is not dominated, or the top of the hill that it stands on."""
        scores = score(candidates)
        for place in np.argsort(-scores, kind="stable"):
            index = int(candidates[place])
            if not self._is_dominated(index):
                return self._climb(index, float(scores[place]), score)
        return None

    def _is_dominated(self, index: int) -> bool:
        return dominating_oom(self._pool.configs[index], self._out_of_memory) is not None

    def _climb(self, index: int, height: float, score: Score) -> int:
        for _ in range(MAX_CLIMB):
            around = self._pool.neighbours(index)
            around = around[self._is_open(around)]
            around = np.array([other for other in around if not self._is_dominated(int(other))], dtype=np.intp)
            if not len(around):
                return index
            scores = score(around)
            if scores.max() <= height:
                return index
            index, height = int(around[np.argmax(scores)]), float(scores.max())
        return index


def _enough_workers(pool: Pool, observed: Observed) -> int | None:
    """The level of the fewest workers of which a trial has shown that nothing waits for data; None if none has.

    More are not searched; fewer are, which leave CPUs to the ranks. A trial that waits with them after all opens all
    numbers of workers again, until one that keeps up is seen among them.
    """
    if WORKERS not in pool.space.searched:
        return None
    levels = pool.levels[pool.space.searched.index(WORKERS)]
    shares = [(int(levels[i]), share) for i, share in zip(observed.ran, observed.data_wait, strict=True)]
    waited = {level for level, share in shares if share is not None and share > SOME_WAIT}
    return min({level for level, share in shares if share is not None and share < NO_WAIT} - waited, default=None)


def _smallest(indices: Indices, order: Floats, number: int) -> Indices:
    if len(indices) <= number:
        return indices
    return indices[np.argpartition(order, number)[:number]]
