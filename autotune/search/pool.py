"""The configs that a search chooses from, as arrays: levels of their knobs, and what is predicted of them."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import optuna

from autotune.preflight.prediction import COLLECTIVE_RATES, Prediction, Predictor
from autotune.space import SearchSpace
from trials.record import Knobs

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]

NUM_DRAWN = 20_000
"""Configs that are drawn of a space too large to be enumerated; neighbours of good ones join them as it goes on."""

AS_ASSUMED = COLLECTIVE_RATES.index(1.0)


class Pool:
    """All configs of a space, or a part of a large one, by index.

    Args:
        limit_gib: memory per rank; None: not known, everything is taken to fit.
        headroom: share of it that a config must leave free.
        seed: of what is drawn.
    """

    def __init__(
        self,
        space: SearchSpace,
        predictor: Predictor | None = None,
        limit_gib: float | None = None,
        headroom: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.space = space
        self.limit_gib, self.headroom = limit_gib, headroom
        self._predictor = predictor
        self.configs: list[Knobs] = []
        self._index: dict[Knobs, int] = {}
        self._of_trial: dict[int, int] = {}
        self.levels: Indices = np.empty((len(space.searched), 0), dtype=np.intp)
        """Of each knob that is searched (row) the index of each config's candidate; that many: it has no effect."""
        self.log_step_at_rates: Floats = np.empty((len(COLLECTIVE_RATES), 0))
        """Log of the predicted seconds of an optimizer step with collectives at each of COLLECTIVE_RATES; NaN where
        nothing is predicted."""
        self.log_fill: Floats = np.empty(0)
        """Log of predicted memory / usable memory; NaN where nothing is predicted, or no limit is known."""
        self.always_allowed: Mask = np.empty(0, dtype=np.bool_)
        """Micro-batch 1 with full checkpointing, and what has no prediction: never taken to be sure to fail."""
        if space.is_enumerable:
            self.add(space.configs())
        else:
            rng = random.Random(seed)
            self.add(space.draw(rng) for _ in range(NUM_DRAWN))

    def for_another_study(self) -> Pool:
        """The same configs and predictions, for trials of another study."""
        other = copy.copy(self)
        other.configs, other._index, other._of_trial = list(self.configs), dict(self._index), {}
        return other

    def __len__(self) -> int:
        return len(self.configs)

    def __contains__(self, knobs: Knobs) -> bool:
        return knobs in self._index

    def add(self, configs: Iterable[Knobs]) -> Indices:
        """Indices of configs of the space; those that are new to the pool join it.

        Raises:
            ValueError: no candidates make a config.
        """
        wanted = list(configs)
        new = [knobs for knobs in dict.fromkeys(wanted) if knobs not in self._index]
        if new:
            levels = np.array([self._levels_of(knobs) for knobs in new], dtype=np.intp).reshape(len(new), -1)
            predictions = [self._predictor.predict(knobs) if self._predictor else None for knobs in new]
            self._index |= {knobs: len(self.configs) + place for place, knobs in enumerate(new)}
            self.configs += new
            self.levels = np.concatenate([self.levels, levels.T], axis=1)
            log_steps = np.array([_log_steps(prediction) for prediction in predictions])
            self.log_step_at_rates = np.concatenate([self.log_step_at_rates, log_steps.T], axis=1)
            self.log_fill = np.append(self.log_fill, [self._log_fill_of(p) for p in predictions])
            frugal = [k.micro_batch_size == 1 and k.activation_checkpointing == "full" for k in new]
            self.always_allowed = np.append(
                self.always_allowed, np.array(frugal) | np.isnan(self.log_fill[-len(new) :])
            )
        return np.array([self._index[knobs] for knobs in wanted], dtype=np.intp)

    @property
    def log_step(self) -> Floats:
        """The same with collectives at the assumed rate."""
        as_assumed: Floats = self.log_step_at_rates[AS_ASSUMED]
        return as_assumed

    def _levels_of(self, knobs: Knobs) -> list[int]:
        indices = self.space.indices(knobs)
        return [indices.get(name, len(self.space.candidates[name])) for name in self.space.searched]

    def _log_fill_of(self, prediction: Prediction | None) -> float:
        if prediction is None or self.limit_gib is None:
            return math.nan
        fill = self.judged_gib(prediction) / (1 - self.headroom) / self.limit_gib
        # On CUDA it is live bytes that are judged, but an allocator that takes all there is has to begin anew.
        return math.log(max(fill, prediction.reserved_gib / self.limit_gib))

    def judged_gib(self, prediction: Prediction) -> float:
        """On the scale that decides whether a config fits: CUDA's live bytes; on a CPU what the limit sees."""
        return prediction.reserved_gib if self.space.facts.device == "cpu" else prediction.allocated_gib

    def neighbours(self, index: int) -> Indices:
        """The configs one knob away."""
        return self.add(self.space.neighbours(self.configs[index]))

    def index_of_trial(self, trial: optuna.trial.FrozenTrial) -> int:
        """Of the config that an Optuna trial drew."""
        if trial.number not in self._of_trial:
            knobs = self.space.suggest(optuna.trial.FixedTrial(trial.params))
            self._of_trial[trial.number] = int(self.add([knobs])[0])
        return self._of_trial[trial.number]


def _log_steps(prediction: Prediction | None) -> list[float]:
    if prediction is None:
        return [math.nan] * len(COLLECTIVE_RATES)
    return [math.log(each_s) for each_s in prediction.step_s_at_rates or [prediction.step_s] * len(COLLECTIVE_RATES)]
