"""Knobs under one name each, those of a user's own trainer among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trials.record import KNOB_NAMES, Knobs

OWN = "custom."
"""Before the names of knobs that only a user's own trainer knows."""
DERIVED = "grad_accum_steps"
"""No choice: the global batch decides it."""


def flat(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """By name; what the global batch decides is left out.

    Args:
        knobs: as `Knobs.to_dict` has them.
    """
    shared = {name: knobs.get(name) for name in KNOB_NAMES if name not in ("custom", DERIVED)}
    return shared | {OWN + name: value for name, value in (knobs.get("custom") or {}).items()}


def with_values(knobs: Knobs, values: Mapping[str, Any]) -> Knobs:
    """`knobs` with other values, by name."""
    own = {name.removeprefix(OWN): value for name, value in values.items() if name.startswith(OWN)}
    shared = {name: value for name, value in values.items() if not name.startswith(OWN)}
    if own:
        shared["custom"] = tuple(sorted((dict(knobs.custom or ()) | own).items()))
    return replace(knobs, **shared)
