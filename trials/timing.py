"""Throughput of a running configuration: whole optimizer steps, in blocks, slowest rank, until the mean is known."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from trials.record import Measure

# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom (NIST e-Handbook, table 1.3.6.7.2).
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip


@dataclass
class Timing:
    block_times_s: list[float] = field(default_factory=list)
    """Seconds per optimizer step of each block, slowest rank."""
    block_steps: list[int] = field(default_factory=list)
    own_step_times_s: list[float] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        return sum(self.block_steps)


def run_blocks(
    step: Callable[[], None],
    synchronize: Callable[[], None],
    slowest: Callable[[float], float],
    measure: Measure,
    expected_step_s: float,
    min_steps: int,
) -> Timing:
    """Times blocks of whole steps until the mean block time is known within `measure.rel_ci`, or `max_steps`.

    Nothing but the step runs inside a block: ranks meet, and decide together, only at its end.

    Args:
        synchronize: waits for the device's queue (nothing on CPU).
        slowest: maximum over ranks of a number of seconds; a collective.
        expected_step_s: the same on all ranks; sizes the blocks.
    """
    limit = max(measure.max_steps, min_steps)
    # Four blocks at least: an interval needs a few.
    steps_per_block = max(1, min(round(measure.block_s / max(expected_step_s, 1e-9)), limit // 4))
    timing = Timing()
    slowest(0.0)  # start together
    while timing.num_steps < limit:
        count = min(steps_per_block, limit - timing.num_steps)
        synchronize()
        started = last = time.perf_counter()
        for _ in range(count):
            step()
            now = time.perf_counter()
            timing.own_step_times_s.append(now - last)
            last = now
        synchronize()
        timing.block_times_s.append(slowest(time.perf_counter() - started) / count)
        timing.block_steps.append(count)
        if timing.num_steps >= min_steps and relative_half_width(timing.block_times_s) <= measure.rel_ci:
            break
    return timing


def t95(degrees_of_freedom: int) -> float:
    return _T95[degrees_of_freedom - 1] if degrees_of_freedom <= len(_T95) else 1.96 + 2.5 / degrees_of_freedom


def relative_half_width(values: list[float]) -> float:
    """Half-width of the 95 % interval of the mean over the mean; infinite below three values.

    Blocks of one run are correlated, so this says when to stop, not how far two configs differ (verdict.py does).
    """
    if len(values) < 3:
        return math.inf
    return t95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values)) / statistics.fmean(values)


def mean_step_s(block_times_s: list[float], block_steps: list[int]) -> float:
    """All timed seconds over all timed steps."""
    return sum(t * n for t, n in zip(block_times_s, block_steps, strict=True)) / sum(block_steps)


def drift(block_times_s: list[float]) -> float:
    """Second half of the blocks over the first half, minus 1; 0 with fewer than two blocks."""
    half = len(block_times_s) // 2
    if half == 0:
        return 0.0
    return statistics.fmean(block_times_s[-half:]) / statistics.fmean(block_times_s[:half]) - 1
