"""This process's control groups, in each form the kernel has them, and the limits they set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_UNLIMITED_BYTES = 2**60
"""cgroup v1 has no word for it: a number that no machine has."""


def folders(controller: str, proc: Path = Path("/proc")) -> Iterator[tuple[bool, Path]]:
    """Folders that rule this process for `controller`, nearest first, each with whether it is cgroup v1's.

    A hybrid host, which has both, keeps its controllers in v1: that comes first.
    """
    mounts = [line.split() for line in read_lines(proc / "self" / "mountinfo")]
    own = [line.split(":", 2) for line in read_lines(proc / "self" / "cgroup")]
    for file_system in ("cgroup", "cgroup2"):
        is_v1 = file_system == "cgroup"
        for fields in mounts:
            root, mount, kind, options = fields[3], Path(fields[4]), fields[-3], fields[-1].split(",")
            if kind != file_system or (is_v1 and controller not in options):
                continue
            for _, controllers, path in own:
                if controller in controllers.split(",") if is_v1 else not controllers:
                    # A container sees its own part of the tree: the mount's root is named from the host's.
                    inside = path.removeprefix(root if root != "/" else "").strip("/")
                    folder = mount / inside
                    # A cgroup v2 without the controller is ruled by its parent.
                    yield from ((is_v1, above) for above in (folder, *folder.parents) if above.is_relative_to(mount))


def read_lines(path: Path) -> list[str]:
    """Lines of a file of the kernel's; none where it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def memory_limit_bytes(proc: Path = Path("/proc")) -> int | None:
    """The least that any of this process's cgroups allows; None without a limit."""
    found = _numbers("memory", "memory.limit_in_bytes", "memory.max", proc)
    return min((limit for limit in found if limit < _UNLIMITED_BYTES), default=None)


def memory_left_bytes(proc: Path = Path("/proc")) -> int | None:
    """The least that any of this process's cgroups still has to give; None without a limit."""
    left = []
    for is_v1, folder in folders("memory", proc):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_v1 else ("memory.max", "memory.current")
        limit, used = ("".join(read_lines(folder / name)) for name in names)
        if limit.isdigit() and used.isdigit() and int(limit) < _UNLIMITED_BYTES:
            left.append(int(limit) - int(used))
    return min(left, default=None)


def max_tasks(proc: Path = Path("/proc")) -> int | None:
    """Processes and threads that the cgroups allow in all; None without a limit."""
    return min(_numbers("pids", "pids.max", "pids.max", proc), default=None)


def cpu_quota(proc: Path = Path("/proc")) -> float | None:
    """CPUs' worth of time that the cgroups allow; None without a quota."""
    quotas = []
    for is_v1, folder in folders("cpu", proc):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_v1 else ("cpu.max",)
        words = " ".join(line for name in names for line in read_lines(folder / name)).split()
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit():  # v1 says -1, v2 max, where there is none
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _numbers(controller: str, v1_name: str, v2_name: str, proc: Path) -> list[int]:
    texts = [read_lines(folder / (v1_name if is_v1 else v2_name)) for is_v1, folder in folders(controller, proc)]
    return [int(lines[0]) for lines in texts if lines and lines[0].isdigit()]
