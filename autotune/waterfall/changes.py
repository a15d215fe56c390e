"""What changes from the baseline to the winner: which knobs are one change, and the configs in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autotune.waterfall.steps import JOINED
from trials.record import KNOB_NAMES, Knobs

FOLLOWS = {"grad_accum_steps": "micro_batch_size", "blocks_per_unit": "bucket_cap_mb"}
"""Knobs that are no choice of their own: of the global batch, and another word for the cap."""
PER_ENGINE = ("bucket_cap_mb", "blocks_per_unit")
"""Knobs that are another thing under ddp."""


@dataclass(frozen=True)
class Path:
    """The changes from one config to another."""

    baseline: Knobs
    winner: Knobs
    changes: tuple[str, ...]
    """Names, knobs joined by `+`; each is the whole of a choice, and has an effect on the baseline by itself."""
    _canonical: Callable[[Knobs], Knobs]

    def config(self, changes: Sequence[str]) -> Knobs:
        """The baseline with some of the changes, in the one spelling of its effect."""
        return _config(self.baseline, self.winner, [_knobs(change) for change in changes], self._canonical)


def path(baseline: Knobs, winner: Knobs, canonical: Callable[[Knobs], Knobs]) -> Path:
    """The changes from `baseline` to `winner`, both canonical.

    Knobs are one change where one follows from the other (the accumulation from the micro-batch, what only one engine
    has from the engine), or where one has no effect without the other.
    """
    groups = _follow(baseline, winner)
    while (pair := _inseparable(groups, baseline, winner, canonical)) is not None:
        ours, other = pair
        groups = [group for group in groups if group not in pair] + [other + ours]
    order = {name: index for index, name in enumerate(KNOB_NAMES)}
    names = sorted((JOINED.join(group) for group in groups), key=lambda name: order[_knobs(name)[0]])
    return Path(baseline, winner, tuple(names), canonical)


def _knobs(change: str) -> list[str]:
    return change.split(JOINED)


def _follow(baseline: Knobs, winner: Knobs) -> list[list[str]]:
    """Knobs that differ, each with those that follow from it."""
    ours, theirs = baseline.to_dict(), winner.to_dict()
    changed = [name for name in KNOB_NAMES if ours[name] != theirs[name]]
    leads: dict[str, list[str]] = {}
    for name in changed:
        leader = FOLLOWS.get(name, name)
        if "engine" in changed and (ours[name] is None or theirs[name] is None) and name != "prefetch_factor":
            leader = "engine"
        if "engine" in changed and "ddp" in (ours["engine"], theirs["engine"]) and name in PER_ENGINE:
            leader = "engine"
        if name == "prefetch_factor" and None in (ours[name], theirs[name]):
            leader = "num_workers"  # without workers nothing is prefetched
        leads.setdefault(leader if leader in changed else name, []).append(name)
    return [sorted(names, key=lambda name, first=first: name != first) for first, names in leads.items()]  # type: ignore[misc]


def _inseparable(
    groups: Sequence[list[str]], baseline: Knobs, winner: Knobs, canonical: Callable[[Knobs], Knobs]
) -> tuple[list[str], list[str]] | None:
    """The first change that has no effect by itself, or none beside another one, with that other one."""

    def config(*chosen: list[str]) -> Knobs:
        return _config(baseline, winner, chosen, canonical)

    for ours in groups:
        others = [group for group in groups if group is not ours]
        for other in others:
            if config(other, ours) == config(other) != baseline:
                return ours, other
        if others and config(ours) == baseline:
            return ours, next((other for other in others if config(other, ours) != config(other)), others[0])
    return None


def _config(
    baseline: Knobs, winner: Knobs, groups: Sequence[Sequence[str]], canonical: Callable[[Knobs], Knobs]
) -> Knobs:
    values = winner.to_dict()
    return canonical(replace(baseline, **{name: values[name] for group in groups for name in group}))
