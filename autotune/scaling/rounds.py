"""Which rounds a scaling has: a pure function of its history.

What is compared was measured beside each other. So a scaling that was interrupted goes on in the round where it
stopped, and one that is asked for more ranks, or for another mode, than were measured measures all of them anew: else
what changed in the machine from one day to the next would be taken for the effect of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from autotune.scaling.points import batch_of
from autotune.stages import SCALE
from trials.outcome import NOT_OF_THE_CONFIG, Outcome

Place = tuple[int, int]
"""Ranks, and sequences per optimizer step over all of them."""


def rounds(rows: Sequence[dict[str, Any]], places: Collection[Place], repeats: int) -> list[int]:
    """Numbers of the rounds to have, whether they are measured already or not.

    Args:
        rows: of a history, of all stages.
        places: that are asked for.
        repeats: rounds that are asked for.
    """
    measured = _measured(rows)
    found: dict[int, set[Place]] = {}
    alive: set[Place] = set()
    for row in measured:
        place = (row["world_size"], batch_of(row))
        if place in places:
            found.setdefault(row["round"], set()).add(place)
            if row["outcome"] == Outcome.OK:
                alive.add(place)
    tried = set().union(*found.values())
    needed = set(places) - (tried - alive)  # what failed is not tried again
    whole = sorted(number for number, seen in found.items() if needed <= seen)
    # Where it was interrupted; rounds of fewer places that are alike, two or more, were of another scaling.
    seen = Counter(frozenset(places) for places in found.values())
    interrupted = sorted(number for number in set(found) - set(whole) if seen[frozenset(found[number])] == 1)[-1:]
    kept = sorted(whole + interrupted)
    first_new = max((row["round"] for row in measured), default=-1) + 1
    return [*kept, *range(first_new, first_new + repeats)][:repeats]


def num_rows_in(rows: Sequence[dict[str, Any]], places: Collection[Place], numbers: Collection[int]) -> int:
    """Trials of these rounds and places that the history has."""
    return sum(row["round"] in numbers and (row["world_size"], batch_of(row)) in places for row in _measured(rows))


def _measured(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["stage"] == SCALE and Outcome(row["outcome"]) not in NOT_OF_THE_CONFIG]
