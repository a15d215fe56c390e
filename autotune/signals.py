"""Ctrl-C, and SIGTERM of Slurm or Kubernetes: the first ends what runs in order, the second at once."""

from __future__ import annotations

import os
import signal
from typing import Any

EXIT_INTERRUPTED = 130


def interrupt_in_order() -> None:
    """From here on the first of either raises KeyboardInterrupt in the main thread."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


def _interrupt(_number: int, _frame: Any) -> None:
    for again in (signal.SIGINT, signal.SIGTERM):
        signal.signal(again, _leave_at_once)
    raise KeyboardInterrupt


def _leave_at_once(_number: int, _frame: Any) -> None:
    os._exit(EXIT_INTERRUPTED)  # the ranks die with what started them
