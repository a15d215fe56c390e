"""A profiled step of real ranks over gloo: what a rank suffers from is what its breakdown shows."""

from __future__ import annotations

import gzip
import json

import pytest

from autotune.diagnose import diagnose
from autotune.rows import Limits, gang_breakdown
from trials.breakdown import FRACTIONS, Breakdown, pacing_rank
from trials.outcome import Outcome
from trials.record import Knobs, RankReport

from .harness import HERE, TINY, make_spec

KNOBS = Knobs(
    micro_batch_size=2,
    grad_accum_steps=2,
    sync_each_micro_batch=True,
    reshard_after_forward=True,
    bucket_cap_mb=2.82,
    blocks_per_unit=1,
    activation_checkpointing="none",
    num_workers=0,
    prefetch_factor=None,
)
FSDP1 = Knobs(
    **(
        KNOBS.to_dict()
        | {"engine": "fsdp1", "limit_all_gathers": True, "backward_prefetch": "pre", "forward_prefetch": False}
    )
)
TINY_KNOBS = Knobs(**(KNOBS.to_dict() | {"bucket_cap_mb": 0.04}))
SMALL = {"preset": "tiny"}


def profiled(ranks, source, knobs=KNOBS, sabotage="none", only_rank=None, profile="breakdown", **model):
    """The gang, and the breakdown of each rank."""
    spec = make_spec(
        source,
        knobs,
        workload="sabotage:decoder",
        import_paths=(str(HERE),),
        model={**(model or SMALL), "knob": sabotage, "only_rank": only_rank},
        seq_len=64,
        profile=profile,
    )
    gang = ranks.run(spec)
    assert gang.outcome is Outcome.OK, str(gang)
    assert all(report.breakdown is not None for report in gang.reports), str(gang)
    return gang, [Breakdown(**report.breakdown) for report in gang.reports]


def findings(knobs, breakdowns):
    """What the driver makes of it."""
    reports = {rank: RankReport(rank, breakdown=found.to_dict()) for rank, found in enumerate(breakdowns)}
    row = {"outcome": "ok", "knobs": knobs.to_dict(), "hosts": ["here", "here"], **gang_breakdown(reports)}
    return diagnose(row, Limits("cpu", None, 0.05))


@pytest.mark.parametrize("knobs", [KNOBS, FSDP1], ids=["fsdp2", "fsdp1"])
def test_a_step_is_matmuls_collectives_and_an_update(ranks, text_folder, knobs):
    gang, found = profiled(ranks, text_folder, knobs)
    for breakdown in found:
        assert sum(breakdown.fractions().values()) == pytest.approx(1, abs=1e-12)
        assert all(breakdown.fractions()[name] > 0 for name in ("compute", "exposed_comm", "optimizer", "idle"))
        assert breakdown.exposed_copy_s == 0
        assert breakdown.exposed_comm_s <= breakdown.comm_s < breakdown.window_s
        assert 0 < breakdown.non_matmul_share < 1
    assert not list(gang.folder.glob("trace*"))


def test_a_slow_loader_is_waiting_for_data(ranks, text_folder):
    for knobs in (TINY_KNOBS, Knobs(**(TINY_KNOBS.to_dict() | {"num_workers": 1, "prefetch_factor": 2}))):
        _, found = profiled(ranks, text_folder, knobs, "slow_loader", config=TINY)
        # A rank whose worker is a batch ahead waits for the other's loader instead of its own.
        assert largest(found[pacing_rank(found)]) == "data_wait"
        assert findings(knobs, found)[0].name == "data-bound"


def test_a_rank_with_a_slow_loader_shows_it_and_its_peer_waits(ranks, text_folder):
    _, found = profiled(ranks, text_folder, TINY_KNOBS, "slow_loader", only_rank=1, config=TINY)
    assert [largest(breakdown) for breakdown in found] == ["exposed_comm", "data_wait"]
    assert pacing_rank(found) == 1
    first = findings(TINY_KNOBS, found)[0]
    assert first.name == "data-bound"
    assert "rank 1 waits" in first.evidence


def test_a_slow_rank_computes_while_its_peer_waits(ranks, text_folder):
    _, found = profiled(ranks, text_folder, TINY_KNOBS, "slow_compute", only_rank=1, config=TINY)
    assert [largest(breakdown) for breakdown in found] == ["exposed_comm", "compute"]
    assert found[1].compute_s > 2 * found[0].compute_s
    assert pacing_rank(found) == 1
    first = findings(TINY_KNOBS, found)[0]
    assert first.name == "straggler"
    assert "rank 1 on here" in first.evidence


def test_a_tiny_model_is_mostly_not_computing(ranks, text_folder):
    _, found = profiled(ranks, text_folder, TINY_KNOBS, config=TINY)
    assert all(breakdown.exposed_comm_s + breakdown.idle_s > breakdown.compute_s for breakdown in found)
    assert findings(TINY_KNOBS, found)[0].name in ("too-small", "comm-bound", "launch-bound", "straggler")


def test_a_trace_is_kept_where_the_trial_keeps_its_files(ranks, text_folder):
    gang, _ = profiled(ranks, text_folder, profile="trace")
    for rank in range(2):
        with gzip.open(gang.folder / f"trace-rank-{rank}.json.gz") as file:
            names = {event.get("name") for event in json.load(file)["traceEvents"]}
        assert {"autotune::step", "autotune::data", "autotune::optimizer", "aten::mm", "gloo:all_gather"} <= names


def test_without_being_asked_nothing_is_profiled(ranks, text_folder):
    spec = make_spec(text_folder, TINY_KNOBS)
    gang = ranks.run(spec)
    assert gang.outcome is Outcome.OK, str(gang)
    assert [report.breakdown for report in gang.reports] == [None, None]
    assert all("profile" not in report.phase_s for report in gang.reports)


@pytest.mark.parametrize(("rate_to_beat", "is_profiled"), [(1.0, True), (1e12, False)])
def test_a_config_that_beats_nothing_is_not_profiled_on_any_rank(ranks, text_folder, rate_to_beat, is_profiled):
    gang = ranks.run(make_spec(text_folder, TINY_KNOBS, profile="breakdown", profile_above=rate_to_beat))
    assert gang.outcome is Outcome.OK, str(gang)
    assert [report.breakdown is not None for report in gang.reports] == [is_profiled] * 2


def largest(breakdown: Breakdown) -> str:
    fractions = breakdown.fractions()
    return max(FRACTIONS, key=lambda name: fractions[name])
