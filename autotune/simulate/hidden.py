"""What no prediction knows: effects of knobs and of pairs of them, drawn from the seed."""

from __future__ import annotations

import functools
import itertools
import math
import random

from trials.record import KNOB_NAMES, Knobs

LEVEL_SD = 0.015
"""Of the logarithm of the step time, for each value of a knob that has such effects. Calibrated, as the next
two are, so that stock samplers find the landscapes of tests/benchmarks as hard as in earlier studies."""
NUM_AFFECTED = 8
"""Knobs, of 21, that have such effects in one landscape: the others do what the mechanisms say."""
PAIR_SD = 0.01
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
        self.names = tuple(name for name in KNOB_NAMES if name not in DERIVED)
        self.affected = frozenset(random.Random(f"{seed}:affected").sample(self.names, NUM_AFFECTED))
        pairs = list(itertools.combinations(self.names, 2))
        self.pairs = tuple(random.Random(f"{seed}:pairs").sample(pairs, NUM_PAIRS))

    @functools.cache  # noqa: B019 (as long as a study)
    def level(self, name: str, value: object) -> float:
        """Added to the logarithm of the step time; a knob that the engine has not adds nothing."""
        return 0.0 if value is None or name not in self.affected else self._gauss(f"{name}={value}", LEVEL_SD)

    @functools.cache  # noqa: B019
    def pair(self, one: str, value: object, other: str, other_value: object) -> float:
        """The same, of two knobs together."""
        absent = value is None or other_value is None
        return 0.0 if absent else self._gauss(f"{one}={value}&{other}={other_value}", PAIR_SD)

    @functools.cache  # noqa: B019
    def memory_level(self, name: str, value: object) -> float:
        """Added to the logarithm of the bytes that live."""
        return self._gauss(f"memory {name}={value}", MEMORY_LEVEL_SD)

    def time_factor(self, knobs: Knobs) -> float:
        """Of the step time."""
        total = sum(self.level(name, getattr(knobs, name)) for name in self.names)
        for one, other in self.pairs:
            total += self.pair(one, getattr(knobs, one), other, getattr(knobs, other))
        return math.exp(total)

    def memory_factor(self, knobs: Knobs) -> float:
        """Of the bytes that live; depends on MEMORY_KNOBS alone."""
        return math.exp(sum(self.memory_level(name, getattr(knobs, name)) for name in MEMORY_KNOBS))

    def fragments(self, knobs: Knobs) -> float:
        """Share of the pools that is lost to fragments, by the sizes that the settings make."""
        sizes = (knobs.activation_checkpointing, knobs.reshard_after_forward, knobs.blocks_per_unit, knobs.compile)
        return self._fragments(sizes)

    @functools.cache  # noqa: B019
    def _fragments(self, sizes: tuple[object, ...]) -> float:
        drawn = random.Random(f"{self.seed}:fragments {sizes}").random()
        return LEAST_FRAGMENTS + MORE_FRAGMENTS * drawn * min(self.size, 1.0)

    def _gauss(self, what: str, sd: float) -> float:
        return random.Random(f"{self.seed}:{what}").gauss(0.0, sd * self.size)
