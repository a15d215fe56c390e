"""A knob that does not take effect in a running rank is never reported as a measurement of that knob."""

from __future__ import annotations

import dataclasses

import pytest

from trials.outcome import EXIT_FAILED, Outcome
from trials.record import Knobs

from .harness import HERE, TINY, make_spec

ASKED = Knobs(
    micro_batch_size=2,
    grad_accum_steps=2,
    sync_each_micro_batch=False,
    reshard_after_forward=True,
    bucket_cap_mb=0.08,
    blocks_per_unit=2,
    activation_checkpointing="full",
    num_workers=2,
    prefetch_factor=2,
)
FSDP1 = {"engine": "fsdp1", "limit_all_gathers": False, "backward_prefetch": "none", "forward_prefetch": True}
NO_WORKERS = {"num_workers": 0, "prefetch_factor": None}


def sabotaged(source, sabotage, only_rank=None, **changes):
    return make_spec(
        source,
        dataclasses.replace(ASKED, **changes),
        workload="sabotage:decoder",
        import_paths=(str(HERE),),
        model={"config": TINY, "knob": sabotage, "only_rank": only_rank},
    )


def differences(reason):
    return {part.split(":")[0]: part.split(": ")[1] for part in reason.split("; ")}


@pytest.mark.parametrize(
    ("sabotage", "asked", "expected"),
    [
        ("micro_batch_size", {}, {"micro_batch_size": "asked 2, applied 1"}),
        ("grad_accum_steps", {"sync_each_micro_batch": True}, {"grad_accum_steps": "asked 2, applied 1"}),
        ("sync_never_held_back", {}, {"sync_each_micro_batch": "asked False, applied True"}),
        (
            "sync_held_back",
            {"sync_each_micro_batch": True},
            {"sync_each_micro_batch": "asked True, applied False"},
        ),
        ("reshard_ignored", {}, {"reshard_after_forward": "asked True, applied False"}),
        (
            "reshard_ignored",
            {"reshard_after_forward": False},
            {"reshard_after_forward": "asked False, applied True"},
        ),
        ("reshard_mixed", {}, {"reshard_after_forward": "asked True, applied 'mixed'"}),
        (
            "grouping",
            {},
            {"bucket_cap_mb": "asked 0.08, applied 0.04", "blocks_per_unit": "asked 2, applied 1"},
        ),
        ("no_checkpointing", {}, {"activation_checkpointing": "asked 'full', applied 'none'"}),
        (
            "no_selective",
            {"activation_checkpointing": "selective_op"},
            {"activation_checkpointing": "asked 'selective_op', applied 'full'"},
        ),
        ("block_missed", {}, {"activation_checkpointing": "asked 'full', applied 'mixed'"}),
        ("fsdp1_sharding", FSDP1, {"reshard_after_forward": "asked True, applied False"}),
        ("fsdp1_limit_all_gathers", FSDP1, {"limit_all_gathers": "asked False, applied True"}),
        ("fsdp1_backward_prefetch", FSDP1, {"backward_prefetch": "asked 'none', applied 'pre'"}),
        ("fsdp1_forward_prefetch", FSDP1, {"forward_prefetch": "asked True, applied False"}),
        ("fsdp1_no_sync", FSDP1, {"sync_each_micro_batch": "asked False, applied True"}),
        (
            "fsdp1_grouping",
            FSDP1,
            {"bucket_cap_mb": "asked 0.08, applied 0.04", "blocks_per_unit": "asked 2, applied 1"},
        ),
        ("num_workers", {}, {"num_workers": "asked 2, applied 1"}),
        ("prefetch_factor", {}, {"prefetch_factor": "asked 2, applied 3"}),
    ],
)
def test_a_knob_without_effect_is_misapplied_and_named(ranks, text_folder, sabotage, asked, expected):
    quick = {} if sabotage in ("num_workers", "prefetch_factor") else NO_WORKERS
    gang = ranks.run(sabotaged(text_folder, sabotage, **quick, **asked))
    assert gang.outcome is Outcome.MISAPPLIED, str(gang)
    for code, report in zip(gang.exit_codes, gang.reports, strict=True):
        assert (code, report.outcome, report.phase) == (EXIT_FAILED, "misapplied", "warmup"), str(gang)
        assert differences(report.reason) == expected
        assert report.block_times_s == []


@pytest.mark.parametrize(("sabotage", "asked"), [("engine", {}), ("fsdp1_engine", FSDP1)], ids=["fsdp2", "fsdp1"])
def test_a_model_that_is_not_sharded_is_misapplied_and_the_engine_is_named(ranks, text_folder, sabotage, asked):
    gang = ranks.run(sabotaged(text_folder, sabotage, **NO_WORKERS, **asked))
    assert gang.outcome is Outcome.MISAPPLIED, str(gang)
    wanted = asked.get("engine", "fsdp2")
    assert differences(gang.reports[0].reason)["engine"] == f"asked '{wanted}', applied 'none'"


def test_one_rank_that_misapplies_is_the_whole_trials_outcome(ranks, text_folder):
    gang = ranks.run(sabotaged(text_folder, "micro_batch_size", only_rank=1, **NO_WORKERS))
    assert gang.outcome is Outcome.MISAPPLIED, str(gang)
    assert gang.reports[1].outcome == "misapplied"
    assert gang.exit_codes[0] != 0


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"sync_each_micro_batch": True, **NO_WORKERS},
        {"activation_checkpointing": "selective_op", "reshard_after_forward": False, **NO_WORKERS},
        FSDP1,
    ],
)
def test_the_same_run_without_sabotage_is_ok(ranks, text_folder, asked):
    spec = sabotaged(text_folder, "none", **asked)
    gang = ranks.run(spec)
    assert gang.outcome is Outcome.OK, str(gang)
    assert gang.exit_codes == [0, 0]
    for report in gang.reports:
        assert (report.outcome, report.phase, report.reason) == ("ok", "done", "")
        assert report.applied == spec.knobs.to_dict()
        assert report.num_steps == sum(report.block_steps) >= spec.measure.min_steps
        assert report.micro_batch_tokens == 2 * spec.seq_len
    assert gang.reports[0].losses == gang.reports[1].losses
