"""What a training run costs with the baseline and with the best config, what that saves, and what the tuning took.

GPU-hours of D tokens = D / (3600 x r x g): r tokens/s per rank as measured, g goodput, the share of its time that a run
really trains. MFU cancels. The saving is reckoned from the lower bound of the gain's interval: what is shown is what is
sure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autotune.stages import SCALE, WATERFALL

SECONDS_PER_HOUR = 3600.0
USEFUL_FLOPS = 1e21
"""Of the model's own, recomputation aside: the amount that prices are compared by."""

EXPLAINED = (WATERFALL, SCALE)
"""Stages that no tuning needs: whoever looks closer afterwards does not make the config pay off later."""


@dataclass(frozen=True)
class Assumptions:
    """What only the user knows."""

    tokens: float
    """To train on, in all."""
    num_gpus: int
    """Of the real run; a rank each."""
    price_per_hour: float | None = None
    """Of one GPU, in `currency`; None: hours alone."""
    goodput: float = 1.0
    """Share of the real run's time that trains: not restarts, checkpoints, evaluation."""
    currency: str = "USD"


@dataclass(frozen=True)
class TrainingCost:
    """Of the whole training run, with one config."""

    tokens_per_s_per_rank: float
    hours: float
    """Times GPUs (ranks, on a CPU)."""
    days: float
    """By the clock."""
    money: float | None
    money_per_1e21_flops: float | None
    """Useful FLOPs; None: they or the price are not known."""


@dataclass(frozen=True)
class Cost:
    """What `autotune cost` answers."""

    assumptions: Assumptions
    unit: str
    """`GPU-hours`; `rank-hours` of a run on CPUs."""
    baseline: TrainingCost
    best: TrainingCost
    """The config to use: of a run without a win it is the baseline."""
    saved_hours: float | None
    """At least, by the lower bound of the gain; None: no saving shown."""
    saved_money: float | None
    why_no_saving: str
    """Empty where there is one."""
    tuning_hours: float
    """All attempts that led to the config and confirmed it, each from the start of its ranks to its clean-up, times its
    ranks; not what was measured afterwards to explain it (waterfall, scaling)."""
    tuning_money: float | None
    break_even_tokens: float | None
    """From which the tuning has paid for itself; None: no saving shown."""
    measured_ranks: int
    """Of the paired rounds that these hours come from."""
    confirmed_ranks: int | None
    """On which `autotune confirm` found the best to hold; None: it did not, or has not run."""
    confirmed_tokens_per_s_per_rank: float | None
    simulated: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def notes(self) -> list[str]:
        """What these figures rest on, for people."""
        asked = self.assumptions
        lines = []
        if asked.num_gpus != self.measured_ranks:
            lines.append(
                f"measured on {self.measured_ranks} ranks, asked for {asked.num_gpus}: the same tokens/s per rank is "
                "assumed there (`autotune scale` measures how it changes with ranks)"
            )
        if self.confirmed_tokens_per_s_per_rank:
            lines.append(
                f"`autotune confirm` measured {self.confirmed_tokens_per_s_per_rank:,.0f} tokens/s per rank of the "
                f"best on {self.confirmed_ranks} ranks; these hours are of the paired rounds"
            )
        if asked.goodput == 1:
            lines.append("goodput 1: no time for restarts, checkpoints or evaluation is counted")
        if self.simulated:
            lines.append("SIMULATED: nothing of this was measured")
        return lines


def training_cost(best: Mapping[str, Any], rows: Iterable[Mapping[str, Any]], asked: Assumptions) -> Cost:
    """The cost of a run's baseline and best config.

    Args:
        best: the content of best.yaml.
        rows: of the history, all stages.

    Raises:
        ValueError: an assumption that cannot be; best.yaml without the throughputs.
    """
    check_assumptions(asked)
    evidence, baseline, fingerprint = best["evidence"], best["baseline"], best["fingerprint"]
    flops_per_token = best["conventions"].get("flops_per_token")
    theirs = _training(baseline["tokens_per_s_per_rank"], flops_per_token, asked)
    ours = _training(evidence["tokens_per_s_per_rank"], flops_per_token, asked)
    why_not = _why_no_saving(best)
    tuning_hours = spent_hours(row for row in rows if row.get("stage") not in EXPLAINED)
    saved = None if why_not else theirs.hours * (1 - 1 / best["gain"]["low"])
    confirmed = best.get("confirmed") or {}
    held = confirmed if confirmed.get("held") == "best" else {}
    is_gpu = fingerprint.get("driver_version") or fingerprint.get("nccl_version")
    return Cost(
        assumptions=asked,
        unit="GPU-hours" if is_gpu else "rank-hours",
        baseline=theirs,
        best=ours,
        saved_hours=saved,
        saved_money=_money(saved, asked),
        why_no_saving=why_not,
        tuning_hours=tuning_hours,
        tuning_money=_money(tuning_hours, asked),
        break_even_tokens=tuning_hours * asked.tokens / saved if saved else None,
        measured_ranks=fingerprint["world_size"],
        confirmed_ranks=held.get("world_size"),
        confirmed_tokens_per_s_per_rank=held.get("tokens_per_s_per_rank"),
        simulated=bool(fingerprint.get("simulated")),
    )


def check_assumptions(asked: Assumptions) -> None:
    """Raises:
    ValueError: it names the option, and what it must be.
    """
    if not 0 < asked.tokens < math.inf:
        raise ValueError(f"--tokens {asked.tokens:g}: must be more than 0, and finite")
    if asked.num_gpus < 1:
        raise ValueError(f"--gpus {asked.num_gpus}: must be 1 or more")
    if asked.price_per_hour is not None and not 0 < asked.price_per_hour < math.inf:
        raise ValueError(f"--price {asked.price_per_hour:g}: must be more than 0, for one GPU and hour")
    if not 0 < asked.goodput <= 1:
        raise ValueError(f"--goodput {asked.goodput:g}: must be a share above 0 and up to 1, e.g. 0.9")


def spent_hours(rows: Iterable[Mapping[str, Any]]) -> float:
    """Hours x ranks of all attempts, out of memory and interrupted ones too.

    The survey, the driver's own work between trials and slots that stood idle are no attempts.
    """
    total_s = 0.0
    for row in rows:
        if row["started_at"] is not None and row["ended_at"] is not None and row["world_size"]:
            total_s += max(0.0, (row["ended_at"] - row["started_at"]).total_seconds()) * row["world_size"]
    return total_s / SECONDS_PER_HOUR


def _why_no_saving(best: Mapping[str, Any]) -> str:
    gain = best["gain"]
    if not best["complete"]:
        return "the run has not ended: its gain is not measured yet"
    if gain is None:
        return str(best["verdict"])
    confirmed = best.get("confirmed")
    if confirmed and confirmed["held"] != "best" and not confirmed.get("measuring_failed"):
        return f"on {confirmed['world_size']} ranks the {confirmed['held']} held, and not the best: {confirmed['why']}"
    if gain["low"] <= 1:
        low, high = (f"{100 * (gain[key] - 1):+.1f} %" for key in ("low", "high"))
        return f"the gain's 95 % interval, {low} to {high}, includes zero"
    return ""


def _training(rate: float | None, flops_per_token: float | None, asked: Assumptions) -> TrainingCost:
    if rate is None or not rate > 0:
        raise ValueError(f"tokens_per_s_per_rank = {rate}: no throughput to reckon with")
    hours = asked.tokens / (SECONDS_PER_HOUR * rate * asked.goodput)
    money = _money(hours, asked)
    per_flops = money / (asked.tokens * flops_per_token) * USEFUL_FLOPS if money and flops_per_token else None
    return TrainingCost(rate, hours, hours / asked.num_gpus / 24, money, per_flops)


def _money(hours: float | None, asked: Assumptions) -> float | None:
    return None if hours is None or asked.price_per_hour is None else hours * asked.price_per_hour
