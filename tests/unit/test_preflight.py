"""The closed forms: sizes against built models, activations against autograd's own list, and what must hold of both."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.hardware import find_device
from autotune.preflight.activations import Setting, activations
from autotune.preflight.closed_form import ClosedForm, closed_form
from autotune.preflight.memory import TERMS, peak
from autotune.preflight.shape import LLAMA_LIKE, of_decoder, of_hf, of_survey
from autotune.preflight.step_time import CPU, step_terms
from autotune.search.feasible import takes_no_less_memory
from tests.unit.conftest import make_job
from trials.flops import matmul_params
from trials.models import Block, DecoderWorkload
from trials.record import Knobs
from trials.shapes import PRESETS, DecoderConfig
from trials.survey import survey_model

LLAMA = of_decoder(PRESETS["llama3-8b"], 8192)
SMALL = of_decoder(DecoderConfig(1000, 64, 12, 4, 2, 160), 128)
FEW_TOKENS = of_decoder(DecoderConfig(300, 512, 12, 4, 2, 2048), 16)
GPUS, CPUS = Setting(64, "bf16", "cuda"), Setting(4, "fp32", "cpu")
PLAIN = Knobs(
    micro_batch_size=2,
    grad_accum_steps=4,
    sync_each_micro_batch=True,
    reshard_after_forward=True,
    bucket_cap_mb=1.0,
    blocks_per_unit=1,
    activation_checkpointing="none",
    num_workers=2,
    prefetch_factor=2,
)
HF: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3": {"head_dim": 24},
    "qwen2": {"tie_word_embeddings": True},
    "llama": {"attention_bias": True, "mlp_bias": True},
}


@pytest.mark.parametrize("preset", ["tiny", "llama3.2-1b", "qwen2.5-0.5b", "qwen3-0.6b", "llama2-7b"])
def test_sizes_are_those_of_the_built_decoder(preset: str) -> None:
    workload = DecoderWorkload(seq_len=64, preset=preset)
    with torch.device("meta"):
        model = workload.build_model()
    shape = of_decoder(PRESETS[preset], 64)
    assert shape.num_params == sum(p.numel() for p in model.parameters())
    assert shape.block_params == sum(p.numel() for p in model.layers[0].parameters())
    assert shape.matmul_params == matmul_params(model)


@pytest.mark.parametrize("model_type", [*LLAMA_LIKE, "gpt2"])
def test_sizes_are_those_that_transformers_builds(model_type: str) -> None:
    from trials.hf import HfWorkload

    config: dict[str, Any] = {"model_type": model_type, "vocab_size": 300}
    if model_type == "gpt2":
        config |= {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    else:
        config |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        config |= {"intermediate_size": 48, **HF.get(model_type, {})}
    workload = HfWorkload(seq_len=16, config=config)
    with torch.device("meta"):
        model = workload.build_model()
    shape = of_hf(config, 16)
    assert shape is not None
    assert shape.num_params == sum(p.numel() for p in model.parameters())
    assert shape.block_params == sum(p.numel() for p in workload.blocks(model)[0].parameters())


def test_an_architecture_that_is_not_counted_has_no_shape() -> None:
    assert of_hf({"model_type": "gemma3_text"}, 64) is None


def test_a_survey_tells_sizes_of_a_plain_model_and_nothing_of_others() -> None:
    config = DecoderConfig(5000, 64, 3, 4, 4, 160)
    workload = DecoderWorkload(seq_len=64, config=dict(vars(config)))
    found = survey_model(workload, 64, "fp32")
    told, known = of_survey(found, "fp32", 64), of_decoder(config, 64)
    assert told is not None
    assert told.num_params == pytest.approx(known.num_params, rel=0.001)
    assert (told.hidden_size, told.num_blocks, told.block_params) == (64, 3, known.block_params)
    assert told.vocab_size == pytest.approx(5000, rel=0.01)
    assert of_survey({**found, "flops_convention": "counted-on-meta,full-attn"}, "fp32", 64) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_block_saves_what_autograd_saves(dtype: torch.dtype, qk_norm: bool) -> None:
    config = DecoderConfig(1000, 64, 1, 8, 2, 160, qk_norm=qk_norm)
    seq_len, micro = 128, 2
    block = Block(config).to(dtype)
    hidden = torch.randn(micro, seq_len, 64, dtype=dtype, requires_grad=True)
    rope = torch.randn(2, seq_len, config.head_dim).to(dtype)  # FSDP casts it at each unit
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = block(hidden, rope)
    assert out.requires_grad
    precision = "bf16" if dtype is torch.bfloat16 else "fp32"
    whole = activations(of_decoder(config, seq_len), Setting(2, precision, "cpu"), replace(PLAIN)).whole
    assert whole == pytest.approx(sum(storage.nbytes() for storage in saved.values()), rel=0.03)


@pytest.mark.parametrize("setting", [GPUS, CPUS], ids=["gpus", "cpus"])
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "ddp"])
def test_terms_are_known_and_add_up(setting: Setting, engine: str) -> None:
    knobs = replace(PLAIN, engine=engine)
    found = peak(SMALL, setting, knobs)
    assert set(found.terms) <= set(TERMS)
    assert all(size >= 0 for size in found.terms.values())
    assert sum(found.terms.values()) == pytest.approx(found.allocated)
    prediction = ClosedForm(SMALL, setting, CPU).predict(knobs)
    assert prediction is not None
    assert sum(prediction.memory_terms.values()) == pytest.approx(prediction.allocated_gib)
    assert sum(prediction.time_terms.values()) == pytest.approx(prediction.step_s)
    assert prediction.reserved_gib >= prediction.allocated_gib


def test_states_and_logits_are_those_of_arithmetic() -> None:
    found = peak(LLAMA, Setting(8, "bf16", "cuda"), replace(PLAIN, micro_batch_size=1, grad_accum_steps=1))
    assert found.moment == "loss"
    assert found.terms["weights"] == pytest.approx(4 * LLAMA.num_params / 8)
    assert found.terms["optimizer_states"] == pytest.approx(8 * LLAMA.num_params / 8)
    assert found.terms["logits_and_loss"] == pytest.approx(12 * 8192 * 128_256, rel=0.02)


def test_gradients_held_back_do_not_shrink_with_the_world() -> None:
    held = replace(PLAIN, sync_each_micro_batch=False)
    for world in (8, 512):
        setting = Setting(world, "bf16", "cuda")
        assert peak(LLAMA, setting, held).terms["gradients"] >= 0.97 * 4 * LLAMA.num_params
    in_bf16 = replace(held, reduce_dtype="bf16")
    assert peak(LLAMA, GPUS, in_bf16).terms["gradients"] <= 2.05 * LLAMA.num_params


CHANGES: dict[str, Any] = {
    "micro_batch_size": 4,
    "grad_accum_steps": 1,
    "sync_each_micro_batch": False,
    "reshard_after_forward": False,
    "blocks_per_unit": 4,
    "activation_checkpointing": "full",
    "num_workers": 0,
    "prefetch_factor": 4,
    "engine": "ddp",
    "keep_last_units": 12,
    "reshard_group_size": 2,
    "backward_prefetch_units": 3,
    "replicate_degree": 2,
    "reduce_dtype": "bf16",
    "cpu_offload": True,
    "compile": True,
    "attention_backend": "math",
    "fused_optimizer": True,
}
OF_FSDP1 = {"limit_all_gathers": False, "backward_prefetch": "post", "forward_prefetch": True}
WITHOUT_EFFECT = {
    "bucket_cap_mb": "blocks_per_unit says it, and for DDP a test below",
    "forward_prefetch_units": "only where the forward is the fullest moment: a test below",
    "forward_prefetch": "the same of FSDP1",
    "custom": "what only a user's own trainer knows",
}


def test_every_knob_has_an_effect_or_is_listed() -> None:
    for name in (field.name for field in fields(Knobs)):
        base = replace(PLAIN, engine="fsdp1") if name in OF_FSDP1 else PLAIN
        if name in WITHOUT_EFFECT:
            continue
        changed = replace(base, **{name: (CHANGES | OF_FSDP1)[name]})
        # Of many tokens activations decide, of few tokens weights.
        predictors = [ClosedForm(shape, GPUS, CPU) for shape in (LLAMA, FEW_TOKENS)]
        assert any(predictor.predict(base) != predictor.predict(changed) for predictor in predictors), name


def test_knobs_that_act_where_little_else_does() -> None:
    ddp = replace(PLAIN, engine="ddp")
    caps = [step_terms(LLAMA, GPUS, replace(ddp, bucket_cap_mb=cap), CPU) for cap in (10.0, 200.0)]
    assert caps[0]["exposed_communication"] > caps[1]["exposed_communication"]  # less latency
    early = replace(PLAIN, activation_checkpointing="full", micro_batch_size=1, grad_accum_steps=1)
    for ahead in ({"forward_prefetch_units": 8}, {"engine": "fsdp1", "forward_prefetch": True}):
        engine = {"engine": ahead.get("engine", "fsdp2")}
        without = peak(FEW_TOKENS, GPUS, replace(early, **engine)).allocated
        assert peak(FEW_TOKENS, GPUS, replace(early, **ahead)).allocated >= without
    assert peak(FEW_TOKENS, GPUS, replace(early, forward_prefetch_units=8)).moment.startswith("forward")


MODES = ("none", "full", "selective_op", "every_2", "every_4")
knobs_of_fsdp2 = st.builds(
    lambda **values: Knobs(**values, bucket_cap_mb=float(values["blocks_per_unit"])),
    micro_batch_size=st.sampled_from([1, 2, 4, 8]),
    grad_accum_steps=st.sampled_from([1, 2, 4]),
    sync_each_micro_batch=st.booleans(),
    reshard_after_forward=st.booleans(),
    blocks_per_unit=st.sampled_from([1, 2, 3, 4, 6, 12]),
    activation_checkpointing=st.sampled_from(MODES),
    num_workers=st.just(0),
    prefetch_factor=st.none(),
    keep_last_units=st.sampled_from([0, 1, 3]),
    forward_prefetch_units=st.sampled_from([0, 1, 2]),
    backward_prefetch_units=st.sampled_from([0, 1, 2]),
)
knobs_of_fsdp1 = st.builds(
    lambda **values: Knobs(**values, bucket_cap_mb=float(values["blocks_per_unit"]), engine="fsdp1"),
    micro_batch_size=st.sampled_from([1, 2, 4]),
    grad_accum_steps=st.sampled_from([1, 4]),
    sync_each_micro_batch=st.booleans(),
    reshard_after_forward=st.booleans(),
    blocks_per_unit=st.sampled_from([1, 2, 4]),
    activation_checkpointing=st.sampled_from(MODES),
    num_workers=st.just(0),
    prefetch_factor=st.none(),
    limit_all_gathers=st.booleans(),
    backward_prefetch=st.sampled_from(["pre", "post", "none"]),
    forward_prefetch=st.booleans(),
)
shapes = st.sampled_from([SMALL, LLAMA, of_decoder(DecoderConfig(300, 512, 12, 8, 8, 2048), 64)])
worlds = st.sampled_from([GPUS, CPUS, Setting(8, "bf16", "cpu"), Setting(8, "fp32", "cuda")])


@settings(max_examples=400, deadline=None)
@given(
    pair=st.one_of(st.tuples(knobs_of_fsdp2, knobs_of_fsdp2), st.tuples(knobs_of_fsdp1, knobs_of_fsdp1)),
    shared=st.sets(st.sampled_from([field.name for field in fields(Knobs)]), min_size=12),
    shape=shapes,
    setting=worlds,
)
def test_what_is_known_to_take_no_less_is_predicted_so(
    pair: tuple[Knobs, Knobs], shared: set[str], shape: Any, setting: Setting
) -> None:
    """The search's rule of dominance and the closed form agree."""
    one, other = pair
    shared |= {"bucket_cap_mb", "blocks_per_unit"} if {"bucket_cap_mb", "blocks_per_unit"} & shared else set()
    other = replace(other, **{name: getattr(one, name) for name in shared})
    for more, less in ((one, other), (other, one)):
        if takes_no_less_memory(more, less):
            found, least = peak(shape, setting, more), peak(shape, setting, less)
            assert found.allocated >= least.allocated * (1 - 1e-9), (found.moment, least.moment)
            assert found.reserved >= least.reserved * (1 - 1e-9), (found.moment, least.moment)


@settings(max_examples=100, deadline=None)
@given(knobs=st.one_of(knobs_of_fsdp2, knobs_of_fsdp1), shape=shapes, device=st.sampled_from(["cpu", "cuda"]))
def test_more_ranks_never_take_more_memory(knobs: Knobs, shape: Any, device: str) -> None:
    sizes = [peak(shape, Setting(world, "bf16", device), knobs) for world in (2, 4, 8, 64, 512)]
    for few, many in itertools.pairwise(sizes):
        assert many.allocated <= few.allocated * (1 + 1e-9)
        assert many.reserved <= few.reserved * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(knobs=st.one_of(knobs_of_fsdp2, knobs_of_fsdp1), shape=shapes)
def test_recomputing_takes_time_and_waiting_is_never_negative(knobs: Knobs, shape: Any) -> None:
    terms = {
        mode: step_terms(shape, GPUS, replace(knobs, activation_checkpointing=mode), CPU)
        for mode in ("none", "every_2", "full")
    }
    assert all(seconds >= 0 for one in terms.values() for seconds in one.values())
    again = [one["recompute"] for one in terms.values()]
    assert again[0] == 0 < again[1] < again[2]


def test_nothing_is_predicted_of_an_unknown_shape() -> None:
    predictor = closed_form(make_job(), None, "cpu", "", 2)
    assert predictor.predict(PLAIN) is None


@pytest.mark.parametrize(
    ("name", "gib"), [("NVIDIA H100 80GB HBM3", 79.2), ("NVIDIA H200", 139.6), ("Tesla V100-SXM2-32GB", 31.7)]
)
def test_a_device_has_the_memory_that_torch_finds(name: str, gib: float) -> None:
    row = find_device(name)
    assert row is not None
    assert row.memory_gib(name) == pytest.approx(gib, abs=0.1)


def test_a_name_that_two_devices_share_is_none_of_them() -> None:
    assert find_device("AMD Instinct MI250X / MI250") is None
    assert find_device("a toaster") is None
