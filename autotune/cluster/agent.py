"""One node's agent: owns the node's devices and the rank processes of the present trial."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from autotune.cluster.interpreter import OURS, Interpreter
from autotune.cluster.oom_killer import oom_kills
from autotune.cluster.processes import ExecLauncher, ForkLauncher, Launcher, kill_groups, process_state
from trials.command_env import prepare_node
from trials.record import TrialSpec

LOG_KEEP_BYTES = 1024 * 1024
"""Kept of each end of a log that is longer than twice this."""


@dataclass(frozen=True)
class NodeFacts:
    """Who a node is."""

    node_id: str
    """Ray's own; several nodes may run on one host."""
    host: str
    address: str
    """IP by which Ray's other nodes reach it."""
    interface: str | None
    """Network interface that carries the address; None if none does."""


@dataclass
class NodeStatus:
    """What `poll` answers."""

    running: list[int]
    """Ranks still running."""
    exits: dict[int, tuple[int, float]]
    """Exit code, and seconds after the start, of each rank that has ended."""


@dataclass
class NodeRecord:
    """What is left of a gang on one node once all its processes are gone."""

    exits: dict[int, tuple[int | None, float]]
    """As in NodeStatus; an exit code of None means that the agent had to kill the rank."""
    reports: dict[int, str]
    """JSON of each rank that wrote a report."""
    logs: dict[int, str] = field(default_factory=dict)
    """End of each rank's output, if it could not be written to the driver's folder directly."""
    states: dict[int, str] = field(default_factory=dict)
    """What each rank that had to be killed was doing, as the kernel says: sleeping, stopped, ..."""
    leftover_pids: list[int] = field(default_factory=list)
    """Processes that could not be ended."""
    oom_kills: int = 0
    """Processes that the kernel's OOM killer has ended here while the gang ran."""


class NodeAgent:
    """Runs inside a Ray actor; one a node. Knows nothing of Optuna or of the study.

    Args:
        device: `cpu` or `cuda`.
        launcher: `fork` (CPU ranks from a warm server) or `exec` (a fresh interpreter a rank).
        threads_per_rank: OMP_NUM_THREADS of CPU ranks.
        interpreter: of the ranks; a user's own command is started by ours all the same.
    """

    def __init__(self, device: str, launcher: str, threads_per_rank: int = 1, interpreter: Interpreter = OURS) -> None:
        # Ray's workers may have inherited the driver's mask (slots.py); what ranks start must end by SIGTERM as usual.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self._scratch = Path(tempfile.mkdtemp(prefix="autotune-"))
        prepare_node(self._scratch)
        self._env: dict[str, str] = {"OMP_NUM_THREADS": str(threads_per_rank)} if device == "cpu" else {}
        self._ranks_env = self._env | interpreter.environment(self._scratch)
        self._ranks: Launcher = (
            ForkLauncher(self._ranks_env, self._scratch / "forkserver.log", interpreter=interpreter)
            if launcher == "fork"
            else ExecLauncher(interpreter=interpreter)
        )
        self._commands = ExecLauncher("trials.command")
        self._launcher: Launcher = self._ranks
        """The one that started the present gang."""
        self._pids: dict[int, int] = {}
        self._exits: dict[int, tuple[int, float]] = {}
        self._logs: dict[int, Path] = {}
        self._remote_log: set[int] = set()
        self._started = 0.0
        self._oom_kills_before = 0

    def describe(self) -> NodeFacts:
        """Who this node is, and how other nodes reach it."""
        import ray

        address = ray.util.get_node_ip_address()
        # A user who has set it in the environment of `ray start` knows better.
        interface = os.environ.get("GLOO_SOCKET_IFNAME") or interface_of(address)
        return NodeFacts(ray.get_runtime_context().get_node_id(), socket.gethostname(), address, interface)

    def free_port(self) -> int:
        """A TCP port that was free a moment ago."""
        with socket.socket() as sock:
            sock.bind(("", 0))
            return int(sock.getsockname()[1])

    def start(self, spec_json: str, ranks: list[int], env: dict[str, str], log_dir: str) -> None:
        """Starts `ranks` (global numbers) of a trial on this node; local rank is the position in the list.

        Args:
            log_dir: the trial's folder as the driver names it; written to directly if it exists here.
        """
        assert not self._pids, "the slot still holds a gang"
        self._exits, self._logs, self._remote_log = {}, {}, set()
        self._started = time.monotonic()
        self._oom_kills_before = oom_kills()
        trainer = TrialSpec.from_json(spec_json).trainer
        self._launcher = self._ranks if trainer is None else self._commands
        own_env = self._ranks_env if trainer is None else self._env
        shared = Path(log_dir)
        folder = shared if shared.is_dir() else self._scratch
        # A command that starts its own ranks is one process for all of them, with one log.
        at_once = len(ranks) if trainer is not None and trainer["launcher"] == "self" else 1
        for local_rank in range(0, len(ranks), at_once):
            together = ranks[local_rank : local_rank + at_once]
            rank = together[0]
            if folder is self._scratch:
                self._remote_log.add(rank)
            self._logs[rank] = folder / f"rank-{rank}.log"
            order = {
                "spec": spec_json,
                "report": str(self._report_path(rank)),
                "reports": {str(one): str(self._report_path(one)) for one in together},
                "scratch": str(self._scratch),
                "folder": str(folder) if folder is shared else None,
            }
            rank_env = {**own_env, **env, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
            pid = self._launcher.start(order, rank_env, self._logs[rank])
            self._pids |= dict.fromkeys(together, pid)

    def poll(self, timeout_s: float) -> NodeStatus:
        """Waits at most `timeout_s` for a rank to end."""
        for pid, code in self._launcher.ended(timeout_s).items():
            ended = code, time.monotonic() - self._started
            self._exits |= {rank: ended for rank, its_pid in self._pids.items() if its_pid == pid}
        return NodeStatus([rank for rank in self._pids if rank not in self._exits], dict(self._exits))

    def finish(self) -> NodeRecord:
        """Ends whatever the gang left, DataLoader workers included, and hands over its reports."""
        ended_s = time.monotonic() - self._started
        states = {rank: process_state(pid) for rank, pid in self._pids.items() if rank not in self._exits}
        leftover = kill_groups(list(set(self._pids.values())))
        exits: dict[int, tuple[int | None, float]] = {
            rank: self._exits.get(rank, (None, ended_s)) for rank in self._pids
        }
        self._launcher.ended(0.0)  # the ranks just killed
        record = NodeRecord(exits, {}, {}, states, leftover, oom_kills() - self._oom_kills_before)
        for rank in self._pids:
            path = self._report_path(rank)
            if path.exists():
                record.reports[rank] = path.read_text()
                path.unlink()
        for rank in self._logs:
            shorten(self._logs[rank])
            if rank in self._remote_log and self._logs[rank].exists():
                record.logs[rank] = self._logs[rank].read_text(errors="replace")
                self._logs[rank].unlink()
        for left in self._scratch.glob("trial-*"):  # of a command that was ended
            shutil.rmtree(left, ignore_errors=True)
        self._pids = {}
        return record

    def close(self) -> None:
        self.finish()
        for launcher in (self._ranks, self._commands):
            launcher.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _report_path(self, rank: int) -> Path:
        return self._scratch / f"rank-{rank}.json"


def interface_of(address: str) -> str | None:
    """The network interface of this machine that carries an IP address."""
    for interface, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return str(interface)
    return None


def shorten(log: Path, keep_bytes: int = LOG_KEEP_BYTES) -> None:
    """Cuts the middle out of a log that a rank has flooded; its beginning and its end are what people read."""
    if not log.exists() or log.stat().st_size <= 2 * keep_bytes:
        return
    with log.open("rb+") as file:
        file.seek(-keep_bytes, 2)
        end = file.read()
        file.seek(keep_bytes)
        file.write(b"\n... cut out here by autotune: the rank printed too much ...\n" + end)
        file.truncate()


def as_actor() -> Any:
    """NodeAgent as a Ray actor class."""
    import ray

    return ray.remote(NodeAgent)
