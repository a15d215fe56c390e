"""What ranks tell of the machine they run on: plain numbers, which the driver reads without loading torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

GIB, MIB = 2**30, 2**20
FOREIGN_USE_GIB = 2.0
"""In use on a GPU before the model is built: this process's own context takes less than this."""

STAGE = "doctor"
"""Of a TrialSpec: a survey, and all of this."""
Shape = tuple[int, int, int]
"""Rows, inner, columns."""


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
        return whole_cpus(self.cpus_affinity, self.cpu_quota)

    @property
    def usable_memory_gib(self) -> float:
        """The host's memory, or what a cgroup leaves of it."""
        return min(self.memory_gib, self.cgroup_memory_gib or math.inf)


def whole_cpus(affinity: int, quota: float | None) -> int:
    return affinity if quota is None else min(affinity, max(1, int(quota)))


@dataclass(frozen=True)
class Gpu:
    """One GPU, as torch lists it."""

    name: str
    sm_count: int
    memory_gib: float
    capability: str
    """Compute capability, as 9.0."""
    has_bf16: bool
    """In hardware; torch emulates it elsewhere."""


@dataclass(frozen=True)
class TorchFacts:
    """What this build of torch is, and what it sees."""

    version: str
    gpu_build: str
    """`cuda 12.8` or `hip 6.4`; empty for a CPU build."""
    nccl_version: str
    driver_version: str
    cpu_name: str
    cpu_has_bf16: bool
    """AVX512-BF16, AMX or Arm's: matmuls in bf16 are faster than in fp32, not slower."""
    gpus: list[Gpu]
    problem: str = ""
    """Why CUDA does not start, in torch's words."""


@dataclass(frozen=True)
class Bandwidth:
    """Of one rank, while all of its node measure at once; GB are 10^9 bytes."""

    copy_gb_per_s: float
    """Read + written, of a large copy inside the device's memory (on a CPU the host's)."""
    all_gather_gb_per_s: float | None
    """Bus bandwidth, as nccl-tests reckon it: received from other ranks / time. None with one rank."""
    all_gather_mib: float
    """Gathered: the largest FSDP unit, or what of it is enough."""


@dataclass(frozen=True)
class MatmulRate:
    """Dense TFLOP/s of one rank."""

    model_tflops_per_s: float
    """All FLOPs of the model's shapes / all their time."""
    best_tflops_per_s: float
    """Of the best shape, the model's or a square."""
    best_shape: Shape
    worst_tflops_per_s: float
    """Of the worst of the model's shapes."""
    worst_shape: Shape
    tokens: int
    """Rows of the forward's matmuls: those of a micro-batch."""
    is_cut: bool
    """Shapes were halved until a CPU multiplies them in a fraction of a second."""
    busy_share: float | None
    """On a CPU: CPU time / wall time of a rank's threads; under 1, others took the CPU meanwhile."""
