"""A small set of points in which every two values of different axes meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Point = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(point: Mapping[str, Any], axes: Sequence[str]) -> list[Pair]:
    return [((a, point[a]), (b, point[b])) for a, b in itertools.combinations(axes, 2)]


def possible_pairs(values: Mapping[str, Sequence[Any]], allowed: Callable[[Point], bool]) -> list[Pair]:
    """Every pair of values that `allowed` does not forbid, in a fixed order."""
    return [
        ((a, x), (b, y))
        for a, b in itertools.combinations(values, 2)
        for x, y in itertools.product(values[a], values[b])
        if allowed({a: x, b: y})
    ]


def pairwise(values: Mapping[str, Sequence[Any]], allowed: Callable[[Point], bool] = lambda _: True) -> list[Point]:
    """Greedy: takes the first pair not met yet, and gives each other axis the value that meets most new ones.

    Args:
        allowed: judges a point, or a part of one. It may forbid pairs only, and leave every value a partner.
    """
    values = dict(sorted(values.items(), key=lambda item: len(item[1]), reverse=True))  # makes fewer points
    axes = list(values)
    missing = dict.fromkeys(possible_pairs(values, allowed))
    points: list[Point] = []
    while missing:
        point: Point = dict(next(iter(missing)))
        for axis in axes:
            if axis not in point:
                choices = [value for value in values[axis] if allowed({**point, axis: value})]
                point[axis] = max(choices, key=lambda v: _num_new({**point, axis: v}, axes, missing))
        for pair in pairs_of(point, axes):
            missing.pop(pair, None)
        points.append(point)
    return points


def _num_new(point: Point, axes: Sequence[str], missing: Mapping[Pair, None]) -> int:
    set_axes = [axis for axis in axes if axis in point]
    return sum(pair in missing for pair in pairs_of(point, set_axes))
