"""Each kind of trouble in one rank of a real gang: the right outcome, nothing left, the slot usable again."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import psutil
import pytest

from autotune.cluster import gang
from autotune.cluster.agent import LOG_KEEP_BYTES
from autotune.cluster.runner import SlotRunner
from tests.cluster.conftest import CONFIG, MARK, rank_processes, spec
from tests.unit.conftest import make_job
from trials.outcome import Outcome
from trials.record import TrialSpec

GENEROUS_S = 120.0
SHORT_S = 12.0
"""Deadline of a trial that is meant to run into it."""


def troubled_spec(texts: Path, trouble: str) -> TrialSpec:
    return spec(texts, workload="troubled_model:make", model={"config": CONFIG, "trouble": trouble})


TABLE = [
    # trouble, outcome, in the reason, failed rank
    ("oom_build", Outcome.OOM_DEVICE, "in build: [enforce fail", 1),
    ("oom_forward", Outcome.OOM_DEVICE, "DefaultCPUAllocator: can't allocate memory", 1),
    ("oom_backward", Outcome.OOM_DEVICE, "DefaultCPUAllocator: can't allocate memory", 1),
    ("oom_optimizer", Outcome.OOM_DEVICE, "DefaultCPUAllocator: can't allocate memory", 1),
    ("killed", Outcome.CRASHED, "rank 1 was killed by SIGKILL and left no report", 1),
    ("stopped", Outcome.TIMEOUT, "rank 1 stopped", 1),
    ("stuck", Outcome.TIMEOUT, "no end after 12 s", None),
    ("exits_0", Outcome.CRASHED, "rank 1 exited with code 0 and left no report", 1),
    ("raises", Outcome.CRASHED, "ValueError in warmup: no such thing", 1),
    ("aborts", Outcome.CRASHED, "rank 1 was killed by SIGABRT", 1),
    ("segfaults", Outcome.CRASHED, "rank 1 was killed by SIGSEGV", 1),
    ("worker_dies", Outcome.CRASHED, "DataLoader worker", 1),
    ("floods", Outcome.OK, "", None),
    ("slow_import", Outcome.OK, "", None),
]


@pytest.mark.parametrize(("trouble", "outcome", "reason", "failed_rank"), TABLE, ids=[row[0] for row in TABLE])
def test_trouble_in_one_rank(
    runner: SlotRunner,
    troubled: Path,
    tmp_path: Path,
    trouble: str,
    outcome: Outcome,
    reason: str,
    failed_rank: int | None,
) -> None:
    before = rank_processes()
    deadline_s = SHORT_S if outcome is Outcome.TIMEOUT else GENEROUS_S
    result = runner.run(troubled_spec(troubled, trouble), tmp_path, deadline_s)
    left = rank_processes() - before
    seen = "-" if result.detected_s is None else f"{result.detected_s:.2f} s"
    print(f"| {trouble} | {result.outcome} | {seen} | {len(left)} processes | {result.reason.splitlines()[:1]} |")
    assert result.outcome is outcome, result.reason
    assert reason in result.reason
    if failed_rank is not None:
        assert result.failed_rank == failed_rank
    assert left == set()
    again = runner.run(spec(troubled), tmp_path, GENEROUS_S)
    assert again.outcome is Outcome.OK, "the slot is usable again"


def test_a_flooded_log_keeps_its_beginning_and_its_end(runner: SlotRunner, troubled: Path, tmp_path: Path) -> None:
    runner.run(troubled_spec(troubled, "floods"), tmp_path, GENEROUS_S)
    log = tmp_path / "rank-1.log"
    assert log.stat().st_size < 2.1 * LOG_KEEP_BYTES
    assert b"cut out here" in log.read_bytes()


def test_a_port_that_was_taken_meanwhile_is_replaced(
    runner: SlotRunner, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendezvous, ports = gang._rendezvous, []
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()

        def first_a_taken_port(slot: gang.Slot, port: int) -> dict[str, str]:
            ports.append(taken.getsockname()[1] if not ports else port)
            return rendezvous(slot, ports[-1])

        monkeypatch.setattr(gang, "_rendezvous", first_a_taken_port)
        result = runner.run(spec(texts), tmp_path, GENEROUS_S)
    assert result.outcome is Outcome.OK, result.reason
    assert len(ports) == 2


@pytest.mark.parametrize("launcher", ["fork", "exec"])
def test_a_killed_agent_is_a_lost_node_and_takes_its_ranks_along(
    runner: SlotRunner, troubled: Path, tmp_path: Path, launcher: str
) -> None:
    before, known = rank_processes(), agents()
    other = SlotRunner(make_job(cluster={"ranks_per_node": 2, "device": "cpu", "launcher": launcher}), "cpu")
    (agent,) = agents() - known

    def kill_once_the_ranks_run() -> None:
        deadline = time.monotonic() + GENEROUS_S
        while len(rank_processes() - before) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(2.0)
        os.kill(agent, signal.SIGKILL)

    killer = threading.Thread(target=kill_once_the_ranks_run)
    killer.start()
    try:
        result = other.run(troubled_spec(troubled, "stuck"), tmp_path, GENEROUS_S)
        killer.join()
        assert result.outcome is Outcome.NODE_LOST, result.reason
        deadline = time.monotonic() + 30
        while rank_processes() - before and time.monotonic() < deadline:
            time.sleep(0.1)
        assert rank_processes() - before == set(), "ranks and their workers die with the agent"
        assert other.run(spec(troubled), tmp_path, GENEROUS_S).outcome is Outcome.OK, "a new slot takes its place"
    finally:
        other.close()


def agents() -> set[int]:
    """Pids of the Ray workers of this session that are node agents."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        is_agent = "ray::NodeAgent" in " ".join(process.info["cmdline"] or [])
        if is_agent and process.environ().get("AUTOTUNE_TESTS") == MARK:
            found.add(process.pid)
    return found
