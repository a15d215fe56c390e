"""The pairwise cover that the conformance suite stands on."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from .pairwise import pairs_of, pairwise, possible_pairs

spaces = st.lists(st.integers(1, 5), min_size=2, max_size=6).map(
    lambda sizes: {f"axis{i}": list(range(size)) for i, size in enumerate(sizes)}
)


def not_both_one(point):
    return not (point.get("axis0") == 1 and point.get("axis1") == 1)


@settings(deadline=None)
@given(spaces)
def test_every_pair_of_values_is_covered(values):
    covered = {pair for point in pairwise(values) for pair in pairs_of(point, list(values))}
    assert covered == set(possible_pairs(values, lambda _: True))


@settings(deadline=None)
@given(spaces)
def test_a_forbidden_pair_never_appears_and_the_others_all_do(values):
    values = {**values, "axis0": [0, 1], "axis1": [0, 1]}
    points = pairwise(values, not_both_one)
    assert all(not_both_one(point) for point in points)
    covered = {pair for point in points for pair in pairs_of(point, list(values))}
    assert covered == set(possible_pairs(values, not_both_one))


def test_the_cover_is_the_same_every_time_and_much_smaller_than_the_product():
    values = {"a": [1, 2, 4], "b": [True, False], "c": [1, 2, 4], "d": list("wxyz")}
    assert pairwise(values) == pairwise(values)
    assert len(pairwise(values)) <= 16 < 72
