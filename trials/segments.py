"""What ranks take of the memory that RLIMIT_DATA limits, seen from outside: CPU ranks of a user's own trainer."""

from __future__ import annotations

import json
import os
from pathlib import Path

from trials.adopted import descendants

GIB = 2**30


class Segments:
    """Samples the data segments (VmData) of ranks, whose processes the probe names.

    Args:
        logs: the probe's file by rank.
    """

    def __init__(self, logs: dict[int, Path]) -> None:
        self._logs = logs
        self._pids: dict[int, int] = {}
        self._base: dict[int, int] = {}
        self._peak: dict[int, int] = {}

    def sample(self, limit_gib: float | None) -> None:
        """Takes the present sizes of those ranks that have begun."""
        for rank in self._logs:
            pid = self._pids.get(rank) or self._find(rank)
            size = _bytes_of(pid, "status", "VmData:", 1024) if pid else None
            if size is None or pid is None:
                continue
            if rank not in self._base:
                # The limit was set at what the rank held when the probe attached.
                limit = _bytes_of(pid, "limits", "Max data size", 1) if limit_gib is not None else None
                self._base[rank] = size if limit is None else limit - round((limit_gib or 0.0) * GIB)
            self._peak[rank] = max(self._peak.get(rank, 0), size)

    def growth_bytes(self, rank: int) -> int | None:
        """The largest since the probe attached; None: the rank was never seen."""
        return max(0, self._peak[rank] - self._base[rank]) if rank in self._base else None

    def _find(self, rank: int) -> int | None:
        try:
            with self._logs[rank].open() as log:
                pid = int(json.loads(log.readline())["pid"])
        except (OSError, ValueError, KeyError):
            return None  # not begun, or half a line
        if pid not in descendants(os.getpid()):
            return None  # in a container's own numbers, which name another process here
        self._pids[rank] = pid
        return pid


def _bytes_of(pid: int, file: str, name: str, unit: int) -> int | None:
    try:
        for line in Path("/proc", str(pid), file).read_text().splitlines():
            if line.startswith(name):
                value = line[len(name) :].split()[0]
                return int(value) * unit if value.isdigit() else None
    except (OSError, IndexError):
        return None
    return None
