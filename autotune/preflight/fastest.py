"""The configs of a space that are predicted to be the fastest of those that fit."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

from autotune.preflight.prediction import Prediction
from autotune.space import SearchSpace
from trials.record import Knobs

CONTEXT_GIB = 2.0
"""Of a GPU's memory: CUDA's context and NCCL's buffers, which no tensor shows. A guess."""
LEAST_OF_ALLOCATED, MOST_OF_RESERVED = 0.90, 1.15
"""By published runs, a peak is no less than the first share of what is predicted, and no more than the second."""
LOADER_TIE = 0.005
"""Of a step, that one loader must save over another one to count as faster: no trial would see less."""
SAFE, RISKY, SURE_OOM = "safe", "risky", "sure_oom"


@dataclass(frozen=True)
class Room:
    """What a rank's config must fit in."""

    limit_gib: float | None
    device: str
    headroom: float

    def zone(self, predicted: Prediction) -> str:
        """`sure_oom`, `risky` or `safe`, by the closed forms alone; without a limit, `safe`."""
        if self.limit_gib is None:
            return SAFE
        free = self.limit_gib - (CONTEXT_GIB if self.device == "cuda" else 0.0)
        if LEAST_OF_ALLOCATED * predicted.allocated_gib > free:
            return SURE_OOM
        return RISKY if MOST_OF_RESERVED * predicted.reserved_gib > free * (1 - self.headroom) else SAFE


def looked_at(space: SearchSpace, rng: random.Random, most: int) -> list[Knobs]:
    """All configs of the space, or of more than `most` so many at random."""
    if not space.is_enumerable:
        return list(dict.fromkeys(space.draw(rng) for _ in range(most)))
    everything = list(space.configs())
    return everything if len(everything) <= most else rng.sample(everything, most)


def fastest(predicted: Iterable[tuple[Knobs, Prediction]], room: Room, count: int) -> list[Knobs]:
    """The fastest that fit; then those that may.

    Of configs that differ in their loader alone there is one: with the fewest workers that keep up.
    """
    alike: dict[Knobs, list[tuple[bool, float, Knobs]]] = {}
    for knobs, found in predicted:
        zone = room.zone(found)
        if zone != SURE_OOM:
            key = replace(knobs, num_workers=0, prefetch_factor=None)
            alike.setdefault(key, []).append((zone != SAFE, found.step_s, knobs))
    ordered = sorted(alike.values(), key=lambda group: min(one[:2] for one in group))
    return [_with_fewest_workers(group) for group in ordered[:count]]


def _with_fewest_workers(group: list[tuple[bool, float, Knobs]]) -> Knobs:
    least_s = min(step_s for _, step_s, _ in group)
    keep_up = [knobs for _, step_s, knobs in group if step_s <= least_s * (1 + LOADER_TIE)]
    return min(keep_up, key=lambda knobs: (knobs.num_workers, knobs.prefetch_factor or 0))
