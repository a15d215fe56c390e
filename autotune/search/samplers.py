"""Samplers by name, behind Optuna's own interface."""

from __future__ import annotations

import warnings

import optuna

SAMPLERS = ("tpe", "random")


def make_sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    """A sampler that respects constraints set on trials.

    Args:
        name: `tpe` (multivariate; knobs that only sometimes exist are modelled in groups), or `random`.

    Raises:
        ValueError: unknown name.
    """
    if name == "tpe":
        with warnings.catch_warnings():
            # `group` is marked experimental; without it, knobs that only sometimes exist are drawn independently.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, n_startup_trials=5)
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    raise ValueError(f"sampler = {name!r}: known are {SAMPLERS}")
