"""First values: the same for a name and a seed, whatever draws beside it; where they are drawn."""

from __future__ import annotations

import pytest
import torch

from trials.initial import CHECKPOINT_PREFIX, LARGEST_ON_A_GPU, device_to_draw_on, full_value
from trials.models import DecoderWorkload

CPU = torch.device("cpu")
SHAPE = torch.Size([8, 4])


def drawn(name: str, seed: int = 0) -> torch.Tensor:
    return full_value(DecoderWorkload(8, preset="llama2-7b"), seed, name, SHAPE, CPU)


def test_a_value_depends_on_its_name_and_the_seed_alone():
    first = drawn("layers.0.w")
    torch.randn(7)  # what else draws does not matter
    assert drawn("layers.0.w").equal(first)
    assert drawn(f"layers.0.{CHECKPOINT_PREFIX}w").equal(first)
    assert not drawn("layers.1.w").equal(first)
    assert not drawn("layers.0.w", seed=1).equal(first)


class PlainWorkload(DecoderWorkload):
    """A user's: nothing in it names a device."""

    def init_parameter(self, name, shape, generator):
        return torch.randn(shape, generator=generator) + torch.ones(shape)


def test_a_workload_that_names_no_device_draws_on_the_generators():
    with torch.device("meta"):  # as a default that the draw must not take over
        assert full_value(PlainWorkload(8, preset="llama2-7b"), 0, "w", SHAPE, CPU).device == CPU


@pytest.mark.parametrize(
    ("numel", "device", "expected"),
    [
        (SHAPE.numel(), "cpu", "cpu"),
        (SHAPE.numel(), "cuda:1", "cuda:1"),
        (LARGEST_ON_A_GPU - 1, "cuda", "cuda"),
        (LARGEST_ON_A_GPU, "cuda", "cpu"),
    ],
)
def test_a_gpu_draws_all_but_the_largest_tables(numel, device, expected):
    assert device_to_draw_on(torch.Size([numel]), torch.device(device)) == torch.device(expected)
