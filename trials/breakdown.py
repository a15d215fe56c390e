"""Where a step's time goes: interval arithmetic over what ran when. Pure; `trials.profiled` makes the events.

Each instant of the window belongs to the first of these that holds, so the fractions sum to 1:

    optimizer      compute, inside the optimizer's span
    compute        other compute
    exposed_comm   a collective, and no compute that hides it
    exposed_copy   a copy between host and device, and neither of the above
    data_wait      the trial waits for the loader, and nothing of the above runs
    idle           the rest: Python, kernel launches, synchronisation, the allocator
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

FRACTIONS = ("compute", "exposed_comm", "exposed_copy", "data_wait", "optimizer", "idle")
"""Names of the fractions, in the order in which people are shown them."""

Interval = tuple[float, float]
"""Start and end, seconds."""


class Kind(str, Enum):  # noqa: UP042 (StrEnum is 3.11; ranks may run on 3.10)
    """What an event is."""

    MATMUL = "matmul"
    """Compute whose speed the matmul units set: GEMMs and fused attention."""
    COMPUTE = "compute"
    """All other compute: mostly bound by memory bandwidth."""
    OPTIMIZER = "optimizer"
    """Compute that the optimizer asked for."""
    COMM = "comm"
    COPY = "copy"
    DATA_WAIT = "data_wait"


@dataclass(frozen=True)
class Event:
    """Something that ran from `start_s` to `end_s` on a stream or thread; they may overlap and nest in any way."""

    start_s: float
    end_s: float
    kind: Kind
    stream: int = 0


@dataclass(frozen=True)
class Breakdown:
    """Of one rank's profiled step; the six `*_s` named by FRACTIONS sum to `window_s`."""

    window_s: float
    compute_s: float
    exposed_comm_s: float
    exposed_copy_s: float
    data_wait_s: float
    optimizer_s: float
    idle_s: float
    comm_s: float
    """Collectives in flight, hidden or not."""
    non_matmul_share: float | None
    """Of the compute outside of the optimizer; None if there was none."""
    median_kernel_us: float | None = None
    """Of compute kernels; None where there are no kernels (CPU)."""

    def fractions(self) -> dict[str, float]:
        """By the names of FRACTIONS, each in [0, 1]; they sum to 1, to the last bit or two."""
        return normalised({name: getattr(self, f"{name}_s") for name in FRACTIONS})

    @property
    def own_s(self) -> float:
        """All but waiting for a collective that nothing hides: what this rank does at its own pace."""
        return self.window_s - self.exposed_comm_s

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, told: dict[str, Any] | None) -> Breakdown | None:
        """Of `to_dict`, as a history has it; None where a time is missing."""
        if told is None or any(value is None for name, value in told.items() if name.endswith("_s")):
            return None
        return cls(**told)


def normalised(seconds: dict[str, float]) -> dict[str, float]:
    """Seconds -> fractions; without any time at all, everything is idle."""
    total = math.fsum(seconds.values())
    if total <= 0:
        return {name: float(name == "idle") for name in seconds}
    fractions = {name: value / total for name, value in seconds.items()}
    # Rounding's last bit goes to the largest, where it is least.
    largest = max(fractions, key=lambda name: fractions[name])
    fractions[largest] = 1.0 - math.fsum(value for name, value in fractions.items() if name != largest)
    return fractions


def break_down(events: Iterable[Event], window: Interval, *, has_kernels: bool = False) -> Breakdown:
    """What each instant of `window` went to.

    Args:
        events: in any order; what lies outside of the window is cut off.
        has_kernels: compute events are kernels of a device, each once: their median length means something.
    """
    start, end = window
    by_kind: dict[Kind, list[Interval]] = {kind: [] for kind in Kind}
    kernels_s: list[float] = []
    for event in events:
        cut = (max(event.start_s, start), min(event.end_s, end))
        if cut[0] < cut[1]:
            by_kind[event.kind].append(cut)
            if event.kind in (Kind.MATMUL, Kind.COMPUTE):
                kernels_s.append(event.end_s - event.start_s)
    matmul = union(by_kind[Kind.MATMUL])
    model = union([*matmul, *by_kind[Kind.COMPUTE]])
    seconds: dict[str, float] = {}
    taken: list[Interval] = []
    for name, intervals in (
        ("optimizer", by_kind[Kind.OPTIMIZER]),
        ("compute", model),
        ("exposed_comm", by_kind[Kind.COMM]),
        ("exposed_copy", by_kind[Kind.COPY]),
        ("data_wait", by_kind[Kind.DATA_WAIT]),
    ):
        seconds[name] = total_s(subtract(union(intervals), taken))
        taken = union([*taken, *intervals])
    window_s = max(end - start, 0.0)
    model_s = total_s(model)
    return Breakdown(
        window_s=window_s,
        compute_s=seconds["compute"],
        exposed_comm_s=seconds["exposed_comm"],
        exposed_copy_s=seconds["exposed_copy"],
        data_wait_s=seconds["data_wait"],
        optimizer_s=seconds["optimizer"],
        idle_s=max(window_s - math.fsum(seconds.values()), 0.0),
        comm_s=total_s(union(by_kind[Kind.COMM])),
        non_matmul_share=total_s(subtract(model, matmul)) / model_s if model_s > 0 else None,
        median_kernel_us=statistics.median(kernels_s) * 1e6 if has_kernels and kernels_s else None,
    )


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same instants in disjoint intervals, in order; empty ones are dropped."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def subtract(intervals: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """What of `intervals` is not in `taken`; both as `union` gives them."""
    left: list[Interval] = []
    first = 0
    for start, end in intervals:
        while first < len(taken) and taken[first][1] <= start:
            first += 1
        position, begin = first, start
        while position < len(taken) and taken[position][0] < end:
            if begin < taken[position][0]:
                left.append((begin, taken[position][0]))
            begin = max(begin, taken[position][1])
            position += 1
        if begin < end:
            left.append((begin, end))
    return left


def total_s(intervals: Iterable[Interval]) -> float:
    """Of disjoint intervals."""
    return math.fsum(end - start for start, end in intervals)


def pacing_rank(breakdowns: Sequence[Breakdown]) -> int:
    """Position of the rank that waits least for a collective: the one that the others wait for.

    A collective ends for all ranks at once, but a rank that comes early also waits for the late ones. So of the rank
    that waits least, exposed_comm is the network alone, and its other fractions are what the gang's step is made of.
    """
    return min(range(len(breakdowns)), key=lambda rank: breakdowns[rank].exposed_comm_s)
