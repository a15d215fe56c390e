"""A real memory cgroup that a rank outgrows: the kernel's OOM killer ends it, and the outcome says so."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from autotune.cluster.runner import SlotRunner
from tests.cluster.conftest import rank_processes, spec
from tests.faults.test_gang_faults import GENEROUS_S, agents, troubled_spec
from tests.unit.conftest import make_job
from trials import cgroup
from trials.outcome import Outcome

LIMIT_BYTES = 600 * 2**20
"""What two ranks of the tiny model and their agent take besides is under a third of it."""


@pytest.fixture
def small_host() -> Iterator[Path]:
    """A memory cgroup below this process's own, with a limit."""
    found = [(is_v1, folder) for is_v1, folder in cgroup.folders("memory") if folder.exists()]
    if not found:
        pytest.skip("no memory cgroup is mounted")
    is_v1, own = found[0]
    group = own / f"autotune-test-{os.getpid()}"
    limit = "memory.limit_in_bytes" if is_v1 else "memory.max"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs the right to make a memory cgroup: {error}")
    try:
        if not (group / limit).exists():
            pytest.skip("cgroup v2 hands the memory controller on only from a cgroup without processes")
        (group / limit).write_text(str(LIMIT_BYTES))
        yield group
    finally:
        deadline = time.monotonic() + 30
        while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        group.rmdir()


def test_a_rank_that_the_oom_killer_ends_is_out_of_host_memory(
    runner: SlotRunner, troubled: Path, tmp_path: Path, small_host: Path
) -> None:
    before, known = rank_processes(), agents()
    other = SlotRunner(make_job(cluster={"ranks_per_node": 2, "device": "cpu"}), "cpu")
    try:
        (agent,) = agents() - known
        for process in (psutil.Process(agent), *psutil.Process(agent).children(recursive=True)):
            (small_host / "cgroup.procs").write_text(str(process.pid))
        result = other.run(troubled_spec(troubled, "eats_memory"), tmp_path, GENEROUS_S)
        print(f"{result.outcome}, detected after {result.detected_s} s: {result.reason}")
        assert result.outcome is Outcome.OOM_HOST, result.reason
        assert result.reason == "the kernel's OOM killer ended rank 1: host memory"
        assert result.failed_rank == 1
        killed = other.run(troubled_spec(troubled, "killed"), tmp_path, GENEROUS_S)
        assert killed.outcome is Outcome.CRASHED, "a SIGKILL of somebody else's is no out-of-memory"
        assert "rank 1 was killed by SIGKILL" in killed.reason
        assert other.run(spec(troubled), tmp_path, GENEROUS_S).outcome is Outcome.OK, "the slot is usable again"
    finally:
        other.close()
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(agent).wait(30)
    assert rank_processes() - before == set()
