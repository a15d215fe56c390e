"""Time as a run sees it: the machine's own, or a simulated cluster's, on which nothing sleeps."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """The two of `time` that a run asks; the module itself is the real clock."""

    def monotonic(self) -> float:
        """Seconds since some moment."""
        ...

    def time(self) -> float:
        """Seconds since the epoch."""
        ...
