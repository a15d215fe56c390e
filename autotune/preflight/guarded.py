"""A predictor that may fail: what is no prediction is none, said once, and never stops a search."""

from __future__ import annotations

import math
from collections.abc import Callable

from autotune.preflight.prediction import Prediction, Predictor
from trials.record import Knobs


class Guarded:
    """Answers as `predictor` does, or None where that fails or makes no sense.

    Args:
        say: told of the first such case, with its reason.
    """

    def __init__(self, predictor: Predictor, say: Callable[[str], None]) -> None:
        self._predictor = predictor
        self._say: Callable[[str], None] | None = say

    def predict(self, knobs: Knobs) -> Prediction | None:
        try:
            found = self._predictor.predict(knobs)
        except Exception as error:  # noqa: BLE001 (whatever it is: a forecast is no reason to stop)
            self._say_once(f"{type(error).__name__}: {error}", knobs)
            return None
        problem = _problem(found)
        if problem:
            self._say_once(problem, knobs)
            return None
        return found

    def _say_once(self, reason: str, knobs: Knobs) -> None:
        say, self._say = self._say, None
        if say is not None:
            say(
                f"  no prediction ({reason}; first for micro-batch {knobs.micro_batch_size}, "
                f"{knobs.activation_checkpointing} checkpointing, {knobs.engine}): where there is none, the search "
                "learns from its trials alone"
            )


def _problem(found: Prediction | None) -> str:
    if found is None:
        return "the model's shape is not known"
    for name in ("allocated_gib", "reserved_gib", "step_s"):
        value = getattr(found, name)
        if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            return f"{name} = {value}"
    return ""
