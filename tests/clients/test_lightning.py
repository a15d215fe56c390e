"""Lightning's Trainer and Fabric, unmodified, with ModelParallelStrategy (FSDP2) on two gloo ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.export import Best, export
from autotune.export.lightning import FILE_NAME
from trials.probe_log import differences
from trials.record import Knobs

from . import exported
from .harness import run
from .scripts.toy import NUM_PARAMETERS, SEQ_LEN
from .test_plain import TORCHRUN, WORLD_SIZE, asked, check

pytest.importorskip("lightning")
pytest.importorskip("jsonargparse")

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


TUNED = {
    "fsdp2": Knobs(4, 2, True, False, 0.06, 1, "full", 1, 3),
    "fsdp2_grouped": Knobs(2, 1, True, True, 0.07, 2, "every_2", 0, None),
}
OWN = [
    "--trainer.accelerator=cpu",
    f"--trainer.devices={WORLD_SIZE}",
    "--trainer.max_steps=1000",
    *(f"--trainer.{name}=false" for name in ("logger", "enable_checkpointing", "enable_progress_bar")),
    "--trainer.enable_model_summary=false",
]


@pytest.mark.parametrize("case", TUNED)
def test_by_exported_files(case: str, tmp_path: Path) -> None:
    tuned = Best(TUNED[case], "fp32", WORLD_SIZE, SEQ_LEN, evidence=[])
    found = export("lightning", tuned)
    for name, text in found.files.items():
        (tmp_path / name).write_text(text)
    command = ["{probe}", "{scripts}/lightning_exported.py", "fit", f"--config={tmp_path / FILE_NAME}", *OWN]
    ran = run(tmp_path, command, env={"PYTHONPATH": str(tmp_path)})
    exported.check(ran, tuned, found.lost, NUM_PARAMETERS, SEQ_LEN)
