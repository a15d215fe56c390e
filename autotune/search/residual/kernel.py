"""How alike two configs are: a table of levels for each knob, summed, and multiplied in pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from autotune.search.pool import Floats, Indices
from autotune.space import ORDERED, SearchSpace

LENGTH = 0.5
"""Of an ordered knob's likeness, where its whole range is 1."""
OF_STEP_TIME = {
    "micro_batch_size": 16.0,
    "activation_checkpointing": 6.0,
    "compile": 6.0,
    "backward_prefetch": 4.0,
    "reshard_after_forward": 3.0,
    "sync_each_micro_batch": 2.0,
    "reduce_dtype": 2.0,
    "bucket_cap_mb": 1.5,
}
"""Variance of each knob's own effect, relative to the others' 1: a roofline misses most in what decides how large
kernels and messages are, and what is computed twice."""
OF_MEMORY = {"limit_all_gathers": 16.0}
"""The same of memory: how far FSDP1 runs ahead where nothing limits it is a guess."""

STRUCTURE = frozenset({"activation_checkpointing", "reshard_after_forward", "compile", "engine"})
"""Knobs that decide which tensors there are at the peak: a wrong term is wrong for all configs that share them."""


class Tables:
    """Likeness of any two levels of each knob that is searched, with one level more for "has no effect".

    Ordered knobs: Matern-3/2 on the rank of the candidate; others: 1 if equal. A knob without effect in both is equal,
    in one of them unlike.

    Args:
        weights: of knobs, by name; of the others, 1.
    """

    def __init__(self, space: SearchSpace, weights: Mapping[str, float]) -> None:
        self.names = space.searched
        self.tables = [weights.get(name, 1.0) * _table(name, len(space.candidates[name])) for name in self.names]
        self.weight = sum(float(table[-1, -1]) for table in self.tables)
        """A config's likeness to itself, summed over knobs."""
        self._structure = [row for row, name in enumerate(self.names) if name in STRUCTURE]
        self.pair_weight = (self.weight**2 - sum(float(table[-1, -1]) ** 2 for table in self.tables)) / 2

    def sums(self, a: Indices, b: Indices) -> tuple[Floats, Floats]:
        """Likeness of configs (columns of levels) `a` and `b`, summed over knobs and over pairs of knobs."""
        single = np.zeros((a.shape[1], b.shape[1]))
        squares = np.zeros_like(single)
        for table, of_a, of_b in zip(self.tables, a, b, strict=True):
            alike = table[of_a[:, None], of_b]
            single += alike
            squares += alike * alike
        return single, (single * single - squares) / 2

    def structure(self, levels: Indices) -> Indices:
        """A number for each config, equal where all of STRUCTURE is."""
        code = np.zeros(levels.shape[1], dtype=np.intp)
        for row in self._structure:
            code = code * len(self.tables[row]) + levels[row]
        return code

    def weighted(self, at: Indices, levels: Indices, weights: Floats) -> Floats:
        """sums(levels, at)[0] weighted by `weights` over `at`, for any number of levels: a table of effects a knob."""
        total = np.zeros(levels.shape[1])
        for table, of_at, of_level in zip(self.tables, at, levels, strict=True):
            total += (table[:, of_at] @ weights)[of_level]
        return total

    def weighted_pairs(self, at: Indices, levels: Indices, weights: Floats) -> Floats:
        """As `weighted`, of sums(levels, at)[1]."""
        total = np.zeros(levels.shape[1])
        likeness = [table[:, of_at] for table, of_at in zip(self.tables, at, strict=True)]
        for g, first in enumerate(likeness):
            weighted = first * weights
            for h in range(g):
                effects = weighted @ likeness[h].T
                total += effects.ravel()[levels[g] * effects.shape[1] + levels[h]]
        return total


def _table(name: str, num_levels: int) -> Floats:
    table = np.eye(num_levels + 1)
    if name in ORDERED:
        rank = np.linspace(0, 1, num_levels)
        apart = math.sqrt(3) * np.abs(rank[:, None] - rank) / LENGTH
        table[:num_levels, :num_levels] = (1 + apart) * np.exp(-apart)
    return table


class Kernels:
    """The likenesses of a space's configs."""

    def __init__(self, space: SearchSpace) -> None:
        self.step_time = Tables(space, OF_STEP_TIME)
        self.memory = Tables(space, OF_MEMORY)
