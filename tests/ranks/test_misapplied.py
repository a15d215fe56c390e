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
DDP = {"engine": "ddp", "bucket_cap_mb": 1.0}
IN_BF16 = {"bucket_cap_mb": 0.04, "precision": "bf16"}
NO_WORKERS = {"num_workers": 0, "prefetch_factor": None}


def sabotaged(source, sabotage, only_rank=None, precision="fp32", **changes):
    return make_spec(
        source,
        dataclasses.replace(ASKED, **changes),
        precision=precision,
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
        (
            "reshard_mixed",
            {},
            {"reshard_after_forward": "asked True, applied 'mixed'", "keep_last_units": "asked 0, applied 'mixed'"},
        ),
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
            "grouping",
            FSDP1,
            {"bucket_cap_mb": "asked 0.08, applied 0.04", "blocks_per_unit": "asked 2, applied 1"},
        ),
        ("ddp_bucket_cap", DDP, {"bucket_cap_mb": "asked 1.0, applied 25.0"}),
        ("fused_optimizer", {"fused_optimizer": True}, {"fused_optimizer": "asked True, applied False"}),
        ("attention_backend", {"attention_backend": "math"}, {"attention_backend": "asked 'math', applied 'flash'"}),
        ("prefetch", {"forward_prefetch_units": 2}, {"forward_prefetch_units": "asked 2, applied 0"}),
        ("prefetch", {"backward_prefetch_units": 1}, {"backward_prefetch_units": "asked 1, applied 0"}),
        ("reduce_dtype", {"reduce_dtype": "bf16", **IN_BF16}, {"reduce_dtype": "asked 'bf16', applied 'fp32'"}),
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


@pytest.mark.parametrize(
    ("sabotage", "asked"),
    [("engine", {}), ("fsdp1_engine", FSDP1), ("ddp_engine", DDP)],
    ids=["fsdp2", "fsdp1", "ddp"],
)
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
        DDP,
        {"fused_optimizer": True, "attention_backend": "math", "forward_prefetch_units": 2, "keep_last_units": 1},
        {"reduce_dtype": "bf16", **IN_BF16},
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


def test_copies_that_are_not_made_are_misapplied(ranks, text_folder):
    spec = sabotaged(text_folder, "replicate_degree", replicate_degree=2, **NO_WORKERS)
    gang = ranks.run(dataclasses.replace(spec, world_size=4, global_batch_size=16))
    assert gang.outcome is Outcome.MISAPPLIED, str(gang)
    assert differences(gang.reports[0].reason) == {"replicate_degree": "asked 2, applied 1"}


def test_blocks_that_are_compiled_run_and_read_back_and_blocks_that_are_not_are_misapplied(ranks, text_folder):
    asked = {"compile": True, "activation_checkpointing": "none", **NO_WORKERS}
    gang = ranks.run(sabotaged(text_folder, "compile", **asked))
    assert differences(gang.reports[0].reason) == {"compile": "asked True, applied False"}
    gang = ranks.run(sabotaged(text_folder, "none", **asked))
    assert gang.outcome is Outcome.OK, str(gang)
    assert gang.reports[0].applied["compile"] is True
    assert gang.reports[0].phase_s["compile"] > 0


def test_compiling_that_takes_longer_than_its_limit_is_a_timeout_that_says_so(ranks, text_folder):
    spec = sabotaged(text_folder, "compile", compile=True, activation_checkpointing="none", **NO_WORKERS)
    gang = ranks.run(dataclasses.replace(spec, compile_timeout_s=0.0001))
    assert gang.outcome is Outcome.TIMEOUT, str(gang)
    assert "measure.compile_timeout_s" in gang.reports[0].reason
