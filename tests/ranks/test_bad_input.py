"""Models and data that cannot be trained: each ends in an outcome that names its cause."""

from __future__ import annotations

import dataclasses

import pytest

from trials.models import DecoderWorkload
from trials.outcome import Outcome
from trials.record import Knobs

from .harness import HERE, TINY, make_spec

KNOBS = Knobs(
    micro_batch_size=2,
    grad_accum_steps=2,
    sync_each_micro_batch=True,
    reshard_after_forward=True,
    bucket_cap_mb=0.04,
    blocks_per_unit=1,
    activation_checkpointing="none",
    num_workers=0,
    prefetch_factor=None,
)


def bad(source, wrong, **changes):
    return make_spec(
        source,
        KNOBS,
        workload="bad_model:make",
        import_paths=(str(HERE),),
        **{"model": {"wrong": wrong, "config": TINY}, **changes},
    )


@pytest.mark.parametrize("survey", [True, False], ids=["survey", "trial"])
@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ("no_blocks", "the workload's blocks() found none: nothing to shard or checkpoint"),
        ("foreign_block", "the workload's blocks() are not modules of its model: ['Linear']"),
        ("per_token", "it must be the micro-batch's mean, one number"),
        ("frozen", ": nothing to train"),
    ],
)
def test_a_workload_that_cannot_be_trained_is_invalid_before_anything_is_measured(
    ranks, text_folder, wrong, cause, survey
):
    spec = bad(text_folder, wrong)
    gang = ranks.run(dataclasses.replace(spec, knobs=None) if survey else spec)
    assert gang.outcome is Outcome.INVALID, str(gang)
    assert any(report is not None and cause in report.reason for report in gang.reports), str(gang)


def test_nan_from_the_start_is_said_to_be_of_the_first_step(ranks, text_folder):
    gang = ranks.run(bad(text_folder, "nan"))
    assert gang.outcome is Outcome.WRONG_NUMERICS, str(gang)
    assert "the loss of the first step (no update yet: initial values or data) is nan" in gang.reports[0].reason


def test_a_loss_over_another_batch_shape_says_both_shapes(ranks, text_folder):
    gang = ranks.run(bad(text_folder, "unshifted"))
    assert gang.outcome is Outcome.CRASHED, str(gang)
    reasons = [report.reason for report in gang.reports if report is not None]
    cause = "ValueError in first_step: Expected input batch_size (64) to match target batch_size (66)"
    assert any(cause in reason for reason in reasons), str(gang)


def test_a_model_that_writes_out_its_scores_trains_and_is_told_what_to_change_first(ranks, text_folder):
    gang = ranks.run(bad(text_folder, "scores"))
    assert gang.outcome is Outcome.OK, str(gang)
    for report in gang.reports:
        assert report.attention_backend == "math"
        assert "attention writes out 32 x 32 scores: before any other setting, call torch's" in report.warnings[0]
    usual = ranks.run(make_spec(text_folder, KNOBS))
    assert usual.reports[0].attention_backend == "flash"
    assert usual.reports[0].warnings == []


@pytest.mark.parametrize("survey", [True, False], ids=["survey", "trial"])
def test_a_vocabulary_without_room_for_the_tokens_names_both(ranks, text_folder, survey):
    spec = make_spec(text_folder, KNOBS, model={"config": {**TINY, "vocab_size": 100}})
    gang = ranks.run(dataclasses.replace(spec, knobs=None) if survey else spec)
    assert gang.outcome is Outcome.INVALID, str(gang)
    assert "needs a vocabulary of 256; the model's is 100" in gang.reports[0].reason


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_a_model_of_one_small_block_is_one_unit_and_trains(ranks, text_folder, engine):
    config = {**TINY, "num_layers": 1, "hidden_size": 2, "num_heads": 1, "num_kv_heads": 1, "ffn_size": 1}
    assert DecoderWorkload(8, config=config).config.head_dim == 2
    fsdp1 = {"limit_all_gathers": True, "backward_prefetch": "pre", "forward_prefetch": False}
    knobs = dataclasses.replace(KNOBS, bucket_cap_mb=0.01, engine=engine, **(fsdp1 if engine == "fsdp1" else {}))
    gang = ranks.run(make_spec(text_folder, knobs, model={"config": config}))
    assert gang.outcome is Outcome.OK, str(gang)
