"""When the losses of a config say that it does not train as the baseline does."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autotune.numerics import TOLERANCE, deviation
from trials.survey import has_dropout

LOSSES = st.lists(st.floats(0.1, 20), min_size=1, max_size=8)


@given(LOSSES, st.sampled_from(sorted(TOLERANCE)), st.floats(-0.9, 0.9))
def test_what_rounding_does_is_no_deviation(losses: list[float], precision: str, share: float) -> None:
    rounded = [loss * (1 + share * TOLERANCE[precision]) for loss in losses]
    assert deviation(rounded, losses, precision) is None


@pytest.mark.parametrize("wrong", [5.0 * 1.1, 5.0 / 2, math.nan, math.inf])
@pytest.mark.parametrize("precision", sorted(TOLERANCE))
def test_a_loss_that_is_another_is_named_with_its_step(wrong: float, precision: str) -> None:
    problem = deviation([5.5, wrong], [5.5, 5.0, 4.5], precision)
    assert problem is not None
    assert problem.startswith("the loss of step 1 is ")
    assert "the baseline's on the same samples 5:" in problem


def test_only_the_steps_of_both_are_compared() -> None:
    assert deviation([5.0], [5.0, 1.0], "fp32") is None
    assert deviation([], [5.0], "fp32") is None


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention_dropout = dropout


@pytest.mark.parametrize(
    ("model", "random"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), True),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), False),
        (Attention(0.1), True),
        (Attention(0.0), False),
    ],
)
def test_dropout_is_found_as_a_module_and_as_a_rate(model: nn.Module, random: bool) -> None:
    assert has_dropout(model) is random
