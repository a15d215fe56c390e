"""The stages of a study, and how the trials of each are measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autotune.job import MeasureSettings
from trials.record import Knobs

BASELINE, FINALIST, ROUND = "baseline", "finalist", "round"
SIDE_BY_SIDE = "explore"
"""The stage whose trials share the cluster; what is compared (baseline, finalists, rounds) runs alone, on one slot."""
SEARCHED = frozenset({BASELINE, SIDE_BY_SIDE})
"""Stages with a best so far; after them it is the rounds that decide."""
ENDURANCE = "endurance"
"""The stage of the winner's longer run."""
BY_HAND = "measure"
"""The stage of `autotune measure`."""
CONFIRM = "confirm"
"""The stage of `autotune confirm`, on the real run's number of ranks."""
WATERFALL = "waterfall"
"""The stage of `autotune waterfall`: what lies between the baseline and the winner, change by change."""
SCALE = "scale"
"""The stage of `autotune scale`, on several numbers of ranks."""
OF_A_RUN = frozenset({BASELINE, SIDE_BY_SIDE, FINALIST, ROUND, ENDURANCE, BY_HAND})
"""What a run that is resumed goes on with; the other stages come after its end, some of them on other ranks."""
STAGES = OF_A_RUN | {CONFIRM, WATERFALL, SCALE}
OF_NO_RUN = frozenset({BY_HAND, SCALE})
"""Of trials that a job has without being tuned, in a folder of their own."""
PROFILED_STAGES = frozenset({BASELINE, SIDE_BY_SIDE, FINALIST, BY_HAND, SCALE})
"""Trials whose bottleneck people ask for; of the exploration, those that are the fastest so far. The rounds that decide
stay free of it."""


def baseline_settings(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Knobs of a run's baseline; where nothing but a scaling ran, of the config with that role; empty: neither ran."""
    own = (row["knobs"] for row in rows if row["stage"] == BASELINE)
    scaled = (row["knobs"] for row in rows if row["stage"] == SCALE and row["role"] == BASELINE)
    return next(own, None) or next(scaled, {})


def is_composed(measure: MeasureSettings, knobs: Knobs, stage: str) -> bool:
    """Whether a trial runs short steps, and puts the time of a whole one together (`trials.composed`)."""
    return stage in (SIDE_BY_SIDE, SCALE) and knobs.grad_accum_steps > measure.compose_above


def endurance_timeout_s(measure: MeasureSettings) -> float:
    """Of the winner's longer run, compiling aside."""
    return measure.trial_timeout_s * (1 + measure.endurance_steps / measure.max_steps)
