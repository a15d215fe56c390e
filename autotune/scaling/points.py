"""Scaling efficiencies: a pure function of a history.

Its rows have the stage `scale`, their config's `role`, and their `world_size`. Strong scaling keeps the global batch
(the job's); weak scaling keeps the sequences per rank (those that the real run's ranks have).
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.interleaved import Figure, Interleaved
from autotune.report.text import count
from autotune.stages import SCALE
from trials.outcome import NOT_OF_THE_CONFIG, Outcome
from trials.record import Knobs

STRONG, WEAK = "strong", "weak"
MODES = (STRONG, WEAK)


@dataclass(frozen=True)
class Point:
    """One config on one number of ranks."""

    role: str
    """`best`, `baseline`, `fallback`, or `finalist` with the number of its trial."""
    mode: str
    """`strong` or `weak`."""
    world_size: int
    """Ranks."""
    settings: dict[str, Any]
    """The accumulation is that of these ranks."""
    global_batch_size: int
    """Sequences per optimizer step."""
    is_predicted: bool
    """Not measured, but by the step-time model from what was."""
    num_runs: int
    problem: str
    """Why there are no figures, e.g. it ran out of memory; empty if there are."""
    num_not_fitting: int = 0
    """Of its runs, those beyond the memory limit less headroom, or that the allocator had to retry in: it ran, but is
    no config to use there."""
    tokens_per_s_per_rank: Figure | None = None
    step_time_s: Figure | None = None
    """Of one optimizer step."""
    mfu: Figure | None = None
    """A fraction; None also where no peak is known."""
    efficiency: Figure | None = None
    """Tokens/s per rank over that on the fewest ranks measured, N0. Of weak scaling that is T(N0) / T(N), of strong
    scaling N0 T(N0) / (N T(N)), with T the time of a step. 1 on N0 itself; None of a config that ran nowhere else.
    95 % interval; of a prediction, the range of what each number of ranks that was measured leads to."""
    exposed_comm_share: float | None = None
    """Of a profiled step, a fraction: communication that no compute hides; the median of its runs."""
    exposed_comm_s: float | None = None
    """The same share of the timed step, seconds."""

    def notes(self) -> list[str]:
        """What to know of it beside its figures."""
        where = f"{self.role}, {self.mode}, on {count(self.world_size, 'rank')}"
        said = [f"{where}: {self.problem}"] if self.problem else []
        if self.num_not_fitting:
            said.append(
                f"{where}: {self.num_not_fitting} of {count(self.num_runs, 'run')} left less memory free than "
                "cluster.memory_headroom asks for, or had retries of the allocator: no config to use there"
            )
        return said


@dataclass(frozen=True)
class Ranked:
    """A config on the largest number of ranks measured."""

    role: str
    place: int
    """From 1, by throughput; those that are no different stand in the order measured."""
    ratio_to_first: Figure
    """Of tokens/s per rank; 95 % interval."""


@dataclass(frozen=True)
class Scaling:
    """How the configs scale."""

    points: tuple[Point, ...]
    """Measured, or missing with their `problem`; by role, mode and number of ranks. Then those that are predicted."""
    ranking: tuple[Ranked, ...]
    """Of the configs on `ranked_world_size` ranks; empty if fewer than two ran there."""
    ranked_mode: str
    ranked_world_size: int
    target_world_size: int
    """Of the real run."""
    simulated: bool
    prediction_problem: str = ""
    """Why nothing is predicted for the real run's ranks; empty if something is, or they were measured."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with units in the names."""
        return dataclasses.asdict(self)


Curve = tuple[str, str]
"""Role and mode."""
Config = tuple[str, int]
"""Role and ranks."""


def scaling(
    rows: Sequence[dict[str, Any]],
    global_batch_size: int,
    target_world_size: int,
    contenders: Mapping[str, Knobs] | None = None,
    not_fitting: Collection[int] = (),
) -> Scaling | None:
    """The scaling that was measured.

    Args:
        rows: of a history, of all stages.
        global_batch_size: of the job, sequences.
        target_world_size: ranks of the real run.
        contenders: by role, as best.yaml has them now. A run that was resumed may have found another best since its
            scaling: rows then have the role that their config has now, and those of no contender are left out. None:
            rows have the role that they were measured in.
        not_fitting: trials that ran, and left too little memory free.

    Returns:
        None where none was.
    """
    of_the_config = [row for row in rows if row["stage"] == SCALE and row.get("role")]
    if contenders is not None:
        named = [row | {"role": _role(row, contenders)} for row in of_the_config]
        of_the_config = [row for row in named if row["role"]]
    known = [row for row in of_the_config if Outcome(row["outcome"]) not in NOT_OF_THE_CONFIG]
    if not known:
        return None
    by_mode = {
        mode: [
            row
            for row in known
            if batch_of(row) == batch_on(global_batch_size, target_world_size, row["world_size"], mode)
        ]
        for mode in MODES
    }
    points = [point for mode, found in by_mode.items() for point in _points(mode, found, not_fitting)]
    points = [_with_curve(point, points) for point in points if _is_of_a_curve(point, points)]
    if not points:
        return None
    largest = max((point.world_size for point in points if point.num_runs), default=0)
    curves = {point.mode for point in points if point.efficiency is not None}
    ranked = next((mode for mode in MODES if mode in curves), STRONG)
    # Those that ran on one number of ranks alone stand with the curves that there are.
    points = [point if point.mode in curves else dataclasses.replace(point, mode=ranked) for point in points]
    return Scaling(
        points=tuple(sorted(points, key=lambda point: (_order(point.role), point.mode, point.world_size))),
        ranking=_ranking(by_mode[ranked], largest),
        ranked_mode=ranked,
        ranked_world_size=largest,
        target_world_size=target_world_size,
        simulated=any(row.get("simulated") for row in known),
    )


def _role(row: dict[str, Any], contenders: Mapping[str, Knobs]) -> str | None:
    """The contender whose config it is, but for what these ranks alone decide."""
    ours = Knobs.from_dict(row["knobs"])
    decided: dict[str, Any] = {"grad_accum_steps": 1}
    if ours.grad_accum_steps == 1:
        decided["sync_each_micro_batch"] = True  # nothing is held back
    if row["world_size"] == 1:
        decided["reshard_after_forward"] = True  # nothing is sharded
    same = dataclasses.replace(ours, **decided)
    return next((role for role, theirs in contenders.items() if dataclasses.replace(theirs, **decided) == same), None)


def batch_of(row: dict[str, Any]) -> int:
    """Sequences per optimizer step of a row, over its ranks."""
    knobs = Knobs.from_dict(row["knobs"])
    return int(knobs.micro_batch_size * knobs.grad_accum_steps * row["world_size"] // knobs.model_parallel_ranks)


def batch_on(global_batch_size: int, target_world_size: int, world_size: int, mode: str) -> int:
    """Sequences per optimizer step that a mode asks for on so many ranks; 0 where weak scaling's share is no whole
    number.

    Args:
        global_batch_size: of the job, whose real run has `target_world_size` ranks.
    """
    if mode == STRONG:
        return global_batch_size
    batch, rest = divmod(global_batch_size * world_size, target_world_size)
    return 0 if rest else batch


def _is_of_a_curve(point: Point, points: Sequence[Point]) -> bool:
    """Where strong and weak scaling have one batch, a point is of both; of a mode that has no other, it is of none."""
    sizes = {mode: {p.world_size for p in points if p.role == point.role and p.mode == mode} for mode in MODES}
    return len(sizes[point.mode]) > 1 or (all(len(found) < 2 for found in sizes.values()) and point.mode == STRONG)


def _with_curve(point: Point, points: Sequence[Point]) -> Point:
    """Without an efficiency where the config ran on one number of ranks alone: there is nothing to compare it with."""
    sizes = {p.world_size for p in points if (p.role, p.mode) == (point.role, point.mode) and p.efficiency}
    return point if len(sizes) > 1 else dataclasses.replace(point, efficiency=None)


def _points(mode: str, rows: Sequence[dict[str, Any]], not_fitting: Collection[int]) -> list[Point]:
    by_config: dict[Config, list[dict[str, Any]]] = {}
    for row in rows:
        by_config.setdefault((row["role"], row["world_size"]), []).append(row)
    runs = _interleaved(rows)
    fewest = (
        {role: min(n for r, n in by_config if r == role and runs and (r, n) in runs) for role, _ in runs.num_runs}
        if runs
        else {}
    )
    points = [_point(mode, config, found, runs, fewest) for config, found in by_config.items()]
    return [
        dataclasses.replace(point, num_not_fitting=sum(row["trial"] in not_fitting for row in found))
        for point, found in zip(points, by_config.values(), strict=True)
    ]


def _interleaved(rows: Sequence[dict[str, Any]]) -> Interleaved[Config] | None:
    ran = [row for row in rows if row["outcome"] == Outcome.OK]
    if not ran:
        return None
    return Interleaved(((row["role"], row["world_size"]), row["round"], row["tokens_per_s_per_rank"]) for row in ran)


def _point(
    mode: str,
    config: Config,
    rows: Sequence[dict[str, Any]],
    runs: Interleaved[Config] | None,
    fewest: dict[str, int],
) -> Point:
    role, world_size = config
    ran = [row for row in rows if row["outcome"] == Outcome.OK]
    failed = [row for row in rows if row["outcome"] != Outcome.OK]
    point = Point(
        role=role,
        mode=mode,
        world_size=world_size,
        settings=rows[0]["knobs"],
        global_batch_size=batch_of(rows[0]),
        is_predicted=False,
        num_runs=len(ran),
        problem=f"{failed[0]['outcome']} in trial {failed[0]['trial']}" if failed else "",
    )
    if not ran or runs is None or config not in runs:
        return point
    rate = runs.level(config)
    shares = [row["frac_exposed_comm"] for row in ran if row.get("frac_exposed_comm") is not None]
    share = statistics.median(shares) if shares else None
    tokens = ran[0]["tokens_per_s_per_rank"] * ran[0]["step_time_s"]
    step = Figure(tokens / rate.value, rate.high and tokens / rate.high, rate.low and tokens / rate.low)
    mfu = next((row["mfu"] / row["tokens_per_s_per_rank"] for row in ran if row.get("mfu") is not None), None)
    first = fewest[role]
    return dataclasses.replace(
        point,
        tokens_per_s_per_rank=rate,
        step_time_s=step,
        mfu=None if mfu is None else rate.times(mfu),
        efficiency=runs.ratio(config, (role, first)),
        exposed_comm_share=share,
        exposed_comm_s=None if share is None else share * step.value,
    )


def _ranking(rows: Sequence[dict[str, Any]], world_size: int) -> tuple[Ranked, ...]:
    runs = _interleaved([row for row in rows if row["world_size"] == world_size])
    if runs is None or len(runs.num_runs) < 2:
        return ()
    ordered = sorted(runs.num_runs, key=lambda config: runs.level(config).value, reverse=True)
    return tuple(Ranked(role, place, runs.ratio((role, n), ordered[0])) for place, (role, n) in enumerate(ordered, 1))


def _order(role: str) -> tuple[int, str]:
    first = ("best", "baseline", "fallback")
    return first.index(role) if role in first else len(first), role
