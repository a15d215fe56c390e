"""What no prediction knows: effects of knobs and of pairs of them, drawn from the seed."""

from __future__ import annotations

import functools
import itertools
import math
import random

from trials.record import KNOB_NAMES, Knobs

LEVEL_SD = 0.03
"""Of the logarithm of the step time, for each value of each knob."""
PAIR_SD = 0.02
NUM_PAIRS = 6
MEMORY_LEVEL_SD = 0.02
"""Of the logarithm of the memory, for each value of MEMORY_KNOBS: about 4 % in all."""
MEMORY_KNOBS = ("activation_checkpointing", "reshard_after_forward", "compile", "engine", "blocks_per_unit")
LEAST_FRAGMENTS, MORE_FRAGMENTS = 0.015, 0.05
"""Of the pools, lost between blocks that do not fit: at least, and by how much more with unlucky sizes."""
DERIVED = frozenset({"grad_accum_steps", "bucket_cap_mb"})
"""Knobs that another one stands for."""


class Hidden:
    """One landscape.

    Args:
        seed: equal seeds make equal landscapes, whatever is asked of them in whatever order.
        size: scales all effects; 0 is none.
    """

    def __init__(self, seed: int, size: float = 1.0) -> None:
        self.seed, self.size = seed, size
        names = [name for name in KNOB_NAMES if name not in DERIVED]
        self._names = tuple(names)
        pairs = list(itertools.combinations(names, 2))
        self._pairs = tuple(random.Random(f"{seed}:pairs").sample(pairs, NUM_PAIRS))

    @functools.cache  # noqa: B019 (as long as a study)
    def _drawn(self, what: str, sd: float) -> float:
        return random.Random(f"{self.seed}:{what}").gauss(0.0, sd * self.size)

    def time_factor(self, knobs: Knobs) -> float:
        """Of the step time. A knob that the engine has not has no effect."""
        values = {name: getattr(knobs, name) for name in self._names}
        total = sum(self._drawn(f"{name}={value}", LEVEL_SD) for name, value in values.items() if value is not None)
        for one, other in self._pairs:
            if values[one] is not None and values[other] is not None:
                total += self._drawn(f"{one}={values[one]}&{other}={values[other]}", PAIR_SD)
        return math.exp(total)

    def memory_factor(self, knobs: Knobs) -> float:
        """Of the bytes that live; depends on MEMORY_KNOBS alone."""
        return math.exp(
            sum(self._drawn(f"memory {name}={getattr(knobs, name)}", MEMORY_LEVEL_SD) for name in MEMORY_KNOBS)
        )

    def fragments(self, knobs: Knobs) -> float:
        """Share of the pools that is lost to fragments, by the sizes that the settings make."""
        sizes = (knobs.activation_checkpointing, knobs.reshard_after_forward, knobs.blocks_per_unit, knobs.compile)
        return LEAST_FRAGMENTS + MORE_FRAGMENTS * self._share(f"fragments {sizes}") * min(self.size, 1.0)

    @functools.cache  # noqa: B019
    def _share(self, what: str) -> float:
        return random.Random(f"{self.seed}:{what}").random()
