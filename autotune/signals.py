"""Ctrl-C, and SIGTERM of Slurm or Kubernetes: the first ends what runs in order, the second at once."""

from __future__ import annotations

import os
import signal
from typing import Any

EXIT_INTERRUPTED = 130
_ignored: set[signal.Signals] = set()
"""When this process was started, as a shell does in the background."""


def interrupt_in_order() -> None:
    """From here on the first of either raises KeyboardInterrupt in the main thread."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            _ignored.add(number)
        signal.signal(number, _interrupt)


def as_at_the_start() -> None:
    """What was ignored when this process was started is so again; the rest is as in a new process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN if number in _ignored else signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
        signal.signal(number, signal.SIG_DFL)


def _interrupt(_number: int, _frame: Any) -> None:
    for again in (signal.SIGINT, signal.SIGTERM):
        signal.signal(again, _leave_at_once)
    raise KeyboardInterrupt


def _leave_at_once(_number: int, _frame: Any) -> None:
    os._exit(EXIT_INTERRUPTED)  # the ranks die with what started them
