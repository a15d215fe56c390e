"""A whole run over long accumulation: the search composes steps, and what decides runs them whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from autotune.history import History
from tests.cluster.columns import missing_where_simulated
from tests.cluster.conftest import write_job
from tests.cluster.test_run import autotune


def test_the_search_composes_steps_and_finalists_and_rounds_run_them_whole(tmp_path: Path) -> None:
    write_job(
        tmp_path,
        batch={"global_batch_size": 24, "target_world_size": 2},
        space={"activation_checkpointing": ["none", "full"]},
        baseline={"num_workers": 0},
        measure={
            "warmup_steps": 2, "min_steps": 3, "max_steps": 4, "rounds": 3, "num_finalists": 1, "compose_above": 4
        },
    )  # fmt: skip
    done = autotune("run", "job.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows, _ = History(tmp_path / "run" / "history").rows()
    composed = {}
    for row in rows:
        assert row["timing"] == ("composed" if row["stage"] == "explore" else "whole")
        assert row["tokens_per_s_per_rank"] * row["step_time_s"] == pytest.approx(12 * 32)
        if row["timing"] == "composed":
            composed[row["knobs"]["activation_checkpointing"]] = row["step_time_s"]
            assert sorted(row["step_parts_s"]) == ["data", "first", "last", "middle", "optimizer"]
    assert list(composed) == ["none"], "the baseline is the other"
    (finalist,) = (row for row in rows if row["stage"] == "finalist" and row["composed_step_time_s"] is not None)
    assert finalist["composed_step_time_s"] == composed["none"]
    assert finalist["composed_difference"] == pytest.approx(composed["none"] / finalist["step_time_s"] - 1)
    shown = autotune("show", "run", cwd=tmp_path, COLUMNS="160").stdout
    assert f"whole (composed {100 * finalist['composed_difference']:+.1f} %)" in shown
    best = yaml.safe_load((tmp_path / "run" / "best.yaml").read_text())
    assert best["evidence"]["timing"] == best["baseline"]["timing"] == "whole"
    assert missing_where_simulated(rows, tmp_path / "job.yaml", tmp_path / "simulated") == {}
