"""Runs that can come to nothing, by the command line on a modelled cluster: what is said, and the exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.history import History
from tests.unit.test_cli import autotune

CLUSTER = "nodes=8 gpus=8 device='NVIDIA H100 80GB HBM3' seed=4"
FEW = ("--trials", "3", "--set", "measure.rounds=3")


@pytest.mark.parametrize(
    ("options", "cluster", "exit_code", "complaint", "hint", "stages"),
    [
        (("--set", "space={}"), "", 2, "space: no config in it differs from the baseline", "more candidates", []),
        (
            ("--set", "space={micro_batch_size: [4, 8], activation_checkpointing: [none]}"),
            "",
            3,
            "of its 2 configs none was tried beside the baseline: with the device's 79.10 GiB all surely run out",
            "smaller micro-batches or more checkpointing, or use devices with more memory",
            ["baseline"],
        ),
        (
            ("--set", "budget.minutes=0.1"),
            "",
            2,
            "budget.minutes = 0.1 is used up: survey and baseline alone took",
            "raise it: the 3 trials of budget.trials take about",
            ["baseline"],
        ),
        (
            (),
            "memory_gib=24",
            3,
            "the device's 24.00 GiB: even the config that takes least ran out of memory",
            "use devices with more memory, use more ranks",
            ["baseline", "baseline"],
        ),
        (
            ("--set", "cluster.memory_limit_gib=20.5"),
            "",
            3,
            "cluster.memory_limit_gib = 20.5: even the config that takes least ran out of memory",
            "raise the limit, use more ranks",
            ["baseline", "baseline"],
        ),
        (("--warm-start", "empty"), "", 2, "--warm-start empty: no history there", "give the folder of a run", []),
    ],
    ids=["nothing to tune", "nothing that fits", "budget", "all out of memory", "limit", "warm start"],
)
def test_what_comes_to_nothing_says_why_and_what_to_do(
    tmp_path: Path, options: tuple[str, ...], cluster: str, exit_code: int, complaint: str, hint: str, stages: list[str]
) -> None:
    (tmp_path / "empty").mkdir()
    simulate = ("--simulate", f"{CLUSTER} {cluster}", "--output", "run")
    done = autotune("run", "llama3-8b", *simulate, *FEW, *options, cwd=tmp_path)
    assert done.returncode == exit_code, done.stdout + done.stderr
    said, _, advice = done.stderr.partition("\n  hint: ")
    assert complaint in said
    assert hint in advice
    assert "Traceback" not in done.stderr
    rows, _ = History(tmp_path / "run" / "history").rows()
    assert [row["stage"] for row in rows if row["outcome"] != "predicted_oom"] == stages
