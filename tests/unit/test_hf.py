"""Models of Hugging Face's transformers: from a config alone, in blocks, with buffers, counted."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from trials.conventions import COUNTED, PALM_MATMUL, flops_per_token
from trials.engines import fsdp2
from trials.flops import counted_flops_per_token, model_flops
from trials.outcome import TrialError
from trials.workload import AttentionShape, load_workload

pytest.importorskip("transformers")

from trials.hf import HfWorkload

SEQ_LEN, VOCAB, WIDTH, LAYERS, FFN = 32, 300, 32, 3, 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": FFN,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen2": SIZES,
    "qwen3": {**SIZES, "head_dim": 16},
    "gpt2": {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "n_positions": 64},
    "mixtral": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**SIZES, **EXPERTS, "shared_expert_intermediate_size": 40},
    "gemma3_text": {**SIZES, "head_dim": 8, "sliding_window": 64},
}
ATTENTION = 2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // 2
"""Weights of one layer's four projections, with half as many key and value heads."""
HEAD = WIDTH * VOCAB


def workload(model_type: str, **changes: Any) -> HfWorkload:
    return HfWorkload(SEQ_LEN, {"model_type": model_type, **MODELS[model_type], **changes})


def on_meta(found: HfWorkload) -> nn.Module:
    with torch.device("meta"):
        return found.build_model()


@pytest.mark.parametrize("model_type", MODELS)
def test_blocks_are_all_layers_in_the_order_they_run_in(model_type: str) -> None:
    found = workload(model_type)
    model = on_meta(found)
    blocks, ran = found.blocks(model), []
    for block in blocks:
        block.register_forward_pre_hook(lambda module, _: ran.append(module))
    found.loss(model, torch.zeros(1, SEQ_LEN + 1, dtype=torch.int64, device="meta"))
    assert list(blocks) == ran
    assert len(blocks) == LAYERS


@pytest.mark.parametrize("model_type", MODELS)
def test_nothing_is_left_as_to_empty_leaves_it(model_type: str) -> None:
    found = workload(model_type)
    built, real = on_meta(found), found.build_model()
    fsdp2.initialise(built, found, torch.device("cpu"), seed=0)
    buffers = dict(real.named_buffers())
    assert dict(built.named_buffers()).keys() == buffers.keys()
    for name, buffer in built.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    tokens = torch.randint(0, VOCAB, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
    loss = found.loss(built, tokens)
    assert loss.item() == pytest.approx(torch.tensor(VOCAB).log().item(), rel=0.05), "knows nothing yet"
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in built.parameters())


@pytest.mark.parametrize("model_type", MODELS)
def test_master_weights_are_fp32_and_attention_is_sdpa(model_type: str) -> None:
    model = on_meta(workload(model_type, dtype="bfloat16"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config._attn_implementation == "sdpa"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("model_type", "matmul_weights", "d_attn", "convention"),
    [
        ("llama", LAYERS * (ATTENTION + 3 * WIDTH * FFN) + HEAD, WIDTH, PALM_MATMUL.name),
        ("qwen2", LAYERS * (ATTENTION + 3 * WIDTH * FFN) + HEAD, WIDTH, PALM_MATMUL.name),
        ("qwen3", LAYERS * (2 * ATTENTION + 3 * WIDTH * FFN) + HEAD, 2 * WIDTH, PALM_MATMUL.name),
        ("gpt2", LAYERS * 12 * WIDTH * WIDTH + HEAD, WIDTH, COUNTED),  # its Conv1D is no nn.Linear
        ("mixtral", LAYERS * (ATTENTION + 4 * WIDTH + 2 * 3 * WIDTH * FFN) + HEAD, WIDTH, COUNTED),
        (
            "qwen2_moe",  # router, two of four experts, the shared one and its gate
            LAYERS * (ATTENTION + 4 * WIDTH + 2 * 3 * WIDTH * 48 + 3 * WIDTH * 40 + WIDTH) + HEAD,
            WIDTH,
            COUNTED,
        ),
    ],
)
def test_flops_are_those_of_the_weights_that_a_token_uses(
    model_type: str, matmul_weights: int, d_attn: int, convention: str
) -> None:
    found = workload(model_type)
    useful = model_flops(found, on_meta(found), SEQ_LEN)
    assert useful.per_token == flops_per_token(matmul_weights, LAYERS, d_attn, SEQ_LEN)
    assert useful.per_token_causal == flops_per_token(matmul_weights, LAYERS, d_attn, SEQ_LEN, "6N+6Lds")
    assert useful.convention == convention
    assert useful.attention_recompute == 2 * LAYERS * d_attn * SEQ_LEN
    assert counted_flops_per_token(found, SEQ_LEN, "none") == useful.per_token
    assert counted_flops_per_token(found, SEQ_LEN, "full") > useful.per_token


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral"])
def test_a_tied_head_costs_what_an_untied_one_costs(model_type: str) -> None:
    tied, untied = (workload(model_type, tie_word_embeddings=tie) for tie in (True, False))
    models = on_meta(tied), on_meta(untied)
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in models]
    assert sizes[0] + HEAD == sizes[1]
    assert model_flops(tied, models[0], SEQ_LEN) == model_flops(untied, models[1], SEQ_LEN)


def test_the_dense_work_equals_the_built_in_decoders() -> None:
    ours = load_workload(
        "decoder",
        {
            "seq_len": SEQ_LEN,
            "config": {
                "vocab_size": VOCAB,
                "hidden_size": WIDTH,
                "num_layers": LAYERS,
                "num_heads": 4,
                "num_kv_heads": 2,
                "ffn_size": FFN,
            },
        },
    )
    theirs = workload("llama")
    with torch.device("meta"):
        assert model_flops(ours, ours.build_model(), SEQ_LEN) == model_flops(theirs, theirs.build_model(), SEQ_LEN)


@pytest.mark.parametrize(("window", "known"), [(SEQ_LEN, True), (SEQ_LEN - 1, False), (None, True)])
def test_attention_in_a_window_is_counted_rather_than_computed(window: int | None, known: bool) -> None:
    found = HfWorkload(SEQ_LEN, {"model_type": "mistral", **SIZES, "sliding_window": window})
    shapes = found.attention_shapes()
    assert shapes == ([AttentionShape(4, 8)] * LAYERS if known else None)


def test_layers_that_differ_are_told_to_fsdp1() -> None:
    assert workload("llama").blocks_take_the_same
    assert not workload(
        "gemma3_text", layer_types=["full_attention", "sliding_attention", "full_attention"]
    ).blocks_take_the_same


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (
            {"model_type": "lama"},
            "model_type = 'lama': transformers has no causal language model of that name; did you mean llama",
        ),
        (
            {"model_type": "llama", "num_layers": 2},
            "config.num_layers: unknown key; did you mean .*num_hidden_layers",
        ),
        ({"model_type": "llama", "hidden_size": "wide"}, "model.config: .*hidden_size"),
        ({"model_type": "llama", "num_attention_heads": 5}, "model.config: .*attention heads"),
        ({"model_type": "vit"}, "model_type = 'vit': transformers has no causal language model of that name"),
        ({"model_type": "llama", "max_position_embeddings": 16}, "seq_len = 32: the config has 16 positions"),
        ({"model_type": "gpt2", "n_positions": 16}, "seq_len = 32: the config has 16 positions"),
    ],
)
def test_a_config_that_is_none_is_refused_with_its_key(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(TrialError, match=complaint):
        HfWorkload(SEQ_LEN, config)


def test_a_config_that_transformers_wrote_may_carry_other_tools_keys() -> None:
    config = {**SIZES, "model_type": "llama", "transformers_version": "4.40.0", "quantised_by": "somebody"}
    assert HfWorkload(SEQ_LEN, config).vocab_size == VOCAB


def test_old_names_of_keys_are_heeded() -> None:
    assert workload("llama", rope_theta=5e5).config.rope_parameters["rope_theta"] == 5e5
    assert workload("gpt2").text_config.num_hidden_layers == LAYERS


def test_a_model_without_blocks_is_refused_by_name() -> None:
    found = workload("llama")
    model = on_meta(found)
    model._no_split_modules = {"NoSuchLayer"}  # type: ignore[assignment]
    with pytest.raises(TrialError, match=r"LlamaForCausalLM has no blocks .* \['NoSuchLayer'\]"):
        found.blocks(model)


def test_a_buffer_that_nobody_fills_is_refused() -> None:
    found = workload("llama")
    model = on_meta(found).to_empty(device="cpu")
    model.model.register_buffer("left", torch.empty(3))  # type: ignore[union-attr,operator]
    with pytest.raises(TrialError, match=r"LlamaModel model: .* buffers \['left'\]"):
        found.init_buffers(model)


def test_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    for model_type in MODELS:
        on_meta(workload(model_type))


def test_without_transformers_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from trials.workload import load_workload\n"
        "load_workload('hf', {'seq_len': 8, 'config': {'model_type': 'llama'}})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "pip install 'fsdp-autotune[hf]'" in done.stderr
