"""The verdict: paired, on log ratios, and no win inside the noise."""

from __future__ import annotations

import math
import random

import pytest

from autotune.verdict import compare


def test_drift_that_both_share_cancels() -> None:
    drift = [1.0, 1.3, 0.8, 1.1, 0.9]
    verdict = compare([110 * d for d in drift], [100 * d for d in drift])
    assert verdict.is_win
    assert verdict.ratio == pytest.approx(1.1)
    assert verdict.low == pytest.approx(1.1)


def test_a_gain_inside_the_noise_is_no_win() -> None:
    verdict = compare([101, 99, 103, 100, 98], [100, 101, 100, 99, 100])
    assert not verdict.is_win
    assert verdict.low < 1 < verdict.high
    assert "keep your baseline" in verdict.sentence()


def test_the_interval_is_students_t_on_log_ratios() -> None:
    ratios = [1.01, 1.03, 1.02]
    verdict = compare(ratios, [1.0, 1.0, 1.0])
    logs = [math.log(r) for r in ratios]
    mean = sum(logs) / 3
    deviation = math.sqrt(sum((x - mean) ** 2 for x in logs) / 2)
    half = 4.302652729911275 * deviation / math.sqrt(3)  # t, 97.5 %, 2 degrees of freedom
    assert (math.log(verdict.low), math.log(verdict.high)) == pytest.approx((mean - half, mean + half))


def test_swapping_the_two_inverts_the_ratio() -> None:
    a, b = [3.0, 4.0, 5.0], [2.0, 3.0, 3.5]
    assert compare(a, b).ratio == pytest.approx(1 / compare(b, a).ratio)
    assert compare(a, b).low == pytest.approx(1 / compare(b, a).high)


def test_two_equal_configs_rarely_win() -> None:
    random.seed(0)
    wins = sum(
        compare([random.gauss(100, 1.5) for _ in range(7)], [random.gauss(100, 1.5) for _ in range(7)]).is_win
        for _ in range(400)
    )
    assert wins <= 20, "2.5 % expected one-sided; 5 % is the promise"


@pytest.mark.parametrize(("a", "b"), [([1.0], [1.0]), ([1.0, 2.0], [1.0]), ([0.0, 1.0], [1.0, 1.0])])
def test_what_cannot_be_compared_is_refused(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError):
        compare(a, b)
