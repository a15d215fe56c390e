"""`autotune watch`: a run seen from outside, through its files and the lock that its driver holds."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from autotune.cli import cli
from autotune.errors import UserError
from autotune.folder import has_driver, sole_driver
from autotune.history import History
from autotune.report.screen import LineScreen
from autotune.watch import follow


@pytest.fixture
def screen() -> LineScreen:
    return LineScreen(Console(record=True, width=300, file=open("/dev/null", "w")))  # noqa: PTH123


def trials_shown(text: str) -> list[int]:
    return [int(line.split()[0]) for line in text.splitlines() if "tokens/s  MFU" in line]


def test_the_kernel_says_whether_a_driver_holds_the_folder(tmp_path: Path) -> None:
    assert not has_driver(tmp_path / "run")
    with sole_driver(tmp_path / "run"):
        assert has_driver(tmp_path / "run")
    assert not has_driver(tmp_path / "run")


def test_what_comes_while_it_is_watched_is_shown_once_and_in_order(
    simulated_run: Path, tmp_path: Path, screen: LineScreen
) -> None:
    run, driver = tmp_path / "run", contextlib.ExitStack()
    files = sorted((simulated_run / "history").iterdir())
    steps = [files[:3], [], files[3:4], files[4:]]

    def next_step(_seconds: float) -> None:
        if not run.exists():
            shutil.copytree(simulated_run, run, ignore=shutil.ignore_patterns("history", "best.yaml"))
            (run / "history").mkdir()
        if not steps:
            shutil.copy(simulated_run / "best.yaml", run)
            driver.close()
            return
        for path in steps.pop(0):
            shutil.copy(path, run / "history")

    with driver:
        driver.enter_context(sole_driver(run))
        assert follow(run, screen, pause=next_step) is True
    rows, _ = History(simulated_run / "history").rows()
    assert trials_shown(screen.console.export_text()) == [row["trial"] for row in rows]


def test_a_driver_that_went_without_a_result_is_told_from_one_that_ended(simulated_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(simulated_run, tmp_path / "run"))
    done = CliRunner().invoke(cli, ["watch", str(run)])
    assert (done.exit_code, "Result, SIMULATED" in done.output) == (0, True)
    (run / "best.yaml").unlink()
    done = CliRunner().invoke(cli, ["watch", str(run)])
    assert done.exit_code == 4
    assert "ended without a result" in done.output
    assert "--resume --simulate \"nodes=8 gpus=8 device='NVIDIA H100 80GB HBM3'\"" in done.output


def test_settings_are_those_that_the_driver_shows_of_a_trainer_of_ones_own(
    simulated_run: Path, tmp_path: Path, screen: LineScreen
) -> None:
    """Its history has null for what the trainer decides itself: no difference from the baseline."""
    run = Path(shutil.copytree(simulated_run, tmp_path / "run"))
    shutil.rmtree(run / "history")
    rows, _ = History(simulated_run / "history").rows()
    for row in rows[:2]:
        left = {"num_workers": None, "prefetch_factor": None, "custom": {"float8": "off"}}
        History(run / "history").append(row | {"knobs": rows[0]["knobs"] | left})
    follow(run, screen)
    (line,) = (line for line in screen.console.export_text().splitlines() if " explore " in line)
    assert "as baseline" in line


def test_a_trial_that_is_under_way_is_named(simulated_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(simulated_run, tmp_path / "run"))
    (run / "history" / "trial-0003-attempt-0.parquet").unlink()
    begun: list[int] = []

    class Screen(LineScreen):
        def trial_started(self, spec, remaining_s) -> None:  # type: ignore[no-untyped-def]
            begun.append(spec.trial)

    follow(run, Screen(Console(quiet=True)))
    assert begun == [3]


def test_another_run_in_the_same_folder_is_a_new_beginning(
    simulated_run: Path, tmp_path: Path, screen: LineScreen
) -> None:
    run, driver = Path(shutil.copytree(simulated_run, tmp_path / "run")), contextlib.ExitStack()

    def replace_it(_seconds: float) -> None:
        for path in sorted((run / "history").iterdir())[1:]:
            path.unlink()
        driver.close()

    with driver:
        driver.enter_context(sole_driver(run))
        follow(run, screen, pause=replace_it)
    text = screen.console.export_text()
    assert trials_shown(text.split("another run has begun")[1]) == [0]


def test_torn_files_are_said_once(simulated_run: Path, tmp_path: Path, screen: LineScreen) -> None:
    run = Path(shutil.copytree(simulated_run, tmp_path / "run"))
    (run / "history" / "trial-0001-attempt-0.parquet").write_bytes(b"PAR1 torn")
    follow(run, screen)
    assert screen.console.export_text().count("skipped trial-0001-attempt-0.parquet") == 1


def test_no_run_is_refused_or_waited_for(simulated_run: Path, tmp_path: Path, screen: LineScreen) -> None:
    with pytest.raises(UserError, match="no run there"):
        follow(tmp_path / "run", screen)
    driver = contextlib.ExitStack()

    def begin_then_end(_seconds: float) -> None:
        if not (tmp_path / "run").exists():
            shutil.copytree(simulated_run, tmp_path / "run")
            driver.enter_context(sole_driver(tmp_path / "run"))
        else:
            driver.close()

    with driver:
        assert follow(tmp_path / "run", screen, wait=True, pause=begin_then_end) is True
    assert "waiting for a run" in screen.console.export_text()
