"""Disks that fill and folders that cannot be written: told, and nothing measured is lost."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.folder import prepare_folder
from autotune.history import History
from autotune.job_file import load_job
from tests.cluster.conftest import write_job
from tests.cluster.test_run import autotune


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 KiB, which a run's logs and history fill within a few trials."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_ends_the_run_with_its_name_and_what_was_measured_stays(small_disk: Path, tmp_path: Path) -> None:
    write_job(tmp_path, budget={"trials": 40}, space="default")
    out = small_disk / "run"
    done = autotune("run", "job.yaml", "--output", str(out), cwd=tmp_path)
    print(done.stdout[-1500:], done.stderr)
    assert done.returncode == 4
    assert "No space left on device" in done.stderr
    assert "--resume" in done.stderr
    assert "Traceback" not in done.stderr
    rows, skipped = History(out / "history").rows()
    assert len(rows) >= 1
    assert skipped == [], "no file is left half written"


@pytest.mark.parametrize("name", ["run", "."])
def test_a_read_only_folder_is_told_at_once_and_what_is_in_it_stays(
    small_disk: Path, tmp_path: Path, name: str
) -> None:
    write_job(tmp_path)
    job, out = load_job(str(tmp_path / "job.yaml")), small_disk / name
    prepare_folder(out, job)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for flags in ([], ["--resume"]):
        done = autotune("run", "job.yaml", "--output", str(out), *flags, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        assert "Read-only file system" in done.stderr
        assert "give a folder you can write to" in done.stderr
    assert load_job(str(out / "job.yaml")) == job


def test_a_folder_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    write_job(tmp_path)
    done = autotune("run", "job.yaml", "--output", "/proc/nowhere/run", cwd=tmp_path)
    assert done.returncode == 2
    assert "/proc/nowhere" in done.stderr
    assert "give a folder you can write to" in done.stderr
