"""Gaussian process regression on a few hundred points (Rasmussen and Williams, algorithm 2.1)."""

from __future__ import annotations

import math

import numpy as np
from scipy.linalg import cho_solve, cholesky, solve_triangular
from scipy.special import log_ndtr

from autotune.search.pool import Floats


class Posterior:
    """Of a function with mean 0, after noisy values of it.

    Args:
        covariance: of the function at the points, (n, n).
        noise_variance: of each value, (n,).
        values: (n,); n may be 0.
    """

    def __init__(self, covariance: Floats, noise_variance: Floats, values: Floats) -> None:
        self._factor: Floats | None = None
        self.weights = np.empty(0)
        """The mean anywhere is the covariance with the points times these."""
        self.log_likelihood = 0.0
        if len(values):
            self._factor = cholesky(covariance + np.diag(noise_variance), lower=True)
            self.weights = cho_solve((self._factor, True), values)
            self.log_likelihood = float(
                -0.5 * values @ self.weights
                - np.log(np.diag(self._factor)).sum()
                - 0.5 * len(values) * math.log(2 * math.pi)
            )

    def sd(self, cross: Floats, prior_variance: float) -> Floats:
        """Standard deviation of the function where its covariance with the points is `cross`, (n, m)."""
        if self._factor is None:
            return np.full(cross.shape[1], math.sqrt(prior_variance))
        explained = (solve_triangular(self._factor, cross, lower=True) ** 2).sum(axis=0)
        return np.asarray(np.sqrt(np.maximum(prior_variance - explained, 1e-12)))


def site_above(bound: float, mean: float, variance: float) -> tuple[float, float] | None:
    """The value and noise variance that stand for "it is above `bound`": they give the truncated normal's moments.

    One step of assumed-density filtering (Minka 2001).

    Args:
        mean, variance: what is believed before.

    Returns:
        None if the bound says nothing new.
    """
    sd = math.sqrt(variance)
    z = (mean - bound) / sd
    # phi(z) / Phi(z), in logarithms: Phi underflows where the belief was far below the bound.
    ratio = math.exp(-0.5 * z * z - 0.5 * math.log(2 * math.pi) - float(log_ndtr(z)))
    shrink = ratio * (ratio + z)
    """By how much of itself the variance shrinks."""
    if shrink < 1e-6:
        return None
    new_mean, new_variance = mean + sd * ratio, variance * max(1 - shrink, 1e-6)
    site_variance = 1 / (1 / new_variance - 1 / variance)
    return site_variance * (new_mean / new_variance - mean / variance), site_variance
