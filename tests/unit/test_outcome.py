"""How failures are told apart, on a rank and over the gang."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
import torch
from torch.distributed import DistBackendError
from torch.utils.data import DataLoader, Dataset

from trials.outcome import Outcome, RankEnd, TrialError, classify_exception, combine

CPU_OOM = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"


NCCL = "NCCL error in: NCCLUtils.hpp:268, unhandled cuda error (run with NCCL_DEBUG=INFO), NCCL version 2.26"
IN_A_WORKER = "Caught {0} in DataLoader worker process 1.\nOriginal Traceback (most recent call last):\n  ..\n{0}: {1}"


@pytest.mark.parametrize(
    ("error", "device", "outcome"),
    [
        # the CUDA allocator
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "cuda", Outcome.OOM_DEVICE),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0)"), "cuda", Outcome.OOM_DEVICE),
        # the CUDA driver, beside the allocator
        (torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors"), "cuda", Outcome.OOM_DEVICE),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), "cuda", Outcome.OOM_DEVICE),
        (RuntimeError("CUDA driver error: out of memory"), "cuda", Outcome.OOM_DEVICE),
        (RuntimeError("CUDA driver error: invalid argument"), "cuda", Outcome.CRASHED),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "cuda", Outcome.CRASHED),
        # NCCL's own buffers
        (DistBackendError(f"{NCCL}\nCuda failure 2 'out of memory'"), "cuda", Outcome.OOM_DEVICE),
        (RuntimeError(f"{NCCL}\nCuda failure 'out of memory'"), "cuda", Outcome.OOM_DEVICE),
        (RuntimeError(f"{NCCL}\nHIP failure 'out of memory'"), "cuda", Outcome.OOM_DEVICE),
        (DistBackendError(f"{NCCL}\nCuda failure 'peer access is not supported'"), "cuda", Outcome.CRASHED),
        # cuBLAS
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "cuda", Outcome.OOM_DEVICE),
        (RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling"), "cuda", Outcome.OOM_DEVICE),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling"), "cuda", Outcome.CRASHED),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "cuda", Outcome.OOM_DEVICE),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "cuda", Outcome.CRASHED),
        # Triton
        (RuntimeError("Triton Error [CUDA]: out of memory"), "cuda", Outcome.OOM_DEVICE),
        (RuntimeError("Triton Error [CUDA]: invalid argument"), "cuda", Outcome.CRASHED),
        # HIP
        (RuntimeError("HIP out of memory. Tried to allocate 2 GiB"), "cuda", Outcome.OOM_DEVICE),
        (RuntimeError("HIP error: out of memory"), "cuda", Outcome.OOM_DEVICE),
        # the CPU allocator, C++ and Python
        (RuntimeError(CPU_OOM), "cpu", Outcome.OOM_DEVICE),
        (RuntimeError(CPU_OOM), "cuda", Outcome.OOM_HOST),
        (RuntimeError("std::bad_alloc"), "cpu", Outcome.OOM_DEVICE),
        (RuntimeError("std::bad_alloc"), "cuda", Outcome.OOM_HOST),
        (RuntimeError("could not create a memory object"), "cpu", Outcome.OOM_DEVICE),
        (MemoryError(), "cpu", Outcome.OOM_DEVICE),
        (MemoryError(), "cuda", Outcome.OOM_HOST),
        (OSError(12, "Cannot allocate memory"), "cpu", Outcome.OOM_DEVICE),
        (OSError(2, "No such file"), "cpu", Outcome.CRASHED),
        # a DataLoader worker's memory is the host's, and under no trial's limit
        (MemoryError(IN_A_WORKER.format("MemoryError", "")), "cpu", Outcome.OOM_HOST),
        (RuntimeError(IN_A_WORKER.format("RuntimeError", CPU_OOM)), "cpu", Outcome.OOM_HOST),
        (RuntimeError(IN_A_WORKER.format("RuntimeError", "no such column")), "cpu", Outcome.CRASHED),
        # a limit on threads or processes: the kernel does not say whether it was memory
        (RuntimeError("can't start new thread"), "cpu", Outcome.CRASHED),
        (RuntimeError("can't start new thread"), "cuda", Outcome.CRASHED),
        (BlockingIOError(11, "Resource temporarily unavailable"), "cpu", Outcome.CRASHED),
        # texts that only speak of it
        (ValueError("the docs say: CUDA out of memory. Tried to allocate"), "cuda", Outcome.CRASHED),
        (RuntimeError("my retry saw 'CUDA out of memory. Tried' and gave up"), "cuda", Outcome.CRASHED),
        (RuntimeError("the queue is out of memory slots"), "cuda", Outcome.CRASHED),
        (RuntimeError("std::bad_alloc is what my parser throws"), "cpu", Outcome.CRASHED),
        (ValueError("CUDA out of memory. Tried to allocate"), "cuda", Outcome.CRASHED),
        (RuntimeError("shapes do not match"), "cpu", Outcome.CRASHED),
        (KeyboardInterrupt(), "cpu", Outcome.CRASHED),
        (TrialError(Outcome.MISAPPLIED, "asked 1"), "cpu", Outcome.MISAPPLIED),
    ],
)
def test_an_exception_is_classified_by_type_and_its_own_words(
    error: BaseException, device: str, outcome: Outcome
) -> None:
    assert classify_exception(error, device) is outcome


def test_an_out_of_memory_is_seen_through_what_was_raised_from_it() -> None:
    outer = RuntimeError("backward failed")
    outer.__cause__ = MemoryError()
    assert classify_exception(outer, "cpu") is Outcome.OOM_DEVICE


def test_a_real_failed_allocation_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert classify_exception(caught.value, "cpu") is Outcome.OOM_DEVICE


class TooLarge(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.empty(2**60, dtype=torch.uint8)


def test_a_real_failed_allocation_in_a_loaders_worker_is_the_hosts() -> None:
    with pytest.raises(RuntimeError) as caught:
        next(iter(DataLoader(TooLarge(), num_workers=1, multiprocessing_context="fork")))
    assert classify_exception(caught.value, "cpu") is Outcome.OOM_HOST


OK0 = RankEnd(0, 0, Outcome.OK, ended_s=9.0)
CLOSED = RankEnd(
    1, 70, Outcome.CRASHED, "RuntimeError in timed: [../gloo/pair.cc:1] Connection closed by peer", "RuntimeError", 1.0
)
OOM = RankEnd(0, 78, Outcome.OOM_DEVICE, "MemoryError in timed", "MemoryError", 1.2)
ABORTED = RankEnd(1, -signal.SIGABRT, ended_s=0.5)
KILLED = RankEnd(1, -signal.SIGKILL, ended_s=1.0)
WORKER_KILLED = RankEnd(
    1, 70, Outcome.CRASHED, "RuntimeError in timed: DataLoader worker (pid(s) 7) exited unexpectedly", "RuntimeError", 1
)


@pytest.mark.parametrize(
    ("ends", "timed_out", "outcome", "rank", "reason"),
    [
        ([OK0, RankEnd(1, 0, Outcome.OK)], False, Outcome.OK, None, ""),
        ([OOM, CLOSED], False, Outcome.OOM_DEVICE, 0, "MemoryError in timed"),
        ([OOM, ABORTED], False, Outcome.OOM_DEVICE, 0, "MemoryError"),
        ([OK0, KILLED], False, Outcome.CRASHED, 1, "rank 1 was killed by SIGKILL and left no report"),
        ([OK0, replace(KILLED, oom_kills=1)], False, Outcome.OOM_HOST, 1, "the kernel's OOM killer ended rank 1: host"),
        ([replace(CLOSED, rank=0), replace(KILLED, oom_kills=2)], False, Outcome.OOM_HOST, 1, "OOM killer"),
        ([RankEnd(0, None), replace(KILLED, oom_kills=1)], True, Outcome.OOM_HOST, 1, "OOM killer"),
        ([OOM, replace(KILLED, oom_kills=1)], False, Outcome.OOM_DEVICE, 0, "MemoryError"),
        ([OK0, replace(WORKER_KILLED, oom_kills=1)], False, Outcome.OOM_HOST, 1, "a DataLoader worker of rank 1"),
        ([OK0, WORKER_KILLED], False, Outcome.CRASHED, 1, "exited unexpectedly"),
        # The OOM killer took somebody else: what this rank says of itself stands.
        ([OK0, RankEnd(1, 70, Outcome.CRASHED, "bug", "KeyError", 1.0, oom_kills=1)], False, Outcome.CRASHED, 1, "bug"),
        ([OK0, RankEnd(1, -11, oom_kills=1, ended_s=1.0)], False, Outcome.CRASHED, 1, "killed by SIGSEGV"),
        # Aborted at a memory limit or for another reason: not known, so no other config is ruled out by it.
        ([OK0, ABORTED], False, Outcome.CRASHED, 1, "rank 1 was killed by SIGABRT and left no report"),
        ([RankEnd(0, -9, ended_s=2.0), CLOSED], False, Outcome.CRASHED, 0, "rank 0 was killed by SIGKILL"),
        ([RankEnd(0, None), RankEnd(1, None)], True, Outcome.TIMEOUT, None, "no end after 5 s"),
        ([RankEnd(0, None), RankEnd(1, None, state="stopped")], True, Outcome.TIMEOUT, 1, "rank 1 stopped"),
        ([OK0, RankEnd(1, None)], True, Outcome.TIMEOUT, 1, "no end after 5 s"),
        ([RankEnd(0, 3, ended_s=1.0), RankEnd(1, None)], True, Outcome.CRASHED, 0, "exited with code 3"),
        ([RankEnd(0, 0, ended_s=1.0), CLOSED], False, Outcome.CRASHED, 0, "left no report"),
        (
            [RankEnd(0, 70, Outcome.MISAPPLIED, "num_workers: asked 1", "TrialError", 2.0), CLOSED],
            False,
            Outcome.MISAPPLIED,
            0,
            "num_workers",
        ),
    ],
)
def test_the_gangs_cause_is_not_what_its_peers_saw(
    ends: list[RankEnd], timed_out: bool, outcome: Outcome, rank: int | None, reason: str
) -> None:
    found = combine(ends, timed_out, 5.0)
    assert found[0] is outcome
    assert found[2] == rank
    assert reason in found[1]
