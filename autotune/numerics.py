"""Whether a config trains as the baseline does: a setting that changes the result is no setting of speed."""

from __future__ import annotations

from collections.abc import Sequence

TOLERANCE = {"fp32": 1e-3, "bf16": 3e-2}
"""Largest relative difference of a loss, by the training precision. Sums in another order differ by 1e-5 in fp32 after
some updates, and by 5e-4 in bf16 (tests/ranks/test_conformance.py); a wrong gradient or a batch counted twice by far
more."""


def deviation(losses: Sequence[float], reference: Sequence[float], precision: str) -> str | None:
    """What is wrong with the losses of a config's first updates, or None.

    Args:
        losses: one an optimizer step, from the first on, mean over all ranks.
        reference: the baseline's on the same samples.
        precision: `fp32` or `bf16`.
    """
    limit = TOLERANCE[precision]
    for step, (found, expected) in enumerate(zip(losses, reference, strict=False)):
        if not abs(found - expected) <= limit * abs(expected):
            return (
                f"the loss of step {step} is {found:.6g}, the baseline's on the same samples {expected:.6g}: "
                f"more than {limit:g} apart in {precision}"
            )
    return None
