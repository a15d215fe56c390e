"""What changes from the baseline to the winner: which knobs are one change, and the configs in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.waterfall.flat import flat, with_values
from autotune.waterfall.steps import JOINED
from trials.record import Knobs

FOLLOWS = {"blocks_per_unit": "bucket_cap_mb"}
"""Knobs that are no choice of their own: another word for the cap."""
PER_ENGINE = ("bucket_cap_mb", "blocks_per_unit")
"""Knobs that are another thing under ddp."""


@dataclass(frozen=True)
class Path:
    """The changes from one config to another."""

    baseline: Knobs
    winner: Knobs
    changes: tuple[str, ...]
    """Names, knobs joined by `+`; each is the whole of a choice, and has an effect on the baseline by itself."""
    _complete: Callable[[Knobs], Knobs]

    def config(self, changes: Sequence[str]) -> Knobs:
        """The baseline with some of the changes, in the one spelling of its effect."""
        return _config(self.baseline, self.winner, [_knobs(change) for change in changes], self._complete)


def path(baseline: Knobs, winner: Knobs, complete: Callable[[Knobs], Knobs]) -> Path:
    """The changes from `baseline` to `winner`.

    Knobs are one change where one follows from the other (what only one engine has from the engine), or where one has
    no effect without the other. The accumulation is none: it follows from the global batch.

    Args:
        complete: gives knobs the accumulation of the global batch, and the one spelling of their effect.
    """
    groups = _follow(baseline, winner)
    while (pair := _inseparable(groups, baseline, winner, complete)) is not None:
        ours, other = pair
        groups = [group for group in groups if group not in pair] + [other + ours]
    order = list(flat(winner.to_dict()))
    names = sorted((JOINED.join(group) for group in groups), key=lambda name: order.index(_knobs(name)[0]))
    return Path(baseline, winner, tuple(names), complete)


def _knobs(change: str) -> list[str]:
    return change.split(JOINED)


def _follow(baseline: Knobs, winner: Knobs) -> list[list[str]]:
    """Knobs that differ, each with those that follow from it."""
    ours, theirs = flat(baseline.to_dict()), flat(winner.to_dict())
    changed = [name for name in theirs if ours.get(name) != theirs[name]]
    leads: dict[str, list[str]] = {}
    for name in changed:
        leader = FOLLOWS.get(name, name)
        if "engine" in changed and None in (ours.get(name), theirs[name]) and name != "prefetch_factor":
            leader = "engine"
        if "engine" in changed and "ddp" in (ours["engine"], theirs["engine"]) and name in PER_ENGINE:
            leader = "engine"
        if name == "prefetch_factor" and None in (ours.get(name), theirs[name]):
            leader = "num_workers"  # without workers nothing is prefetched
        leads.setdefault(leader if leader in changed else name, []).append(name)
    return [sorted(names, key=lambda name, first=first: name != first) for first, names in leads.items()]  # type: ignore[misc]


def _inseparable(
    groups: Sequence[list[str]], baseline: Knobs, winner: Knobs, complete: Callable[[Knobs], Knobs]
) -> tuple[list[str], list[str]] | None:
    """The first change that has no effect by itself, or none beside another one, with that other one."""

    def config(*chosen: list[str]) -> Knobs:
        return _config(baseline, winner, chosen, complete)

    for ours in groups:
        others = [group for group in groups if group is not ours]
        for other in others:
            if config(other, ours) == config(other) != baseline:
                return ours, other
        if others and config(ours) == baseline:
            return ours, next((other for other in others if config(other, ours) != config(other)), others[0])
    return None


def _config(
    baseline: Knobs, winner: Knobs, groups: Sequence[Sequence[str]], complete: Callable[[Knobs], Knobs]
) -> Knobs:
    values = flat(winner.to_dict())
    return complete(with_values(baseline, {name: values[name] for group in groups for name in group}))
