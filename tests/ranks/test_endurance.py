"""The endurance run on real ranks: a checkpoint brings everything back, and what only shows here is caught."""

from __future__ import annotations

import subprocess

import pytest

from trials.outcome import Outcome
from trials.record import Knobs, Measure

from .harness import HERE, TINY, make_spec

STEPS = 30
BASE = {
    "micro_batch_size": 2,
    "grad_accum_steps": 2,
    "sync_each_micro_batch": True,
    "reshard_after_forward": True,
    "bucket_cap_mb": 0.04,
    "blocks_per_unit": 1,
    "activation_checkpointing": "every_2",
    "num_workers": 1,
    "prefetch_factor": 2,
}
KNOBS = {
    "fsdp2": Knobs(**BASE),
    # Kept weights are whole after an evaluation, when the state is taken.
    "fsdp2-kept": Knobs(**BASE | {"reshard_after_forward": False, "num_workers": 0, "prefetch_factor": None}),
    "fsdp1": Knobs(**BASE, engine="fsdp1"),
    "fsdp1-kept": Knobs(**BASE | {"reshard_after_forward": False}, engine="fsdp1"),
    "ddp": Knobs(**BASE | {"bucket_cap_mb": 25.0}, engine="ddp"),
}


def enduring(text_folder, folder, knobs, name="", steps=STEPS, **changes):
    values = {"measure": Measure(1, steps, steps, rel_ci=1e-9, block_s=0.01), "tracked_bytes": 1}
    if name:
        values |= {"workload": f"enduring_models:{name}", "import_paths": (str(HERE),)}
    return make_spec(text_folder, knobs, stage="endurance", checkpoint_dir=str(folder), **{**values, **changes})


@pytest.mark.parametrize("engine", KNOBS)
def test_evaluation_save_and_load_bring_back_every_bit_of_state(ranks, text_folder, tmp_path, engine):
    gang = ranks.run(enduring(text_folder, tmp_path / "checkpoint", KNOBS[engine], memory_limit_gib=1.0))
    assert gang.outcome is Outcome.OK, str(gang)
    for report in gang.reports:
        assert report.num_steps == STEPS
        phases = {phase["phase"]: phase for phase in report.endurance["phases"]}
        assert list(phases) == ["train", "evaluate", "save", "load"]
        assert all(phase["host_bytes"] > 0 and phase["seconds"] > 0 for phase in phases.values())
        assert report.endurance["host_available_bytes"] > 0
        assert report.endurance["host_growth_bytes_per_step"] == 0
    assert not (tmp_path / "checkpoint").exists(), "it is removed"


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1-kept"])
def test_one_rank_endures_too(ranks, text_folder, tmp_path, engine):
    """There is nothing to shard: torch makes FSDP1 NO_SHARD, and a sharded state dict is asked of it all the same."""
    gang = ranks.run(enduring(text_folder, tmp_path / "checkpoint", KNOBS[engine], steps=2, world_size=1))
    assert gang.outcome is Outcome.OK, str(gang)
    (report,) = gang.reports
    assert [phase["phase"] for phase in report.endurance["phases"]] == ["train", "evaluate", "save", "load"]


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "ddp"])
def test_a_load_that_forgets_the_optimizer_is_wrong_numerics(ranks, text_folder, tmp_path, engine):
    gang = ranks.run(enduring(text_folder, tmp_path / "c", KNOBS[engine], "forgets_the_optimizer", steps=2))
    assert gang.outcome is Outcome.WRONG_NUMERICS, str(gang)
    assert "exp_avg" in str(gang)


@pytest.mark.parametrize(
    ("name", "outcome", "phase", "word"),
    [
        ("loads_nothing", Outcome.WRONG_NUMERICS, "load", "tensors are not, after the load"),
        ("DriftingInEval", Outcome.WRONG_NUMERICS, "load", "evaluation's losses"),
        ("HungryInEval", Outcome.OOM_DEVICE, "evaluate", "out of memory in evaluate"),
    ],
)
def test_what_shows_only_in_an_endurance_run_is_caught(ranks, text_folder, tmp_path, name, outcome, phase, word):
    gang = ranks.run(enduring(text_folder, tmp_path / "c", KNOBS["fsdp2"], name, steps=2))
    assert gang.outcome is outcome, str(gang)
    failed = [report for report in gang.reports if report is not None and report.outcome == outcome.value]
    assert failed, str(gang)
    for report in failed:
        assert report.phase == phase
        assert word in report.reason


def test_a_leak_of_host_memory_is_found_in_bytes_per_step(ranks, text_folder, tmp_path):
    model = {"config": TINY, "leak_mib": 2}
    gang = ranks.run(enduring(text_folder, tmp_path / "c", KNOBS["fsdp2"], "Leaky", steps=30, model=model))
    assert gang.outcome is Outcome.OK, str(gang)
    truth = 2 * 2**20 * KNOBS["fsdp2"].grad_accum_steps
    for report in gang.reports:
        assert 0.5 * truth < report.endurance["host_growth_bytes_per_step"] < 2 * truth


@pytest.mark.parametrize("name", ["", "trusts_the_disk"], ids=["before the write", "in the write"])
def test_a_full_disk_is_named_and_not_the_configs_fault(ranks, text_folder, tmp_path, name):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        gang = ranks.run(enduring(text_folder, tmp_path / "c", KNOBS["fsdp2"], name, steps=2))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert gang.outcome is Outcome.STORAGE_FAILED, str(gang)
    assert "No space left on device" in str(gang)
