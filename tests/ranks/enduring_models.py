"""The built-in decoder with what only an endurance run shows: named by a spec as `enduring_models:NAME`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trials import endurance
from trials.models import DecoderWorkload
from trials.step import Stepper


class HungryInEval(DecoderWorkload):
    """Asks in eval mode for more than any machine has, as a metric does that keeps all logits."""

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        loss = super().loss(model, tokens)
        return loss if model.training else loss + torch.ones(2**40).sum()


class Leaky(DecoderWorkload):
    """Keeps `leak_mib` of host memory of every micro-batch in training."""

    def __init__(self, leak_mib: int, **model: Any) -> None:
        super().__init__(**model)
        self.leak_mib, self.kept = leak_mib, []

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        if model.training and not tokens.is_meta:
            self.kept.append(b"x" * (self.leak_mib * 2**20))
        return super().loss(model, tokens)


class DriftingInEval(DecoderWorkload):
    """Computes something else at every evaluation, though its weights are the same."""

    calls = 0

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        self.calls += not model.training
        return super().loss(model, tokens) * (1 + 0.01 * self.calls * (not model.training))


def loads_nothing(**model: Any) -> DecoderWorkload:
    endurance.load = lambda stepper, folder: None
    return DecoderWorkload(**model)


def forgets_the_optimizer(**model: Any) -> DecoderWorkload:
    load = endurance.load

    def only_weights(stepper: Stepper, folder: Path) -> None:
        def state() -> dict[str, Tensor]:
            return {name: tensor for name, tensor in endurance.tensors(stepper) if name.endswith("exp_avg")}

        kept = {name: tensor.clone() for name, tensor in state().items()}
        load(stepper, folder)
        for name, tensor in state().items():
            tensor.copy_(kept[name])

    endurance.load = only_weights
    return DecoderWorkload(**model)


def trusts_the_disk(**model: Any) -> DecoderWorkload:
    """So that it is the write that fails."""
    endurance.Endurance._refuse_a_small_disk = lambda self, stepper: None
    return DecoderWorkload(**model)
