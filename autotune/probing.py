"""Requests to `trials.probe` by the environment, by value: of a real run, whose nodes need not share a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

PROBE_VARIABLE = "AUTOTUNE_PROBE"


def knobs_only(knobs: Mapping[str, Any]) -> str:
    """A request under which a script that asks `probe.knob` is told these, and nothing is measured."""
    return json.dumps({"attach": "none", "timed_steps": None, "knobs": dict(knobs)})


def given_knobs(environment: Mapping[str, str]) -> dict[str, Any]:
    """The knobs of the request in `environment`; none without one that was passed by value."""
    given = environment.get(PROBE_VARIABLE, "")
    return dict(json.loads(given)["knobs"]) if given.startswith("{") else {}
