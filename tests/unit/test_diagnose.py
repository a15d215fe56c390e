"""Constructed figures of an attempt, and what bounds it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autotune.diagnose import diagnose, upper_bound
from autotune.history import History
from autotune.report.tables import print_best
from autotune.rows import Limits, attempt_from_row, gang_breakdown
from tests.ranks.harness import make_spec
from tests.unit.conftest import make_space
from tests.unit.test_history import row as stored_row
from tests.unit.test_hostile import best
from trials.breakdown import FRACTIONS, Breakdown
from trials.record import RankReport, TrialSpec

LIMITS = Limits("cpu", limit_gib=1.0, headroom=0.05)
KNOBS = make_space().baseline.to_dict()


def rank(*, non_matmul: float | None = 0.2, kernel_us: float | None = None, **fractions: float) -> Breakdown:
    """One second of a step, in hundredths; what is not given is compute."""
    parts = {f"{name}_s": fractions.get(name, 0) / 100 for name in FRACTIONS}
    parts["compute_s"] = 1 - sum(value for name, value in parts.items() if name != "compute_s")
    return Breakdown(
        window_s=1, comm_s=parts["exposed_comm_s"], non_matmul_share=non_matmul, median_kernel_us=kernel_us, **parts
    )


def row(*ranks: Breakdown, **changes: Any) -> dict[str, Any]:
    reports = {number: RankReport(number, breakdown=one.to_dict()) for number, one in enumerate(ranks)}
    values: dict[str, Any] = {
        "outcome": "ok",
        "knobs": KNOBS,
        "hosts": ["a", "a", "b", "b"][: len(ranks)],
        "reserved_gib": 0.5,
        "allocated_gib": 0.4,
        "alloc_retries": 0,
        "flops_per_token": 6e9,
        "hardware_flops_per_token": 6e9,
    }
    return values | gang_breakdown(reports) | changes


def both(**parts: Any) -> dict[str, Any]:
    return row(rank(**parts), rank(**parts))


@pytest.mark.parametrize(
    ("figures", "names", "bound"),
    [
        (both(data_wait=20, exposed_comm=5), ["data-bound"], 0.25),
        (both(data_wait=4, exposed_comm=9, optimizer=9), ["compute-bound"], 22 / 78),
        (both(exposed_comm=50, idle=5), ["comm-bound"], 1.0),
        (both(exposed_comm=20, data_wait=30), ["data-bound", "comm-bound"], 30 / 70),
        (both(idle=20), ["launch-bound"], 0.25),
        (both(idle=40, exposed_comm=40), ["too-small", "comm-bound"], 4.0),
        (both(idle=10, exposed_comm=80), ["comm-bound"], 4.0),  # a slow network is no small model
        (both(optimizer=50), ["optimizer-bound"], 1.0),
        (both(exposed_copy=20), ["copy-bound"], 0.25),
        (both(non_matmul=0.5), ["memory-bandwidth-bound"], 1.0),
        (both(non_matmul=None), ["compute-bound"], 0.0),
        (row(rank(), rank(), hardware_flops_per_token=8e9), ["recompute-bound"], 1 / 3),
        (
            row(rank(), rank(), hardware_flops_per_token=8e9, attention_recompute_flops_per_token=2e9),
            ["compute-bound"],  # by the attention kernel, which no checkpointing changes
            0.0,
        ),
        (both(idle=14, exposed_comm=9, optimizer=9), ["mixed"], 23 / 77),
    ],
)
def test_what_bounds_a_step_and_how_much_there_is_to_gain(figures, names, bound):
    found = diagnose(figures, LIMITS)
    assert [finding.name for finding in found] == names
    assert found[0].upper_bound == pytest.approx(bound)
    assert all(finding.evidence for finding in found)
    assert all(finding.to_try for finding in found if finding.name != "mixed")


def test_a_slow_rank_is_told_apart_from_a_slow_network():
    slow = row(rank(exposed_comm=40), rank(exposed_comm=40), rank(exposed_comm=5), rank(exposed_comm=42))
    found = diagnose(slow, LIMITS)
    assert [finding.name for finding in found] == ["straggler"]
    assert "rank 2 on b works 950 ms of a step, the middle rank 600 ms" in found[0].evidence
    assert found[0].upper_bound == pytest.approx(upper_bound(0.35))
    assert slow["frac_exposed_comm"] == pytest.approx(0.05)
    network = diagnose(row(*[rank(exposed_comm=40 + number) for number in range(4)]), LIMITS)
    assert [finding.name for finding in network] == ["comm-bound"]


def test_a_rank_whose_own_python_is_slow_is_a_straggler_too():
    found = diagnose(row(rank(exposed_comm=50), rank(idle=50)), LIMITS)
    assert [finding.name for finding in found] == ["straggler", "launch-bound"]
    assert "rank 1" in found[0].evidence


def test_a_rank_that_waits_for_its_loader_is_no_straggler():
    found = diagnose(row(rank(exposed_comm=60), rank(data_wait=60)), LIMITS)
    assert [finding.name for finding in found] == ["data-bound"]
    assert "rank 1 waits for the loader 60 % of the step" in found[0].evidence


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1.0])
def test_the_upper_bound_is_the_gain_without_that_part(share):
    step_s = 2.0
    left_s = step_s * (1 - min(share, 0.999))
    assert upper_bound(share) == pytest.approx(step_s / left_s - 1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("used_gib", [0.90, 0.94, 0.96, 1.1])
def test_memory_is_judged_by_the_limit_that_makes_a_config_infeasible(device, used_gib):
    limits = Limits(device, limit_gib=1.0, headroom=0.05)
    judged = "reserved_gib" if device == "cpu" else "allocated_gib"
    figures = stored_row(0) | both() | {judged: used_gib, "reason": ""}
    feasible = attempt_from_row(figures, limits).is_feasible
    assert ("memory-limited" in [finding.name for finding in diagnose(figures, limits)]) == (not feasible)


def test_allocator_retries_come_first():
    found = diagnose(both(data_wait=50) | {"alloc_retries": 3}, LIMITS)
    assert [finding.name for finding in found] == ["allocator-retries", "data-bound"]
    assert "3 times" in found[0].evidence


def test_scores_that_are_written_out_come_before_all_else():
    known = row(rank(data_wait=20), rank(data_wait=20), attention_backend="math", alloc_retries=3)
    assert [f.name for f in diagnose(known, LIMITS)] == ["unfused-attention", "allocator-retries", "data-bound"]
    assert "unfused" not in str(diagnose(known | {"attention_backend": "flash"}, LIMITS))
    asked = KNOBS | {"attention_backend": "math"}
    assert "unfused" not in str(diagnose(known | {"knobs": asked}, LIMITS))
    unprofiled = {name: value for name, value in known.items() if name != "rank_breakdowns"}
    assert diagnose(unprofiled, LIMITS)[0].name == "unfused-attention"


def test_only_knobs_that_can_still_be_turned_are_named():
    def to_try(**knobs):
        return diagnose(both(exposed_comm=50) | {"knobs": KNOBS | knobs}, LIMITS)[0].to_try

    held = {"grad_accum_steps": 4, "sync_each_micro_batch": False, "reshard_after_forward": False}
    assert "sync_each_micro_batch off" in to_try(grad_accum_steps=4, sync_each_micro_batch=True)
    assert {"sync_each_micro_batch off", "reshard_after_forward off"}.isdisjoint(to_try(**held))
    assert "prefetch" in to_try(engine="fsdp1")


def test_short_kernels_are_evidence_of_launches():
    assert (
        "the median kernel takes 4 us (no longer than a launch)"
        in diagnose(both(idle=30, kernel_us=4), LIMITS)[0].evidence
    )
    assert "4" not in diagnose(both(idle=30), LIMITS)[0].evidence


def test_without_a_breakdown_the_loader_and_the_memory_are_still_known():
    timed = {"outcome": "ok", "knobs": KNOBS, "step_time_s": 2.0, "num_steps": 10, "alloc_retries": 0}
    assert diagnose(timed | {"data_wait_s": 0.5}, LIMITS) == []
    found = diagnose(timed | {"data_wait_s": 10.0, "reserved_gib": 0.99}, LIMITS)
    assert [finding.name for finding in found] == ["memory-limited", "data-bound"]
    assert diagnose({"outcome": "oom_device", "alloc_retries": 1}, LIMITS) == []


def test_figures_that_are_not_to_be_trusted_are_named_after_what_bounds_a_step():
    steady = both(data_wait=20) | {"loader_sustained": True, "drift": 0.09}
    assert [finding.name for finding in diagnose(steady, LIMITS)] == ["data-bound"]
    doubtful = both(data_wait=20) | {"loader_sustained": False, "drift": -0.2}
    found = diagnose(doubtful, LIMITS)
    assert [finding.name for finding in found] == ["data-bound", "queue-not-drained", "drifting"]
    assert "took 20 % less time" in found[2].evidence


@pytest.mark.parametrize(
    ("figures", "line"),
    [
        ({"composed_difference": 0.0123}, "together from the parts of a short one: +1.2 % of the time"),
        ({"timing": "composed"}, "was not run whole"),
        ({"loader_sustained": False}, "the rate may not be sustained"),
    ],
)
def test_the_result_says_how_it_was_timed_if_not_as_it_should_be(capsys, figures, line):
    content = json.loads(json.dumps(best()))
    print_best(Console(width=200, highlight=False), content)
    assert line not in capsys.readouterr().out
    content["evidence"] |= {"trial": 7} | figures
    print_best(Console(width=200, highlight=False), content)
    assert line in capsys.readouterr().out


def test_a_gang_of_which_one_rank_could_not_be_profiled_has_no_breakdown():
    reports = {0: RankReport(0, breakdown=rank().to_dict()), 1: RankReport(1)}
    assert gang_breakdown(reports) == {}


def test_a_breakdown_survives_the_history(tmp_path):
    figures = both(exposed_comm=20, kernel_us=4.0)
    columns = {name: figures[name] for name in figures if name.startswith(("frac_", "rank_", "non_"))}
    history = History(tmp_path)
    history.append(stored_row(0) | columns)
    history.append(stored_row(1))
    found, unprofiled = history.rows()[0]
    assert {name: found[name] for name in columns} == columns
    assert unprofiled["frac_compute"] is unprofiled["rank_breakdowns"] is None
    assert [finding.name for finding in diagnose(found | {"outcome": "ok", "knobs": KNOBS}, LIMITS)] == ["comm-bound"]


def test_the_result_says_where_the_step_goes_and_what_bounds_it(capsys):
    finding = diagnose(both(data_wait=20), LIMITS)[0].to_dict()
    content = json.loads(json.dumps(best()))
    breakdown = dict.fromkeys(FRACTIONS, 0.0) | {"compute": 0.8, "data_wait": 0.2}
    content["baseline"] |= {"breakdown": breakdown, "bottlenecks": [finding]}
    content["evidence"] |= {"trial": 7, "breakdown": None, "bottlenecks": []}
    print_best(Console(width=200, highlight=False), content)
    shown = capsys.readouterr().out
    assert "A step of baseline: compute 80.0 %, data wait 20.0 %" in shown
    assert "data-bound: the ranks wait for the loader 20 % of the step; gain at most +25 %; try more" in shown
    assert "A step of best" not in shown


def test_profiling_does_not_change_what_is_measured(baseline):
    spec = make_spec(Path("texts"), baseline)
    assert replace(spec, profile="trace", profile_above=100.0).digest() == spec.digest()
    assert TrialSpec.from_json(replace(spec, profile="trace").to_json()).profile == "trace"
