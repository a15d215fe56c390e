"""How often the kernel's OOM killer has struck: what tells a rank that died for want of memory from a `kill -9`."""

from __future__ import annotations

from pathlib import Path

from trials.cgroup import folders, read_lines


def oom_kills(proc: Path = Path("/proc")) -> int:
    """Processes that the kernel has killed for memory in this process's cgroup; outside of any, on this host.

    Only the difference of two readings means anything; without a counter that can be read it is 0.
    """
    # Where the kernel counts, nearest first.
    counters = [
        folder / ("memory.oom_control" if is_v1 else "memory.events") for is_v1, folder in folders("memory", proc)
    ]
    for counter in (*counters, proc / "vmstat"):
        for line in read_lines(counter):
            name, _, number = line.partition(" ")
            if name == "oom_kill" and number.isdigit():
                return int(number)
    return 0
