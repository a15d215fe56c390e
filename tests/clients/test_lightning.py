"""Lightning's Trainer and Fabric, unmodified, with ModelParallelStrategy (FSDP2) on two gloo ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trials.probe_log import differences

from .harness import run
from .scripts.toy import SEQ_LEN
from .test_plain import TORCHRUN, WORLD_SIZE, asked, check

pytest.importorskip("lightning")

SETTINGS = ["--mbs", "3", "--accum", "2", "--checkpoint-every", "2", "--reshard", "False", "--workers", "1"]


def wanted(sync_each_micro_batch: bool) -> dict[str, Any]:
    return asked("plain") | {
        "micro_batch_size": 3,
        "grad_accum_steps": 2,
        "activation_checkpointing": "every_2",
        "reshard_after_forward": False,
        "sync_each_micro_batch": sync_each_micro_batch,
        "num_workers": 1,
        "prefetch_factor": 2,
    }


def test_trainer(tmp_path: Path) -> None:
    ran = run(tmp_path, ["{probe}", "{scripts}/lightning_trainer.py", *SETTINGS])
    check(ran, wanted(sync_each_micro_batch=True))  # it reduces after each micro-batch, whatever one says


def test_trainer_by_torchrun_and_callback(tmp_path: Path) -> None:
    command = [*TORCHRUN, "{scripts}/lightning_trainer.py", "--callback", *SETTINGS]
    ran = run(tmp_path, command, by_rank=False, attach="callback", env={"PYTHONPATH": "."})
    check(ran, wanted(sync_each_micro_batch=True))


def test_fabric(tmp_path: Path) -> None:
    ran = run(tmp_path, ["{probe}", "{scripts}/fabric.py", *SETTINGS])
    check(ran, wanted(sync_each_micro_batch=False))


def test_the_strategys_own_sizes_shard_over_nothing_and_that_is_told(tmp_path: Path) -> None:
    ran = run(tmp_path, ["{probe}", "{scripts}/lightning_trainer.py", "--data-parallel-size", "0"])
    different, _ = differences(ran.logs, asked("plain"))
    assert [each.name for each in different] == ["shard_mesh_size"]
    assert "write both data_parallel_size and tensor_parallel_size" in str(different[0])


def test_its_own_counts_against_ours(tmp_path: Path) -> None:
    """ThroughputMonitor's device/items_per_sec is tokens of its rank, items_per_sec that times the ranks."""
    ran = run(
        tmp_path, ["{probe}", "{scripts}/lightning_trainer.py", "--accum", "2", "--steps", "12"], timed_steps=None
    )
    assert ran.codes == [0, 0], ran.output
    for log in ran.logs:
        (theirs,) = [said for said in ran.printed() if said["rank"] == log.start["rank"]]
        assert theirs["steps"] == len(log.steps) == 12
        seen = [step for step in log.steps if step["micro_batches"] is not None]
        assert theirs["batches"] / theirs["steps"] == sum(step["micro_batches"] for step in seen) / len(seen)
    (logged,) = ran.folder.glob("logs/**/metrics.csv")
    columns, *rows = [line.split(",") for line in logged.read_text().splitlines()]
    last = dict(zip(columns, map(float, rows[-1]), strict=True))
    per_step = ran.logs[0].steps[-1]["tokens"]
    assert last["train/lengths"] == 12 * per_step == 12 * 2 * 2 * SEQ_LEN
    assert last["train/items_per_sec"] == pytest.approx(WORLD_SIZE * last["train/device/items_per_sec"])


SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "1",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "localhost",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
"""What srun gives the one task of a node, which starts the ranks."""


def test_trainer_inside_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    ran = run(tmp_path, ["{probe}", "{scripts}/lightning_trainer.py", *SETTINGS])
    check(ran, wanted(sync_each_micro_batch=True))
