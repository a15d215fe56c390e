"""User's workloads that are wrong in one way each, named by `make`'s argument."""

from __future__ import annotations

from collections.abc import Sequence

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
        if self.wrong == "scores":
            for layer in model.layers:
                layer.attention = WritesScores(self.config.hidden_size)
        return model.requires_grad_(self.wrong != "frozen")

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        wrong: dict[str, list[nn.Module]] = {"no_blocks": [], "foreign_block": [nn.Linear(2, 2)]}
        return wrong[self.wrong] if self.wrong in wrong else super().blocks(model)

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        if self.wrong == "unshifted":  # one target more than there are positions
            return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens.flatten())
        if self.wrong == "per_token":
            return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        loss = super().loss(model, tokens)
        return loss * float("nan") if self.wrong == "nan" else loss


class WritesScores(nn.Module):
    """Attention of one head as it is written by hand: its sequence x sequence scores lie in memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, _rope: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        out: Tensor = self.out(scores.masked_fill(later, -torch.inf).softmax(-1) @ v)
        return out


def make(seq_len: int, wrong: str, config: dict[str, int]) -> Bad:
    return Bad(seq_len, wrong, config)
