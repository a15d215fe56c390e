"""One line on the real run: its throughput beside the promise, and what is otherwise than when it was measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.report.text import count, gib, percent, rate
from autotune.verify.promise import Promise
from autotune.verify.watched import Rank, Stretch
from trials.probe_log import differences

GIB = 2**30
A_TIE = 0.02
"""Of throughput, where a single run is all that the promise is made of."""
WAITS_MORE = 0.05
"""Of a step: a rank that waits for batches so much longer than the middle one does not wait as the others do."""


@dataclass(frozen=True)
class HostMemory:
    """Of the ranks of this host and their loaders' workers."""

    resident_bytes: int
    growth_bytes_per_s: float | None
    """None: not known yet; 0: it does not go on growing."""
    available_bytes: int


def stretch_line(when: str, stretch: Stretch, promise: Promise, ranks: Sequence[Rank], host: HostMemory | None) -> str:
    """For the screen and the log.

    Args:
        when: `step 200`, `after 3 h 00 min, step 9,310`.
        ranks: of this host.
    """
    parts = [_throughput(stretch, promise), *_waits(stretch, promise), *_late(stretch)]
    parts += [*_memory(ranks, promise), *_host(host)]
    return f"{when}: {'; '.join(parts)}"


def _throughput(stretch: Stretch, promise: Promise) -> str:
    own, rates = stretch.tokens_per_s_per_rank, promise.rates
    if own is None:
        return f"{stretch.step_s:.3g} s a step; tokens could not be counted"
    off = round(100 * (own / rates.mean - 1), 1) + 0.0  # never -0.0
    shown = f"{rate(own)} tokens/s per rank, {off:+.1f} % of the {rate(rates.mean)} promised"
    if rates.low is None or rates.high is None:
        low, high, interval = rates.mean * (1 - A_TIE), rates.mean * (1 + A_TIE), "one run, no interval"
    else:
        low, high = rates.low, rates.high
        interval = f"95 % of runs {rate(low)} to {rate(high)}"
    verdict = "below the promise" if own < low else "above the promise" if own > high else "as promised"
    return f"{shown} ({interval}): {verdict}"


def _waits(stretch: Stretch, promise: Promise) -> list[str]:
    shares = stretch.wait_shares
    if not shares:
        return []
    worst = max(shares, key=shares.__getitem__)
    then = f" (was {percent(promise.data_wait_share)})" if promise.data_wait_share is not None else ""
    said = [f"data wait {percent(shares[worst])} of the step{then}"]
    middle = statistics.median(shares.values()) if len(shares) > 2 else min(shares.values())
    if shares[worst] - middle >= WAITS_MORE:
        said.append(f"straggler: rank {worst} waits for its loader, the middle one {percent(middle)}")
    return said


def _late(stretch: Stretch) -> list[str]:
    if stretch.late is None:
        return []
    number, share, lateness = stretch.late
    return [f"straggler: rank {number} ends last in {100 * share:.0f} % of the steps, by {percent(lateness)} of one"]


def _memory(ranks: Sequence[Rank], promise: Promise) -> list[str]:
    events = [rank.log.memory for rank in ranks if rank.log.memory is not None]
    reserved = [event["device_reserved"] for event in events if event["device_reserved"] is not None]
    retries = max((event["alloc_retries"] for event in events), default=0)
    said = []
    if reserved:
        then = f" (was {gib(promise.reserved_gib)})" if promise.reserved_gib is not None else ""
        said.append(f"memory {gib(max(reserved) / GIB)} reserved{then}")
    if retries:
        said.append(f"the allocator had to begin anew {count(retries, 'time')}")
    return said


def _host(host: HostMemory | None) -> list[str]:
    if host is None:
        return []
    said = f"host memory {gib(host.resident_bytes / GIB)}"
    growth = host.growth_bytes_per_s
    if not growth:
        return [said + (", not growing" if growth == 0 else "")]
    hours = host.available_bytes / growth / 3600
    return [f"{said}, growing by {gib(growth * 3600 / GIB)} an hour: full in {hours:,.1f} hours"]


def difference_lines(ranks: Sequence[Rank], promise: Promise, world_size: int) -> list[str]:
    """What the real run applied otherwise than the promise was measured with."""
    said = []
    if world_size != promise.world_size:
        said.append(f"{count(world_size, 'rank')}; the promise was measured on {promise.world_size}")
    logs = [rank.log for rank in ranks if rank.log.applied is not None]
    found, _unread = differences(logs, promise.asked(world_size) | {"world_size": world_size})
    said += [f"not as promised: {difference}" for difference in found]
    return said
