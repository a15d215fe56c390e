"""Runs that end otherwise than well, or that had to find another way; and a user's own models."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from autotune.cluster.runner import SlotRunner
from autotune.errors import UserError
from autotune.folder import prepare_folder
from autotune.job_file import load_job
from autotune.report.screen import LineScreen
from autotune.run import Run
from tests.cluster.conftest import CONFIG, rank_processes, write_job
from tests.cluster.test_run import AUTOTUNE, autotune, rows


def test_a_limit_in_which_nothing_fits_exits_3_and_says_what_it_needed(tmp_path: Path) -> None:
    write_job(
        tmp_path,
        model={"preset": "tiny", "seq_len": 256},
        cluster={"ranks_per_node": 2, "device": "cpu", "memory_limit_gib": 0.03},
    )
    done = autotune("run", "job.yaml", cwd=tmp_path)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "even the config that takes least ran out of memory" in done.stderr
    assert "you tried to allocate" in done.stderr
    assert "states alone take about 24 MiB per rank" in done.stderr
    assert "raise the limit" in done.stderr
    assert {row["outcome"] for row in rows(tmp_path)} == {"oom_device"}


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"model": {"workload": "nowhere:make", "seq_len": 32}}, "No module named 'nowhere'"),
        ({"data": {"source": "missing"}}, "no such file or folder"),
        ({"model": {"config": CONFIG | {"vocab_size": 100}, "seq_len": 32}}, "needs a vocabulary of 256"),
        ({"model": {"config": CONFIG | {"num_heads": 5}, "seq_len": 32}}, "must divide"),
    ],
)
def test_what_only_a_rank_can_find_wrong_is_told_before_anything_is_spent(
    runner: SlotRunner, tmp_path: Path, sections: dict[str, Any], complaint: str
) -> None:
    job = load_job(str(write_job(tmp_path, **sections)))
    prepare_folder(tmp_path / "run", job)
    screen = LineScreen(Console(quiet=True))
    with pytest.raises(UserError, match=complaint):
        Run(job, tmp_path / "run", runner, screen).go()
    assert not list((tmp_path / "run").glob("history/*"))


def test_a_baseline_that_does_not_fit_gives_way_to_the_careful_default(runner: SlotRunner, tmp_path: Path) -> None:
    job = load_job(
        str(
            write_job(
                tmp_path,
                model={"preset": "tiny", "seq_len": 256},
                batch={"global_batch_size": 32, "target_world_size": 2},
                cluster={"ranks_per_node": 2, "device": "cpu", "memory_limit_gib": 0.2},
                baseline={"micro_batch_size": 16, "activation_checkpointing": "none", "num_workers": 0},
                space={"reshard_after_forward": [True, False]},
                budget={"trials": 1},
                measure={"warmup_steps": 1, "min_steps": 2, "max_steps": 2, "rounds": 3, "num_finalists": 1},
            )
        )
    )
    prepare_folder(tmp_path / "run", job)
    result = Run(job, tmp_path / "run", runner, LineScreen(Console())).go()
    stages = [(row["stage"], row["outcome"]) for row in rows(tmp_path)][:2]
    assert stages == [("baseline", "oom_device"), ("baseline", "ok")]
    assert result.baseline.knobs.micro_batch_size == 1
    assert result.baseline.knobs.activation_checkpointing == "full"


def test_a_baseline_that_crashes_ends_the_run_with_its_error(runner: SlotRunner, texts: Path, tmp_path: Path) -> None:
    model = {
        "workload": "faulty_model:make",
        "import_path": str(texts),
        "config": {"mode": "raise", "config": CONFIG},
        "seq_len": 32,
    }
    job = load_job(str(write_job(tmp_path, model=model)))
    prepare_folder(tmp_path / "run", job)
    with pytest.raises(UserError, match="no such thing"):
        Run(job, tmp_path / "run", runner, LineScreen(Console(quiet=True))).go()
    assert [row["outcome"] for row in rows(tmp_path)] == ["crashed"]


def test_the_readmes_own_model_is_tuned(runner: SlotRunner, tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (code,) = re.findall(r"```python\n(# my_model\.py.*?)```", readme, flags=re.DOTALL)
    (tmp_path / "my_model.py").write_text(code)
    config = {"width": 32, "num_layers": 2, "heads": 4}
    model = {"workload": "my_model:make", "config": config, "seq_len": 32}
    job = load_job(str(write_job(tmp_path, model=model, budget={"trials": 2})))
    prepare_folder(tmp_path / "run", job)
    Run(job, tmp_path / "run", runner, LineScreen(Console())).go()
    assert {row["outcome"] for row in rows(tmp_path)} == {"ok"}
    assert {row["flops_convention"] for row in rows(tmp_path)} == {"palm-matmul,full-attn"}
    assert all(row["mfu"] <= row["hfu"] for row in rows(tmp_path))


def test_ctrl_c_ends_the_ranks_keeps_the_history_and_exits_130(tmp_path: Path) -> None:
    before = rank_processes()
    write_job(tmp_path, budget={"trials": 500}, space="default")
    process = subprocess.Popen(
        [AUTOTUNE, "run", "job.yaml"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("run/history/*.parquet"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert yaml.safe_load((tmp_path / "run" / "best.yaml").read_text())["complete"] is False
    assert len(rows(tmp_path)) >= 3
    time.sleep(1.0)  # a process that was killed is reaped by its parent
    assert rank_processes() <= before


def test_a_model_that_is_wrong_under_one_knob_cannot_win_with_it(texts: Path, tmp_path: Path) -> None:
    write_job(
        tmp_path,
        model={
            "workload": "faulty_model:make",
            "import_path": str(texts),
            "config": {"mode": "sums", "config": CONFIG},
            "seq_len": 32,
        },
        space={"micro_batch_size": [1, 4], "reshard_after_forward": [True, False]},
    )
    done = autotune("run", "job.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {row["knobs"]["micro_batch_size"]: row for row in rows(tmp_path)}
    assert found[1]["outcome"] == "ok"
    assert found[4]["outcome"] == "wrong_numerics"
    assert "the baseline's on the same samples" in found[4]["reason"]
    best = yaml.safe_load((tmp_path / "run" / "best.yaml").read_text())
    assert best["settings"]["micro_batch_size"] == 1
