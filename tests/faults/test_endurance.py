"""A whole run whose fastest config breaks only where training goes on: in its evaluation."""

from __future__ import annotations

import textwrap
from pathlib import Path

import yaml

from tests.cluster.conftest import CONFIG, write_job
from tests.cluster.test_run import autotune, rows

# Waits decide which micro-batch is fastest, by factors that no load on the machine turns around.
MODEL = """
    import time

    import torch

    from trials.models import DecoderWorkload


    class Waiting(DecoderWorkload):
        def loss(self, model, tokens):
            if not model.training and len(tokens) == 4:
                torch.ones(2**40)
            if not tokens.is_meta:
                time.sleep({1: 0.25, 2: 0.12, 4: 0.01}[len(tokens)])
            return super().loss(model, tokens)


    def make(seq_len, config):
        return Waiting(seq_len=seq_len, config=config)
"""


def test_a_winner_that_cannot_evaluate_makes_room_for_the_next(tmp_path: Path) -> None:
    (tmp_path / "waiting_model.py").write_text(textwrap.dedent(MODEL))
    write_job(
        tmp_path,
        model={"workload": "waiting_model:make", "config": {"config": CONFIG}, "seq_len": 32},
        space={"micro_batch_size": "auto"},
        measure={"warmup_steps": 1, "min_steps": 2, "max_steps": 2, "rounds": 3, "num_finalists": 2},
    )
    done = autotune("run", "job.yaml", cwd=tmp_path)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    best = yaml.safe_load((tmp_path / "run" / "best.yaml").read_text())
    assert best["settings"]["micro_batch_size"] == 2
    endurance = best["endurance"]
    assert endurance["status"] == "passed"
    assert [phase["phase"] for phase in endurance["phases"]] == ["train", "evaluate", "save", "load"]
    (failed,) = endurance["failed"]
    assert (failed["settings"]["micro_batch_size"], failed["outcome"]) == (4, "oom_device")
    assert "in evaluate" in failed["reason"]
    assert best["fallback"]["settings"]["micro_batch_size"] == 1, "the next measured config that fits"
    enduring = [row for row in rows(tmp_path) if row["stage"] == "endurance"]
    assert [row["outcome"] for row in enduring] == ["oom_device", "ok"]
    assert enduring[1]["num_steps"] == 6
    assert not list((tmp_path / "run").glob("**/checkpoint")), "the checkpoints are gone"
    shown = autotune("show", "run", cwd=tmp_path)
    assert shown.returncode == 0
    assert "Endurance: passed, 6 steps" in shown.stdout
    assert "failed its own: oom_device" in shown.stdout
