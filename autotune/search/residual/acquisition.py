"""What a trial of a config promises."""

from __future__ import annotations

import numpy as np
from scipy.special import ndtr

from autotune.search.pool import Floats

SAFE = 0.8
"""Probability of fitting from which a config is tried without second thoughts."""
RISKY_WEIGHT = 0.4
"""What a less probable one is worth beside it, by its expected improvement: tried once little is left to gain safely.
Chosen on landscapes of tests/benchmarks: with 0.05, gains beyond a wrong memory prediction are never found."""
EXPLORE_SDS = 2.5
"""How far above its mean a config is taken to be, when it is uncertainty that is looked for."""


def expected_improvement(mean: Floats, sd: Floats, best: float) -> Floats:
    """Of values to be maximised, over `best`."""
    z = (mean - best) / sd
    density = np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi)
    return np.asarray(np.maximum(sd * (z * ndtr(z) + density), 0))


def worth(mean: Floats, sd: Floats, best: float, p_fit: Floats) -> Floats:
    """Expected improvement times the probability of fitting; of what may well not fit, less."""
    return expected_improvement(mean, sd, best) * p_fit * np.where(p_fit < SAFE, RISKY_WEIGHT, 1.0)


def optimistic(mean: Floats, sd: Floats, p_fit: Floats) -> Floats:
    """Upper confidence bound; what may well not fit comes after all that fits."""
    return mean + EXPLORE_SDS * sd - np.where(p_fit < SAFE, 1e3, 0.0)
