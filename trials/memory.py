"""A real memory limit on a rank, and what a configuration really takes.

On CUDA the caching allocator has both. On CPU the limit is RLIMIT_DATA: the kernel refuses to grow the data segment,
so a config that does not fit fails in the real allocator. What counts against the limit is the data segment; what
repeats exactly is MemTracker's count of live tensor bytes. They are two scales: `allocated` is MemTracker's,
`reserved` the growth of the data segment, which is what the limit judges.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from trials.collectives import all_gather_single, reduce_scatter_single
from trials.facts import FOREIGN_USE_GIB
from trials.outcome import Outcome, TrialError

GIB = 2**30
_STATUS = Path("/proc/self/status")
_SAMPLE_INTERVAL_S = 0.002
_GRAIN_SIZE = 32768
"""Elements that torch gives an OpenMP thread at least (at::internal::GRAIN_SIZE)."""


def data_segment_bytes() -> int:
    """VmData of this process: what RLIMIT_DATA limits. Linux only."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no VmData in {_STATUS}")


def use_threads_once() -> None:
    """A backward, and collectives enough to occupy each of gloo's threads, on tensors that OpenMP shares out.

    A thread's first use takes memory. At the limit, where there is none, glibc and libgomp end the process by
    themselves: no exception, no report.
    """
    size = 2 * _GRAIN_SIZE * torch.get_num_threads()
    torch.ones(size, requires_grad=True).square().sum().backward()  # type: ignore[no-untyped-call]
    if dist.is_initialized():
        part, whole = torch.ones(size), torch.ones(size * dist.get_world_size())
        works = [all_gather_single(whole.clone(), part, async_op=True) for _ in range(8)]
        works += [reduce_scatter_single(part.clone(), whole, async_op=True) for _ in range(8)]
        for work in works:
            work.wait()


class CpuLimit:
    """RLIMIT_DATA at the present data segment + `limit_bytes`, until `lift`; samples the segment's growth."""

    def __init__(self, limit_bytes: int | None) -> None:
        # What threads take at their first use is no part of the config.
        use_threads_once()
        self.peak_growth_bytes = 0
        self._sampling = threading.Event()
        threading.Thread(target=self._sample, daemon=True).start()
        self.base_bytes = data_segment_bytes()
        if limit_bytes is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (self.base_bytes + limit_bytes, hard))

    def lift(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))

    def watch(self, steps: Callable[[], None]) -> None:
        """Runs untimed `steps` while a thread samples the data segment; the largest growth is kept."""
        self._sampling.set()
        try:
            steps()
        finally:
            self._sampling.clear()
        self.note()

    def _sample(self) -> None:
        while self._sampling.wait():
            self.note()
            time.sleep(_SAMPLE_INTERVAL_S)

    def note(self) -> None:
        """Takes a sample of the data segment now."""
        self.peak_growth_bytes = max(self.peak_growth_bytes, data_segment_bytes() - self.base_bytes)


def tracked_peak_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[Callable[[], None]], None]
) -> int:
    """Peak live tensor bytes on this rank in one step, by MemTracker; the same at every repeat.

    Slower than a plain step, and never inside one that is timed.

    Args:
        step: runs an optimizer step, and calls its argument before each micro-step (the tracker refuses a second
            forward of a module otherwise).
    """
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        step(tracker.reset_mod_stats)
    peak = tracker.get_tracker_snapshot("peak")
    return max((snapshot["Total"] for snapshot in peak.values()), default=0)


def gpu_used_gib() -> float:
    """In use on this rank's GPU, by whomever."""
    free, total = torch.cuda.mem_get_info()
    return float(total - free) / GIB


def refuse_a_busy_gpu() -> None:
    """Another process's memory would be taken for this config's.

    Raises:
        TrialError: outcome `unclean_device`.
    """
    used_gib = gpu_used_gib()
    if used_gib > FOREIGN_USE_GIB:
        raise TrialError(
            Outcome.UNCLEAN_DEVICE,
            f"{used_gib:.1f} GiB of the GPU are in use before the model is built; see nvidia-smi",
        )


def limit_cuda(limit_bytes: int | None) -> None:
    """Caps the caching allocator; the context and NCCL's buffers are outside it, which is what the headroom is for."""
    if limit_bytes is not None:
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total))


def cuda_peaks() -> tuple[int, int, int]:
    """Peak allocated bytes, peak reserved bytes, and allocator retries since the last `reset_peak_memory_stats`."""
    stats = torch.cuda.memory_stats()
    return (
        int(stats["allocated_bytes.all.peak"]),
        int(stats["reserved_bytes.all.peak"]),
        int(stats["num_alloc_retries"]),
    )
