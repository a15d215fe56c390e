"""The first trials: of each checkpointing mode, the config that predictions speak for."""

from __future__ import annotations

import math

import numpy as np

from autotune.search.correct import Corrected, Fit
from autotune.search.pool import Indices, Mask, Pool

FILL = 0.93
"""Share of the usable memory that a seed may take as predicted."""
NUM_SEEDS = 2
"""More of them cost trials; when trials run side by side, as many as run at once."""
VARIED = frozenset({"micro_batch_size", "activation_checkpointing"})
"""Knobs in which a seed differs from the baseline; all others stay at what is known to run, where the space has it."""


def seeds(pool: Pool, fit: Fit, step_time: Corrected, is_open: Mask, num_seeds: int) -> list[int]:
    """Indices of the best predicted safe configs, one a checkpointing mode, fastest first.

    Of each mode: of the configs that fit as predicted, those nearest to the baseline's settings; of these the largest
    micro-batch. Modes and configs of which nothing is predicted give none.

    Args:
        is_open: which of the pool are worth a trial.
    """
    fill = fit.log_fill()
    predicted = np.isfinite(pool.log_step) & (np.isfinite(pool.log_fill) | (pool.limit_gib is None))
    fitting = is_open & predicted & (fill <= math.log(FILL))
    by_mode: dict[str, list[int]] = {}
    for index in np.flatnonzero(fitting):
        by_mode.setdefault(pool.configs[index].activation_checkpointing, []).append(int(index))
    strange = _num_unlike_baseline(pool)
    speed = -step_time.mean()
    best = [
        min(indices, key=lambda i: (strange[i], -pool.configs[i].micro_batch_size, -speed[i]))
        for indices in by_mode.values()
    ]
    return sorted(best, key=lambda i: -speed[i])[:num_seeds]


def _num_unlike_baseline(pool: Pool) -> Indices:
    """Knobs, of those that a seed does not vary, in which each config differs from the baseline."""
    usual = pool.space.usual_indices
    number = np.zeros(len(pool), dtype=np.intp)
    for name, levels in zip(pool.space.searched, pool.levels, strict=True):
        if name not in VARIED:
            number += (levels != usual[name]) & (levels != len(pool.space.candidates[name]))
    return number
