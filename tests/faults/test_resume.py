"""Runs that were cut short, by a signal or by SIGKILL, go on to the end and repeat nothing finished."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.history import History
from tests.cluster.conftest import rank_processes, write_job
from tests.cluster.test_run import AUTOTUNE, autotune

MEASURE = {"warmup_steps": 2, "min_steps": 3, "max_steps": 6, "rounds": 3, "num_finalists": 2}
TRIALS = 6


def start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [AUTOTUNE, "run", "job.yaml"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for(folder: Path, num_attempts: int) -> None:
    deadline = time.monotonic() + 120
    while len(list(folder.glob("run/history/*.parquet"))) < num_attempts:
        assert time.monotonic() < deadline, "the run measured nothing in two minutes"
        time.sleep(0.02)


def wait_until_gone(before: set[int]) -> float:
    started = time.monotonic()
    while rank_processes() - before:
        assert time.monotonic() < started + 60, "ranks outlived their driver by a minute"
        time.sleep(0.1)
    return time.monotonic() - started


def rows(folder: Path) -> list[dict[str, Any]]:
    found, skipped = History(folder / "run" / "history").rows()
    assert skipped == []
    return found


def identity(row: dict[str, Any]) -> str:
    return json.dumps([row["stage"], row["round"], row["knobs"]], sort_keys=True)


@pytest.mark.parametrize("after", [1, 4, 9])
def test_a_killed_driver_resumes_to_the_end_and_repeats_nothing(tmp_path: Path, after: int) -> None:
    before = rank_processes()
    write_job(tmp_path, budget={"trials": TRIALS}, measure=MEASURE, space="default")
    process = start(tmp_path)
    wait_for(tmp_path, after)
    time.sleep(random.Random(after).uniform(0.0, 0.8))  # at any moment of a trial, or between two
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    print(f"ranks gone {wait_until_gone(before):.1f} s after the driver's SIGKILL")
    finished = rows(tmp_path)

    done = autotune("run", "job.yaml", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    all_rows = rows(tmp_path)
    assert all_rows[: len(finished)] == finished, "nothing measured is lost or changed"
    once = [identity(row) for row in all_rows if row["stage"] != "round"]
    assert len(once) == len(set(once)), "nothing finished is run again"
    assert sum(row["stage"] == "explore" for row in all_rows) == TRIALS
    assert len({row["study_id"] for row in all_rows}) == 1
    assert len({row["peak_tflops_per_s"] for row in all_rows}) == 1
    numbers = [row["trial"] for row in all_rows]
    assert len(numbers) == len(set(numbers))
    assert yaml.safe_load((tmp_path / "run" / "best.yaml").read_text())["complete"] is True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_in_order_and_says_how_to_go_on(tmp_path: Path, number: signal.Signals) -> None:
    before = rank_processes()
    write_job(tmp_path, budget={"trials": TRIALS}, measure=MEASURE, space="default")
    process = start(tmp_path)
    wait_for(tmp_path, 2)
    time.sleep(0.3)
    os.kill(process.pid, number)
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


def test_another_job_in_the_folder_is_refused_with_the_difference(tmp_path: Path) -> None:
    write_job(tmp_path)
    (tmp_path / "run").mkdir()
    resolved = autotune("run", "job.yaml", "--resume", cwd=tmp_path)
    assert resolved.returncode == 2
    assert "no run there to resume" in resolved.stderr
    (tmp_path / "run" / "job.yaml").write_text(
        (tmp_path / "job.yaml").read_text().replace("seq_len: 32", "seq_len: 64")
    )
    (tmp_path / "run" / "texts").symlink_to(tmp_path / "texts")
    other = autotune("run", "job.yaml", "--resume", cwd=tmp_path)
    assert other.returncode == 2
    assert "model.seq_len: was 64, now 32" in other.stderr
