"""The waterfall: a pure function of a run's history.

Its rows have the stage `waterfall`, and `changes`: what their config takes from the winner, in the order in which it
was applied; none is the baseline, one is a change by itself, all are the winner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.interleaved import Figure, Interleaved
from autotune.report.text import differences
from autotune.stages import WATERFALL
from autotune.waterfall.flat import flat
from trials.outcome import NOT_OF_THE_CONFIG, Outcome
from trials.record import Knobs

JOINED = "+"
"""Between the knobs of one change, in its name."""
Key = frozenset[str]


@dataclass(frozen=True)
class Worth:
    """A throughput per rank, or a difference of two, in three units; 95 % intervals."""

    tokens_per_s_per_rank: Figure
    tflops_per_s_per_rank: Figure | None
    """Of the model, without recomputation; None: its FLOPs are not known."""
    mfu: Figure | None
    """A fraction; None: no peak is known."""


@dataclass(frozen=True)
class Alone:
    """One change by itself, on the baseline."""

    change: str
    """Its knob in the history's words; several are joined by `+`."""
    label: str
    """For people: what the config has otherwise than the baseline."""
    worth: Worth | None
    """More or less than the baseline; None: it did not run alone."""
    problem: str
    """Why not; empty if it did."""


@dataclass(frozen=True)
class Step:
    """One bar of the waterfall: a change, or several that cannot be told apart, on top of those before."""

    changes: tuple[str, ...]
    label: str
    worth: Worth
    note: str = ""
    """Why several changes are one step, or what this one does not run without; empty if neither is so."""


@dataclass(frozen=True)
class Waterfall:
    """From the baseline to the winner. In each unit, baseline + the worth of all `steps` + that of `not_measurable` =
    winner, exactly; and baseline + the worth of all `alone` that have one + `interactions` = winner."""

    baseline: Worth
    winner: Worth
    total: Worth
    """Winner less baseline."""
    gain: Figure
    """The same as a fraction of the baseline."""
    steps: tuple[Step, ...]
    """In order of their gain alone: those whose interval leaves zero out."""
    not_measurable: Step | None
    """All others, as one bar."""
    alone: tuple[Alone, ...]
    """Each change by itself, in the same order."""
    interactions: Worth
    """What the changes are worth together beyond the sum of what they are worth alone; those that do not run alone are
    part of it. Next to nothing where there is one change."""
    num_rounds: int
    """Interleaved repeats that the figures come from."""
    is_complete: bool
    """False: it was interrupted, and steps are taken together that may yet be told apart."""
    simulated: bool

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with units in the names."""
        return dataclasses.asdict(self)


def waterfall(
    rows: Sequence[dict[str, Any]],
    baseline: Mapping[str, Any] | None = None,
    winner: Mapping[str, Any] | None = None,
) -> Waterfall | None:
    """The waterfall of a run.

    Args:
        rows: of its history, of all stages.
        baseline, winner: their knobs by best.yaml; rows of a waterfall between other configs, measured before the run
            found a better one, are left out. None: all rows are of one waterfall.

    Returns:
        None where baseline and winner have not both been measured.
    """
    kept = [row for row in rows if _is_of_a_waterfall(row)]
    if baseline is not None and winner is not None:
        ours, theirs = _spelt(baseline), _spelt(winner)
        kept = [row for row in kept if _belongs(row, ours, theirs)]
        if not any(_spelt(row["knobs"]) == theirs for row in kept):
            return None  # another waterfall, to a winner that this one has overtaken
    return _Reading(kept).waterfall() if kept else None


def _spelt(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """In one spelling: best.yaml and the history have null for what a trainer of one's own decides."""
    return flat(Knobs.from_dict(dict(knobs)).to_dict())


def _is_of_a_waterfall(row: dict[str, Any]) -> bool:
    told = row["stage"] == WATERFALL and row.get("changes") is not None
    return told and Outcome(row["outcome"]) not in NOT_OF_THE_CONFIG


def _belongs(row: dict[str, Any], ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    of_row = _spelt(row["knobs"])
    if not row["changes"]:
        return of_row == ours
    changed = [knob for change in row["changes"] for knob in change.split(JOINED)]
    return all(ours.get(knob) != theirs.get(knob) == of_row.get(knob) for knob in changed)


class _Reading:
    """Rows of one waterfall, and what they say."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = rows
        self.row_of: dict[Key, dict[str, Any]] = {}
        self.problems: dict[Key, str] = {}
        runs: list[tuple[Key, int, float]] = []
        for row in rows:
            key = frozenset(row["changes"])
            self.row_of.setdefault(key, row)
            if row["outcome"] == Outcome.OK:
                runs.append((key, row["round"], row["tokens_per_s_per_rank"]))
            else:
                self.problems.setdefault(key, f"{row['outcome']} in trial {row['trial']}")
        ran = [run for run in runs if run[0] not in self.problems]
        self.runs = Interleaved(ran) if ran else None

    def waterfall(self) -> Waterfall | None:
        start, end = Key(), max(self.row_of, key=len)
        if self.runs is None or not end or start not in self.runs or end not in self.runs:
            return None
        order = self.order(end)
        steps, is_complete = self.steps(order)
        alone = tuple(self.alone(change) for change in order)
        together = {end: 1.0, start: -1.0}
        ran_alone = [Key({one.change}) for one in alone if one.worth is not None]
        apart = together | {start: len(ran_alone) - 1.0}
        for key in ran_alone:
            apart[key] = apart.get(key, 0.0) - 1.0
        small = [step for step, _ in steps if not step.worth.tokens_per_s_per_rank.is_measurable]
        ratio = self.runs.ratio(end, start)
        return Waterfall(
            baseline=self.worth({start: 1.0}),
            winner=self.worth({end: 1.0}),
            total=self.worth(together),
            gain=Figure(ratio.value - 1, ratio.low and ratio.low - 1, ratio.high and ratio.high - 1),
            steps=tuple(step for step, _ in steps if step not in small),
            not_measurable=self.grouped([(step, weights) for step, weights in steps if step in small]),
            alone=alone,
            interactions=self.worth(apart),
            num_rounds=self.runs.num_rounds,
            is_complete=is_complete,
            simulated=any(row.get("simulated") for row in self.rows),
        )

    def order(self, end: Key) -> list[str]:
        """As the cumulative configs were measured; before that, by what each change gains alone."""
        between = [row["changes"] for row in self.rows if 1 < len(row["changes"]) < len(end)]
        if between:
            longest = max(reversed(between), key=len)  # of the latest, if more repeats have changed the order
            return [*longest, *(change for change in self.row_of[end]["changes"] if change not in longest)]
        return by_gain(self.rows, self.row_of[end]["changes"])

    def steps(self, order: Sequence[str]) -> tuple[list[tuple[Step, dict[Key, float]]], bool]:
        """Each step that can be told apart, with what its worth is the sum of; and whether no config is missing."""
        assert self.runs is not None
        found: list[tuple[Step, dict[Key, float]]] = []
        before, waiting, why, is_complete = Key(), [], [], True
        for number in range(1, len(order) + 1):
            key = Key(order[:number])
            waiting.append(order[number - 1])
            if key not in self.runs:
                why.append(f"without {self.label(order[number])}: {self.problems.get(key, 'not measured')}")
                is_complete &= key in self.problems
                continue
            alone = Key(waiting)
            if before and alone in self.problems:  # those before are what it needs, however little they gain
                needed = ", ".join(self.label(change) for change in order[: len(before)])
                why.append(f"without {needed}: {self.problems[alone]}")
            weights = {key: 1.0, before: -1.0}
            label = " + ".join(self.label(change) for change in waiting)
            found.append((Step(tuple(waiting), label, self.worth(weights), "; ".join(why)), weights))
            before, waiting, why = key, [], []
        return found, is_complete

    def grouped(self, steps: Sequence[tuple[Step, dict[Key, float]]]) -> Step | None:
        """Several steps as one; those that follow each other cancel in between."""
        if not steps:
            return None
        weights: dict[Key, float] = {}
        for _, each in steps:
            for key, weight in each.items():
                weights[key] = weights.get(key, 0.0) + weight
        changes = tuple(change for step, _ in steps for change in step.changes)
        return Step(changes, ", ".join(step.label for step, _ in steps), self.worth(weights))

    def alone(self, change: str) -> Alone:
        key = Key({change})
        ran = self.runs is not None and key in self.runs
        problem = "" if ran else self.problems.get(key, "not measured")
        return Alone(change, self.label(change), self.worth({key: 1.0, Key(): -1.0}) if ran else None, problem)

    def label(self, change: str) -> str:
        row = self.row_of.get(Key({change}))
        return differences(row["knobs"], self.row_of[Key()]["knobs"]) if row else change

    def worth(self, weights: Mapping[Key, float]) -> Worth:
        assert self.runs is not None
        tokens = self.runs.sum(weights)
        row = next(row for row in self.rows if row["outcome"] == Outcome.OK)
        units = [
            tokens.times(row[name] / row["tokens_per_s_per_rank"]) if row.get(name) is not None else None
            for name in ("model_tflops_per_s_per_rank", "mfu")
        ]
        return Worth(tokens, *units)


def by_gain(rows: Sequence[dict[str, Any]], changes: Sequence[str]) -> list[str]:
    """The changes in order of what each gains alone, by the rows of a waterfall; those that did not run come last."""
    runs = _Reading(rows).runs

    def gain(change: str) -> float:
        key = Key({change})
        return runs.level(key).value if runs is not None and key in runs else 0.0

    return sorted(changes, key=gain, reverse=True)
