"""Runs that were cut short, by a signal or by SIGKILL, go on to the end and repeat nothing finished."""

from __future__ import annotations

import contextlib
import json
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

MEASURE = {"warmup_steps": 2, "min_steps": 3, "max_steps": 6, "rounds": 3, "num_finalists": 1}
TRIALS = 4


def start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [AUTOTUNE, "run", "job.yaml"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
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


def assert_it_goes_on(folder: Path, trials: int, *flags: str) -> None:
    """The run that was cut short in `folder` goes on to its end; nothing it measured is lost, changed or repeated."""
    finished = rows(folder)
    done = autotune("run", "job.yaml", *flags, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    all_rows = rows(folder)
    assert all_rows[: len(finished)] == finished, "nothing measured is lost or changed"
    ended = [row for row in all_rows if row["outcome"] != "interrupted"]
    once = [identity(row) for row in ended if row["stage"] != "round"]
    assert len(once) == len(set(once)), "nothing finished is run again"
    assert sum(row["stage"] == "explore" for row in ended) == trials
    assert len({row["study_id"] for row in all_rows}) == 1
    assert len({row["peak_tflops_per_s"] for row in all_rows}) == 1
    numbers = [row["trial"] for row in ended]
    assert len(numbers) == len(set(numbers))
    assert yaml.safe_load((folder / "run" / "best.yaml").read_text())["complete"] is True


def test_a_driver_killed_while_it_explores_resumes_to_the_end_and_repeats_nothing(tmp_path: Path) -> None:
    before = rank_processes()
    write_job(tmp_path, budget={"trials": TRIALS}, measure=MEASURE, space="default")
    process = start(tmp_path)
    wait_for(tmp_path, 3)
    time.sleep(random.Random(0).uniform(0.0, 0.8))  # at any moment of a trial, or between two
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    print(f"ranks gone {wait_until_gone(before):.1f} s after the driver's SIGKILL")
    assert_it_goes_on(tmp_path, TRIALS, "--resume")


def test_a_second_driver_on_a_folder_at_work_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    write_job(tmp_path, budget={"trials": TRIALS}, measure=MEASURE, space="default")
    process = start(tmp_path)
    wait_for(tmp_path, 1)
    for flags in ([], ["--resume"]):
        second = autotune("run", "job.yaml", *flags, cwd=tmp_path)
        assert second.returncode == 2, second.stdout + second.stderr
        assert "another autotune is running" in second.stderr
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert yaml.safe_load((tmp_path / "run" / "best.yaml").read_text())["complete"] is True


SHORT = {
    "batch": {"global_batch_size": 4, "target_world_size": 1},
    "cluster": {"ranks_per_node": 1, "device": "cpu", "peak_tflops_per_s": 1.0},
    "space": {"activation_checkpointing": ["none", "full"]},
    "budget": {"trials": 1},
    "measure": {"warmup_steps": 1, "min_steps": 2, "max_steps": 2, "rounds": 3, "num_finalists": 1},
}


@pytest.fixture(scope="module")
def usual_s(tmp_path_factory: pytest.TempPathFactory) -> float:
    """How long the short run takes when nobody disturbs it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_job(folder, **SHORT)
    started = time.monotonic()
    assert autotune("run", "job.yaml", cwd=folder).returncode == 0
    return time.monotonic() - started


@pytest.mark.parametrize("fifth", range(5))
def test_a_driver_killed_at_a_random_moment_resumes_to_the_end(tmp_path: Path, usual_s: float, fifth: int) -> None:
    before = rank_processes()
    write_job(tmp_path, **SHORT)
    # One moment in each fifth of a run: start-up and survey are moments like others.
    moment_s = 0.5 + (usual_s - 0.5) * (fifth + random.Random(fifth).random()) / 5
    process = start(tmp_path)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(moment_s)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    wait_until_gone(before)
    begun = (tmp_path / "run" / "job.yaml").exists()
    print(f"killed after {moment_s:.1f} s of about {usual_s:.1f} s, with {len(rows(tmp_path))} attempts in the history")
    # Before it has a folder there is nothing to resume: it is started.
    assert_it_goes_on(tmp_path, 1, *(["--resume"] if begun else []))


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
