"""Rank processes of one node: start, watch, and end them, DataLoader workers included."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Protocol

import psutil

from autotune.cluster.interpreter import OURS, Interpreter
from trials.adopted import descendants


class Launcher(Protocol):
    """Starts rank processes, each the leader of its own process group, and tells how they ended."""

    def start(self, order: dict[str, Any], env: dict[str, str], log: Path) -> int:
        """Starts one rank; returns its pid."""
        ...

    def ended(self, timeout_s: float) -> dict[int, int]:
        """Exit codes by pid of ranks that ended since the last call; waits at most `timeout_s` for the first."""
        ...

    def close(self) -> None: ...


class ExecLauncher:
    """A fresh interpreter a rank, as torchrun starts them: right for GPUs, 3 s slower on CPU.

    Args:
        module: that takes the order.
        interpreter: that runs it.
    """

    def __init__(self, module: str = "trials.entry", interpreter: Interpreter = OURS) -> None:
        self._command = interpreter.module(module)
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, order: dict[str, Any], env: dict[str, str], log: Path) -> int:
        path = Path(order["report"]).with_suffix(".order.json")
        path.write_text(json.dumps(order))
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*self._command, str(path)],
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running[process.pid] = process
        return process.pid

    def ended(self, timeout_s: float) -> dict[int, int]:
        deadline = time.monotonic() + timeout_s
        while True:
            done = {pid: p.returncode for pid, p in self._running.items() if p.poll() is not None}
            if done or time.monotonic() >= deadline:
                for pid in done:
                    del self._running[pid]
                return done
            time.sleep(0.02)

    def close(self) -> None:
        for process in self._running.values():
            process.kill()


class ForkLauncher:
    """Forks ranks from one process that has imported torch already (`trials.forkserver`); CPU ranks only.

    Args:
        env: set before the server loads its libraries, which read OMP_NUM_THREADS and the like only once.
    """

    def __init__(
        self, env: dict[str, str], log: Path, ready_timeout_s: float = 120.0, interpreter: Interpreter = OURS
    ) -> None:
        with log.open("ab") as output:
            self._server = subprocess.Popen(
                interpreter.module("trials.forkserver"),
                env={**os.environ, **env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._requests, self._answers = self._server.stdin, self._server.stdout
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._answers, selectors.EVENT_READ)
        self._pending = b""
        self._ended: dict[int, int] = {}
        self._await("ready", ready_timeout_s)

    def start(self, order: dict[str, Any], env: dict[str, str], log: Path) -> int:
        request = {"start": {"order": order, "env": env, "log": str(log)}}
        self._requests.write(json.dumps(request).encode() + b"\n")
        self._requests.flush()
        return self._await("started", 60.0)

    def ended(self, timeout_s: float) -> dict[int, int]:
        if not self._ended:
            self._read(timeout_s)
        done, self._ended = self._ended, {}
        return done

    def _await(self, key: str, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for message in self._read(deadline - time.monotonic()):
                if key in message:
                    return int(message[key])
        raise TimeoutError(f"trials.forkserver did not answer {key!r} within {timeout_s:.0f} s")

    def _read(self, timeout_s: float) -> list[dict[str, int]]:
        """New messages; those that tell of an end are kept for `ended`.

        Raises:
            EOFError: the server is gone.
        """
        if not self._selector.select(timeout_s):
            return []
        chunk = os.read(self._answers.fileno(), 65536)
        if not chunk:
            raise EOFError(f"trials.forkserver is gone (exit code {self._server.wait()})")
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        messages = [json.loads(line) for line in lines]
        for message in messages:
            if "ended" in message:
                self._ended[message["ended"]] = message["exit_code"]
        return messages

    def close(self) -> None:
        self._requests.close()
        try:
            self._server.wait(5.0)
        except subprocess.TimeoutExpired:
            self._server.kill()


def kill_groups(leaders: list[int], timeout_s: float = 20.0) -> list[int]:
    """SIGKILLs all that descends from `leaders`, then their process groups, and waits until they are gone, up to
    `timeout_s` for either.

    Descendants first: some may lead groups of their own (torchrun's ranks), and while their ancestor lives, which is
    given its orphans, all can be found.

    Returns:
        Pids of members that are still there after `timeout_s`; empty when all is clean.
    """
    deadline = time.monotonic() + timeout_s
    while (left := [pid for leader in leaders for pid in _living(descendants(leader))]) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    deadline = time.monotonic() + timeout_s
    for leader in leaders:
        try:
            os.killpg(leader, signal.SIGKILL)
        except ProcessLookupError:
            continue
    while (members := group_members(leaders)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return sorted({*_living(left), *members})


def _living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if process_state(pid) not in ("", psutil.STATUS_ZOMBIE)]


def group_members(leaders: list[int]) -> list[int]:
    """Living processes (no zombies) whose process group is led by one of `leaders`."""
    wanted = set(leaders)
    members = []
    for pid in psutil.pids():
        try:
            if os.getpgid(pid) in wanted and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                members.append(pid)
        except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            continue
    return members


def process_state(pid: int) -> str:
    """What the kernel says of a process: sleeping, running, stopped, ...; empty if it is gone."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return ""
