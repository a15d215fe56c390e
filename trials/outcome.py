"""How an attempt ended, and why: pure functions, used on the rank and by the driver.

A failure is classified on the rank by exception type, then by the message's own form, then (for a rank that left
no report) by exit code; never by searching a log. Over the gang an out-of-memory is the cause whatever the peers
say, since a peer only sees the connection close.

What cannot be told for sure is `crashed`: that rules out one config, a false out-of-memory all that take more. So
* a SIGKILL is out of memory only if the kernel's OOM killer has struck on that node meanwhile;
* a SIGABRT without a report is not, although C++ code and OpenMP abort at a memory limit, too: the words they leave
  are in a log, and gloo aborts likewise for other reasons;
* "can't start new thread" is not: the kernel answers so for a limit on processes as for one on memory.
"""

from __future__ import annotations

import errno
import re
import signal
from dataclasses import dataclass
from enum import Enum


class Outcome(str, Enum):  # noqa: UP042 (StrEnum is 3.11; ranks may run on 3.10)
    OK = "ok"
    OOM_DEVICE = "oom_device"
    OOM_HOST = "oom_host"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    NODE_LOST = "node_lost"
    INVALID = "invalid"
    MISAPPLIED = "misapplied"
    TOO_SHORT = "too_short"
    WRONG_NUMERICS = "wrong_numerics"
    UNCLEAN_DEVICE = "unclean_device"
    INTERRUPTED = "interrupted"
    STORAGE_FAILED = "storage_failed"
    PREDICTED_OOM = "predicted_oom"
    """Proposed by the search, and not tried."""

    def __str__(self) -> str:
        return self.value


OUT_OF_MEMORY = frozenset({Outcome.OOM_DEVICE, Outcome.OOM_HOST})
INFRASTRUCTURE = frozenset({Outcome.NODE_LOST, Outcome.UNCLEAN_DEVICE, Outcome.INTERRUPTED})
"""Outcomes that say nothing about the config, on a machine that is to blame; only these are tried again."""
NOT_OF_THE_CONFIG = INFRASTRUCTURE | {Outcome.STORAGE_FAILED}
"""Outcomes that say nothing about the config. A disk that is full is full at the next attempt too."""

OF_THE_WORKLOAD = frozenset(
    {Outcome.CRASHED, Outcome.INVALID, Outcome.MISAPPLIED, Outcome.WRONG_NUMERICS, Outcome.TOO_SHORT}
)
"""Of a config that its user chose: the model or the settings are wrong."""

VANISHED = "Vanished"
"""In the place of an error's type: a rank of a user's own command began, and left no word. Its launcher's exit code
says nothing of it."""
EXIT_OOM = 78
EXIT_FAILED = 70


class TrialError(Exception):
    """A failure whose outcome the rank knows already."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


# The allocators' own words, at the start of the message: a text that only quotes them is no out-of-memory.
_DEVICE_ALLOCATOR = re.compile(
    r"(CUDA out of memory\. Tried"
    r"|HIP out of memory\. Tried"
    r"|(CUDA|HIP)( driver)? error: out of memory"
    r"|Triton Error \[(CUDA|HIP)\]: out of memory"
    r"|cuDNN error: CUDNN_STATUS_ALLOC_FAILED"
    r"|(CUDA|HIP) error: (CU|HIP)BLAS_STATUS_ALLOC_FAILED"
    r"|NCCL [\s\S]*(Cuda|HIP) failure (2 )?'out of memory')"
)
_HOST_ALLOCATOR = re.compile(
    r"(\[enforce fail at [^\]]*\] [\s\S]{0,80}DefaultCPUAllocator: (can't allocate memory|not enough memory)"
    r"|DefaultCPUAllocator: (can't allocate memory|not enough memory)"
    r"|std::bad_alloc\s*$"
    r"|could not create a memory object)"
)
_IN_A_WORKER = re.compile(r"Caught (\w+) in DataLoader worker process \d+\.\n")
_WORKER_DIED = re.compile(r"DataLoader worker \(pid\S* [^)]*\) (is killed by signal: Killed|exited unexpectedly)")
_CONNECTION = re.compile(
    r"(Connection (reset|closed|refused)|Broken pipe|\[[^\]]*gloo[^\]]*\][\s\S]*(closed by peer|reset by peer|timed out"
    r"|Timed out)|NCCL communicator was aborted|Socket Timeout)",
    re.IGNORECASE,
)


def classify_exception(error: BaseException, device: str) -> Outcome:
    """The outcome that `error`, or what it was raised from, stands for on a rank of `device` (`cpu` or `cuda`).

    On `cpu` the memory limit plays the part of the device's memory, so a failed host allocation is `oom_device`; but
    a DataLoader worker's memory is the host's everywhere.
    """
    seen: BaseException | None = error
    while seen is not None:
        message = str(seen)
        worker = _IN_A_WORKER.match(message)
        if worker:  # torch raises the worker's error again, with the worker's traceback for a message
            message = message.rpartition(f"\n{worker[1]}: ")[2]
        host = Outcome.OOM_DEVICE if device == "cpu" and not worker else Outcome.OOM_HOST
        if isinstance(seen, TrialError):
            return seen.outcome
        if type(seen).__name__ == "OutOfMemoryError":
            return Outcome.OOM_DEVICE
        if isinstance(seen, MemoryError) or (isinstance(seen, OSError) and seen.errno == errno.ENOMEM):
            return host
        if isinstance(seen, RuntimeError):
            if _DEVICE_ALLOCATOR.match(message):
                return Outcome.OOM_DEVICE
            if _HOST_ALLOCATOR.match(message):
                return host
        seen = seen.__cause__
    return Outcome.CRASHED


def is_secondary(error_type: str, message: str) -> bool:
    """Whether a failure is only the echo of a peer's: a closed connection, a lost collective."""
    return error_type in ("DistBackendError", "DistNetworkError", "ConnectionError") or bool(
        _CONNECTION.search(message)
    )


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended, as its node's agent saw it."""

    rank: int
    exit_code: int | None
    """None: it was still running when the deadline passed, or its peers had failed."""
    outcome: Outcome | None = None
    """From the rank's own report; None if it left none."""
    reason: str = ""
    error_type: str = ""
    ended_s: float = float("inf")
    """Seconds after the start of the gang."""
    state: str = ""
    """Of a rank that was still running: sleeping, running, stopped, ... as the kernel says."""
    oom_kills: int = 0
    """Processes of the rank's node that the kernel's OOM killer has ended while the gang ran."""


def describe_exit(exit_code: int | None) -> str:
    if exit_code is None:
        return "was still running"
    if exit_code < 0:
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:
            name = f"signal {-exit_code}"
        return f"was killed by {name}"
    return f"exited with code {exit_code}"


def combine(ends: list[RankEnd], timed_out: bool, timeout_s: float) -> tuple[Outcome, str, int | None]:
    """The gang's outcome, its reason, and the rank that caused it (None if all is well).

    Ranked: out of memory; a rank that knows what was wrong; a deadline; the earliest failure that is not the echo
    of a peer's; the earliest failure.
    """
    failed = sorted(
        (end for end in ends if end.outcome is not Outcome.OK or end.exit_code != 0),
        key=lambda end: end.ended_s,
    )
    for end in failed:
        if end.outcome in OUT_OF_MEMORY:
            return end.outcome, end.reason, end.rank
    for end in failed:
        killed = _killed_for_memory(end)
        if killed:
            return Outcome.OOM_HOST, f"the kernel's OOM killer ended {killed}: host memory", end.rank
    for end in failed:
        if end.outcome not in (None, Outcome.OK, Outcome.CRASHED):
            return end.outcome, end.reason, end.rank
    own = [end for end in failed if end.exit_code is not None and not _is_echo(end)]
    if timed_out and not own:
        running = [end for end in ends if end.exit_code is None]
        stopped = [end for end in running if end.state == "stopped"]
        # One that is stuck in its own code looks like those that wait for it.
        suspects = stopped or (running if len(running) == 1 else [])
        stuck = suspects[0].rank if suspects else None
        states = ", ".join(f"rank {end.rank} {end.state}" for end in running if end.state)
        return Outcome.TIMEOUT, f"no end after {timeout_s:.0f} s" + (f": {states}" if states else ""), stuck
    if failed:
        cause = own[0] if own else failed[0]
        reason = cause.reason or f"rank {cause.rank} {describe_exit(cause.exit_code)} and left no report"
        return Outcome.CRASHED, reason, cause.rank
    return Outcome.OK, "", None


def _killed_for_memory(end: RankEnd) -> str:
    """What of a rank the kernel's OOM killer ended; empty if nothing."""
    killed = end.outcome is None and end.exit_code == -signal.SIGKILL
    if end.oom_kills and (killed or end.error_type == VANISHED):
        return f"rank {end.rank}"
    if end.oom_kills and _WORKER_DIED.search(end.reason):
        return f"a DataLoader worker of rank {end.rank}"
    return ""


def _is_echo(end: RankEnd) -> bool:
    # gloo aborts a peer whose collective no longer matches: SIGABRT without a report.
    return end.exit_code == -signal.SIGABRT or is_secondary(end.error_type, end.reason)
