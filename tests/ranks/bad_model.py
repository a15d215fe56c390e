"""User's workloads that are wrong in one way each, named by `make`'s argument."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trials.models import Decoder, DecoderWorkload


class Bad(DecoderWorkload):
    def __init__(self, seq_len: int, wrong: str, config: dict[str, int]) -> None:
        super().__init__(seq_len, config=config)
        self.wrong = wrong

    def build_model(self) -> Decoder:
        model = super().build_model()
        return model.requires_grad_(self.wrong != "frozen")

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        wrong: dict[str, list[nn.Module]] = {"no_blocks": [], "foreign_block": [nn.Linear(2, 2)]}
        return wrong[self.wrong] if self.wrong in wrong else super().blocks(model)

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        if self.wrong == "unshifted":  # one target more than there are positions
            return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens.flatten())
        if self.wrong == "per_token":
            return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        if self.wrong == "scores":
            with patch.object(F, "scaled_dot_product_attention", written_out):
                return super().loss(model, tokens)
        loss = super().loss(model, tokens)
        return loss * float("nan") if self.wrong == "nan" else loss


def written_out(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, enable_gqa: bool) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf).softmax(-1) @ v


def make(seq_len: int, wrong: str, config: dict[str, int]) -> Bad:
    return Bad(seq_len, wrong, config)
