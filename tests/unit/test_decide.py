"""What the driver decides of configs that are measured again: whole studies over modelled trials."""

from __future__ import annotations

from tests.benchmarks.verdict import tally


def test_equal_configs_do_not_win_by_luck_and_a_true_gain_is_found() -> None:
    assert tally(0.0, 30, 7, seed=1).num_wins <= 2
    assert tally(0.08, 10, 7, seed=1).num_wins == 10


def test_the_two_of_a_round_take_turns_in_going_first() -> None: ...
