"""What a machine allows the processes on it, as one of them sees it: CPUs, memory, limits, packages. No torch here."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
from importlib import metadata
from pathlib import Path

from trials import cgroup
from trials.facts import GIB, MIB, Machine, whole_cpus

PACKAGES = ("fsdp-autotune", "torch", "ray", "optuna", "pyarrow", "numpy", "transformers", "tokenizers")
COMPILERS = ("c++", "g++", "clang++")


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
    return whole_cpus(len(os.sched_getaffinity(0)), cgroup.cpu_quota())


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


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
