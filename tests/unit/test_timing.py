"""Blocks of whole steps: when they end, and what they add up to. With a clock of the test's own steps."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from scipy import stats

from trials import timing
from trials.clock import HostClock
from trials.record import Measure


def run(measure: Measure, step_times_s: list[float], monkeypatch: pytest.MonkeyPatch, **kwargs: float) -> timing.Timing:
    clock = 0.0
    steps = itertools.cycle(step_times_s)

    def step() -> None:
        nonlocal clock
        clock += next(steps)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock)
    options = {"expected_step_s": 0.25, "min_steps": measure.min_steps} | kwargs
    return timing.run_blocks(timing.whole_steps(step, HostClock()), lambda s: s, measure, **options)  # type: ignore[arg-type]


def test_a_steady_step_ends_at_min_steps_in_blocks_of_about_block_s(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = run(Measure(min_steps=6, max_steps=40, block_s=0.5), [0.25], monkeypatch)
    assert measured.block_steps == [2, 2, 2]
    assert measured.block_times_s == pytest.approx([0.25] * 3)
    assert timing.mean_step_s(measured.block_times_s, measured.block_steps) == pytest.approx(0.25)


def test_a_noisy_step_is_measured_until_max_steps_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = run(Measure(min_steps=4, max_steps=11, rel_ci=0.001, block_s=0.5), [0.1, 0.2, 0.7, 0.1], monkeypatch)
    assert measured.num_steps == 11
    assert sum(measured.own_step_times_s) == pytest.approx(
        sum(t * n for t, n in zip(measured.block_times_s, measured.block_steps, strict=True))
    )


def test_a_deep_loader_queue_asks_for_more_steps_than_max_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(Measure(min_steps=4, max_steps=10), [0.25], monkeypatch, min_steps=24).num_steps >= 24


@pytest.mark.parametrize("freedom", [1, 2, 5, 10, 20, 21, 40, 100])
def test_the_quantiles_are_students(freedom: int) -> None:
    assert timing.t95(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=0.01)


def test_the_half_width_is_that_of_the_mean() -> None:
    values = [1.0, 1.1, 0.9, 1.05]
    wanted = timing.t95(3) * statistics.stdev(values) / 2 / statistics.fmean(values)
    assert timing.relative_half_width(values) == pytest.approx(wanted)
    assert timing.relative_half_width([1.0, 1.0]) == math.inf


def test_drift_compares_the_halves() -> None:
    assert timing.drift([1.0, 1.0, 1.2, 1.2]) == pytest.approx(0.2)
    assert timing.drift([1.0]) == 0.0


def test_nothing_but_steps_is_inside_a_block_and_ranks_meet_only_between_blocks() -> None:
    log: list[str] = []

    class LoggedClock(HostClock):
        def synchronize(self) -> None:
            log.append("synchronize")

    def meet(seconds: list[float]) -> list[float]:
        log.append("meet")
        return seconds

    run_block = timing.whole_steps(lambda: log.append("step"), LoggedClock())
    timing.run_blocks(run_block, meet, Measure(min_steps=6, max_steps=6, block_s=3.0), 1.0, 6)
    assert log == ["meet", *6 * ["synchronize", "step", "synchronize", "meet"]], "a block of a quarter of the limit"


def test_a_block_takes_as_long_as_on_the_slowest_rank_and_own_samples_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0

    def step() -> None:
        nonlocal clock
        clock += 0.25

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock)
    measured = timing.run_blocks(
        timing.whole_steps(step, HostClock()), lambda own: [2 * s for s in own], Measure(min_steps=4), 0.25, 4
    )
    assert measured.block_times_s == pytest.approx([0.5] * len(measured.block_times_s))
    assert measured.own_step_times_s == pytest.approx([0.25] * measured.num_steps)


def test_all_ranks_stop_at_the_same_block_whatever_their_own_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is decided by are the numbers that all have, not a rank's own."""
    agreed = [[0.0], *([s, s] for s in (0.5, 0.9, 0.4, 0.6, 0.55, 0.5, 0.6, 0.5, 0.5, 0.6))]

    def blocks(own_s: float) -> list[int]:
        clock, answers = 0.0, iter(agreed)

        def step() -> None:
            nonlocal clock
            clock += own_s

        monkeypatch.setattr(timing.time, "perf_counter", lambda: clock)
        steps = timing.whole_steps(step, HostClock())
        return timing.run_blocks(steps, lambda _: next(answers), Measure(4, 4, 10, 0.2), 0.5, 4, 4.0).block_steps

    assert blocks(0.1) == blocks(0.25) == blocks(0.4)


def test_the_blocks_end_in_their_time_but_for_the_steps_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    noisy = [0.1, 0.5, 0.9, 0.5]
    measure = Measure(min_steps=3, max_steps=40, rel_ci=1e-6)
    assert run(measure, noisy, monkeypatch, expected_step_s=0.5, budget_s=5.0).num_steps == 10, "4.6 s; one more is 0.9"
    assert run(measure, noisy, monkeypatch, expected_step_s=0.5, budget_s=0.0).num_steps == 3
    deep = run(measure, [0.5], monkeypatch, expected_step_s=0.5, budget_s=5.0, min_steps=300)
    assert deep.num_steps == 10, "a deep queue asks for 300"
