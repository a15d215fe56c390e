"""Predictions, corrected by the trials so far.

Of memory and of step time alike: log(measured / predicted) is a Gaussian process over the configs, so that one trial
corrects all predictions somewhat, those of configs with the same tensors more, and those of its neighbours most. It is
a Bayesian regression on the trials; without predictions it is one on the measurements themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
from scipy.special import ndtr

from autotune.preflight.prediction import COLLECTIVE_RATES
from autotune.search.observed import Observed, most_telling
from autotune.search.pool import AS_ASSUMED, Floats, Indices, Mask, Pool
from autotune.search.residual.acquisition import SAFE
from autotune.search.residual.kernel import Kernels, Tables
from autotune.search.residual.posterior import Posterior, site_above

MAX_POINTS = 224
"""Measured trials that are conditioned on: the fit takes their number cubed."""
MAX_BOUNDS = 32
"""Out-of-memories that are: each is taken in after the others."""
SURELY_OUT = 0.02
"""Probability of fitting below which a config is not tried."""
SCALES = (1.0, 2.0, 4.0, 8.0)
"""How wrong predictions may be in units of what is assumed at first: the likeliest is taken. Never less than 1: a
handful of trials that happen to agree would make it sure of itself."""


@dataclass(frozen=True)
class Assumed:
    """Standard deviations of log(measured / predicted), before any trial."""

    common: float
    """Of what all configs share."""
    structure: float
    """Of what configs with the same tensors share (`STRUCTURE`)."""
    knob: float
    """Of each knob's own effect, but for its weight (kernel.py)."""
    pair_share: float
    """Variance of the effect of two knobs together / of one knob."""
    noise: float
    """Of a measurement."""


STEP_TIME = Assumed(common=0.25, structure=0.0, knob=0.0125, pair_share=0.05, noise=0.018)
MEMORY = Assumed(common=0.08, structure=0.05, knob=0.02, pair_share=0.0, noise=0.01)
UNPREDICTED = Assumed(common=1.0, structure=0.2, knob=0.15, pair_share=0.25, noise=0.018)
"""Of the measurements themselves, where there is no prediction."""


RATE_SD = 1.0
"""Standard deviation of the logarithm of the true rate of collectives over the assumed one."""


class Zone(str, Enum):  # noqa: UP042 (as Outcome)
    """How probable it is that a config fits."""

    SAFE = "safe"
    RISKY = "risky"
    """P(fit) below 0.8: only when nothing safe is left to gain."""
    SURE_OOM = "sure_oom"
    """P(fit) below 0.02, which before any trial is a prediction about 20 % over the usable memory: never tried."""


class Corrected:
    """The log of one figure of every config of the pool: what is believed of it.

    Args:
        predictions: of the pool's configs, NaN where there is none; read anew each time, as the pool may grow.
        ran: configs it was measured of, and the logs of what was measured.
        above: configs of which it is known to be above a bound, and the logs of those.
        running: configs that are being measured: taken to come out as believed.
        same_unit: whether measured and predicted figures are in the same unit; else a constant between them is free.
    """

    def __init__(
        self,
        pool: Pool,
        tables: Tables,
        assumed: Assumed,
        predictions: Callable[[], Floats],
        ran: tuple[Indices, Floats],
        above: tuple[Indices, Floats] | None = None,
        running: Indices | None = None,
        same_unit: bool = True,
    ) -> None:
        self._pool, self._tables = pool, tables
        self._predictions = predictions
        known = predictions()[np.isfinite(predictions())]
        self._assumed = assumed if len(known) else UNPREDICTED
        self._filler = float(np.median(known)) if len(known) else 0.0
        self._at, values = ran
        residuals = values - self._predicted(self._at)
        self._offset = float(residuals.mean()) if len(residuals) and not (same_unit and len(known)) else 0.0
        self._values = residuals - self._offset
        self._noise = np.full(len(residuals), self._assumed.noise**2)
        self._fit_scale()
        for index, bound in zip(*above, strict=True) if above else ():
            self._take_in_bound(int(index), float(bound))
        if running is not None and len(running):
            mean = self.mean(running) - self._predicted(running) - self._offset
            self._append(running, mean, self._assumed.noise**2)

    def _predicted(self, indices: Indices | None) -> Floats:
        predictions = self._predictions()
        some = predictions if indices is None else predictions[indices]
        return np.asarray(np.where(np.isfinite(some), some, self._filler))

    def _fit_scale(self) -> None:
        at = self._pool.levels[:, self._at]
        likeness = self._likeness(at, at)
        fits = [(scale, Posterior(self._scaled(likeness, scale), self._noise, self._values)) for scale in SCALES]
        self._scale, self._posterior = max(fits, key=lambda fit: fit[1].log_likelihood)
        self._at_points = self._scaled(likeness, self._scale)

    def _append(self, indices: Indices, values: Floats, noise_variance: float) -> None:
        new = self._pool.levels[:, indices]
        cross = self._covariance(self._pool.levels[:, self._at], new)
        self._at_points = np.block([[self._at_points, cross], [cross.T, self._covariance(new, new)]])
        self._at = np.append(self._at, indices)
        self._values = np.append(self._values, values)
        self._noise = np.append(self._noise, np.full(len(indices), noise_variance))
        self._posterior = Posterior(self._at_points, self._noise, self._values)

    def _take_in_bound(self, index: int, bound: float) -> None:
        one = np.array([index], dtype=np.intp)
        cross = self._covariance(self._pool.levels[:, self._at], self._pool.levels[:, one])
        residual, sd = float(self._posterior.weights @ cross[:, 0]), self._posterior.sd(cross, self._prior_variance)[0]
        predicted = float(self._predicted(one)[0]) + self._offset
        site = site_above(bound - predicted, residual, sd**2)
        if site is not None:
            self._append(one, np.array([site[0]]), site[1])

    def _covariance(self, a: Indices, b: Indices) -> Floats:
        return self._scaled(self._likeness(a, b), self._scale)

    def _likeness(self, a: Indices, b: Indices) -> Floats:
        """Covariance of configs (columns of levels) but for what they all share, in units of the scale squared."""
        assumed, tables = self._assumed, self._tables
        single, pairs = tables.sums(a, b)
        alike = tables.structure(a)[:, None] == tables.structure(b)
        return np.asarray(assumed.structure**2 * alike + assumed.knob**2 * (single + assumed.pair_share * pairs))

    def _scaled(self, likeness: Floats, scale: float) -> Floats:
        return self._assumed.common**2 + scale**2 * likeness

    @property
    def log_likelihood(self) -> float:
        """Of what was measured."""
        return self._posterior.log_likelihood

    @property
    def _prior_variance(self) -> float:
        assumed, tables = self._assumed, self._tables
        of_knobs = tables.weight + assumed.pair_share * tables.pair_weight
        return assumed.common**2 + self._scale**2 * (assumed.structure**2 + assumed.knob**2 * of_knobs)

    def mean(self, indices: Indices | None = None) -> Floats:
        """Of configs, or of the whole pool: exact, from one table of effects a knob and pair of knobs."""
        levels = self._pool.levels if indices is None else self._pool.levels[:, indices]
        predicted = self._predicted(indices)
        weights, assumed, tables = self._posterior.weights, self._assumed, self._tables
        if not len(weights):
            return np.asarray(predicted + self._offset)
        at = self._pool.levels[:, self._at]
        effects = tables.weighted(at, levels, weights)
        if assumed.pair_share:
            effects += assumed.pair_share * tables.weighted_pairs(at, levels, weights)
        total = predicted + self._offset + assumed.common**2 * weights.sum()
        total += (assumed.knob * self._scale) ** 2 * effects
        if assumed.structure:
            codes, codes_at = tables.structure(levels), tables.structure(at)
            shared = np.bincount(codes_at, weights, minlength=int(codes.max(initial=0)) + 1)
            total += (assumed.structure * self._scale) ** 2 * shared[codes]
        return np.asarray(total)

    def sd(self, indices: Indices) -> Floats:
        """Of what is believed of configs, without the noise of a measurement."""
        cross = self._covariance(self._pool.levels[:, self._at], self._pool.levels[:, indices])
        return self._posterior.sd(cross, self._prior_variance)

    @property
    def prior_sd(self) -> float:
        """Of any config, before any trial."""
        return float(np.sqrt(self._prior_variance))


class Fit:
    """Whether configs fit in memory: an out-of-memory is a point that is known to lie above the limit."""

    def __init__(self, pool: Pool, kernels: Kernels, observed: Observed) -> None:
        self._pool = pool
        self._log_fill: Corrected | None = None
        if pool.limit_gib is not None:
            self._log_fill = Corrected(
                pool,
                kernels.memory,
                MEMORY,
                lambda: pool.log_fill,
                most_telling(observed.measured, observed.log_fill, MAX_POINTS),
                above=most_telling(observed.too_large, observed.log_fill_above, MAX_BOUNDS),
                running=np.array(observed.running, dtype=np.intp),
            )

    def log_fill(self, indices: Indices | None = None) -> Floats:
        """Believed log of used / usable memory; -inf where no limit is known."""
        if self._log_fill is None:
            return np.full(len(self._pool) if indices is None else len(indices), -np.inf)
        return self._log_fill.mean(indices)

    def probability(self, indices: Indices) -> Floats:
        """P(fit) of configs."""
        if self._log_fill is None:
            return np.ones(len(indices))
        return np.asarray(ndtr(-self._log_fill.mean(indices) / self._log_fill.sd(indices)))

    def roughly(self) -> Floats:
        """P(fit) of the whole pool, with the spread that one has before any trial."""
        if self._log_fill is None:
            return np.ones(len(self._pool))
        return np.asarray(ndtr(-self._log_fill.mean() / self._log_fill.prior_sd))

    def zone(self, index: int) -> Zone:
        """Of one config."""
        probability = float(self.probability(np.array([index], dtype=np.intp))[0])
        if probability >= SAFE:
            return Zone.SAFE
        sure = probability < SURELY_OUT and not self._pool.always_allowed[index]
        return Zone.SURE_OOM if sure else Zone.RISKY

    def may_fit(self) -> Mask:
        """Which of the pool are not (roughly) sure to run out of memory."""
        return (self.roughly() >= SURELY_OUT) | self._pool.always_allowed


def step_time(pool: Pool, kernels: Kernels, observed: Observed) -> Corrected:
    """Log step time of every config, but for a constant; with collectives at the rate that makes the trials likeliest.

    The rate between nodes is assumed, and one that is several times lower turns the order of configs around. All else
    that predictions miss, they miss by less.
    """
    ran = most_telling(observed.ran, observed.log_step, MAX_POINTS)
    running = np.array(observed.running, dtype=np.intp)

    def at_rate(rate: int, running: Indices | None = None) -> Corrected:
        return Corrected(
            pool,
            kernels.step_time,
            STEP_TIME,
            lambda: pool.log_step_at_rates[rate],
            ran,
            running=running,
            same_unit=False,
        )

    def likelihood(rate: int) -> float:
        return at_rate(rate).log_likelihood - 0.5 * (math.log(COLLECTIVE_RATES[rate]) / RATE_SD) ** 2

    likeliest = max(range(len(COLLECTIVE_RATES)), key=likelihood) if len(ran[0]) > 1 else AS_ASSUMED
    return at_rate(likeliest, running)
