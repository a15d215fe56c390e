"""Processes that a command leaves behind: torchrun gives each of its ranks a session of its own, out of reach of a kill
of its process group. A subreaper is given every orphan below it, and can end them all. Linux only."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_PAUSE_S = 0.02


def become_subreaper() -> None:
    """Orphans among this process's descendants become its own children, and not init's."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children(pid: int | None = None) -> list[int]:
    """Pids of the living and dead children of a process; by default of this one."""
    parent = os.getpid() if pid is None else pid
    found = []
    for entry in os.listdir("/proc"):  # noqa: PTH208 (names, not paths, and thousands of them)
        if entry.isdigit() and _parent_of(entry) == parent:
            found.append(int(entry))
    return found


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on."""
    parents = {int(entry): _parent_of(entry) for entry in os.listdir("/proc") if entry.isdigit()}  # noqa: PTH208
    found, grown = {pid}, True
    while grown:
        more = {child for child, parent in parents.items() if parent in found} - found
        grown = bool(more)
        found |= more
    return sorted(found - {pid})


def _parent_of(entry: str) -> int | None:
    try:
        # The name in brackets may hold anything, brackets too.
        return int(Path("/proc", entry, "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None


def end_children(timeout_s: float = 10.0) -> list[int]:
    """SIGKILLs and reaps all children of this process, and what they leave to a subreaper.

    Returns:
        Pids that are still there after `timeout_s`; empty when all is clean.
    """
    deadline = time.monotonic() + timeout_s
    while left := children():
        for pid in left:
            _kill(pid)
        reap()
        if time.monotonic() > deadline:
            return children()
        time.sleep(_PAUSE_S)
    return []


def reap() -> dict[int, int]:
    """Takes leave of children that have ended.

    Returns:
        Their exit codes by pid; a negative one is the signal that ended it.
    """
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if not pid:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
