"""The ranks of the real run on this host, as their probes write them; read as they grow."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trials.probe_log import RankLog

_NAME = re.compile(r"rank-(\d+)(?:\.(\d+))?\.jsonl")
KEPT_STEPS = 1000
"""Ends of single steps, for who ends last."""
FEWEST_STEPS = 20
"""Of which anything is said about who ends last."""
OFTEN, LATE = 0.8, 0.01
"""A rank that ends last in so many of the steps, by so much of a step in the mean, is one that the others wait for."""


@dataclass(frozen=True)
class Point:
    """What a rank had done by the end of a step, since its clock began."""

    n: int
    t: float
    tokens: float | None
    wait_s: float | None


@dataclass
class Rank:
    """One rank's file, as far as it is read."""

    path: Path
    number: int
    marks: frozenset[int]
    log: RankLog = field(init=False)
    """Without its steps."""
    begin: Point | None = None
    last: Point | None = None
    at: dict[int, Point] = field(default_factory=dict)
    """At the steps that are marks."""
    ends: dict[int, float] = field(default_factory=dict)
    """Of the last steps."""
    _offset: int = 0

    def __post_init__(self) -> None:
        self.log = RankLog(self.path)

    def read(self) -> None:
        """Takes in the lines that are whole by now.

        Raises:
            ValueError: a line is none of a probe's.
        """
        with self.path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        name = event["event"]
        if name != "step":
            if hasattr(self.log, name):
                setattr(self.log, name, event)
            if name == "window":
                self.begin = self.last = Point(event["num_untimed_steps"], event["t"], 0.0, 0.0)
            return
        if not event["timed"] or self.last is None:
            return
        self.last = Point(
            event["n"],
            event["t"],
            _sum(self.last.tokens, event["tokens"]),
            _sum(self.last.wait_s, event["wait_s"]),
        )
        self.ends[event["n"]] = event["t"]
        if len(self.ends) > KEPT_STEPS:
            del self.ends[next(iter(self.ends))]
        if event["n"] in self.marks:
            self.at[event["n"]] = self.last


def _sum(before: float | None, more: float | None) -> float | None:
    return None if before is None or more is None else before + more


@dataclass(frozen=True)
class Stretch:
    """Between two steps of the real run, by the ranks of this host."""

    first: int
    last: int
    tokens_per_s_per_rank: float | None
    """All tokens / time of the slowest / ranks; None: tokens could not be counted."""
    step_s: float
    wait_shares: dict[int, float]
    """Of the time, by rank: waited for batches."""
    late: tuple[int, float, float] | None
    """The rank that the others wait for: its number, share of the steps in which it was last, mean lateness / step."""


class Watched:
    """The files in a folder. A rank that was started again writes another file, and counting begins anew.

    Args:
        marks: steps at which a stretch may begin or end.
    """

    def __init__(self, folder: Path, marks: Sequence[int]) -> None:
        self.folder, self._marks = folder, frozenset(marks)
        self.ranks: dict[int, Rank] = {}
        self.generation = 0

    def read(self) -> bool:
        """Takes in what is new; whether the ranks were started again."""
        found = {
            (int(name[1]), int(name[2] or 0)): p for p in self.folder.iterdir() if (name := _NAME.fullmatch(p.name))
        }
        newest = max((generation for _, generation in found), default=0)
        again = newest > self.generation
        if again:
            self.generation, self.ranks = newest, {}
        for (number, generation), path in sorted(found.items()):
            if generation == self.generation and number not in self.ranks:
                self.ranks[number] = Rank(path, number, self._marks)
        for rank in self.ranks.values():
            rank.read()
        return again

    @property
    def counting(self) -> list[Rank]:
        """Ranks whose clock has begun."""
        return [rank for rank in self.ranks.values() if rank.begin is not None]

    def reached(self, mark: int) -> bool:
        """Whether all that count have ended step `mark`, or have been looking for longer."""
        return bool(self.counting) and all(rank.last is not None and rank.last.n >= mark for rank in self.counting)

    def points(self, mark: int | None) -> dict[int, Point]:
        """By rank, at a mark, or where it began if it began later; None: the last."""
        found: dict[int, Point] = {}
        for rank in self.counting:
            point = rank.last if mark is None else rank.at.get(mark, rank.begin)
            assert point is not None
            found[rank.number] = point
        return found

    def stretch(self, begin: dict[int, Point], end: dict[int, Point]) -> Stretch | None:
        """None if there is no step between."""
        both = {n: (begin[n], end[n]) for n in begin.keys() & end.keys() if end[n].n > begin[n].n}
        if not both:
            return None
        seconds = max(b.t - a.t for a, b in both.values())
        tokens = [_sum(b.tokens, None if a.tokens is None else -a.tokens) for a, b in both.values()]
        known = [one for one in tokens if one is not None]
        first, last = min(a.n for a, _ in both.values()), max(b.n for _, b in both.values())
        step_s = statistics.fmean((b.t - a.t) / (b.n - a.n) for a, b in both.values())
        return Stretch(
            first=first,
            last=last,
            tokens_per_s_per_rank=sum(known) / seconds / len(known) if len(known) == len(tokens) else None,
            step_s=step_s,
            wait_shares={
                n: (b.wait_s - a.wait_s) / (b.t - a.t)
                for n, (a, b) in both.items()
                if a.wait_s is not None and b.wait_s is not None
            },
            late=self._late(first, last, step_s),
        )

    def _late(self, first: int, last: int, step_s: float) -> tuple[int, float, float] | None:
        """By the ends of steps that all ranks of this host have; its ranks share a clock."""
        ranks = self.counting
        if len(ranks) < 2:
            return None
        common = set.intersection(*(set(rank.ends) for rank in ranks))
        steps = [n for n in common if first < n <= last]
        if len(steps) < FEWEST_STEPS:
            return None
        ends = [{rank.number: rank.ends[n] for rank in ranks} for n in steps]
        number, times = Counter(max(one, key=one.__getitem__) for one in ends).most_common(1)[0]
        others = [statistics.median(t for rank, t in one.items() if rank != number) for one in ends]
        lateness = statistics.fmean(one[number] - other for one, other in zip(ends, others, strict=True)) / step_s
        share = times / len(steps)
        return (number, share, lateness) if share >= OFTEN and lateness >= LATE else None
