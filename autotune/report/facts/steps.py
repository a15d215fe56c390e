"""Where a step's time goes, by part and by rank."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from autotune.diagnose import diagnose
from autotune.loaded import LoadedRun
from autotune.rows import Attempt
from autotune.stages import OF_A_RUN
from trials.breakdown import FRACTIONS, Breakdown
from trials.outcome import Outcome
from trials.record import Knobs


@dataclass(frozen=True)
class StepParts:
    """A profiled step of one config."""

    label: str
    trial: int
    step_time_s: float | None
    """Of the timed steps of that trial."""
    fractions: dict[str, float]
    """Part -> share of the profiled step, on the rank that the others wait for; they sum to 1."""
    bottlenecks: list[dict[str, Any]]
    """What bounds it, largest possible gain first: name, evidence, upper_bound (a fraction), to_try."""


@dataclass(frozen=True)
class RankTime:
    rank: int
    host: str
    mean_step_s: float
    """Of the timed steps; a rank that waits for another takes as long as that one."""
    min_step_s: float
    max_step_s: float
    work_s: float | None
    """Of the profiled step: without waits for other ranks and for the loader; null: it was not profiled."""


@dataclass(frozen=True)
class RankTimes:
    """One trial, rank by rank."""

    label: str
    trial: int
    ranks: list[RankTime]
    block_times_s: list[float]
    """Seconds a step of each timed block, slowest rank."""
    drift: float | None
    """Second half of the blocks over the first, minus 1."""


def step_parts(run: LoadedRun) -> list[StepParts]:
    """Of the baseline, the best config, and the fastest of each other checkpointing mode that was profiled."""
    profiled = {attempt.knobs: attempt for attempt in run.attempts if _is_profiled(attempt)}
    chosen: dict[Knobs, str] = {}
    for label, knobs in _named(run).items():
        if knobs in profiled:
            chosen[knobs] = label
    by_mode: dict[str, Attempt] = {}
    for attempt in profiled.values():
        mode = attempt.knobs.activation_checkpointing
        if attempt.is_feasible and (mode not in by_mode or _rate(attempt) > _rate(by_mode[mode])):
            by_mode[mode] = attempt
    for mode, attempt in by_mode.items():
        if attempt.knobs in chosen:
            chosen[attempt.knobs] += f" (checkpointing: {mode})"
        else:
            chosen[attempt.knobs] = f"fastest profiled with checkpointing: {mode}"
    return [_parts(run, label, profiled[knobs]) for knobs, label in chosen.items()]


def _is_profiled(attempt: Attempt) -> bool:
    return (
        attempt.outcome is Outcome.OK
        and attempt.stage in OF_A_RUN
        and all(attempt.row.get(f"frac_{name}") is not None for name in FRACTIONS)
    )


def _named(run: LoadedRun) -> dict[str, Knobs]:
    """Baseline and best, once if they are one."""
    if run.best is None:
        found = [attempt.knobs for attempt in run.attempts if attempt.stage == "baseline"]
        return {"baseline": found[-1]} if found else {}
    baseline, best = (Knobs.from_dict(part["settings"]) for part in (run.best["baseline"], run.best))
    return {"baseline": baseline} | ({"best": best} if best != baseline else {})


def _rate(attempt: Attempt) -> float:
    return attempt.tokens_per_s_per_rank or 0.0


def _parts(run: LoadedRun, label: str, attempt: Attempt) -> StepParts:
    row = attempt.row
    return StepParts(
        label=label,
        trial=attempt.trial,
        step_time_s=row["step_time_s"],
        fractions={name: row[f"frac_{name}"] for name in FRACTIONS},
        bottlenecks=[finding.to_dict() for finding in diagnose(row, run.study.limits)],
    )


def rank_times(run: LoadedRun) -> list[RankTimes]:
    """Of the baseline and the best config: their last trial that has the times of each rank, profiled if one is."""
    found = []
    for label, knobs in _named(run).items():
        own = [
            attempt
            for attempt in run.attempts
            if attempt.knobs == knobs and attempt.outcome is Outcome.OK and attempt.stage in OF_A_RUN
        ]
        timed = [attempt for attempt in own if _is_timed(attempt.row)]
        if timed:
            found.append(_of_ranks(label, max(timed, key=lambda one: (_is_profiled(one), one.trial)).row))
    return found


def _is_timed(row: dict[str, Any]) -> bool:
    times: list[list[float]] | None = row.get("rank_step_times_s")
    return times is not None and bool(times) and all(own and None not in own for own in times)


def _of_ranks(label: str, row: dict[str, Any]) -> RankTimes:
    hosts, parts = row["hosts"], row.get("rank_breakdowns") or []
    return RankTimes(
        label=label,
        trial=row["trial"],
        ranks=[
            RankTime(
                rank=rank,
                host=hosts[rank] if rank < len(hosts) else "",
                mean_step_s=statistics.fmean(times),
                min_step_s=min(times),
                max_step_s=max(times),
                work_s=_work_s(parts[rank]) if rank < len(parts) else None,
            )
            for rank, times in enumerate(row["rank_step_times_s"])
        ],
        block_times_s=row.get("block_times_s") or [],
        drift=row.get("drift"),
    )


def _work_s(part: dict[str, Any] | None) -> float | None:
    parts = Breakdown.read(part)
    return None if parts is None else parts.own_s - parts.data_wait_s
