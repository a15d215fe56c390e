"""FLOP formulas against published runs, and against torch's own count of the built-in decoder."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from trials.attention import BACKENDS
from trials.conventions import COUNTED, PALM_MATMUL, flops_per_token, keeps_no_scores, tflops_per_s, utilisation
from trials.flops import counted_flops_per_token, matmul_params, model_flops
from trials.models import Decoder, DecoderWorkload
from trials.wrap import apply_checkpointing, block_names

Shape = tuple[int, ...]
VECTORS = Path(__file__).parents[1] / "data" / "mfu_vectors.csv"
"""Published runs; each row names its source and the convention that its authors used."""
SEQ_LEN = 64
CONFIG: dict[str, int | bool | float] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 4,
    "ffn_size": 88,
}


def published() -> list[dict[str, str]]:
    with VECTORS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def decoder(**changes: int | bool) -> DecoderWorkload:
    return DecoderWorkload(seq_len=SEQ_LEN, config={**CONFIG, **changes})


def on_meta(workload: DecoderWorkload) -> Decoder:
    with torch.device("meta"):
        return workload.build_model()


def counted(activation_checkpointing: str) -> float:
    return counted_flops_per_token(decoder(), SEQ_LEN, activation_checkpointing)


@pytest.mark.parametrize("row", published(), ids=lambda row: row["id"])
def test_published_figure_is_reproduced_by_its_convention(row: dict[str, str]) -> None:
    each_token = flops_per_token(
        float(row["N_used"]),
        int(row["n_layers"]),
        int(row["d_attn"]),
        int(row["seq_len"]),
        convention=row["formula"],
    )
    tokens_per_s = float(row["tokens_per_s_per_gpu"])  # MaxText's rows: per step, and TFLOP per step
    if row["metric"] == "model_tflops":
        found = tflops_per_s(tokens_per_s, each_token)
    else:
        assert row["metric"] in ("mfu_pct", "hfu_pct")
        found = 100 * utilisation(tokens_per_s, each_token, float(row["peak_tflops"]))
    assert found == pytest.approx(float(row["expected"]), rel=float(row["rel_tol_pct"]) / 100)


def test_published_rows_cover_every_convention_and_metric() -> None:
    rows = published()
    assert len(rows) == 35
    assert all(row["source_url"].startswith("https://") for row in rows)
    assert {row["formula"] for row in rows} == {"6N+12Lds", "6N+6Lds", "8N+16Lds"}
    assert {row["metric"] for row in rows} == {"mfu_pct", "hfu_pct", "model_tflops"}


def test_unknown_convention_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"6N\+12Lds.*8N\+16Lds"):
        flops_per_token(1e9, 32, 4096, 2048, convention="6ND")


@pytest.mark.parametrize("more", [{}, {"qkv_bias": True}, {"qk_norm": True, "head_size": 16}])
@pytest.mark.parametrize("tie_embeddings", [False, True])
@pytest.mark.parametrize("num_kv_heads", [4, 1])
def test_formula_equals_torchs_count_on_meta(
    tie_embeddings: bool, num_kv_heads: int, more: dict[str, int | bool]
) -> None:
    workload = decoder(tie_embeddings=tie_embeddings, num_kv_heads=num_kv_heads, **more)
    useful = model_flops(workload, on_meta(workload), SEQ_LEN)
    assert useful.convention == PALM_MATMUL.name
    assert useful.per_token == counted_flops_per_token(workload, SEQ_LEN, "none")


def test_tied_head_counts_as_much_as_an_untied_one() -> None:
    tied, untied = on_meta(decoder(tie_embeddings=True)), on_meta(decoder())
    assert matmul_params(tied) == matmul_params(untied)
    assert sum(p.numel() for p in tied.parameters()) < sum(p.numel() for p in untied.parameters())


def test_causal_count_is_the_formulas_with_half_the_attention() -> None:
    workload = decoder()
    model = on_meta(workload)
    useful = model_flops(workload, model, SEQ_LEN)
    layers, width = workload.config.num_layers, workload.config.hidden_size
    assert useful.per_token_causal == flops_per_token(
        matmul_params(model), layers, width, SEQ_LEN, convention="6N+6Lds"
    )
    assert useful.per_token_causal < useful.per_token


def test_without_attention_shapes_flops_are_counted_and_named_so() -> None:
    class ShapesUnknown(DecoderWorkload):
        def attention_shapes(self) -> None:  # type: ignore[override]
            return None

    workload = ShapesUnknown(seq_len=SEQ_LEN, config=CONFIG)
    useful = model_flops(workload, on_meta(workload), SEQ_LEN)
    known = model_flops(decoder(), on_meta(decoder()), SEQ_LEN)
    assert (useful.per_token, useful.per_token_causal) == (known.per_token, None)
    assert useful.convention == COUNTED != known.convention


def test_hfu_equals_mfu_without_checkpointing_and_exceeds_it_with() -> None:
    workload = decoder()
    useful = model_flops(workload, on_meta(workload), SEQ_LEN).per_token
    mfu = utilisation(1000.0, useful, 1.0)
    assert utilisation(1000.0, counted("none"), 1.0) == mfu
    assert utilisation(1000.0, counted("full"), 1.0) > mfu


@pytest.mark.parametrize("mode", ["none", "full", "every_2", "selective_op"])
def test_the_attention_backend_in_use_changes_no_count(mode: str) -> None:
    usual = counted(mode)
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        with sdpa_kernel(backend):
            assert counted(mode) == usual


def executed_on_a_cpu(mode: str, backend: SDPBackend, **changes: int | bool) -> float:
    """FLOPs per token that torch counts while real tensors run forward and backward through one SDPA kernel."""
    workload = decoder(**changes)
    model = workload.build_model()
    apply_checkpointing(model, block_names(model, workload.blocks(model)), mode)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def forward(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
        return sdpa_flop_count(q, k, v)

    def backward(gradient: Shape, q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
        return sdpa_backward_flop_count(gradient, q, k, v)

    known = {flash: forward, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: backward}
    with sdpa_kernel(backend), FlopCounterMode(display=False, custom_mapping=known) as counter:
        workload.loss(model, torch.randint(0, 96, (1, SEQ_LEN + 1))).backward()
    return counter.get_total_flops() / SEQ_LEN


@pytest.mark.parametrize("mode", ["none", "full", "every_2", "selective_op"])
@pytest.mark.parametrize("kernel", ["flash", "math"])
def test_each_checkpointing_and_kernel_executes_what_is_counted_of_them(mode: str, kernel: str) -> None:
    again = model_flops(decoder(), on_meta(decoder()), SEQ_LEN).attention_recompute if keeps_no_scores(kernel) else 0
    assert executed_on_a_cpu(mode, BACKENDS[kernel]) == counted(mode) + again


def test_a_fused_backward_takes_two_and_a_half_times_the_forward_and_another_twice() -> None:
    workload = decoder()
    layers, width = workload.config.num_layers, workload.config.hidden_size
    forward = 4 * layers * width * SEQ_LEN
    found = model_flops(workload, on_meta(workload), SEQ_LEN)
    assert found.attention_recompute == forward / 2
    grouped = decoder(num_kv_heads=1)
    assert model_flops(grouped, on_meta(grouped), SEQ_LEN).attention_recompute == forward / 2


@pytest.mark.parametrize(
    ("kernel", "fused"),
    [
        *((kernel, True) for kernel in ("flash", "efficient", "cudnn", "efficient+flash", "auto")),
        *((kernel, False) for kernel in ("math", "none", "flash+math")),
    ],
)
def test_kernels_that_keep_no_scores(kernel: str, fused: bool) -> None:
    assert keeps_no_scores(kernel) is fused


def test_a_model_that_writes_out_its_scores_computes_none_of_them_again() -> None:
    class OwnAttention(DecoderWorkload):
        def loss(self, model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.nn.functional, "scaled_dot_product_attention", _written_out)
                return super().loss(model, tokens)

    workload = OwnAttention(seq_len=SEQ_LEN, config=CONFIG)
    found = model_flops(workload, on_meta(workload), SEQ_LEN)
    assert (found.per_token, found.attention_recompute) == (counted("none"), 0)


def _written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: bool) -> torch.Tensor:
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v


def test_more_checkpointing_recomputes_more() -> None:
    assert counted("full") > counted("every_2") > counted("none")


def test_selective_op_recomputes_no_matmul() -> None:
    assert counted("selective_op") == counted("none")


def test_full_checkpointing_runs_less_than_the_rule_of_thumb_says() -> None:
    workload = decoder()
    layers, width = workload.config.num_layers, workload.config.hidden_size
    rule_of_thumb = flops_per_token(matmul_params(on_meta(workload)), layers, width, SEQ_LEN, convention="8N+16Lds")
    assert counted("none") < counted("full") < rule_of_thumb


class HeadByFunction(DecoderWorkload):
    """A head that is no nn.Linear, which the formula does not see."""

    def build_model(self) -> Decoder:
        model = super().build_model()
        weight = model.head.weight
        del model.head
        model.head = lambda x: torch.nn.functional.linear(x, weight)  # type: ignore[assignment]
        model.head_weight = weight
        return model


def test_a_matmul_that_the_formula_misses_makes_the_count_stand() -> None:
    plain, hidden = (cls(seq_len=SEQ_LEN, config=CONFIG) for cls in (DecoderWorkload, HeadByFunction))
    with torch.device("meta"):
        right, found = (model_flops(w, w.build_model(), SEQ_LEN) for w in (plain, hidden))
    assert found.convention == COUNTED
    assert found.per_token == right.per_token
    assert found.per_token_causal == right.per_token_causal


def test_a_loss_that_meta_cannot_run_leaves_the_formula() -> None:
    class Reads(DecoderWorkload):
        def loss(self, model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
            loss = super().loss(model, tokens)
            loss.item()
            return loss

    class Unknown(Reads):
        def attention_shapes(self) -> None:  # type: ignore[override]
            return None

    with torch.device("meta"):
        known, unknown = (
            model_flops(w, w.build_model(), SEQ_LEN)
            for w in (cls(seq_len=SEQ_LEN, config=CONFIG) for cls in (Reads, Unknown))
        )
    assert known.convention == PALM_MATMUL.name
    assert (unknown.per_token, unknown.convention) == (None, "not known")
