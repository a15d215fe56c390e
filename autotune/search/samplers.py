"""Samplers by name, behind Optuna's own interface."""

from __future__ import annotations

import warnings

import optuna

from autotune.search.pool import Pool
from autotune.search.residual.sampler import ResidualSampler

SAMPLERS = ("tpe", "gp", "random", "residual")
FLAT = frozenset({"gp"})
"""Samplers that model a knob only if every trial has it: they draw also those without effect."""
FITS_COMPLETE_ONLY = frozenset({"gp"})
"""Samplers that read nothing of a pruned trial: an out-of-memory is told them as the worst value that fits."""
KNOWS_WHAT_FITS = frozenset({"residual"})
"""Samplers that weigh the probability of fitting themselves."""
WITHOUT_STATE = frozenset({"residual"})
"""Samplers that draw by what has been tried, and not by what they drew before: a resumed study needs no other seed."""


def make_sampler(name: str, seed: int, pool: Pool) -> optuna.samplers.BaseSampler:
    """A sampler that respects constraints set on trials.

    Args:
        name: `tpe` (multivariate; knobs that only sometimes exist are modelled in groups), `gp` (Optuna's Gaussian
            process), `random`, or `residual` (Gaussian processes on what predictions miss, over the valid configs).
        pool: the configs that `residual` chooses from.

    Raises:
        ValueError: unknown name.
    """
    if name == "tpe":
        with warnings.catch_warnings():
            # `group` is marked experimental; without it, knobs that only sometimes exist are drawn independently.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, n_startup_trials=5)
    if name == "gp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.GPSampler(seed=seed, n_startup_trials=5, deterministic_objective=False)
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    if name == "residual":
        return ResidualSampler(pool, seed)
    raise ValueError(f"sampler = {name!r}: known are {SAMPLERS}")
