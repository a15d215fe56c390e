"""Throughput of a running configuration: whole optimizer steps, in blocks, slowest rank, until the mean is known."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trials.record import Measure

if TYPE_CHECKING:
    from trials.clock import Clock

# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom (NIST e-Handbook, table 1.3.6.7.2).
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip

TIMED_SHARE = 0.7
"""Of a trial's time: its timed blocks end by then. The rest is for what follows them: memory, profile, FLOPs."""
DRAIN_SHARE = 0.25
"""Of the time left for draining the loader's queue and timing: the timed steps take three times as many batches."""
QUEUES_TIMED = 3
"""Times what the loader's queue holds: so many batches are timed, so that what is left in the queue counts little."""
NOT_SUSTAINED = (
    "a trial's loader was too slow, or its queue (num_workers x prefetch_factor) too deep, to be emptied "
    "and timed three times over in measure.trial_timeout_s: its throughput may be the queue's and not the "
    "loader's (loader_sustained in the history); raise measure.trial_timeout_s, or search shorter queues"
)
MOST_PROFILED_MICRO_STEPS = 32
"""Of a composed trial's whole step: each event of it becomes a Python object on every rank. Finalists are profiled
whatever they accumulate."""
PROFILED_STEPS = 4
"""Steps that a short and a whole one under the profiler may take."""


@dataclass
class Timing:
    block_times_s: list[float] = field(default_factory=list)
    """Seconds per optimizer step of each block, slowest rank."""
    block_steps: list[int] = field(default_factory=list)
    own_step_times_s: list[float] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        return sum(self.block_steps)


Block = tuple[float, list[float]]
"""Of some steps on this rank: seconds of all, and of each."""


def whole_steps(step: Callable[[], None], clock: Clock) -> Callable[[int], Block]:
    """Runs so many optimizer steps as they are. A block is timed from an empty queue of the device to an empty one."""

    def run(count: int) -> Block:
        clock.synchronize()
        started = time.perf_counter()
        marks = [clock.mark()]
        for _ in range(count):
            step()
            marks.append(clock.mark())
        clock.synchronize()
        block_s = time.perf_counter() - started
        return block_s, [clock.seconds(start, end) for start, end in itertools.pairwise(marks)]

    return run


def run_blocks(
    run: Callable[[int], Block],
    slowest: Callable[[list[float]], list[float]],
    measure: Measure,
    expected_step_s: float,
    min_steps: int,
    budget_s: float = math.inf,
    now: Callable[[], float] | None = None,
) -> Timing:
    """Times blocks of steps until the mean block time is known within `measure.rel_ci`, or `max_steps`.

    Nothing but the steps runs inside a block: ranks meet, and decide together, only at its end.

    Args:
        run: runs a block of so many steps (`whole_steps`).
        slowest: maxima over ranks of some numbers of seconds; a collective.
        expected_step_s: what `run` takes for one; the same on all ranks; sizes the blocks.
        min_steps: more than `measure.min_steps` where a loader's queue must not carry the blocks.
        budget_s: the blocks end in this time, the same on all ranks; only `measure.min_steps` come before it.
        now: seconds by the clock on which `run` takes time; default: the host's.
    """
    now = now or time.perf_counter
    limit = max(measure.max_steps, min_steps)
    # Four blocks at least: an interval needs a few.
    steps_per_block = max(1, min(round(measure.block_s / max(expected_step_s, 1e-9)), limit // 4))
    timing = Timing()
    spent_s, longest_s = 0.0, expected_step_s
    slowest([0.0])  # start together
    while timing.num_steps < limit:
        count = min(steps_per_block, limit - timing.num_steps)
        if timing.num_steps >= measure.min_steps and spent_s + count * longest_s > budget_s:
            break
        started = now()
        own_s, own_step_times_s = run(count)
        block_s, took_s = slowest([own_s, now() - started])
        spent_s, longest_s = spent_s + took_s, max(longest_s, took_s / count)
        timing.own_step_times_s.extend(own_step_times_s)
        timing.block_times_s.append(block_s / count)
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
