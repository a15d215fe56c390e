"""Every way in which a search ends, with its reason."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.job import Budget
from autotune.search.stopping import MIN_TRIALS, Stopping


def stopping(num_ranks: int = 16, **budget: Any) -> Stopping:
    return Stopping(Budget(**budget), num_ranks)


@pytest.mark.parametrize(
    ("budget", "num_proposed", "elapsed_s", "reason"),
    [
        ({"trials": 3}, 3, 0.0, "budget.trials = 3"),
        ({"minutes": 2.0}, 1, 121.0, "budget.minutes = 2"),
        ({"gpu_hours": 0.5}, 1, 113.0, "budget.gpu_hours = 0.5"),
    ],
)
def test_a_budget_ends_the_search_only_once_it_is_used_up(
    budget: dict[str, Any], num_proposed: int, elapsed_s: float, reason: str
) -> None:
    used_up = stopping(**budget).reason(num_proposed, elapsed_s)
    assert used_up is not None
    assert reason in used_up
    assert stopping(**budget).reason(num_proposed - 1, elapsed_s * 0.9) is None


def test_patience_ends_a_search_that_gains_nothing() -> None:
    search = stopping(trials=99)
    for number in range(1, 40):
        search.count(100.0 if number < 8 else 100.4)
        reason = search.reason(number, 0.0)
        assert (reason is not None) == (number >= MIN_TRIALS), "0.4 % is no gain"
    assert reason is not None
    assert "0.5%" in reason


def test_a_gain_renews_patience_and_what_does_not_fit_is_none() -> None:
    search = stopping(trials=99, patience=5)
    for number in range(1, 31):
        search.count(100.0 * 1.01**number if number % 2 else None)
        assert search.reason(number, 0.0) is None


def test_patience_can_be_off() -> None:
    search = stopping(trials=99, patience=0)
    for _ in range(50):
        search.count(1.0)
    assert search.reason(50, 0.0) is None
