"""`autotune confirm` by the command line: tuned on one real rank, confirmed on two, and the real run started."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.history import History
from tests.cluster.conftest import rank_processes
from tests.cluster.test_run import AUTOTUNE, autotune
from tests.cluster.tuned import EXIT_CODE, real_run, started, tune


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("confirmed")
    tune(folder)
    return folder


def files(run: Path) -> dict[str, str]:
    return {str(p.relative_to(run)): hashlib.sha256(p.read_bytes()).hexdigest() for p in run.rglob("*") if p.is_file()}


def rows(run: Path) -> list[dict[str, Any]]:
    found, skipped = History(run / "history").rows()
    assert skipped == []
    return found


def test_a_run_tuned_on_one_rank_is_confirmed_on_two_and_the_real_run_is_started(folder: Path) -> None:
    run = folder / "run"
    before, best_before, ranks = files(run), yaml.safe_load((run / "best.yaml").read_text()), rank_processes()
    words = ("--config", "{config}", "--mbs", "{micro_batch_size}", "--accum={grad_accum_steps}", "{world_size}", "a b")
    command = [AUTOTUNE, "confirm", "run", "--within", "3m", *real_run(*words)]
    given, pipe = dict(os.environ), subprocess.PIPE
    process = subprocess.Popen(command, cwd=folder, env=given, stdout=pipe, stderr=pipe, text=True)
    output, said = process.communicate(timeout=240)
    print(said)

    got = started(folder)
    assert got is not None
    assert process.returncode == EXIT_CODE, "the real run's own"
    assert output == "the real run's own output\n", "ours is on the other stream"
    assert got["pid"] == process.pid, "it takes our place"
    confirmed = yaml.safe_load((run / "best.yaml").read_text())["confirmed"]
    settings, config = confirmed["settings"], run / "export" / "confirmed-plain" / "autotune-best.yaml"
    assert got["words"] == [
        *("--config", str(config), "--mbs", str(settings["micro_batch_size"])),
        *(f"--accum={settings['grad_accum_steps']}", "2", "a b"),
    ]
    assert got["environment"]["AUTOTUNE_CONFIG"] == str(config)
    assert got["environment"]["AUTOTUNE_HELD"] == confirmed["held"]
    assert {name for name in got["environment"] if name not in given} == {
        *("AUTOTUNE_CONFIG", "AUTOTUNE_HELD", "AUTOTUNE_PROBE")
    }
    exported = yaml.safe_load(config.read_text())
    assert exported["world_size"] == 2
    for name, value in exported["knobs"].items():
        assert value == settings[name], name
    assert f"held: {confirmed['held']}" in said
    assert rank_processes() <= ranks

    after = files(run)
    changed = {name for name, digest in before.items() if after.get(name) != digest}
    assert changed == {"best.yaml"}, "nothing that was there is lost"
    assert yaml.safe_load((run / "best.yaml").read_text()) == best_before | {"confirmed": confirmed}
    new = [row for row in rows(run) if row["stage"] == "confirm"]
    assert {(row["world_size"], row["outcome"]) for row in new} == {(2, "ok")}
    assert {row["study_id"] for row in rows(run)} == {new[0]["study_id"]}
    for row in new:
        assert row["applied"] == row["knobs"], "on real ranks"
        assert row["knobs"]["micro_batch_size"] * row["knobs"]["grad_accum_steps"] * 2 == 8
        assert len(row["rank_step_times_s"]) == 2
    _check_the_figures(confirmed, new)
    _check_what_is_shown_later(folder, confirmed)


def _check_the_figures(confirmed: dict[str, Any], new: list[dict[str, Any]]) -> None:
    """The section is that of the rows."""
    for one in confirmed["contenders"].values():
        rates = [row["tokens_per_s_per_rank"] for row in new if row["knobs"] == one["settings"]]
        assert one["num_runs"] == len(rates)
        assert one["tokens_per_s_per_rank"] == pytest.approx(statistics.geometric_mean(rates))
    assert confirmed["world_size"] == 2
    assert confirmed["num_paired_rounds"] in (0, 3)
    assert confirmed["settings"] == confirmed["contenders"][confirmed["held"]]["settings"]


def _check_what_is_shown_later(folder: Path, confirmed: dict[str, Any]) -> None:
    shown = autotune("show", "run", cwd=folder).stdout
    assert f"Confirmed on 2 ranks, {confirmed['at'][:10]}: {confirmed['held']} held" in shown
    assert json.loads(autotune("show", "run", "--json", cwd=folder).stdout)["best"]["confirmed"] == confirmed


def test_without_a_cluster_the_real_run_is_started_with_the_baseline_unless_strict(folder: Path) -> None:
    (folder / "started.json").unlink(missing_ok=True)
    nowhere = ("confirm", "run", "--set", "cluster.address=127.0.0.1:1")
    strict = autotune(*nowhere, "--strict", *real_run("{held}"), cwd=folder)
    assert strict.returncode == 4
    assert "--strict: the measuring failed: cluster.address = '127.0.0.1:1': nothing answers there" in strict.stderr
    assert started(folder) is None
    done = autotune(*nowhere, *real_run("{held}", "{activation_checkpointing}"), cwd=folder)
    assert done.returncode == EXIT_CODE
    got = started(folder)
    assert got is not None
    assert got["words"] == ["baseline", "full"]
    assert "held: baseline (nothing was measured: cluster.address = '127.0.0.1:1': nothing answers there" in done.stderr
    section = yaml.safe_load((folder / "run" / "best.yaml").read_text())["confirmed"]
    assert (section["held"], section["measuring_failed"]) == ("baseline", True)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere", "--", "true"], "no such folder"),
        (["run"], "no COMMAND is given"),
        (["run", "--", "no-such-command-anywhere"], "command not found"),
        (["run", "--", "true", "{micro}"], "{micro}: no such placeholder"),
        (["run", "--ranks", "3", "--", "true"], "3 ranks: a global batch of 8 sequences"),
        (["run", "--within", "soon", "--", "true"], "expected a time such as 10m"),
        (["run", "--to", "acelerate", "--", "true"], "did you mean accelerate"),
        (["run", "--set", "model.seq_len=8", "--", "true"], "something else than what was tuned"),
        (["run", "--simulate", "nodes=1", "--", "true"], "leave out --simulate"),
    ],
)
def test_bad_input_is_refused_before_anything_is_started(folder: Path, arguments: list[str], complaint: str) -> None:
    done = autotune("confirm", *arguments, cwd=folder)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert done.stdout == ""


def test_a_simulated_run_is_rehearsed_on_a_simulated_cluster(tmp_path: Path) -> None:
    cluster = "nodes=8 gpus=8 device='NVIDIA H100 80GB HBM3' seed=4"
    options = ("--set", "measure.rounds=3", "--set", "cluster.nodes_per_trial=2", "--trials", "3")
    tuned = autotune("run", "llama3-8b", "--simulate", cluster, "--output", "run", *options, cwd=tmp_path)
    assert tuned.returncode == 0, tuned.stderr
    echo = ("--", "echo", "{held}", "{world_size}")
    assert "was simulated" in autotune("confirm", "run", *echo, cwd=tmp_path).stderr
    ranks = ("--set", "cluster.address=auto", "--ranks", "64")
    done = autotune("confirm", "run", "--simulate", cluster, *ranks, *echo, cwd=tmp_path)
    print(done.stderr)
    assert done.returncode == 0
    confirmed = yaml.safe_load((tmp_path / "run" / "best.yaml").read_text())["confirmed"]
    assert done.stdout == f"{confirmed['held']} 64\n"
    assert confirmed["simulated"] is True
    new = [row for row in rows(tmp_path / "run") if row["stage"] == "confirm"]
    assert {(row["world_size"], row["simulated"]) for row in new} == {(64, True)}
    assert all(row["started_at"].year == 2000 for row in new)
    assert "SIMULATED" in Path(confirmed["exported"]["files"][0]).read_text()


def test_help_names_what_the_command_receives() -> None:
    text = autotune("confirm", "--help", cwd=Path(sys.prefix)).stdout
    for part in ("{config}", "$AUTOTUNE_CONFIG", "srun accelerate launch", "--within TIME", "--strict"):
        assert part in text
