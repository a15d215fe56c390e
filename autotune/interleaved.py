"""Throughputs of several configs that ran in turn, round by round: what each reaches, and what lies between them.

The model is that of randomised blocks: log throughput = config + round + noise, by least squares, where a run may be
missing. What drifts from round to round cancels, as in paired runs (`autotune.verdict`); and the noise is
estimated from all runs at once, so that few rounds of many configs suffice. It is taken to be equal, relative, for all
configs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from autotune.verdict import t_quantile

Config = TypeVar("Config", bound=Hashable)


@dataclass(frozen=True)
class Figure:
    """An amount with its 95 % interval; the interval is None where there were too few runs for one."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def is_measurable(self) -> bool:
        """As a difference: whether the whole interval lies on one side of zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    def times(self, factor: float) -> Figure:
        """In another unit; `factor` is not negative."""
        return Figure(
            self.value * factor,
            None if self.low is None else self.low * factor,
            None if self.high is None else self.high * factor,
        )


class Interleaved(Generic[Config]):
    """The runs of some configs.

    Args:
        runs: config, number of the round, throughput. Only rounds that have a run of the config that ran most often
            count: by it, all others compare.

    Raises:
        ValueError: no runs, or a throughput that is not positive.
    """

    def __init__(self, runs: Iterable[tuple[Config, int, float]]) -> None:
        known = list(runs)
        if not known or min(rate for _, _, rate in known) <= 0:
            raise ValueError("throughputs must be there, and positive")
        anchor = Counter(config for config, _, _ in known).most_common(1)[0][0]
        rounds = {number: index for index, number in enumerate(sorted({r for c, r, _ in known if c == anchor}))}
        used = [(config, rounds[number], rate) for config, number, rate in known if number in rounds]
        self.num_rounds = len(rounds)
        self.num_runs = Counter(config for config, _, _ in used)
        """By config."""
        self._index = {config: index for index, config in enumerate(self.num_runs)}
        design = np.zeros((len(used), len(self._index) + len(rounds) - 1))
        for row, (config, number, _) in enumerate(used):
            design[row, self._index[config]] = 1.0
            if number:
                design[row, len(self._index) + number - 1] = 1.0
            else:  # the effects of rounds sum to nothing
                design[row, len(self._index) :] = -1.0
        logs = np.log([rate for _, _, rate in used])
        effects = np.linalg.lstsq(design, logs, rcond=None)[0]
        freedom = len(used) - design.shape[1]
        num_configs = len(self._index)
        self._logs = effects[:num_configs]
        self._covariance = None
        if freedom > 0:
            variance = float(np.sum((logs - design @ effects) ** 2)) / freedom
            self._covariance = variance * np.linalg.inv(design.T @ design)[:num_configs, :num_configs]
            self._quantile = t_quantile(freedom)

    def __contains__(self, config: Config) -> bool:
        return config in self._index

    def level(self, config: Config) -> Figure:
        """Throughput of a config: the geometric mean over the rounds; its interval leaves the rounds' drift out."""
        return self._exponential({config: 1.0})

    def ratio(self, config: Config, other: Config) -> Figure:
        """Throughput of the first over that of the second."""
        return self._exponential({config: 1.0, other: -1.0} if config != other else {})

    def sum(self, weights: Mapping[Config, float]) -> Figure:
        """Sum of weight x throughput, e.g. the difference of two; the interval by linearisation."""
        levels = np.exp(self._logs)
        gradient = np.zeros(len(levels))
        for config, weight in weights.items():
            gradient[self._index[config]] += weight * levels[self._index[config]]
        value = float(gradient.sum())
        half = self._half(gradient)
        return Figure(value) if half is None else Figure(value, value - half, value + half)

    def _exponential(self, weights: Mapping[Config, float]) -> Figure:
        """Of a sum of weight x log throughput."""
        gradient = np.zeros(len(self._logs))
        for config, weight in weights.items():
            gradient[self._index[config]] += weight
        value = float(gradient @ self._logs)
        half = self._half(gradient)
        if half is None:
            return Figure(math.exp(value))
        return Figure(math.exp(value), math.exp(value - half), math.exp(value + half))

    def _half(self, gradient: Any) -> float | None:
        if self._covariance is None:
            return None
        return float(self._quantile * math.sqrt(max(0.0, gradient @ self._covariance @ gradient)))
