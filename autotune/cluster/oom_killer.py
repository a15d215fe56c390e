"""How often the kernel's OOM killer has struck: what tells a rank that died for want of memory from a `kill -9`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def oom_kills(proc: Path = Path("/proc")) -> int:
    """Processes that the kernel has killed for memory in this process's cgroup; outside of any, on this host.

    Only the difference of two readings means anything; without a counter that can be read it is 0.
    """
    for counter in (*_memory_cgroup_counters(proc), proc / "vmstat"):
        for line in _lines(counter):
            name, _, number = line.partition(" ")
            if name == "oom_kill" and number.isdigit():
                return int(number)
    return 0


def _memory_cgroup_counters(proc: Path) -> Iterator[Path]:
    """Where the kernel counts, nearest first: of cgroup v1, which a hybrid host has for memory, and of v2."""
    mounts = [line.split() for line in _lines(proc / "self" / "mountinfo")]
    own = [line.split(":", 2) for line in _lines(proc / "self" / "cgroup")]
    for file_system, name in (("cgroup", "memory.oom_control"), ("cgroup2", "memory.events")):
        is_v1 = file_system == "cgroup"
        for fields in mounts:
            root, mount, kind, options = fields[3], Path(fields[4]), fields[-3], fields[-1].split(",")
            if kind != file_system or (is_v1 and "memory" not in options):
                continue
            for _, controllers, path in own:
                if "memory" in controllers.split(",") if is_v1 else not controllers:
                    # A container sees its own part of the tree: the mount's root is named from the host's.
                    inside = path.removeprefix(root if root != "/" else "").strip("/")
                    folder = mount / inside
                    # A cgroup v2 without the memory controller is counted with its parent.
                    yield from (above / name for above in (folder, *folder.parents) if above.is_relative_to(mount))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
