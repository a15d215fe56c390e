"""What real ranks report of their speed: the loader's sustained rate, the slowest rank's blocks, composed steps."""

from __future__ import annotations

import pytest

from trials.outcome import Outcome
from trials.record import COMPOSED, SHORT_MICRO_STEPS, WHOLE, Knobs, Measure
from trials.timing import mean_step_s

from .harness import HERE, TINY, make_spec
from .sabotage import FULL_QUEUE_BATCH_S

KNOBS = Knobs(
    micro_batch_size=1,
    grad_accum_steps=1,
    sync_each_micro_batch=True,
    reshard_after_forward=True,
    bucket_cap_mb=0.04,
    blocks_per_unit=1,
    activation_checkpointing="none",
    num_workers=1,
    prefetch_factor=4,
)
QUEUED = 4
LONG = 12
"""Micro-steps of a composed step."""
PARTS = ["data", "first", "last", "middle", "optimizer"]


def run(ranks, source, sabotage="none", only_rank=None, measure=None, expected=Outcome.OK, knobs=None, **changes):
    spec = make_spec(
        source,
        Knobs(**(KNOBS.to_dict() | (knobs or {}))),
        workload="sabotage:decoder",
        import_paths=(str(HERE),),
        model={"config": TINY, "knob": sabotage, "only_rank": only_rank},
        measure=measure or Measure(warmup_steps=1, min_steps=2, max_steps=2, rel_ci=0.5, block_s=0.01),
        **changes,
    )
    gang = ranks.run(spec)
    assert gang.outcome is expected, str(gang)
    return gang.reports


def step_s(report):
    return mean_step_s(report.block_times_s, report.block_steps)


def test_a_slow_loader_behind_a_full_queue_shows_its_sustained_rate(ranks, text_folder):
    """The queue, full when the clock is about to start, holds twice the steps that are asked for at least."""
    first, second = run(ranks, text_folder, "full_queue")
    assert first.num_steps >= 3 * QUEUED
    assert step_s(first) >= 0.95 * FULL_QUEUE_BATCH_S, "no faster than the loader can be"
    assert first.data_wait_s <= 2 * FULL_QUEUE_BATCH_S * first.num_steps, "nor is it waited for longer than it takes"
    assert first.loader_sustained
    assert second.loader_sustained


def test_a_composed_step_shows_a_slow_loader_too(ranks, text_folder):
    first, _ = run(ranks, text_folder, "full_queue", composed=True, knobs={"grad_accum_steps": LONG})
    assert first.timing == COMPOSED
    assert first.num_steps >= 3 * QUEUED / SHORT_MICRO_STEPS
    assert step_s(first) >= 0.85 * LONG * FULL_QUEUE_BATCH_S


def test_a_loader_without_workers_is_part_of_a_composed_step(ranks, text_folder):
    knobs = {"grad_accum_steps": LONG, "num_workers": 0, "prefetch_factor": None}
    first, _ = run(ranks, text_folder, "slow_loader_of_one_process", composed=True, knobs=knobs)
    assert first.step_parts_s["data"] >= LONG * FULL_QUEUE_BATCH_S
    assert first.loader_sustained


def test_a_queue_that_cannot_be_drained_in_the_trials_time_is_said_and_does_not_outlast_it(ranks, text_folder):
    """200 batches to empty and 600 to time, of a tenth of a second each; the trial has ten seconds."""
    measure = Measure(warmup_steps=1, min_steps=1, max_steps=4, rel_ci=0.001, block_s=0.01)
    knobs = {"prefetch_factor": 200}
    reports = run(ranks, text_folder, "slow_loader_of_one_process", measure=measure, knobs=knobs, timeout_s=10.0)
    for report in reports:
        assert not report.loader_sustained
        assert report.num_steps >= measure.min_steps
        assert report.num_steps < 3 * 200 / KNOBS.grad_accum_steps
        assert any("loader_sustained" in warning for warning in report.warnings)


def test_a_trial_without_time_left_is_not_profiled_and_says_so(ranks, text_folder):
    reports = run(ranks, text_folder, profile="breakdown", timeout_s=0.01, knobs={"prefetch_factor": 2})
    for report in reports:
        assert report.breakdown is None
        assert any("profile" in warning for warning in report.warnings)
        assert report.num_steps == 2, "the steps that were asked for at least are run all the same"


def test_nothing_waits_for_a_value_inside_a_micro_step(ranks, text_folder):
    """Which would drain what a GPU's host has queued ahead. That the test can fail, the second trial shows."""
    knobs = {"num_workers": 0, "prefetch_factor": None, "grad_accum_steps": 2}
    run(ranks, text_folder, "host_reads_refused", knobs=knobs)
    for report in run(ranks, text_folder, "host_read", knobs=knobs, expected=Outcome.CRASHED):
        assert "waits for a value inside a micro-step" in report.reason


def test_blocks_are_those_of_the_slowest_rank(ranks, text_folder):
    first, second = run(ranks, text_folder, "slow_compute", only_rank=1)
    assert first.block_times_s == second.block_times_s
    assert first.block_steps == second.block_steps
    for report in (first, second):
        assert len(report.own_step_times_s) == report.num_steps == sum(report.block_steps)
        assert sum(report.own_step_times_s) <= step_s(report) * report.num_steps


@pytest.mark.parametrize(
    "knobs",
    [
        {"sync_each_micro_batch": False},
        {"reshard_after_forward": False},
        {"engine": "fsdp1", "sync_each_micro_batch": False, "reshard_after_forward": False},
        {"engine": "ddp", "bucket_cap_mb": 25.0, "blocks_per_unit": None, "reshard_after_forward": None},
    ],
    ids=lambda knobs: "-".join(str(value) for value in knobs.values()),
)
def test_a_composed_trial_runs_few_micro_steps_and_is_what_it_says(ranks, text_folder, knobs):
    knobs = {"grad_accum_steps": LONG, "num_workers": 0, "prefetch_factor": None, **knobs}
    for report in run(ranks, text_folder, composed=True, knobs=knobs):
        assert report.timing == COMPOSED
        assert report.applied["grad_accum_steps"] == LONG
        assert sorted(report.step_parts_s) == PARTS
        assert all(seconds > 0 for seconds in report.step_parts_s.values())
        own_s = sum(report.own_step_times_s) / report.num_steps
        assert sum(report.step_parts_s.values()) == pytest.approx(own_s)
        assert own_s <= step_s(report) * (1 + 1e-9)


@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_a_composed_trial_takes_the_memory_and_trains_as_whole_steps_do(ranks, text_folder, engine):
    """Gradients that are held back exist from the first micro-step's end on: the peak is in the second."""
    knobs = {"grad_accum_steps": LONG, "sync_each_micro_batch": False, "num_workers": 0, "prefetch_factor": None}
    if engine == "ddp":
        knobs |= {"engine": "ddp", "bucket_cap_mb": 25.0, "blocks_per_unit": None, "reshard_after_forward": None}
    whole, _ = run(ranks, text_folder, knobs=knobs)
    short, _ = run(ranks, text_folder, composed=True, knobs=knobs)
    assert (whole.timing, whole.step_parts_s) == (WHOLE, None)
    assert short.allocated_bytes == whole.allocated_bytes
    assert short.losses[:2] == whole.losses[:2]
