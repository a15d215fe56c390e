"""What a machine allows the processes on it, as one of them sees it: CPUs, memory, limits, packages. No torch here."""

from __future__ import annotations

import math
import os
import platform
import resource
import shutil
import socket
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from trials import cgroup

GIB, MIB = 2**30, 2**20
PACKAGES = ("fsdp-autotune", "torch", "ray", "optuna", "pyarrow", "numpy", "transformers", "tokenizers")
COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True)
class Machine:
    """One node, by a process on it."""

    host: str
    cpus_online: int
    cpus_affinity: int
    """That this process may run on."""
    cpu_quota: float | None
    """CPUs' worth of time that its cgroups allow; None without a quota."""
    memory_gib: float
    memory_available_gib: float
    cgroup_memory_gib: float | None
    """None without a limit."""
    shm_free_mib: float | None
    """Of /dev/shm; None where it is missing or cannot be written."""
    limits: dict[str, int | None]
    """Soft RLIMITs: `as` and `data` in bytes, `nofile` in file descriptors, `nproc` in processes and threads of the
    user, `memlock` in bytes; None without a limit."""
    max_tasks: int | None
    """Processes and threads that the cgroups allow in all; None without a limit."""
    is_root: bool
    """Whom `nproc` does not bind."""
    has_gpu: bool
    """The kernel has a device of NVIDIA's or AMD's, whatever torch can use."""
    compiler: str | None
    """C++, which torch.compile calls on a CPU."""
    python: str
    versions: dict[str, str]
    """Of the packages that are installed."""

    @property
    def cpus_allowed(self) -> int:
        return _whole_cpus(self.cpus_affinity, self.cpu_quota)

    @property
    def usable_memory_gib(self) -> float:
        """The host's memory, or what a cgroup leaves of it."""
        return min(self.memory_gib, self.cgroup_memory_gib or math.inf)


def examine() -> Machine:
    """This machine, by this process."""
    memory_bytes = _memory_bytes()
    cgroup_bytes = cgroup.memory_limit_bytes()
    return Machine(
        host=socket.gethostname(),
        cpus_online=os.cpu_count() or 1,
        cpus_affinity=len(os.sched_getaffinity(0)),
        cpu_quota=cgroup.cpu_quota(),
        memory_gib=memory_bytes["MemTotal"] / GIB,
        memory_available_gib=memory_bytes["MemAvailable"] / GIB,
        cgroup_memory_gib=cgroup_bytes / GIB if cgroup_bytes is not None else None,
        shm_free_mib=_shm_free_mib(),
        limits={name: _soft_limit(name) for name in ("as", "data", "nofile", "nproc", "memlock")},
        max_tasks=cgroup.max_tasks(),
        is_root=os.geteuid() == 0,
        has_gpu=has_gpu(),
        compiler=next(filter(None, map(shutil.which, COMPILERS)), None),
        python=platform.python_version(),
        versions=_versions(),
    )


def has_gpu() -> bool:
    """Whether the kernel has a GPU of NVIDIA's or AMD's for this process, whatever torch can use."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()


def cpus_allowed() -> int:
    """CPUs this process may use, by affinity and by the cgroups' quota."""
    return _whole_cpus(len(os.sched_getaffinity(0)), cgroup.cpu_quota())


def _whole_cpus(affinity: int, quota: float | None) -> int:
    return affinity if quota is None else min(affinity, max(1, int(quota)))


def _memory_bytes() -> dict[str, int]:
    lines = (line.partition(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in lines}


def _shm_free_mib(shm: Path = Path("/dev/shm")) -> float | None:
    if not os.access(shm, os.W_OK):
        return None
    return shutil.disk_usage(shm).free / MIB


def _soft_limit(name: str) -> int | None:
    soft, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
    return None if soft == resource.RLIM_INFINITY else soft


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
