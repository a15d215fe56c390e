"""`autotune waterfall` and `autotune scale` by the command line, on real ranks of a local Ray."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.history import History
from autotune.waterfall.steps import waterfall
from tests.cluster.conftest import rank_processes, write_job
from tests.cluster.test_run import autotune
from tests.cluster.tuned import SHORT


def rows_of(folder: Path, stage: str) -> list[dict[str, Any]]:
    rows, skipped = History(folder / "history").rows()
    assert skipped == []
    return [row for row in rows if row["stage"] == stage]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks, that has ended; by Python, which leaves what the command leaves."""
    folder = tmp_path_factory.mktemp("ended")
    write_job(
        folder,
        **SHORT,
    )
    code = "from autotune import load_job, tune; run = tune(load_job('job.yaml')); print(run.complete, run.verdict)"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("True ")
    _name_a_best(folder / "run")
    return folder


def _name_a_best(run: Path) -> None:
    """On a busy machine no config may have won: what is taken apart here differs in two changes."""
    best = yaml.safe_load((run / "best.yaml").read_text())
    base = best["baseline"]["settings"]
    best["settings"] = base | {"micro_batch_size": 4, "grad_accum_steps": 1, "activation_checkpointing": "none"}
    (run / "best.yaml").write_text(yaml.safe_dump(best, sort_keys=False))


def test_the_gain_of_a_run_is_taken_apart_on_real_ranks(folder: Path) -> None:
    ranks = rank_processes()
    done = autotune("waterfall", "run", "--repeats", "2", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(folder / "run", "waterfall")
    assert len(rows) == 8
    assert {(row["outcome"], row["world_size"], row["round"]) for row in rows} == {("ok", 2, 0), ("ok", 2, 2)}
    assert all(row["applied"] == row["knobs"] for row in rows)
    best = yaml.safe_load((folder / "run" / "best.yaml").read_text())
    made = waterfall(rows, best["baseline"]["settings"], best["settings"])
    assert made is not None
    bars = [*made.steps, *([made.not_measurable] if made.not_measurable else [])]
    for unit in ("tokens_per_s_per_rank", "tflops_per_s_per_rank", "mfu"):
        end = getattr(made.baseline, unit).value + sum(getattr(bar.worth, unit).value for bar in bars)
        assert end == pytest.approx(getattr(made.winner, unit).value, rel=1e-9)
    changes = {"micro_batch_size", "activation_checkpointing"}
    assert {change for bar in bars for change in bar.changes} == changes
    shown = f"{made.winner.tokens_per_s_per_rank.value:,.0f}"
    for part in ("8 trials", "Waterfall", "TFLOP/s", "MFU (cpu probe)", "interactions", "2 interleaved", shown):
        assert part in done.stdout
    assert rank_processes() <= ranks


def test_a_run_is_scaled_on_one_and_two_real_ranks(folder: Path) -> None:
    ranks = rank_processes()
    done = autotune("scale", "run", "--ranks", "1,2", "--repeats", "2", "--json", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    rows = rows_of(folder / "run", "scale")
    assert {row["outcome"] for row in rows} == {"ok"}
    batches = {
        (row["role"], row["world_size"], row["knobs"]["micro_batch_size"] * row["knobs"]["grad_accum_steps"])
        for row in rows
    }
    of_both = {(role, *point) for role in ("best", "baseline") for point in ((1, 8), (1, 4), (2, 4))}
    assert {one for one in batches if one[0] in ("best", "baseline")} == of_both
    assert all(len(row["rank_step_times_s"]) == row["world_size"] == len(row["hosts"]) for row in rows)
    assert all(row["frac_exposed_comm"] is not None for row in rows)
    points = {(p["role"], p["mode"], p["world_size"]): p for p in found["points"]}
    for role in ("best", "baseline"):
        for mode in ("strong", "weak"):
            one, two = points[role, mode, 1], points[role, mode, 2]
            rates = [p["tokens_per_s_per_rank"]["value"] for p in (one, two)]
            assert one["efficiency"]["value"] == 1.0
            assert two["efficiency"]["value"] == pytest.approx(rates[1] / rates[0], rel=1e-9)
            assert two["num_runs"] == 2
    assert found["ranked_world_size"] == 2
    assert {one["role"] for one in found["ranking"]} >= {"best", "baseline"}
    assert not any(point["is_predicted"] for point in found["points"]), "the real run's ranks were measured"
    assert rank_processes() <= ranks


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["scale", "nowhere", "--ranks", "1,2"], "nowhere"),
        (["scale", "run", "--ranks", "3", "--mode", "strong"], "does not divide over 3"),
        (["scale", "run", "--ranks", "1,8"], "more than there are only on a modelled cluster: --simulate"),
        (["scale", "run", "--ranks", "one"], "numbers of ranks with commas"),
        (["scale", "run", "--ranks", "1", "--set", "model.seq_len=8"], "something else than what was tuned"),
        (["waterfall", "nowhere"], "no such folder"),
        (["waterfall", "."], "no best.yaml"),
    ],
)
def test_bad_input_is_refused(folder: Path, arguments: list[str], complaint: str) -> None:
    done = autotune(*arguments, cwd=folder)
    assert done.returncode == 2, done.stdout + done.stderr
    assert complaint in done.stderr


def test_a_simulated_run_is_taken_apart_and_scaled_beyond_what_is_here(tmp_path: Path) -> None:
    cluster = "nodes=16 gpus=8 device='NVIDIA H100 80GB HBM3' seed=4"
    options = ("--set", "measure.rounds=3", "--trials", "6", "--waterfall", "--output", "run")
    done = autotune("run", "llama3-8b", "--simulate", cluster, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Waterfall, SIMULATED" in done.stdout
    assert {row["simulated"] for row in rows_of(tmp_path / "run", "waterfall")} == {True}
    assert "was simulated" in autotune("scale", "run", "--ranks", "8", cwd=tmp_path).stderr
    ranks = ("--simulate", cluster, "--ranks", "8,32", "--repeats", "2", "--mode", "strong")
    done = autotune("scale", "run", *ranks, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in (
        "Scaling, SIMULATED",
        "Predicted for the real run's 64 ranks, NOT measured, SIMULATED",
        "Ranked on 32",
    ):
        assert part in done.stdout
    scaled = rows_of(tmp_path / "run", "scale")
    assert {(row["world_size"], row["simulated"]) for row in scaled} == {(n, True) for n in (8, 32)}
    more = ("--simulate", cluster, "--ranks", "8,256")
    assert "--simulate has 16" in autotune("scale", "run", *more, cwd=tmp_path).stderr
