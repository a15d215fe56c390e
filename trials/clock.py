"""Marks of time that cost nothing where they are made: they are read once the device's queue has been waited for."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    def mark(self) -> Any:
        """Notes this point of the work; waits for nothing."""
        ...

    def synchronize(self) -> None:
        """Waits for all the work so far."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks, which `synchronize` has waited for."""
        ...


class HostClock:
    """Of a rank on a CPU, which does its work itself."""

    def mark(self) -> float:
        return time.perf_counter()

    def synchronize(self) -> None:
        pass

    def seconds(self, start: float, end: float) -> float:
        return end - start


class CudaClock:
    """Events in the current stream: when the GPU gets to a mark, not when the host, which runs ahead, makes it."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1e3  # milliseconds


def clock_of(device: str) -> Clock:
    return CudaClock() if device == "cuda" else HostClock()
