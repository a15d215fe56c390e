"""`autotune export`: what it writes, what it says on the screen, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from autotune.best import note_confirmed
from autotune.cli import cli
from autotune.errors import UserError
from autotune.export import EXPORTERS
from tests.unit.conftest import make_space
from tests.unit.test_hostile import best as content_of_best
from tests.unit.test_hostile import write

WIDE = {"COLUMNS": "1000"}


def run_of(folder: Path, engine: str = "fsdp2", **changes: Any) -> Path:
    """A run's folder, whose winner is not its baseline."""
    settings = replace(make_space().baseline, micro_batch_size=2, grad_accum_steps=4, engine=engine)
    if engine == "ddp":
        settings = replace(settings, bucket_cap_mb=25.0)
    return write(folder / "run", content_of_best(settings=settings.to_dict(), **changes))


def export(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["export", *map(str, arguments)], env=WIDE)


def refused(*arguments: object) -> UserError:
    error = export(*arguments).exception
    assert isinstance(error, UserError)
    assert error.exit_code == 2 and error.hint
    return error


@pytest.mark.parametrize("to", EXPORTERS)
def test_every_knob_that_the_engine_has_is_a_line_on_the_screen(to: str, tmp_path: Path) -> None:
    run = run_of(tmp_path)
    done = export(run, "--to", to)
    assert done.exit_code == 0, done.output
    content = yaml.safe_load((run / "best.yaml").read_text())
    lines = done.stdout.splitlines()
    for name, value in content["settings"].items():
        said = [line.split() for line in lines if line.split()[:1] == [name]]
        lost_without_value = value is None and not said
        assert lost_without_value or (len(said) == 1 and said[0][2] in ("carried", "lost")), name
    for path in (run / "export" / to).iterdir():
        assert f"wrote {path}" in lines


def test_what_a_lost_knob_needs_is_on_the_screen(tmp_path: Path) -> None:
    done = export(run_of(tmp_path), "--to", "accelerate")
    (line,) = [line for line in done.stdout.splitlines() if line.split()[:1] == ["micro_batch_size"]]
    assert line.split()[1:3] == ["2", "lost"] and "`DataLoader(..., batch_size=2)`" in line
    assert "note: On CPU accelerate does not shard at all" in done.stdout
    assert done.stderr == ""


def test_a_narrow_screen_loses_no_word(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    words = CliRunner().invoke(cli, ["export", str(run), "--to", "accelerate"], env={"COLUMNS": "80"}).stdout
    assert "persistent_workers" in "".join(words.split())


def test_a_file_or_a_folder_may_be_named(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    export(run, "--to", "plain", "-o", tmp_path / "new" / "mine.yaml")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["autotune_best.py", "mine.yaml"]
    (tmp_path / "there").mkdir()
    export(run, "--to", "deepspeed", "-o", tmp_path / "there")
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["ds_config.json"]
    (tmp_path / "file").write_text("")
    assert "file" in refused(run, "--to", "plain", "-o", tmp_path / "file" / "x.yaml").message


def test_a_name_that_is_no_trainers_is_seen_before_the_run_is_read(tmp_path: Path) -> None:
    error = refused(tmp_path / "nowhere", "--to", "lightening")
    assert "'lightening': no such trainer" in error.message and "did you mean lightning" in error.hint


def test_a_run_that_has_not_ended_is_exported_only_when_asked(tmp_path: Path) -> None:
    run = run_of(tmp_path, complete=False)
    error = refused(run, "--to", "plain")
    assert "has not ended" in error.message
    assert "--resume" in error.hint and "--incomplete" in error.hint
    assert not (run / "export").exists()
    done = export(run, "--to", "plain", "--incomplete")
    assert done.exit_code == 0 and "the run has not ended" in done.stderr
    assert "The run had not ended" in (run / "export" / "plain" / "autotune_best.py").read_text()


def test_what_was_confirmed_is_exported_when_asked(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    assert "nothing was confirmed" in refused(run, "--to", "plain", "--confirmed").message
    content = yaml.safe_load((run / "best.yaml").read_text())
    settings = content["baseline"]["settings"] | {"grad_accum_steps": 2}
    found = {"held": "baseline", "why": "the best is no faster here", "at": "2026-11-30T10:00:00+00:00"}
    rates = dict.fromkeys(("tokens_per_s_per_rank", "tokens_per_s_per_rank_low", "tokens_per_s_per_rank_high"), 1234.0)
    note_confirmed(run, found | {"world_size": 8, "settings": settings} | rates)
    done = export(run, "--to", "plain", "--confirmed", "-o", tmp_path / "held.yaml")
    assert done.exit_code == 0, done.output
    text = (tmp_path / "held.yaml").read_text()
    assert "For 8 ranks" in text and "The baseline, 1,234 tokens/s per rank on 8 ranks" in text
    assert "grad_accum_steps: 2" in text


def test_a_run_without_a_winner_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run" / "history").mkdir(parents=True)
    error = refused(tmp_path / "run", "--to", "plain")
    assert "no winner" in error.message and "autotune show" in error.hint
    assert "no best.yaml there" in refused(tmp_path / "nowhere", "--to", "plain").message


def test_the_baselines_own_settings_are_said_to_be_that(tmp_path: Path) -> None:
    done = export(write(tmp_path / "run", content_of_best()), "--to", "plain")
    assert done.exit_code == 0 and "nothing beat the baseline: these are its settings" in done.stderr


@pytest.mark.parametrize(("to", "engine"), [("torchtitan", "ddp"), ("torchtitan", "fsdp1"), ("axolotl", "fsdp1")])
def test_a_trainer_that_cannot_take_the_winner_at_all(to: str, engine: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, engine)
    error = refused(run, "--to", to)
    assert f"the settings are for {engine}, which {to} has not" in error.message
    assert "export them to plain" in error.hint and f"export_for: {to}" in error.hint
    assert not (run / "export").exists()


def test_another_version_than_was_checked_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "99.1")
    done = export(run_of(tmp_path), "--to", "accelerate")
    assert done.exit_code == 0
    assert "WARNING: accelerate 99.1 is installed here" in done.stderr
