"""The built-in decoder: its presets have the published sizes, and it computes what Llama and Qwen compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trials.engines import fsdp2
from trials.models import DecoderWorkload
from trials.outcome import TrialError
from trials.shapes import PRESETS

# Numbers of parameters that huggingface.co gives beside the weights (safetensors metadata) of meta-llama/Llama-2-7b-hf,
# Llama-2-13b-hf, Llama-2-70b-hf, Meta-Llama-3-8B, Meta-Llama-3-70B, Llama-3.1-405B, Llama-3.2-1B, Llama-3.2-3B,
# Qwen/Qwen2.5-0.5B ... -72B, Qwen/Qwen3-0.6B ... -32B. Two differ: Llama-2-70b's 68,976,653,312 there has 5,120 numbers
# of RoPE in it, which are no parameters; Qwen3-0.6B's and -1.7B's have the tied embedding twice.
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}
SMALL: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 64,
}
THEIR_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention": "self_attn",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
    "layers": "model.layers",
}


def test_every_preset_but_tiny_is_a_published_model() -> None:
    assert PRESETS.keys() - {"tiny"} == PUBLISHED.keys()


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(preset: str) -> None:
    with torch.device("meta"):
        model = DecoderWorkload(seq_len=8, preset=preset).build_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[preset]


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_has_its_familys_rope_and_ties_the_small_ones(preset: str) -> None:
    shape = PRESETS[preset]
    theta = {"llama2": 1e4, "llama3": 5e5, "qwen2": 1e6, "qwen3": 1e6}[preset.partition("-")[0].partition(".")[0]]
    assert shape.rope_theta == theta
    assert shape.tie_embeddings == (PUBLISHED[preset] < 4.5e9)  # published: Llama 3.2, Qwen2.5 to 3B, Qwen3 to 4B
    assert shape.qkv_bias == preset.startswith("qwen2.5")
    assert shape.qk_norm == preset.startswith("qwen3")


@pytest.mark.parametrize(
    ("model_type", "ours", "theirs"),
    [
        ("llama", {"rope_theta": 5e5}, {}),
        ("llama", {"tie_embeddings": True}, {"tie_word_embeddings": True}),
        ("qwen2", {"qkv_bias": True}, {}),
        ("qwen3", {"qk_norm": True, "head_size": 16}, {"head_dim": 16}),
    ],
)
def test_the_decoder_computes_what_transformers_computes(
    model_type: str, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers")
    workload = DecoderWorkload(seq_len=16, config={**SMALL, **ours})
    model = workload.build_model()
    fsdp2.initialise(model, workload, torch.device("cpu"), seed=0)
    with torch.no_grad():
        for parameter in model.parameters():  # larger than at the start, and biases and norms as well: all must tell
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.2)
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=257,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        rms_norm_eps=1e-5,
        rope_theta=workload.config.rope_theta,
        **theirs,
    )
    other = transformers.AutoModelForCausalLM.from_config(config)
    named = {_their_name(name): value for name, value in model.state_dict().items()}
    assert named.keys() == other.state_dict().keys()
    other.load_state_dict(named)
    tokens = torch.randint(0, 257, (2, 16), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(other(input_ids=tokens).logits, model(tokens), rtol=1e-4, atol=1e-4)


def _their_name(name: str) -> str:
    *path, leaf = name.split(".")
    return ".".join([*(THEIR_NAMES.get(part, part) for part in path), leaf])


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_heads": 3}, "hidden_size = 32 must divide by num_heads = 3"),
        ({"num_kv_heads": 3}, "num_heads by num_kv_heads = 3"),
        ({"head_size": 7}, "a head of 7 numbers"),
    ],
)
def test_a_shape_that_is_none_is_refused(changes: dict[str, int], complaint: str) -> None:
    with pytest.raises(TrialError, match=complaint):
        DecoderWorkload(seq_len=8, config={**SMALL, **changes})
