"""The interface between the closed forms and whoever asks them: the search, `plan`, the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from trials.record import Knobs


@dataclass(frozen=True)
class Prediction:
    """One config on one world, per rank."""

    memory_terms: Mapping[str, float]
    """GiB at the peak, by named term; they add up to `allocated_gib`."""
    allocated_gib: float
    """Peak of live tensors."""
    reserved_gib: float
    """Peak that the allocator takes from the device, which is what meets the limit."""
    time_terms: Mapping[str, float]
    """Seconds of one optimizer step that nothing hides, by named term; they add up to `step_s`."""
    step_s: float
    """One optimizer step: all micro-steps and the update."""


class Predictor(Protocol):
    """Answers for one model, one cluster and one batch."""

    def predict(self, knobs: Knobs) -> Prediction | None:
        """None where the model is not of a known shape: the search then learns from its trials alone."""
        ...
