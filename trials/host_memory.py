"""What a rank and its DataLoader workers take of the host's memory, and whether it goes on growing. Linux only."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from trials import cgroup

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
LEAST_GROWTH_BYTES = 8 * 2**20
"""From one third of the steps to the next; below, allocators and page faults grow as much by themselves."""


def resident_bytes(pids: Sequence[int]) -> int:
    """Resident memory of processes; one that has ended counts nothing. What they share is counted for each."""
    total = 0
    for pid in pids:
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def available_bytes() -> int:
    """What this host, or the container's limit, still has to give."""
    found = [
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    ]
    left = cgroup.memory_left_bytes()
    return max(0, min(found if left is None else [*found, left]))


FEWEST_STEPS = 30
"""Before memory is said to grow: a run that has just begun still reaches pages it has not touched, and fills caches."""


def growth_bytes_per_step(samples: Sequence[int]) -> float | None:
    """What memory grows by from step to step; 0 where it does not go on growing, None where that cannot be told.

    The smaller of the two growths between the medians of successive thirds: memory that rises once, or levels off,
    shows in one of them alone; a leak shows in both.

    Args:
        samples: one a step, in bytes; fewer than `FEWEST_STEPS` say nothing.
    """
    if len(samples) < FEWEST_STEPS:
        return None
    third = len(samples) // 3
    first, second, last = (
        statistics.median(part) for part in (samples[:third], samples[third : 2 * third], samples[-third:])
    )
    growth = min(second - first, last - second)
    return growth / third if growth >= LEAST_GROWTH_BYTES else 0.0
