"""A confirmation that is cut short, by a signal or since what measures dies: whether the real run then starts."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import yaml

from autotune.history import History
from tests.cluster.conftest import rank_processes
from tests.cluster.test_run import AUTOTUNE
from tests.cluster.tuned import EXIT_CODE, real_run, started, tune
from tests.faults.test_resume import wait_until_gone


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("confirmed")
    tune(folder)
    return folder


def begin(folder: Path, num_rows: int) -> subprocess.Popen[str]:
    """A confirmation that has gone on until it has written so many rows."""
    (folder / "started.json").unlink(missing_ok=True)
    before = len(list(folder.glob("run/history/*.parquet")))
    process = subprocess.Popen(
        # More rounds than there is patience for: only what is done to it ends it.
        [AUTOTUNE, "confirm", "run", "--set", "measure.rounds=99", *real_run("{held}")],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while len(list(folder.glob("run/history/*.parquet"))) < before + num_rows:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    return process


def measuring(process: subprocess.Popen[str]) -> psutil.Process:
    (found,) = (
        child for child in psutil.Process(process.pid).children() if "autotune.confirm.measuring" in child.cmdline()
    )
    return found


def test_if_the_process_that_measures_dies_the_real_run_starts_with_the_baseline(folder: Path) -> None:
    before = rank_processes()
    process = begin(folder, 2)
    measuring(process).kill()
    output, said = process.communicate(timeout=60)
    assert process.returncode == EXIT_CODE, said
    assert output == "the real run's own output\n"
    got = started(folder)
    assert got is not None
    assert got["words"] == ["baseline"]
    assert "the measuring process was killed by SIGKILL" in said
    section = yaml.safe_load((folder / "run" / "best.yaml").read_text())["confirmed"]
    assert (section["held"], section["measuring_failed"]) == ("baseline", True)
    wait_until_gone(before)


@pytest.mark.parametrize(
    ("number", "to"),
    [(signal.SIGINT, "process group"), (signal.SIGTERM, "driver")],
    ids=["ctrl-c", "scancel"],
)
def test_a_signal_ends_it_in_order_and_nothing_is_started(folder: Path, number: signal.Signals, to: str) -> None:
    before = rank_processes()
    process = begin(folder, 1)
    (os.kill if to == "driver" else os.killpg)(process.pid, number)
    output, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert output == ""
    assert "Traceback" not in said
    assert started(folder) is None
    wait_until_gone(before)
    rows, skipped = History(folder / "run" / "history").rows()
    assert skipped == []
    assert {row["outcome"] for row in rows if row["stage"] == "confirm"} <= {"ok", "interrupted"}
