"""The figures of a row agree with each other, whatever was measured."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.cluster.gang import GangResult
from autotune.hardware import Peak
from autotune.rows import Limits, ModelFacts, Study, composed_beside, history_row
from tests.unit.conftest import make_job, make_space
from trials.outcome import Outcome
from trials.record import Knobs, Measure, RankReport, TrialSpec

BASELINE = make_space().baseline
TIMES_S = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8)
FLOPS = st.floats(1e3, 1e13)
PEAK = st.floats(1e-3, 1e5)


def row_of(
    times_s: list[float],
    flops: float | None,
    peak_tflops_per_s: float | None,
    hardware_flops: float | None,
    checkpointing: str = "none",
    kernel: str = "math",
    attention_recompute: float = 0.0,
) -> dict[str, Any]:
    knobs = Knobs.from_dict(BASELINE.to_dict() | {"activation_checkpointing": checkpointing})
    job = make_job()
    spec = TrialSpec(
        0, "explore", "decoder", {"preset": "tiny"}, 256, {"source": "t"}, 16, "fp32", {}, 2, "cpu", 0, Measure(), knobs
    )
    report = RankReport(
        rank=0,
        outcome="ok",
        micro_batch_tokens=knobs.micro_batch_size * 256,
        num_steps=len(times_s),
        block_times_s=times_s,
        block_steps=[1] * len(times_s),
        allocated_bytes=1,
        hardware_flops_per_token=hardware_flops,
        attention_backend=kernel,
    )
    study = Study(
        "s",
        job,
        ModelFacts(1, 1, flops, flops, "palm-matmul,full-attn", attention_recompute),
        Peak(peak_tflops_per_s, "bf16", "test"),
        Limits("cpu", None, 0.05),
        "hash",
        2,
    )
    reports = dict.fromkeys(range(2), report)
    return history_row(spec, GangResult(Outcome.OK, "", None, reports, ["a"] * 2, 0.0, 1.0), study, "logs")


@given(TIMES_S, FLOPS, PEAK)
def test_tokens_time_flops_and_peak_give_the_same_mfu(times_s: list[float], flops: float, peak: float) -> None:
    row = row_of(times_s, flops, peak, flops)
    tokens = BASELINE.micro_batch_size * BASELINE.grad_accum_steps * 256
    assert row["tokens_per_s_per_rank"] * row["step_time_s"] == pytest.approx(tokens)
    assert row["model_tflops_per_s_per_rank"] * 1e12 == pytest.approx(row["tokens_per_s_per_rank"] * flops)
    expected = row["tokens_per_s_per_rank"] * flops / (peak * 1e12)
    if expected <= 1:
        assert row["mfu"] == pytest.approx(expected)
        assert row["hfu"] == row["mfu"]
    else:
        assert row["mfu"] is None, "the peak is wrong; tokens/s still competes"


@given(TIMES_S, FLOPS, PEAK, st.floats(1, 1.4), st.sampled_from(["full", "every_2", "selective_op"]))
def test_checkpointing_at_equal_time_never_raises_mfu(
    times_s: list[float], flops: float, peak: float, recomputed: float, mode: str
) -> None:
    without, with_it = row_of(times_s, flops, peak, flops), row_of(times_s, flops, peak, flops * recomputed, mode)
    assert with_it["mfu"] == without["mfu"]
    if with_it["hfu"] is not None:
        assert with_it["hfu"] >= with_it["mfu"]


@given(TIMES_S, FLOPS, st.floats(1e3, 1e6))
def test_what_a_fused_kernel_computes_again_is_in_hfu_alone(times_s: list[float], flops: float, again: float) -> None:
    rows = {kernel: row_of(times_s, flops, 1e5, flops, "none", kernel, again) for kernel in ("math", "flash", "")}
    assert len({row["mfu"] for row in rows.values()}) == 1
    assert rows["math"]["hardware_flops_per_token"] == flops
    for kernel in ("flash", ""):  # compiled blocks, where torch chooses, show none
        assert rows[kernel]["hardware_flops_per_token"] == flops + again
        assert rows[kernel]["attention_recompute_flops_per_token"] == again


@given(TIMES_S, PEAK)
def test_flops_that_are_not_known_leave_tokens_per_s_alone(times_s: list[float], peak: float) -> None:
    row = row_of(times_s, None, peak, None)
    assert row["mfu"] is row["mfu_causal"] is row["hfu"] is row["model_tflops_per_s_per_rank"] is None
    assert row["tokens_per_s_per_rank"] > 0


def timed(own_s: list[list[float]], **report: Any) -> dict[str, Any]:
    """A row of two ranks whose own steps took so long."""
    job, knobs = make_job(), BASELINE
    spec = TrialSpec(0, "finalist", "decoder", {}, 256, {"source": "t"}, 16, "fp32", {}, 2, "cpu", 0, Measure(), knobs)
    slowest_s = [max(both) for both in zip(*own_s, strict=True)]
    reports = {
        rank: RankReport(
            rank=rank,
            outcome="ok",
            micro_batch_tokens=256,
            num_steps=len(own),
            block_times_s=slowest_s,
            block_steps=[1] * len(own),
            own_step_times_s=own,
            **{name: values[rank] for name, values in report.items()},
        )
        for rank, own in enumerate(own_s)
    }
    study = Study("s", job, ModelFacts(1, 1, 1.0, 1.0, "c"), Peak(None, "fp32", "n"), Limits("cpu", None, 0.05), "h", 2)
    return history_row(spec, GangResult(Outcome.OK, "", None, reports, ["a"] * 2, 0.0, 1.0), study, "logs")


def test_all_samples_are_kept_and_blocks_are_the_slowest_ranks() -> None:
    row = timed([[1.0, 2.0, 1.0], [1.5, 1.5, 1.5]])
    assert row["rank_step_times_s"] == [[1.0, 2.0, 1.0], [1.5, 1.5, 1.5]]
    assert row["block_times_s"] == [1.5, 2.0, 1.5]
    assert (row["timing"], row["step_parts_s"], row["loader_sustained"]) == ("whole", None, True)


def test_parts_are_those_of_the_slowest_rank_and_one_rank_that_was_not_sustained_is_enough() -> None:
    parts = [{"first": 1.0}, {"first": 1.5}]
    row = timed([[1.0], [1.5]], timing=["composed"] * 2, step_parts_s=parts, loader_sustained=[True, False])
    assert row["timing"] == "composed"
    assert row["step_parts_s"] == {"first": 1.5}
    assert row["loader_sustained"] is False


def test_whole_steps_stand_beside_what_was_composed_before() -> None:
    whole = timed([[2.0], [2.0]])
    assert composed_beside(whole, 2.1) == {
        "composed_step_time_s": 2.1,
        "composed_difference": pytest.approx(0.05),
    }
    assert composed_beside(whole, None) == {}
    assert composed_beside(whole | {"timing": "composed"}, 2.1) == {}
    assert composed_beside({"outcome": "oom_device"}, 2.1) == {}


@given(TIMES_S, FLOPS)
def test_a_peak_that_is_not_known_leaves_tokens_per_s_alone(times_s: list[float], flops: float) -> None:
    row = row_of(times_s, flops, None, flops)
    assert row["mfu"] is row["hfu"] is None
    assert row["model_tflops_per_s_per_rank"] > 0
