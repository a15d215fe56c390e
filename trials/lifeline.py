"""A rank must not outlive what started it: on a GPU it would hold the memory that the next trial needs."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Asks the kernel to signal this process when its parent ends, however it ends. Linux only."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the kernel was asked
        os.kill(os.getpid(), number)
