"""What a simulated trial takes and reports, beside the rules that real ranks go by."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from autotune.measuring import make_spec
from autotune.simulate.reports import Measured, measure
from autotune.simulate.runner import EPOCH_S, SimulatedRunner
from autotune.simulate.world import World
from tests.unit.test_simulate import GPU_JOB, H100, space_of, world_of
from trials import timing
from trials.outcome import Outcome
from trials.record import Knobs, RankReport

LONG = {"batch": {"global_batch_size": 16 * 64, "target_world_size": 16}, "space": {"num_workers": [4]}}
"""64 micro-steps at a micro-batch of 1."""


def measured(world: World, knobs: Knobs, stage: str = "explore", **changes: Any) -> Measured:
    spec = replace(make_spec(world.job, SimulatedRunner(world), knobs, stage, 0), **changes)
    return measure(world, spec, 1.0, EPOCH_S, random.Random(0))


def step_s(report: RankReport) -> float:
    return timing.mean_step_s(report.block_times_s, report.block_steps)


@pytest.fixture(scope="module")
def long() -> World:
    return world_of(**LONG)


def test_long_accumulation_is_composed_in_the_search_and_takes_a_fraction_of_the_time(long: World) -> None:
    base = space_of(long).baseline
    assert base.grad_accum_steps == 64
    composed, whole = measured(long, base), measured(long, base, "finalist", profile="")
    short, full = composed.reports[0], whole.reports[0]
    assert (short.timing, full.timing, full.step_parts_s) == ("composed", "whole", None)
    assert short.step_parts_s is not None
    assert set(short.step_parts_s) == {"first", "middle", "last", "optimizer", "data"}
    assert sum(short.step_parts_s.values()) == pytest.approx(step_s(short))
    assert step_s(short) == pytest.approx(step_s(full), rel=0.08), "noise, drift and the bias of putting together"
    each = short.phase_s["timed"] / short.num_steps, full.phase_s["timed"] / full.num_steps
    assert each[0] < each[1] / 8, "4 micro-steps and an update, of 64"
    assert composed.seconds < whole.seconds / 2
    assert (short.breakdown, full.breakdown) == (None, None), "64 micro-steps are too many events for a composed trial"


def test_held_back_gradients_show_in_the_parts(long: World) -> None:
    held = replace(space_of(long).baseline, sync_each_micro_batch=False)
    parts = measured(long, held).reports[0].step_parts_s
    assert parts is not None
    assert parts["last"] > parts["middle"] / 62, "the last micro-step reduces for all"


def test_blocks_end_by_the_rules_of_the_measure_section() -> None:
    sections = {"measure": {"min_steps": 5, "max_steps": 11, "rel_ci": 1e-6, "warmup_steps": 4}}
    world = world_of(**sections)
    base = space_of(world).baseline
    unsteady = measured(world, base).reports[0]
    assert unsteady.num_steps == 11 == sum(unsteady.block_steps)
    assert unsteady.phase_s["warmup"] == pytest.approx(4 * step_s(unsteady), rel=0.05)
    steady = measured(world_of(measure=sections["measure"] | {"rel_ci": 0.5}), base).reports[0]
    assert 5 <= steady.num_steps < 11


def test_timing_ends_within_its_share_of_the_time_but_for_the_steps_that_are_asked_for() -> None:
    settings = {"min_steps": 4, "max_steps": 1000, "rel_ci": 1e-9}
    world = world_of(measure=settings | {"trial_timeout_s": 300})
    report = measured(world, space_of(world).baseline).reports[0]
    before = sum(report.phase_s[name] for name in ("start", "data", "process_group", "build", "first_step", "warmup"))
    assert 4 < report.num_steps < 1000
    assert before + report.phase_s["drain"] + report.phase_s["timed"] <= timing.TIMED_SHARE * 300
    hurried = measured(world_of(measure=settings | {"trial_timeout_s": 20}), space_of(world).baseline).reports[0]
    assert hurried.num_steps == 4
    assert hurried.breakdown is None, "no time for a profile"


def test_a_loader_that_cannot_be_emptied_in_time_is_said_to_be_not_sustained() -> None:
    slow = {
        "model": {"preset": "llama3.2-1b", "seq_len": 4096},
        "data": {"source": "corpus", "tokenizer": "tokenizer.json"},
        "cluster": GPU_JOB["cluster"] | {"nodes_per_trial": 1},
        "batch": {"global_batch_size": 64, "target_world_size": 8},
        "space": {"num_workers": [8], "prefetch_factor": [64]},
        "measure": {"trial_timeout_s": 60, "max_steps": 8},
    }
    world = world_of(H100, **slow)
    base = space_of(world).baseline
    deep = replace(base, num_workers=8, prefetch_factor=64)
    report = measured(world, deep).reports[0]
    assert not report.loader_sustained
    assert report.warnings == [timing.NOT_SUSTAINED]
    shallow = measured(world, replace(base, num_workers=1, prefetch_factor=1)).reports[0]
    assert shallow.loader_sustained
    assert shallow.warnings == []


def test_a_queue_that_is_deep_is_timed_three_times_over() -> None:
    world = world_of(measure={"min_steps": 2, "max_steps": 4})
    deep = replace(space_of(world).baseline, num_workers=8, prefetch_factor=16)
    report = measured(world, deep).reports[0]
    assert report.num_steps * deep.grad_accum_steps >= timing.QUEUES_TIMED * 128
    assert report.loader_sustained


def test_compiling_has_a_limit_of_its_own() -> None:
    world = world_of(measure={"compile_timeout_s": 30})
    found = measured(world, replace(space_of(world).baseline, compile=True))
    assert found.outcome is Outcome.TIMEOUT
    assert "measure.compile_timeout_s = 30" in found.reason


def test_the_kernel_of_compiled_blocks_is_not_seen() -> None:
    world = world_of()
    base = space_of(world).baseline
    assert measured(world, base).reports[0].attention_backend == "flash"
    assert measured(world, replace(base, compile=True)).reports[0].attention_backend == ""
