"""Gangs of real ranks on a real Ray: outcomes, root causes, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.cluster.runner import SlotRunner
from autotune.errors import UserError
from tests.cluster.conftest import rank_processes, spec
from tests.unit.conftest import make_job
from trials.outcome import Outcome


def test_a_trial_reports_from_every_rank(runner: SlotRunner, texts: Path, tmp_path: Path) -> None:
    result = runner.run(spec(texts), tmp_path, 120)
    assert (result.outcome, result.reason) == (Outcome.OK, "")
    assert sorted(result.reports) == [0, 1]
    assert len(result.hosts) == 2
    for rank, report in result.reports.items():
        assert report.applied == spec(texts).knobs.to_dict()  # type: ignore[union-attr]
        assert (tmp_path / f"rank-{rank}.log").exists()
    assert result.reports[0].losses == result.reports[1].losses
    assert result.reports[0].block_times_s == result.reports[1].block_times_s


@pytest.mark.parametrize(
    ("mode", "outcome", "reason"),
    [
        ("oom", Outcome.OOM_DEVICE, "DefaultCPUAllocator: can't allocate memory"),
        ("raise", Outcome.CRASHED, "ValueError in first_step: no such thing"),
        ("exit0", Outcome.CRASHED, "rank 1"),
        ("hang", Outcome.TIMEOUT, "no end after 8 s"),
        (
            "nan",
            Outcome.WRONG_NUMERICS,
            "the loss of the first step (no update yet: initial values or data) is nan",
        ),
    ],
)
def test_one_rank_in_trouble_ends_the_gang_and_leaves_the_slot_clean(
    runner: SlotRunner, texts: Path, tmp_path: Path, mode: str, outcome: Outcome, reason: str
) -> None:
    before = rank_processes()
    result = runner.run(spec(texts, mode), tmp_path, 8 if mode == "hang" else 120)
    print(f"{mode}: {result.outcome}, detected after {result.detected_s} s: {result.reason}")
    assert result.outcome is outcome
    assert reason in result.reason
    assert result.leftover_pids == []
    assert rank_processes() == before, "ranks and their DataLoader workers are gone; the fork server stays"
    assert runner.run(spec(texts), tmp_path, 120).outcome is Outcome.OK, "the slot is usable again"


def test_a_real_limit_ends_in_the_allocator(runner: SlotRunner, texts: Path, tmp_path: Path) -> None:
    small = spec(texts, memory_limit_gib=0.03, model={"preset": "tiny"}, seq_len=256)
    result = runner.run(small, tmp_path, 120)
    assert result.outcome is Outcome.OOM_DEVICE


def test_a_factory_that_does_not_import_is_invalid_with_its_cause(
    runner: SlotRunner, texts: Path, tmp_path: Path
) -> None:
    result = runner.run(spec(texts, workload="no_such_module:make"), tmp_path, 120)
    assert result.outcome is Outcome.INVALID
    assert "ModuleNotFoundError" in result.reason


def test_what_cannot_be_counted_beside_the_measurement_is_told_and_the_measurement_stands(
    runner: SlotRunner, texts: Path, tmp_path: Path
) -> None:
    result = runner.run(spec(texts, "item"), tmp_path, 120)
    assert result.outcome is Outcome.OK, result.reason
    assert result.reports[0].hardware_flops_per_token is None
    assert result.reports[0].block_times_s
    (warning,) = result.reports[0].warnings
    assert warning.startswith("HFU is not known: the FLOP count on meta failed")
    survey = runner.run(spec(texts, "item", knobs=None, stage="survey"), tmp_path, 120).reports[0].survey
    assert survey is not None
    assert survey["flops_convention"] == "palm-matmul,full-attn", "the formula needs no count"


def test_the_survey_tells_what_the_space_needs(runner: SlotRunner, texts: Path, tmp_path: Path) -> None:
    result = runner.run(spec(texts, knobs=None, stage="survey"), tmp_path, 120)
    found = result.reports[0].survey
    assert found is not None
    assert found["num_blocks"] == len(found["block_mib"]) == 2
    assert found["cpu_peak_tflops_per_s"] > 0
    assert 0 < found["cpu_share"] <= 1
    assert found["num_params"] > found["num_matmul_params"] > 0


def test_plain_exec_gives_the_same_trial(runner: SlotRunner, texts: Path, tmp_path: Path) -> None:
    forked = runner.run(spec(texts), tmp_path, 120)
    other = SlotRunner(make_job(cluster={"ranks_per_node": 2, "device": "cpu", "launcher": "exec"}), "cpu")
    try:
        executed = other.run(spec(texts), tmp_path, 120)
    finally:
        other.close()
    assert executed.outcome is Outcome.OK, executed.reason
    first = [len(report.losses) for report in (forked.reports[0], executed.reports[0])]
    common = min(first)
    assert executed.reports[0].losses[:common] == forked.reports[0].losses[:common]
    assert executed.reports[0].allocated_bytes == forked.reports[0].allocated_bytes


def test_more_ranks_than_the_cluster_has_is_refused_at_once(runner: SlotRunner) -> None:
    with pytest.raises(UserError, match=r"1 node with 64 CPUs is not to be had; Ray has \[\d+ CPU\]"):
        SlotRunner(make_job(cluster={"ranks_per_node": 64, "device": "cpu"}), "cpu")
