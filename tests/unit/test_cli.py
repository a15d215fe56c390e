"""The command line where no rank is needed: start-up, init, errors and their exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.folder import latest_moved, prepare_folder, sole_driver
from autotune.job_file import load_job

AUTOTUNE = str(Path(sys.executable).with_name("autotune"))


def autotune(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([AUTOTUNE, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def test_help_imports_neither_torch_nor_ray() -> None:
    code = (
        "import sys\nfrom autotune.cli import cli\n"
        "try:\n    cli(['--help'])\nexcept SystemExit:\n    pass\n"
        "bad = {'torch', 'ray', 'optuna', 'pyarrow', 'scipy'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "measured MFU" in done.stdout


def test_a_foreign_trials_on_the_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trials").mkdir()
    (tmp_path / "trials" / "__init__.py").write_text("")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [AUTOTUNE, "init"], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"the package trials was found in {tmp_path}" in done.stderr


def test_init_writes_a_job_that_loads_and_never_overwrites(tmp_path: Path) -> None:
    first = autotune("init", cwd=tmp_path)
    assert first.returncode == 0
    assert load_job(str(tmp_path / "job.yaml")) == load_job("quickstart")
    again = autotune("init", cwd=tmp_path)
    assert again.returncode == 2
    assert "exists already" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["run", "quickstrat"], "did you mean quickstart"),
        (["run", "quickstart", "--set", "space.limit_all_gathers=[true]"], "fsdp2 has no such knob"),
        (["run", "quickstart", "--trials", "0"], "x>=1"),
        (["run"], "Missing argument"),
        (["init", "--template", "nothing"], "no such template"),
        (["show", "nowhere"], "no run there"),
        (["export", "nowhere", "--to", "plain"], "no best.yaml there"),
        (["frobnicate"], "No such command"),
    ],
)
def test_bad_input_exits_2_and_says_what_to_do(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    done = autotune(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_run_is_moved_aside_and_nothing_of_it_lost(tmp_path: Path) -> None:
    out, job = tmp_path / "run", load_job("quickstart")
    assert prepare_folder(out, job) is None
    assert prepare_folder(out, job) is None, "a run that has measured nothing is replaced"
    for number in (1, 2):
        (out / "history").mkdir()
        (out / "history" / "trial-0000-attempt-0.parquet").write_text(f"measured {number}")
        moved = tmp_path / f"run.{number}"
        assert prepare_folder(out, job) == latest_moved(out) == moved
        assert (moved / "history" / "trial-0000-attempt-0.parquet").read_text() == f"measured {number}"
        assert sorted(path.name for path in out.iterdir()) == ["job.yaml", "logs"]


def test_a_second_driver_on_one_folder_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "run"
    with sole_driver(out), pytest.raises(UserError, match="another autotune is running"), sole_driver(out):
        pytest.fail("two drivers on one folder")
    with sole_driver(out):
        pass


@pytest.mark.parametrize("others", [["thesis.tex"], ["job.yaml"], ["job.yaml", "logs", "thesis.tex"]])
def test_a_folder_of_something_else_is_not_touched(tmp_path: Path, others: list[str]) -> None:
    for name in others:
        (tmp_path / name).write_text("years of work")
    with pytest.raises(UserError, match="holds something that is no run"):
        prepare_folder(tmp_path, load_job("quickstart"))
    assert sorted(path.name for path in tmp_path.iterdir()) == others


def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(UserError, match="run"):
        prepare_folder(tmp_path / "run", load_job("quickstart"))
