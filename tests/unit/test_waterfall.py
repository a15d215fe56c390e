"""What a waterfall says, out of rows; and which knobs are one change."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from autotune.report.text import json_safe
from autotune.waterfall.changes import path
from autotune.waterfall.steps import Waterfall, Worth, waterfall
from tests.unit.conftest import make_space
from trials.record import Knobs

SPACE = make_space()
NAMES = ("activation_checkpointing", "micro_batch_size", "num_workers")
FLOPS = 2e-8
"""TFLOP/s of a token/s."""


def make_rows(
    gains: dict[str, float],
    *,
    rounds: int = 3,
    noise: float = 0.01,
    interaction: float = 1.0,
    fails: tuple[frozenset[str], ...] = (),
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Rows of a waterfall as they are measured: each change by itself, then on top of each other.

    Args:
        gains: factor of throughput of each change, in the order of measuring.
        interaction: factor more where all changes are together.
        fails: what runs out of memory.
    """
    rng = random.Random(seed)
    order = list(gains)
    singles = [[], *([name] for name in order), order]
    chain = [order[:number] for number in range(len(order) + 1)]
    rows: list[dict[str, Any]] = []
    for number in range(2 * rounds):
        drift = rng.gauss(0, 0.1)
        for changes in singles if number < rounds else chain:
            rate = 1000.0 * 2.718281828 ** (drift + rng.gauss(0, noise))
            for name in changes:
                rate *= gains[name]
            rate *= interaction if len(changes) == len(order) > 1 else 1.0
            failed = frozenset(changes) in fails
            rows.append(
                {
                    "stage": "waterfall",
                    "trial": len(rows),
                    "round": number,
                    "changes": list(changes),
                    "outcome": "oom_device" if failed else "ok",
                    "knobs": SPACE.baseline.to_dict() | {name: name in changes for name in order},
                    "tokens_per_s_per_rank": None if failed else rate,
                    "model_tflops_per_s_per_rank": rate * FLOPS,
                    "mfu": rate * 1e-4,
                    "simulated": False,
                }
            )
    return rows


def amounts(worth: Worth) -> tuple[float, float, float]:
    assert worth.tflops_per_s_per_rank is not None and worth.mfu is not None
    return worth.tokens_per_s_per_rank.value, worth.tflops_per_s_per_rank.value, worth.mfu.value


def check_sums(found: Waterfall) -> None:
    bars = [*(step.worth for step in found.steps), *([found.not_measurable.worth] if found.not_measurable else [])]
    alone = [one.worth for one in found.alone if one.worth is not None]
    for unit in range(3):
        start, end = amounts(found.baseline)[unit], amounts(found.winner)[unit]
        assert start + sum(amounts(bar)[unit] for bar in bars) == pytest.approx(end, rel=1e-12)
        singles = sum(amounts(one)[unit] for one in [*alone, found.interactions])
        assert start + singles == pytest.approx(end, rel=1e-12)
        assert amounts(found.total)[unit] == pytest.approx(end - start, rel=1e-9)


@pytest.mark.parametrize("seed", range(25))
def test_bars_sum_from_the_baseline_to_the_winner_whatever_ran(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"knob{number}" for number in range(rng.randint(1, 5))]
    gains = {name: rng.uniform(0.9, 1.5) for name in names}
    keys = [frozenset(names[:n]) for n in range(1, len(names))] + [frozenset({n}) for n in names if len(names) > 1]
    fails = tuple(rng.sample(keys, rng.randint(0, len(keys))))
    rows = make_rows(gains, noise=rng.choice([0.001, 0.05]), interaction=rng.uniform(0.8, 1.2), fails=fails, seed=seed)
    rows = [row for row in rows if not row["changes"] or len(row["changes"]) == len(names) or rng.random() < 0.9]
    found = waterfall(rows)
    assert found is not None
    check_sums(found)
    said = [
        change
        for step in [*found.steps, *([found.not_measurable] * bool(found.not_measurable))]
        for change in step.changes
    ]  # type: ignore[union-attr]
    assert sorted(said) == sorted(names), "each change is in one bar"
    json.loads(json.dumps(json_safe(found.to_dict())))


def test_steps_stand_in_order_of_gain_with_what_each_is_worth() -> None:
    found = waterfall(make_rows({"a": 1.5, "b": 1.2, "c": 1.1}, noise=0.001))
    assert found is not None
    assert [step.changes for step in found.steps] == [("a",), ("b",), ("c",)]
    rates = [1.5, 1.2, 1.1]
    level = found.baseline.tokens_per_s_per_rank.value
    for step, rate in zip(found.steps, rates, strict=True):
        assert step.worth.tokens_per_s_per_rank.value == pytest.approx(level * (rate - 1), rel=0.03)
        level *= rate
    assert found.gain.value == pytest.approx(1.98 - 1, abs=0.01)
    assert found.is_complete and found.not_measurable is None


def test_a_step_that_runs_out_of_memory_merges_with_the_next() -> None:
    found = waterfall(make_rows({"a": 1.5, "b": 1.3, "c": 1.2}, noise=0.001, fails=(frozenset("ab"), frozenset("b"))))
    assert found is not None
    assert [step.changes for step in found.steps] == [("a",), ("b", "c")]
    assert "oom_device" in found.steps[1].note
    assert found.is_complete
    (alone,) = (one for one in found.alone if one.change == "b")
    assert alone.worth is None and "oom_device" in alone.problem
    check_sums(found)


def test_what_runs_only_on_top_of_others_names_them_however_little_they_gain() -> None:
    found = waterfall(make_rows({"a": 1.0, "b": 1.5}, noise=0.01, fails=(frozenset("b"),)))
    assert found is not None
    (step,) = found.steps
    assert step.changes == ("b",)
    assert step.note.startswith("without ")
    assert ": oom_device in trial " in step.note
    assert found.not_measurable is not None
    assert found.not_measurable.changes == ("a",)


def test_gains_under_their_interval_are_one_bar() -> None:
    found = waterfall(make_rows({"a": 1.5, "b": 1.001, "c": 0.999}, noise=0.02))
    assert found is not None
    assert [step.changes for step in found.steps] == [("a",)]
    assert found.not_measurable is not None
    assert set(found.not_measurable.changes) == {"b", "c"}
    check_sums(found)


def test_interactions_are_the_total_beyond_the_sum_of_single_gains() -> None:
    found = waterfall(make_rows({"a": 1.2, "b": 1.2}, noise=0.001, interaction=1.25))
    assert found is not None
    base = found.baseline.tokens_per_s_per_rank.value
    beyond = found.interactions.tokens_per_s_per_rank
    assert beyond.value == pytest.approx(base * (1.2 * 1.2 * 1.25 - 1 - 0.4), rel=0.05)
    assert beyond.is_measurable


def test_without_baseline_or_winner_there_is_none_and_a_half_is_not_complete() -> None:
    rows = make_rows({"a": 1.2, "b": 1.1, "c": 1.1})
    assert waterfall([]) is None
    assert waterfall([row for row in rows if row["changes"]]) is None
    assert waterfall(make_rows({"a": 1.2, "b": 1.1, "c": 1.1}, fails=(frozenset("abc"),))) is None
    half = waterfall([row for row in rows if row["round"] < 2])
    assert half is not None and not half.is_complete
    check_sums(half)
    one = waterfall([row for row in rows if row["round"] == 0])
    assert one is not None and one.total.tokens_per_s_per_rank.low is None, "one repeat has no interval"


def test_rows_of_another_winner_are_left_out() -> None:
    rows = make_rows({"compile": 1.2, "fused_optimizer": 1.1})
    base = SPACE.baseline.to_dict()
    one = waterfall(rows, base, base | {"compile": True})
    assert one is not None
    assert [alone.change for alone in one.alone] == ["compile"]
    both = waterfall(rows, base, base | {"compile": True, "fused_optimizer": True})
    assert both is not None
    assert len(both.alone) == 2
    assert waterfall(rows, base | {"num_workers": 3}, base | {"compile": True}) is None, "of another baseline"


# --- which knobs are one change --------------------------------------------------------------------------------------


def test_a_winner_with_one_change_more_has_no_waterfall_yet() -> None:
    """All rows of the overtaken winner's belong to the new one's too, which has not been measured."""
    base = SPACE.baseline
    earlier = replace(base, activation_checkpointing="none", micro_batch_size=2)
    later = replace(earlier, bucket_cap_mb=2 * base.bucket_cap_mb, blocks_per_unit=2)
    found = path(base, earlier, SPACE.completed)
    rows = make_rows(dict.fromkeys(found.changes, 1.2))
    for row in rows:
        row["knobs"] = found.config(row["changes"]).to_dict()
    assert waterfall(rows, base.to_dict(), earlier.to_dict()) is not None
    assert waterfall(rows, base.to_dict(), later.to_dict()) is None


def winner(**changes: Any) -> Knobs:
    return SPACE.canonical(replace(SPACE.baseline, **changes))


def test_the_accumulation_follows_the_micro_batch_and_the_prefetch_the_workers() -> None:
    base = SPACE.canonical(replace(SPACE.baseline, num_workers=0))
    there = winner(micro_batch_size=4, grad_accum_steps=2, num_workers=1, prefetch_factor=2)
    there = replace(there, activation_checkpointing="none")
    found = path(base, there, SPACE.completed)
    names = {frozenset(change.split("+")) for change in found.changes}
    assert names == {
        frozenset({"micro_batch_size"}),
        frozenset({"num_workers", "prefetch_factor"}),
        frozenset({"activation_checkpointing"}),
    }
    assert found.config(()) == base
    assert found.config(found.changes) == there


def test_what_has_no_effect_by_itself_is_one_change_with_what_gives_it_one() -> None:
    base = winner(micro_batch_size=8, grad_accum_steps=1)
    there = winner(micro_batch_size=4, grad_accum_steps=2, sync_each_micro_batch=False)
    (change,) = path(base, there, SPACE.completed).changes
    assert set(change.split("+")) == {"micro_batch_size", "sync_each_micro_batch"}


def test_an_engine_is_one_change_with_the_knobs_that_only_it_has() -> None:
    base = SPACE.baseline
    ddp = SPACE.canonical(replace(base, engine="ddp", bucket_cap_mb=25.0, reshard_after_forward=None, num_workers=0))
    found = path(base, ddp, SPACE.completed)
    (engine,) = (change for change in found.changes if "engine" in change)
    assert "bucket_cap_mb" in engine and "keep_last_units" in engine
    assert found.config(found.changes) == ddp


@pytest.mark.parametrize("seed", range(30))
def test_every_change_has_an_effect_and_all_together_are_the_winner(seed: int) -> None:
    rng = random.Random(seed)
    here, there = SPACE.draw(rng), SPACE.draw(rng)
    found = path(here, there, SPACE.completed)
    if here == there:
        assert found.changes == ()
        return
    assert found.config(found.changes) == there
    singles = [found.config((change,)) for change in found.changes]
    assert len({here, *singles}) == len(singles) + 1, "all are different"


def test_knobs_of_a_users_own_trainer_are_changes_like_others() -> None:
    base = replace(SPACE.baseline, custom=(("flash", "no"), ("tp", "1")))
    there = replace(base, custom=(("flash", "yes"), ("tp", "2")))
    found = path(base, there, lambda knobs: knobs)
    assert found.changes == ("custom.flash", "custom.tp")
    assert found.config(("custom.tp",)).custom == (("flash", "no"), ("tp", "2"))
    assert found.config(found.changes) == there
