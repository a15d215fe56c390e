"""FLOPs of a trainer's model, from what the probe counted in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from trials.record import RankReport

if TYPE_CHECKING:
    from autotune.rows import ModelFacts

CONVENTION = "6 x trainable parameters (embeddings too), no attention"
"""Of a model whose shape the job does not declare (`model:`)."""
NOT_COUNTED = "not known: the probe found no parameters; declare the shape under `model`"


def model_of(reports: Mapping[int, RankReport], declared: ModelFacts) -> ModelFacts:
    """The declared model's own figures; where none is declared, 6 N for the N that the ranks counted."""
    if declared.flops_per_token is not None:
        return declared
    counted = next((found.num_trainable_params for found in reports.values() if found.num_trainable_params), None)
    if counted is None:
        return replace(declared, flops_convention=NOT_COUNTED)
    return replace(declared, num_params=counted, flops_per_token=6.0 * counted, flops_convention=CONVENTION)
