"""A whole study some of whose configs fail, each in its own way: it ends well, and no failure is tried twice."""

from __future__ import annotations

import textwrap
from collections import Counter
from pathlib import Path

import yaml

from tests.cluster.conftest import CONFIG, rank_processes, write_job
from tests.cluster.test_run import autotune, rows

# What becomes of a config is decided by its micro-batch, which a model sees as the first dimension of its tokens.
MODEL = """
    import os
    import time

    import torch

    from trials.models import DecoderWorkload


    class Fragile(DecoderWorkload):
        def loss(self, model, tokens):
            if os.environ["RANK"] == "1" and not tokens.is_meta:
                getattr(self, f"micro_{len(tokens)}", lambda: None)()
            return super().loss(model, tokens)

        def micro_4(self):
            raise ValueError("four is too many")

        def micro_8(self):
            os._exit(0)

        def micro_16(self):
            time.sleep(3600)

        def micro_32(self):
            torch.ones(2**40)


    def make(seq_len, config):
        return Fragile(seq_len=seq_len, config=config)
"""
EXPECTED = {1: "ok", 2: "ok", 4: "crashed", 8: "crashed", 16: "timeout", 32: "oom_device"}


def test_a_study_goes_on_past_every_kind_of_failure_and_repeats_none(tmp_path: Path) -> None:
    before = rank_processes()
    (tmp_path / "fragile_model.py").write_text(textwrap.dedent(MODEL))
    write_job(
        tmp_path,
        model={"workload": "fragile_model:make", "config": {"config": CONFIG}, "seq_len": 32},
        batch={"global_batch_size": 64, "target_world_size": 2},
        space={"micro_batch_size": "auto"},
        budget={"trials": 100},
        measure={
            "warmup_steps": 1,
            "min_steps": 2,
            "max_steps": 3,
            "rounds": 3,
            "num_finalists": 1,
            "trial_timeout_s": 30,
        },
    )
    done = autotune("run", "job.yaml", cwd=tmp_path)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert "every config worth a trial has been tried" in done.stdout
    searched = [row for row in rows(tmp_path) if row["stage"] in ("baseline", "explore")]
    for row in searched:
        micro, outcome = row["knobs"]["micro_batch_size"], row["outcome"]
        print(f"| micro {micro} | {outcome} | detected after {row['detected_s']} s | {row['reason'][:60]!r} |")
    assert {row["knobs"]["micro_batch_size"]: row["outcome"] for row in searched} == EXPECTED
    assert set(Counter(row["spec_digest"] for row in searched).values()) == {1}, "nothing is tried twice"
    decided = [row for row in rows(tmp_path) if row["stage"] in ("finalist", "round")]
    assert {row["knobs"]["micro_batch_size"] for row in decided} <= {1, 2}, "what failed decides nothing"
    best = yaml.safe_load((tmp_path / "run" / "best.yaml").read_text())
    assert best["complete"] is True
    assert best["settings"]["micro_batch_size"] in (1, 2)
    assert rank_processes() - before == set()
