"""The interface between the closed forms and whoever asks them: the search, `plan`, the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from trials.record import Knobs

COLLECTIVE_RATES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Multiples of the assumed rate of collectives at which step times are predicted too: what lies between the nodes of a
cluster is in no datasheet of its devices."""


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
    step_s_at_rates: tuple[float, ...] = ()
    """The same with collectives at each of COLLECTIVE_RATES; empty if that is not predicted."""


class Predictor(Protocol):
    """Answers for one model, one cluster and one batch."""

    def predict(self, knobs: Knobs) -> Prediction | None:
        """None where the model is not of a known shape: the search then learns from its trials alone."""
        ...
