"""Cost: published arithmetic, the lower bound of the gain, and what is refused."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from autotune.cli import cli
from autotune.commands.cost import quantity
from autotune.cost import Assumptions, Cost, training_cost
from autotune.errors import UserError
from autotune.report.cost import cost_lines

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
PEAK = 989.4e12
FLOPS_PER_TOKEN = 51.5e9


def rate(mfu: float) -> float:
    return mfu * PEAK / FLOPS_PER_TOKEN


def best(ratio: float = 1.15, low: float = 1.1, complete: bool = True, **fingerprint: Any) -> dict[str, Any]:
    return {
        "complete": complete,
        "verdict": "no config that fits was faster: keep your baseline",
        "evidence": {"tokens_per_s_per_rank": rate(0.40) * ratio},
        "baseline": {"tokens_per_s_per_rank": rate(0.40)},
        "gain": {"ratio": ratio, "low": low, "high": 2 * ratio - low},
        "conventions": {"flops_per_token": FLOPS_PER_TOKEN},
        "fingerprint": {"world_size": 8, "driver_version": "580.1", "nccl_version": "2.27", **fingerprint},
    }


def row(minutes: float, world_size: int | None = 8, outcome: str = "ok") -> dict[str, Any]:
    ended = BEGAN + timedelta(minutes=minutes)
    return {"started_at": BEGAN, "ended_at": ended, "world_size": world_size, "outcome": outcome}


def cost(content: dict[str, Any] | None = None, rows: list[dict[str, Any]] | None = None, **asked: Any) -> Cost:
    values: dict[str, Any] = {"tokens": 1e12, "num_gpus": 8, "price_per_hour": 2.0, **asked}
    return training_cost(content or best(), rows if rows is not None else [row(30)], Assumptions(**values))


def test_the_price_of_useful_flops_is_that_of_the_mfu() -> None:
    found = cost()
    # 1e21 / (3600 x MFU x peak) GPU-hours: 701.9 at 40 % of 989.4 TFLOP/s, at 2 an hour 1,404.
    assert found.baseline.money_per_1e21_flops == pytest.approx(1403.8, abs=0.1)
    assert found.baseline.hours == pytest.approx(36_150, abs=5)
    assert found.best.hours == pytest.approx(found.baseline.hours / 1.15)
    assert found.baseline.days == pytest.approx(found.baseline.hours / 8 / 24)


def test_the_saving_is_that_of_the_lower_bound() -> None:
    found = cost()
    assert found.saved_hours == pytest.approx(found.baseline.hours * (1 - 1 / 1.1))
    assert found.saved_hours < found.baseline.hours - found.best.hours
    assert found.saved_money == pytest.approx(2 * found.saved_hours)


def test_at_the_break_even_the_saving_is_what_the_tuning_took() -> None:
    found = cost()
    assert found.break_even_tokens is not None
    again = cost(tokens=found.break_even_tokens)
    assert again.saved_hours == pytest.approx(again.tuning_hours) == pytest.approx(4.0)


def test_lost_time_makes_both_dearer_and_the_tuning_pay_sooner() -> None:
    whole, half = cost(), cost(goodput=0.5)
    assert half.baseline.hours == pytest.approx(2 * whole.baseline.hours)
    assert half.baseline.money_per_1e21_flops == pytest.approx(2 * (whole.baseline.money_per_1e21_flops or 0))
    assert half.break_even_tokens == pytest.approx((whole.break_even_tokens or 0) / 2)
    assert any("goodput 1" in note for note in whole.notes())
    assert not any("goodput" in note for note in half.notes())


def test_tuning_counts_every_attempt_by_its_own_ranks() -> None:
    rows = [row(30), row(15, world_size=4, outcome="oom_device"), row(60, world_size=None), row(-5)]
    assert cost(rows=rows).tuning_hours == pytest.approx(4 + 1)


def test_a_closer_look_afterwards_is_no_cost_of_the_tuning() -> None:
    stages = ("explore", "round", "confirm", "waterfall", "scale")
    rows = [row(15) | {"stage": stage} for stage in stages]
    assert cost(rows=rows).tuning_hours == pytest.approx(3 * 2)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (best(1.02, low=0.99), "-1.0 % to +5.0 %, includes zero"),
        (best(1.02, low=1.0), "includes zero"),
        (best(complete=False), "has not ended"),
        (best() | {"gain": None}, "keep your baseline"),
        (
            best() | {"confirmed": {"held": "baseline", "why": "best: oom_device", "world_size": 512}},
            "on 512 ranks the baseline held, and not the best: best: oom_device",
        ),
    ],
)
def test_no_saving_is_shown_where_none_was_measured(content: dict[str, Any], why: str) -> None:
    found = cost(content)
    assert (found.saved_hours, found.saved_money, found.break_even_tokens) == (None, None, None)
    lines = cost_lines(found)
    assert lines[0].startswith("No saving shown: ")
    assert why in lines[0]
    assert not any("paid back" in line for line in lines)


def test_what_differs_from_the_measurement_is_said() -> None:
    assert any("measured on 8 ranks, asked for 512" in note for note in cost(num_gpus=512).notes())
    assert not any("measured on" in note for note in cost(num_gpus=8).notes())
    held = {"held": "best", "why": "", "world_size": 512, "tokens_per_s_per_rank": 6543.2}
    confirmed = cost(best() | {"confirmed": held}, num_gpus=512).notes()
    assert any("measured 6,543 tokens/s per rank of the best on 512 ranks" in note for note in confirmed)
    other = cost(best() | {"confirmed": held | {"held": "fallback"}}).notes()
    assert not any("of the best on" in note for note in other)
    assert "SIMULATED: nothing of this was measured" in cost(best(simulated=True)).notes()
    assert cost(best(driver_version="", nccl_version="")).unit == "rank-hours"
    assert cost().unit == "GPU-hours"


def test_without_a_price_or_flops_there_are_hours_alone() -> None:
    found = cost(best() | {"conventions": {"flops_per_token": None}}, price_per_hour=None)
    assert found.baseline.hours > 0
    assert (found.baseline.money, found.baseline.money_per_1e21_flops, found.tuning_money) == (None, None, None)
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("asked", "option"),
    [
        ({"tokens": 0.0}, "--tokens"),
        ({"tokens": float("inf")}, "--tokens"),
        ({"num_gpus": 0}, "--gpus"),
        ({"price_per_hour": 0.0}, "--price"),
        ({"price_per_hour": -2.5}, "--price"),
        ({"price_per_hour": float("nan")}, "--price"),
        ({"goodput": 0.0}, "--goodput"),
        ({"goodput": 1.1}, "--goodput"),
    ],
)
def test_assumptions_that_cannot_be_name_their_option(asked: dict[str, float], option: str) -> None:
    with pytest.raises(ValueError, match=f"^{option} "):
        cost(**asked)


def test_a_run_without_throughputs_is_refused() -> None:
    with pytest.raises(ValueError, match="no throughput"):
        cost(best() | {"baseline": {"tokens_per_s_per_rank": None}})


@pytest.mark.parametrize(
    ("text", "number"),
    [("1T", 1e12), ("300B", 3e11), ("2.5e11", 2.5e11), ("15_000_000", 1.5e7), ("1,000M", 1e9), ("12 k", 1.2e4)],
)
def test_quantities(text: str, number: float) -> None:
    context = click.Context(click.Command("cost"))
    assert quantity(context, click.Option(["--tokens"]), text) == number


@pytest.mark.parametrize("text", ["", "T", "1TT", "-1T", "1 trillion", "nan", "inf", "0x10"])
def test_what_is_no_quantity_is_refused_with_examples(text: str) -> None:
    with pytest.raises(click.BadParameter, match="1T, 300B"):
        quantity(click.Context(click.Command("cost")), click.Option(["--tokens"]), text)


def test_the_command_names_what_is_wrong(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["cost", str(tmp_path), "--tokens", "1T"], standalone_mode=False)
    assert isinstance(done.exception, UserError)
    assert "no best.yaml there" in str(done.exception)
