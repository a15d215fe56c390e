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
NUM_SEEDS = 2
"""More of them cost trials; when trials run side by side, as many as run at once."""
VARIED = frozenset({"micro_batch_size", "activation_checkpointing"})
"""Knobs in which a seed differs from the baseline; all others stay at what is known to run, where the space has it."""


def seeds(pool: Pool, fit: Fit, step_time: Corrected, is_open: Callable[[Knobs], bool], num_seeds: int) -> list[Knobs]:
    """The best predicted safe configs, one a checkpointing mode, fastest first.

    Of each mode: of the configs that fit as predicted, those nearest to the baseline's settings; of these the largest
    micro-batch. Modes and configs of which nothing is predicted give none.

    Args:
        is_open: whether a config is worth a trial.
    """
    predicted = np.isfinite(pool.log_step) & (np.isfinite(pool.log_fill) | (pool.limit_gib is None))
    fitting = np.flatnonzero(predicted & (fit.log_fill() <= math.log(FILL)))
    micro_batch = np.array([knobs.micro_batch_size for knobs in pool.configs])
    step = step_time.mean()
    # By the last key first.
    order = np.lexsort((step[fitting], -micro_batch[fitting], _num_unlike_baseline(pool)[fitting]))
    best: dict[str, int] = {}
    for index in fitting[order]:
        knobs = pool.configs[index]
        if knobs.activation_checkpointing not in best and is_open(knobs):
            best[knobs.activation_checkpointing] = int(index)
    return [pool.configs[index] for index in sorted(best.values(), key=lambda i: step[i])[:num_seeds]]


def _num_unlike_baseline(pool: Pool) -> Indices:
    """Knobs, of those that a seed does not vary, in which each config differs from the baseline."""
    usual = pool.space.usual_indices
    number = np.zeros(len(pool), dtype=np.intp)
    for name, levels in zip(pool.space.searched, pool.levels, strict=True):
        if name not in VARIED:
            number += (levels != usual[name]) & (levels != len(pool.space.candidates[name]))
    return number
