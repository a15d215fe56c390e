"""A run in other tools: the journal by the dashboard's own API, the scalars by an event reader."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import optuna
import pytest
from click.testing import CliRunner
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna_dashboard import wsgi
from tensorboardX.proto.event_pb2 import Event

from autotune.cli import cli
from autotune.errors import UserError
from autotune.folder import prepare_folder
from autotune.history import History
from autotune.job_file import load_job
from autotune.loaded import load
from autotune.views.optuna_journal import trials_of


@pytest.fixture
def run(simulated_run: Path, tmp_path: Path) -> Path:
    """With a trial that ran out of memory, one that was predicted to, and one that crashed."""
    copied = Path(shutil.copytree(simulated_run, tmp_path / "run"))
    history = History(copied / "history")
    rows, _ = history.rows()
    explored = [row for row in rows if row["stage"] == "explore"]
    for row, outcome in zip(explored, ("oom_device", "predicted_oom", "crashed"), strict=False):
        history.append(row | {"outcome": outcome, "reason": "on purpose", "tokens_per_s_per_rank": None, "mfu": None})
    return copied


def rows_of(run: Path, *stages: str) -> list[dict[str, Any]]:
    return [row for row in History(run / "history").rows()[0] if row["stage"] in stages]


def ask_dashboard(path: Path, url: str) -> Any:
    """What the installed dashboard answers its own page."""
    environ: dict[str, Any] = {}
    setup_testing_defaults(environ)
    environ["PATH_INFO"] = url
    status: list[str] = []
    app = wsgi(JournalStorage(JournalFileBackend(str(path))))
    body = b"".join(app(environ, lambda line, headers, exc_info=None: status.append(line)))
    assert status[0].startswith("200"), body
    return json.loads(body)


def test_the_dashboard_shows_every_trial_with_its_constraint(run: Path) -> None:
    done = CliRunner().invoke(cli, ["journal", str(run)], catch_exceptions=False)
    assert done.exit_code == 0
    journal = run / "optuna.journal"
    (study,) = ask_dashboard(journal, "/api/studies")["study_summaries"]
    assert study["study_name"] == "run"
    detail = ask_dashboard(journal, f"/api/studies/{study['study_id']}")
    rows = rows_of(run, "baseline", "explore")
    assert len(detail["trials"]) == len(rows)
    for shown, row in zip(detail["trials"], rows, strict=True):
        attrs = {attr["key"]: attr["value"] for attr in shown["user_attrs"]}
        assert json.loads(attrs["trial"]) == row["trial"]
        if row["outcome"] == "ok":
            assert (shown["state"], shown["values"]) == ("Complete", [row["tokens_per_s_per_rank"]])
            assert len(shown["constraints"]) == 1
            assert -1 < shown["constraints"][0] <= 0, "it fitted"
        elif row["outcome"] in ("oom_device", "predicted_oom"):
            assert shown["state"] == "Pruned"
            assert shown["constraints"][0] > 0
        else:
            assert (shown["state"], shown["constraints"]) == ("Fail", [])
    assert {"oom_device", "predicted_oom", "crashed"} <= {row["outcome"] for row in rows}
    assert {param["name"] for param in detail["trials"][0]["params"]} <= set(rows[0]["knobs"])


def test_optuna_itself_reads_the_same_constraints(run: Path) -> None:
    CliRunner().invoke(cli, ["journal", str(run)], catch_exceptions=False)
    storage = JournalStorage(JournalFileBackend(str(run / "optuna.journal")))
    study = optuna.load_study(study_name="run", storage=storage)
    fastest = max(row["tokens_per_s_per_rank"] or 0 for row in rows_of(run, "baseline", "explore"))
    assert study.best_value == fastest
    assert study.metric_names == ["tokens/s per rank"]


def test_knobs_of_a_trainer_of_ones_own_are_params_by_their_names(run: Path) -> None:
    attempts = load(run).attempts[:3]
    own = [
        replace(one, knobs=replace(one.knobs, custom=(("float8", value), ("tp", "1"))))
        for one, value in zip(attempts, ("off", "rowwise", "off"), strict=True)
    ]
    params = [trial.params for trial in trials_of(own)]
    assert [one["custom.float8"] for one in params] == ["off", "rowwise", "off"]
    assert "custom.tp" not in params[0], "it was the same in all"


def events(folder: Path) -> list[Event]:
    """TFRecord: length (8 bytes), its checksum (4), the event, its checksum (4)."""
    (path,) = folder.glob("events.out.tfevents.*")
    content, found, at = path.read_bytes(), [], 0
    while at < len(content):
        length = int.from_bytes(content[at : at + 8], "little")
        found.append(Event.FromString(content[at + 12 : at + 12 + length]))
        at += length + 16
    return found


def test_scalars_are_those_of_the_history(run: Path) -> None:
    for _ in range(2):  # the second replaces the first
        assert CliRunner().invoke(cli, ["tensorboard", str(run)], catch_exceptions=False).exit_code == 0
    points = {
        (value.tag, event.step): value.simple_value
        for event in events(run / "tensorboard")
        for value in event.summary.value
    }
    rows = History(run / "history").rows()[0]
    for row in rows:
        tag = ("throughput/mfu", row["trial"])
        assert points.get(tag) == (pytest.approx(row["mfu"]) if row["mfu"] is not None else None)
        assert points["trial/is_ok", row["trial"]] == (row["outcome"] == "ok")
    best = [points[key] for key in sorted(points) if key[0] == "search/best_tokens_per_s_per_rank"]
    assert best == sorted(best)
    assert best[-1] == pytest.approx(max(row["tokens_per_s_per_rank"] or 0 for row in rows_of(run, "explore")))


@pytest.mark.parametrize("command", ["journal", "tensorboard"])
def test_no_run_and_no_place_to_write_are_named(command: str, run: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, [command, str(tmp_path / "nothing")], standalone_mode=False)
    assert isinstance(done.exception, UserError)
    assert "no run there" in str(done.exception)
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(cli, [command, str(run), "-o", str(tmp_path / "file" / "x")], standalone_mode=False)
    assert isinstance(done.exception, UserError), done.exception
    assert "--output" in str(done.exception)


def test_a_run_with_views_in_it_is_still_moved_aside(run: Path) -> None:
    for command in ("journal", "tensorboard"):
        CliRunner().invoke(cli, [command, str(run)], catch_exceptions=False)
    assert prepare_folder(run, load_job("quickstart")) == run.with_name("run.1")
