"""One micro-step on one rank: the CPU thread, the compute stream, and the communicator, event by event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OVERLAP_STRETCH = 0.12
"""Compute beside a collective, which takes multiprocessors and bandwidth, runs so much longer."""


@dataclass(frozen=True)
class UnitTimes:
    """One FSDP unit; seconds. Under DDP, with nothing to gather."""

    forward_s: float
    backward_s: float
    """With what is computed again."""
    forward_host_s: float
    backward_host_s: float
    gather_s: float = 0.0
    regather_s: float = 0.0
    """For backward; 0 where weights were kept."""
    reduce_s: float = 0.0
    copy_out_s: float = 0.0
    """On the compute stream, from the gathered buffer into the weights."""
    copy_in_s: float = 0.0
    """On the compute stream, from the gradients into the buffer to be reduced."""
    replicate_s: float = 0.0
    """All-reduce of the reduced shard over the copies of the model, on a communicator of its own."""


@dataclass(frozen=True)
class Order:
    """When the engine issues what."""

    hook_s: float
    """Of the CPU, each time a unit begins or ends."""
    forward_ahead: int = 1
    """Gathers that may be ahead of compute."""
    forward_early: int = 0
    """Units whose gather is issued before this one's forward is launched."""
    backward_ahead: int = 1
    backward_late: bool = False
    """The next gather is issued after this unit's gradients are computed, not before."""
    blocks_host: bool = False
    """The CPU thread waits until a buffer is free, instead of the stream."""


@dataclass
class Span:
    """Where the time of one micro-step went; the parts add up to `total_s`."""

    total_s: float = 0.0
    compute_s: float = 0.0
    exposed_s: float = 0.0
    """The compute stream waited for a collective."""
    idle_s: float = 0.0
    """It waited for the CPU."""
    host_s: float = 0.0
    """When the CPU thread was done; not a part."""
    comm_s: float = 0.0
    """Collectives in flight; not a part."""


class _Streams:
    def __init__(self) -> None:
        self.host = self.gpu = self.comm = self.replica = 0.0
        self.span = Span()

    def collective(self, ready: float, seconds: float) -> float:
        """Queued on the communicator; when it ends."""
        if seconds <= 0.0:
            return ready
        self.comm = max(self.comm, ready) + seconds
        self.span.comm_s += seconds
        return self.comm

    def compute(self, gathered: float, issued: float, seconds: float) -> None:
        """Work that needs its weights and its launches."""
        start = max(self.gpu, gathered, issued)
        if start > self.gpu:
            by_network = max(0.0, gathered - max(self.gpu, issued))
            self.span.exposed_s += by_network
            self.span.idle_s += start - self.gpu - by_network
        beside = min(max(self.comm - start, 0.0), seconds)
        seconds += OVERLAP_STRETCH * beside
        self.gpu = start + seconds
        self.span.compute_s += seconds

    def launched(self, seconds: float) -> None:
        """The CPU's part of the work just queued: what it launches too slowly runs when it is launched."""
        self.host += seconds
        if self.host > self.gpu:
            self.span.idle_s += self.host - self.gpu
            self.gpu = self.host

    def wait_for(self, until: float) -> None:
        if until > self.gpu:
            self.span.exposed_s += until - self.gpu
            self.gpu = until

    def finish(self) -> Span:
        self.wait_for(max(self.comm, self.replica))
        self.span.total_s, self.span.host_s = self.gpu, self.host
        return self.span


def micro_step(
    units: Sequence[UnitTimes], root: UnitTimes, order: Order, *, gathers: bool = True, reduces: bool = True
) -> Span:
    """Runs one forward and backward of one micro-batch.

    Args:
        units: in order of execution.
        root: embedding, head and loss; its weights stay gathered between forward and backward.
        gathers: False where weights are still there from the micro-step before.
        reduces: False where gradients are held back.
    """
    streams = _Streams()
    _forward(streams, units, root, order, gathers)
    _backward(streams, units, root, order, reduces)
    return streams.finish()


def _forward(streams: _Streams, units: Sequence[UnitTimes], root: UnitTimes, order: Order, gathers: bool) -> None:
    num_units = len(units)
    arrived: list[float] = []
    begun: list[float] = []
    """When the compute of each unit began, which frees the buffer it was gathered into."""

    def issue(index: int) -> None:
        ready = streams.host
        freed = index - 1 - order.forward_ahead
        if gathers and 0 <= freed < len(begun):
            if order.blocks_host:
                streams.host = max(streams.host, begun[freed])
            ready = max(ready, begun[freed])
        arrived.append(streams.collective(ready, units[index].gather_s if gathers else 0.0))

    streams.host += order.hook_s
    there = streams.collective(streams.host, root.gather_s if gathers else 0.0)
    streams.compute(there, streams.host, root.copy_out_s)
    for index, unit in enumerate(units):
        streams.host += order.hook_s
        while len(arrived) <= min(index + order.forward_early, num_units - 1):
            issue(len(arrived))
        streams.compute(arrived[index], streams.host, (unit.copy_out_s if gathers else 0.0) + unit.forward_s)
        begun.append(streams.gpu - unit.forward_s)
        streams.launched(unit.forward_host_s)
    streams.compute(0.0, streams.host, root.forward_s)
    streams.launched(root.forward_host_s)


def _backward(streams: _Streams, units: Sequence[UnitTimes], root: UnitTimes, order: Order, reduces: bool) -> None:
    streams.compute(0.0, streams.host, root.backward_s)
    streams.launched(root.backward_host_s)
    num_units = len(units)
    arrived: dict[int, float] = {}
    reduced = 0.0

    def issue_down_to(lowest: int) -> None:
        for index in range(num_units - 1 - len(arrived), max(lowest, 0) - 1, -1):
            arrived[index] = streams.collective(streams.host, units[index].regather_s)

    for index in range(num_units - 1, -1, -1):
        unit = units[index]
        streams.host += order.hook_s
        issue_down_to(index)
        if not order.backward_late:
            issue_down_to(index - order.backward_ahead)
        copies = unit.copy_out_s if unit.regather_s else 0.0
        streams.compute(arrived[index], streams.host, copies + unit.backward_s)
        streams.launched(unit.backward_host_s)
        if order.backward_late:
            issue_down_to(index - order.backward_ahead)
        if reduces:
            reduced = _reduce(streams, unit, reduced)
    if reduces:
        _reduce(streams, root, reduced)


def _reduce(streams: _Streams, unit: UnitTimes, before: float) -> float:
    """Copies gradients in and reduces them. One buffer at a time: the copy waits for the reduction before."""
    streams.wait_for(before)
    if unit.copy_in_s:
        streams.compute(0.0, 0.0, unit.copy_in_s)
    reduced = streams.collective(streams.gpu, unit.reduce_s)
    if unit.replicate_s:
        streams.replica = max(streams.replica, reduced) + unit.replicate_s
        streams.span.comm_s += unit.replicate_s
    return reduced
