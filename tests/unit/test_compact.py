"""`autotune compact`: the same history in one file, and whatever befalls it meanwhile."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from rich.console import Console

from autotune.cli import cli
from autotune.folder import sole_driver
from autotune.history import SCHEMA, History
from autotune.loaded import load
from autotune.report.facts import summarise
from autotune.report.screen import LineScreen
from autotune.watch import follow
from tests.unit.test_history import row
from tests.unit.test_simulated_run import autotune


@pytest.fixture
def run(simulated_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(simulated_run, tmp_path / "run"))


def files(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "history").iterdir())


def compact(run: Path) -> str:
    done = CliRunner().invoke(cli, ["compact", str(run)], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_all_is_read_as_before_from_one_file(run: Path) -> None:
    before, old_files = load(run), files(run)
    said = compact(run)
    after = load(run)
    assert after.rows == before.rows
    assert summarise(after, None).to_json() == summarise(before, None).to_json()
    last = before.rows[-1]["trial"]
    assert files(run) == [f"trials-0000-to-{last:04d}.parquet"]
    assert f"{len(old_files)} files" in said
    assert f"{len(before.rows)} rows" in said
    assert len(pd.read_parquet(run / "history")) == len(before.rows)
    assert "nothing to do" in compact(run)


def test_an_interrupted_one_leaves_every_row_once_and_the_next_ends_it(run: Path, monkeypatch: Any) -> None:
    before = load(run)
    unlink, kept = Path.unlink, 3

    def stop_early(path: Path, missing_ok: bool = False) -> None:
        if len(files(run)) <= kept:
            raise OSError(5, "Input/output error", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", stop_early)
    done = CliRunner().invoke(cli, ["compact", str(run)])
    assert "nothing measured is lost" in str(done.exception)
    monkeypatch.undo()
    assert len(files(run)) == kept
    assert load(run).rows == before.rows
    compact(run)
    assert len(files(run)) == 1
    assert load(run).rows == before.rows


def test_what_cannot_be_read_stays_as_it_is(run: Path) -> None:
    (run / "history" / "trial-0900-attempt-0.parquet").write_bytes(b"torn")
    assert "left as it is: trial-0900-attempt-0.parquet: unreadable" in compact(run)
    assert len(files(run)) == 2
    assert History(run / "history").last_trial() == 900


def test_rows_of_an_older_schema_are_written_as_this_version_has_them(tmp_path: Path) -> None:
    old = pa.schema([field for field in SCHEMA if field.name != "loader_sustained"], metadata=SCHEMA.metadata)
    pq.write_table(pa.Table.from_pylist([row(0)], schema=old), tmp_path / "trial-0000-attempt-0.parquet")
    history = History(tmp_path)
    history.append(row(1))
    before, _ = history.rows()
    assert history.compact() is not None
    assert history.rows() == (before, [])
    (path,) = tmp_path.iterdir()
    assert pq.read_schema(path).equals(SCHEMA)


def test_it_goes_on_after_the_last_trial_of_the_one_file(run: Path) -> None:
    compact(run)
    shutil.rmtree(run / "logs")
    (run / "logs").mkdir()
    last = load(run).rows[-1]["trial"]
    budget = load(run).job.budget.trials
    job = run / "job.yaml"
    job.write_text(job.read_text().replace(f"trials: {budget}", f"trials: {budget + 4}"))
    autotune("run", str(job), "--resume", "--simulate", load(run).survey.simulated)
    assert files(run)[0] == f"trial-{last + 1:04d}-attempt-0.parquet"
    assert [found["trial"] for found in load(run).rows] == list(range(len(load(run).rows)))
    compact(run)
    assert len(files(run)) == 1


def test_a_reader_that_had_listed_the_files_reads_the_one(run: Path) -> None:
    before = load(run)

    def told(done: int, _of: int) -> None:
        if done == 2 and len(files(run)) > 1:
            compact(run)

    assert load(run, told).rows == before.rows


def test_who_watches_sees_each_trial_once(run: Path) -> None:
    compact(run)
    screen = LineScreen(Console(record=True, width=300, quiet=False))
    follow(run, screen)
    text = screen.console.export_text()
    shown = [int(line.split()[0]) for line in text.splitlines() if "tokens/s  MFU" in line]
    assert shown == [found["trial"] for found in load(run).rows]
    assert "started" not in text


@pytest.mark.parametrize("name", ["nowhere", "empty", "foreign"])
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign" / "history").mkdir(parents=True)
    (tmp_path / "foreign" / "history" / "notes.txt").write_text("mine")
    done = CliRunner().invoke(cli, ["compact", str(tmp_path / name)])
    assert "no run there that has measured anything" in str(done.exception)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "foreign"]


def test_a_run_that_goes_on_is_refused(run: Path) -> None:
    old = files(run)
    with sole_driver(run):
        done = CliRunner().invoke(cli, ["compact", str(run)])
    assert "another autotune is running" in str(done.exception)
    assert files(run) == old


@pytest.mark.parametrize("number", [-1, 1_000_000, 2**31 - 1])
def test_a_number_that_no_trial_has_stays_in_its_own_file(tmp_path: Path, number: int) -> None:
    history = History(tmp_path)
    for trial in (0, 1, number):
        history.append(row(trial))
    made = history.compact()
    assert made is not None
    assert made.num_rows == 2
    assert len(made.left) == 1
    assert history.last_trial() == 1 or number == 1_000_000
    assert len(list(tmp_path.iterdir())) == 2
