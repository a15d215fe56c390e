"""A decoder whose matrices are frozen and have small trained ones beside them: a user's own workload, as LoRA is."""

from __future__ import annotations

from torch import Tensor, nn

from trials.models import Decoder, DecoderWorkload


class Adapted(nn.Module):
    """A frozen nn.Linear plus the product of two trained ones of rank `rank`."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


class LoraWorkload(DecoderWorkload):
    rank = 4

    def build_model(self) -> Decoder:
        model = super().build_model().requires_grad_(False)
        for module in list(model.layers.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, Adapted(child, self.rank))
        return model


def make(seq_len: int, config: dict[str, int]) -> LoraWorkload:
    return LoraWorkload(seq_len, config=config)
