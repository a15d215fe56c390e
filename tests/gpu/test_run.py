"""A whole run by the command line on one GPU, through Ray."""

from __future__ import annotations

import subprocess
import sys

import yaml

from autotune.history import History
from tests.cluster.tuned import SHORT
from tests.gpu.conftest import SMALL


def test_a_run_on_a_gpu_ends_with_an_mfu_and_an_oom_that_was_learnt_from(tmp_path, texts):
    job = {
        "model": {"config": SMALL, "seq_len": 256},
        "data": {"source": str(texts)},
        "batch": {"global_batch_size": 64, "target_world_size": 1},
        "training": {"engines": ["fsdp2", "fsdp1"], "precision": "bf16"},
        "cluster": {"ranks_per_node": 1, "device": "auto", "memory_limit_gib": 1.5},
        "space": {"micro_batch_size": [1, 8, 64], "activation_checkpointing": ["none", "full"]},
        "budget": {"trials": 3},
        "measure": SHORT["measure"] | {"endurance": True, "endurance_steps": 6},
        "output": "run",
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    command = [sys.executable, "-c", "from autotune.cli import main; main()", "run", "job.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    rows, skipped = History(tmp_path / "run" / "history").rows()
    assert skipped == []
    assert {row["outcome"] for row in rows} <= {"ok", "oom_device"}
    assert all(0 < row["mfu"] < 1 for row in rows if row["outcome"] == "ok")
    assert yaml.safe_load((tmp_path / "run" / "best.yaml").read_text())["complete"] is True
