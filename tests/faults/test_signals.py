"""Signals end a run in order: ranks gone, history and best.yaml written, the command to go on printed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from tests.cluster.conftest import rank_processes, write_job
from tests.cluster.test_run import autotune
from tests.faults.test_gang_faults import agents
from tests.faults.test_resume import (
    MEASURE,
    TRIALS,
    assert_it_goes_on,
    identity,
    rows,
    start,
    wait_for,
    wait_until_gone,
)


def test_a_second_sigterm_leaves_at_once_and_leaves_no_ranks(tmp_path: Path) -> None:
    before, known = rank_processes(), agents()
    write_job(tmp_path, budget={"trials": TRIALS}, measure=MEASURE, space="default")
    process = start(tmp_path)
    wait_for(tmp_path, 2)
    (agent,) = agents() - known
    os.kill(agent, signal.SIGSTOP)  # so that to end in order takes long
    try:
        sent = 0
        while process.poll() is None:
            assert sent < 60, "still there after 60 signals in a minute"
            process.send_signal(signal.SIGTERM)
            sent += 1
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(agent, signal.SIGCONT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert sent >= 2
    assert "the ranks are gone" not in errors, "it did not wait for the end in order"
    print(f"ranks gone {wait_until_gone(before):.1f} s after signal {sent}")
    assert_it_goes_on(tmp_path, TRIALS, "--resume")


@pytest.mark.parametrize(
    ("number", "to"),
    [(signal.SIGINT, "process group"), (signal.SIGTERM, "driver"), (signal.SIGTERM, "process group")],
    ids=["ctrl-c", "kubernetes", "slurm"],
)
def test_a_signal_ends_in_order_and_says_how_to_go_on(tmp_path: Path, number: signal.Signals, to: str) -> None:
    before = rank_processes()
    write_job(tmp_path, budget={"trials": TRIALS}, measure=MEASURE, space="default")
    process = start(tmp_path)
    wait_for(tmp_path, 2)
    time.sleep(0.3)
    (os.kill if to == "driver" else os.killpg)(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "autotune run run/job.yaml --resume" in errors
    wait_until_gone(before)
    assert yaml.safe_load((tmp_path / "run" / "best.yaml").read_text())["complete"] is False
    stopped = rows(tmp_path)

    done = autotune("run", "run/job.yaml", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for row in stopped:
        later = [r for r in rows(tmp_path) if identity(r) == identity(row) and r["outcome"] != "interrupted"]
        assert len(later) == 1, "what was interrupted is run again, and only that"
