"""The first trials: of each checkpointing mode, the config that predictions speak for."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from autotune.search.correct import Corrected, Fit
from autotune.search.pool import Indices, Pool
from trials.record import Knobs

FILL = 0.93
"""Share of the usable memory that a seed may take as predicted."""
NUM_SEEDS = 1
"""Beside the baseline. More of them cost trials; when trials run side by side, as many as run at once."""

ALIKE = 0.01
"""Difference in log step time below which predictions say nothing."""


def seeds(pool: Pool, fit: Fit, step_time: Corrected, is_open: Callable[[Knobs], bool], num_seeds: int) -> list[Knobs]:
    """The best predicted safe configs, one a checkpointing mode, fastest first.

    Of those that are predicted to be alike in speed, the one nearest to the baseline, which is known to run.
    Modes and configs of which nothing is predicted give none.

    Args:
        is_open: whether a config is worth a trial.
    """
    predicted = np.isfinite(pool.log_step) & (np.isfinite(pool.log_fill) | (pool.limit_gib is None))
    fitting = np.flatnonzero(predicted & (fit.log_fill() <= math.log(FILL)))
    step = step_time.mean()
    best: dict[str, int] = {}
    for index in fitting[np.lexsort((_num_unlike_baseline(pool)[fitting], np.round(step[fitting] / ALIKE)))]:
        knobs = pool.configs[index]
        if knobs.activation_checkpointing not in best and is_open(knobs):
            best[knobs.activation_checkpointing] = int(index)
    return [pool.configs[index] for index in sorted(best.values(), key=lambda i: step[i])[:num_seeds]]


def _num_unlike_baseline(pool: Pool) -> Indices:
    """Knobs in which each config of the pool differs from the baseline."""
    usual = pool.space.usual_indices
    number = np.zeros(len(pool), dtype=np.intp)
    for name, levels in zip(pool.space.searched, pool.levels, strict=True):
        number += (levels != usual[name]) & (levels != len(pool.space.candidates[name]))
    return number
