"""What the sections of a job file have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0, lt=2**31)]
"""The history stores whole numbers in 32 bits."""
NotNegative = Annotated[int, Field(ge=0, lt=2**31)]


class Section(BaseModel):
    """Frozen and strict; a field's docstring is also the hint of an error in it."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
