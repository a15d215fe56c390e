"""A run that was really tuned, on one rank, and a real run that says what it was started with."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from autotune.history import History
from tests.cluster.conftest import write_job
from tests.cluster.test_run import autotune

EXIT_CODE = 7
"""Of the real run."""
REAL_RUN = f"""
import json, os, sys
json.dump({{"words": sys.argv[1:], "environment": dict(os.environ), "pid": os.getpid()}}, open("started.json", "w"))
print("the real run's own output")
sys.exit({EXIT_CODE})
"""


SHORT: dict[str, Any] = {
    "space": {"activation_checkpointing": ["none", "full"], "micro_batch_size": [1, 4]},
    "budget": {"trials": 3},
    "measure": {
        "warmup_steps": 1,
        "min_steps": 3,
        "max_steps": 4,
        "rounds": 3,
        "num_finalists": 1,
        "endurance": False,
    },
}
"""Sections of a job that is tuned in half a minute."""


def tune(folder: Path) -> Path:
    """Tunes the tiny model on one rank; its real run has two. Returns the run's folder."""
    write_job(
        folder,
        cluster={"ranks_per_node": 1, "device": "cpu"},
        **SHORT,
    )
    done = autotune("run", "job.yaml", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "real_run.py").write_text(REAL_RUN)
    _name_a_best(folder / "run")
    return folder / "run"


def _name_a_best(run: Path) -> None:
    """On a busy machine no config may have won; but what is confirmed here has a best and a fallback."""
    path = run / "best.yaml"
    best = yaml.safe_load(path.read_text())
    rows, _ = History(run / "history").rows()
    explored = [row["knobs"] for row in rows if row["stage"] == "explore"]
    best["settings"], other = explored[0], explored[1]
    best["fallback"] = best["baseline"] | {"settings": other}
    path.write_text(yaml.safe_dump(best, sort_keys=False))


def real_run(*words: str) -> list[str]:
    """Arguments of `autotune confirm RUN`."""
    return ["--", sys.executable, "real_run.py", *words]


def started(folder: Path) -> dict[str, Any] | None:
    """What the real run was started with; None if it was not."""
    path = folder / "started.json"
    return dict(json.loads(path.read_text())) if path.exists() else None
