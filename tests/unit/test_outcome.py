"""How failures are told apart, on a rank and over the gang."""

from __future__ import annotations

import signal

import pytest
import torch

from trials.outcome import Outcome, RankEnd, TrialError, classify_exception, combine

CPU_OOM = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"


@pytest.mark.parametrize(
    ("error", "device", "outcome"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "cuda", Outcome.OOM_DEVICE),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0)"), "cuda", Outcome.OOM_DEVICE),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), "cuda", Outcome.OOM_DEVICE),
        (RuntimeError("HIP out of memory. Tried to allocate 2 GiB"), "cuda", Outcome.OOM_DEVICE),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "cuda", Outcome.OOM_DEVICE),
        (RuntimeError("NCCL error in: x.cpp:1, Cuda failure 2 'out of memory'"), "cuda", Outcome.OOM_DEVICE),
        (RuntimeError(CPU_OOM), "cpu", Outcome.OOM_DEVICE),
        (RuntimeError(CPU_OOM), "cuda", Outcome.OOM_HOST),
        (RuntimeError("std::bad_alloc"), "cpu", Outcome.OOM_DEVICE),
        (RuntimeError("CUDA driver error: out of memory"), "cuda", Outcome.OOM_DEVICE),
        (OSError(12, "Cannot allocate memory"), "cpu", Outcome.OOM_DEVICE),
        (OSError(2, "No such file"), "cpu", Outcome.CRASHED),
        (MemoryError(), "cpu", Outcome.OOM_DEVICE),
        (MemoryError(), "cuda", Outcome.OOM_HOST),
        (ValueError("the docs say: CUDA out of memory. Tried to allocate"), "cuda", Outcome.CRASHED),
        (RuntimeError("my retry saw 'CUDA out of memory. Tried' and gave up"), "cuda", Outcome.CRASHED),
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


OK0 = RankEnd(0, 0, Outcome.OK, ended_s=9.0)
CLOSED = RankEnd(
    1, 70, Outcome.CRASHED, "RuntimeError in timed: [../gloo/pair.cc:1] Connection closed by peer", "RuntimeError", 1.0
)
OOM = RankEnd(0, 78, Outcome.OOM_DEVICE, "MemoryError in timed", "MemoryError", 1.2)
ABORTED = RankEnd(1, -signal.SIGABRT, ended_s=0.5)


@pytest.mark.parametrize(
    ("ends", "timed_out", "outcome", "rank", "reason"),
    [
        ([OK0, RankEnd(1, 0, Outcome.OK)], False, Outcome.OK, None, ""),
        ([OOM, CLOSED], False, Outcome.OOM_DEVICE, 0, "MemoryError in timed"),
        ([OOM, ABORTED], False, Outcome.OOM_DEVICE, 0, "MemoryError"),
        ([OK0, RankEnd(1, -9, ended_s=1.0)], False, Outcome.CRASHED, 1, "killed by SIGKILL"),
        ([RankEnd(0, -9, ended_s=2.0), CLOSED], False, Outcome.CRASHED, 0, "rank 0 was killed by SIGKILL"),
        ([RankEnd(0, None), RankEnd(1, None)], True, Outcome.TIMEOUT, 0, "no end after 5 s"),
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
