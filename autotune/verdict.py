"""Whether the best config really beats the baseline: paired, interleaved repeats, on log ratios.

The unit of replication is the run, not the step: steps inside a run are correlated, and whole runs of one config
differ by more than their steps do. Each round runs both configs one right after the other, so that what drifts
between rounds cancels in the ratio.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
MIN_ROUNDS = 3
"""Pairs that a verdict needs at least."""


@dataclass(frozen=True)
class Verdict:
    ratio: float
    """Throughput of the candidate over the baseline's: exp of the mean log ratio."""
    low: float
    high: float
    """95 % interval of the ratio (Student's t over rounds)."""
    num_rounds: int

    @property
    def is_win(self) -> bool:
        """Whether the whole interval lies above no gain."""
        return self.low > 1.0

    def sentence(self) -> str:
        gain, low, high = (f"{100 * (value - 1):+.1f} %" for value in (self.ratio, self.low, self.high))
        interval = f"95 % interval {low} to {high}, {self.num_rounds} paired rounds"
        if self.is_win:
            return f"{gain} tokens/s over the baseline ({interval})"
        return f"no win beyond noise: keep your baseline ({gain}; {interval})"


def compare(candidate: Sequence[float], baseline: Sequence[float]) -> Verdict:
    """The verdict from paired throughputs, round by round.

    Raises:
        ValueError: fewer than two rounds, sequences of unequal length, or a throughput that is not positive.
    """
    if len(candidate) != len(baseline):
        raise ValueError(f"{len(candidate)} runs of the candidate against {len(baseline)} of the baseline")
    if len(candidate) < 2:
        raise ValueError("an interval needs at least two rounds")
    if min(*candidate, *baseline) <= 0:
        raise ValueError("throughputs must be positive")
    logs = [math.log(a / b) for a, b in zip(candidate, baseline, strict=True)]
    half = t_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    mean = statistics.fmean(logs)
    return Verdict(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


@dataclass(frozen=True)
class UnpairedRatio:
    """Of the throughputs of two configs whose runs are no pairs."""

    ratio: float
    low: float
    high: float
    """95 % interval."""


def welch(ours: Sequence[float], theirs: Sequence[float]) -> UnpairedRatio:
    """The ratio of two throughputs from runs that are no pairs; Welch's interval on logs, of unequal variances.

    Degrees of freedom by Welch and Satterthwaite (B. L. Welch, Biometrika 34, 1947).

    Raises:
        ValueError: fewer than two runs of one, or a throughput that is not positive.
    """
    if min(len(ours), len(theirs)) < 2:
        raise ValueError("an interval needs at least two runs of each")
    if min(*ours, *theirs) <= 0:
        raise ValueError("throughputs must be positive")
    logs = [[math.log(rate) for rate in rates] for rates in (ours, theirs)]
    mean = statistics.fmean(logs[0]) - statistics.fmean(logs[1])
    errors = [statistics.variance(log) / len(log) for log in logs]
    total = sum(errors)
    half = 0.0
    if total > 0:
        freedom = total**2 / sum(error**2 / (len(log) - 1) for error, log in zip(errors, logs, strict=True))
        half = t_quantile(freedom) * math.sqrt(total)
    return UnpairedRatio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


@dataclass(frozen=True)
class Spread:
    """Throughputs of several runs of one config, in their own unit."""

    mean: float
    """Geometric."""
    low: float | None
    high: float | None
    """95 % prediction interval: where one more run is expected to lie. None of a single run."""
    num_runs: int


def spread(rates: Sequence[float]) -> Spread:
    """What one more run of the config is expected to reach, by the throughputs of earlier ones.

    On logs: mean +- t x s x sqrt(1 + 1/n), Student's interval for a further observation.

    Raises:
        ValueError: no throughput, or one that is not positive.
    """
    if not rates or min(rates) <= 0:
        raise ValueError("throughputs must be there, and positive")
    logs = [math.log(rate) for rate in rates]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Spread(math.exp(mean), None, None, len(logs))
    half = t_quantile(len(logs) - 1) * statistics.stdev(logs) * math.sqrt(1 + 1 / len(logs))
    return Spread(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


def t_quantile(degrees_of_freedom: float) -> float:
    """Student's t, of a two-sided interval of CONFIDENCE."""
    from scipy.special import stdtrit  # scipy.stats has the same, and takes a second to import

    return float(stdtrit(degrees_of_freedom, 0.5 + CONFIDENCE / 2))
