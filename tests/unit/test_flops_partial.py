"""FLOPs of models that train, or use, only some of their weights: frozen ones, experts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trials.conventions import COUNTED, PALM_MATMUL
from trials.flops import UNKNOWN, counted_flops_per_token, model_flops
from trials.models import Decoder, DecoderWorkload
from trials.outcome import TrialError
from trials.workload import AttentionShape, Workload, default_init_parameter

SEQ_LEN, WIDTH, RANK, VOCAB, LAYERS = 16, 32, 4, 96, 3
DECODER: dict[str, int | bool | float] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_layers": LAYERS,
    "num_heads": 4,
    "num_kv_heads": 4,
    "ffn_size": 64,
}


class Stack(nn.Module):
    """An embedding, LAYERS layers, a head."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


class StackWorkload:
    """Without attention, so that what the layers' own matmuls cost can be said in a line."""

    vocab_size = VOCAB

    def __init__(self, layer: type[nn.Module]) -> None:
        self.layer = layer

    def build_model(self) -> nn.Module:
        return Stack(self.layer)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, Stack)
        return list(model.layers)

    def attention_shapes(self) -> list[AttentionShape]:
        return []

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())

    def init_parameter(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        return default_init_parameter(name, shape, generator)

    def init_buffers(self, model: nn.Module) -> None: ...


class Adapted(nn.Module):
    """A frozen matrix and two small trained ones beside it, as LoRA has them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


class Lora(StackWorkload):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        assert isinstance(model, Stack)
        model.embedding.requires_grad_(False)
        model.head.requires_grad_(False)
        return model


def flops_of(workload: Workload) -> tuple[float | None, str]:
    with torch.device("meta"):
        found = model_flops(workload, workload.build_model(), SEQ_LEN)
    return found.per_token, found.convention


def test_a_frozen_matrix_costs_4_where_gradients_pass_and_2_below_the_first_trained_one() -> None:
    big, small = WIDTH * WIDTH, WIDTH * RANK
    first = 2 * big + 4 * small + 6 * small  # nothing below the first layer wants a gradient
    others = (LAYERS - 1) * (4 * big + 6 * 2 * small)
    assert flops_of(Lora(Adapted)) == (first + others + 4 * WIDTH * VOCAB, COUNTED)


def test_a_frozen_table_alone_leaves_the_formula() -> None:
    class FrozenTable(DecoderWorkload):
        def build_model(self) -> Decoder:
            model = super().build_model()
            model.embedding.requires_grad_(False)
            return model

    trained, frozen = (cls(SEQ_LEN, config=DECODER) for cls in (DecoderWorkload, FrozenTable))
    assert flops_of(frozen) == flops_of(trained)
    assert flops_of(frozen)[1] == PALM_MATMUL.name


def test_a_frozen_table_that_is_the_head_too_counts_as_frozen() -> None:
    class FrozenTied(DecoderWorkload):
        def build_model(self) -> Decoder:
            model = super().build_model()
            model.head.weight.requires_grad_(False)
            return model

    config = {**DECODER, "tie_embeddings": True}
    trained, _ = flops_of(DecoderWorkload(SEQ_LEN, config=config))
    assert trained is not None
    assert flops_of(FrozenTied(SEQ_LEN, config=config)) == (trained - 2 * WIDTH * VOCAB, COUNTED)


def test_frozen_weights_without_a_count_are_not_known() -> None:
    class Reads(Lora):
        def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
            loss = super().loss(model, tokens)
            loss.item()
            return loss

    assert flops_of(Reads(Adapted)) == (None, UNKNOWN.convention)


NUM_EXPERTS, TOP_K = 8, 2


class GroupedExperts(nn.Module):
    """Stacked experts in one grouped matmul; each token goes to TOP_K of them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.empty(NUM_EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(TOP_K)
        order = chosen.flatten().argsort()
        ends = torch.histc(chosen.flatten().int(), NUM_EXPERTS, 0, NUM_EXPERTS - 1).cumsum(0).to(torch.int32)
        rows = flat[order // TOP_K].bfloat16()
        out = F.grouped_mm(rows, self.experts.bfloat16(), offs=ends).float() * weights.flatten()[order, None]
        return x + torch.zeros_like(flat).index_add(0, order // TOP_K, out).view_as(x)


class LoopedExperts(nn.Module):
    """Experts as layers, run over the tokens that were sent to them: how many those are, only values tell."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(TOP_K)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(flat[token]) * weights[token, place, None])
        return x + out.view_as(x)


def test_of_experts_those_count_that_a_token_uses() -> None:
    active = LAYERS * (WIDTH * NUM_EXPERTS + TOP_K * WIDTH * WIDTH) + WIDTH * VOCAB
    assert flops_of(StackWorkload(GroupedExperts)) == (6 * active, COUNTED)


def test_experts_that_meta_cannot_run_are_not_known_rather_than_all_counted() -> None:
    assert flops_of(StackWorkload(LoopedExperts)) == (None, UNKNOWN.convention)


def test_selective_checkpointing_keeps_what_experts_computed() -> None:
    workload = StackWorkload(GroupedExperts)
    kept, all_again = (counted_flops_per_token(workload, SEQ_LEN, mode) for mode in ("selective_op", "full"))
    assert kept == counted_flops_per_token(workload, SEQ_LEN, "none") < all_again


def test_stacked_weights_without_a_count_are_not_known() -> None:
    class Reads(StackWorkload):
        def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
            loss = super().loss(model, tokens)
            loss.item()
            return loss

    assert flops_of(Reads(GroupedExperts)) == (None, UNKNOWN.convention)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (lambda loss: loss.expand(2, 3), r"returned a tensor of shape \(2, 3\); it must be .* one number"),
        (lambda loss: (loss, {}), "returned tuple"),
        (lambda loss: loss.detach(), "does not depend on a trainable parameter"),
    ],
)
def test_a_loss_that_is_none_is_refused_and_said_what_it_is(wrong, complaint: str) -> None:  # type: ignore[no-untyped-def]
    class Wrong(StackWorkload):
        def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
            found: Tensor = wrong(super().loss(model, tokens))
            return found

    with pytest.raises(TrialError, match=complaint):
        flops_of(Wrong(Adapted))
