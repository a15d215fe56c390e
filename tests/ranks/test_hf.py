"""Models of Hugging Face's transformers on two real gloo ranks: sharded, they train as they do alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from trials import wrap
from trials.outcome import Outcome
from trials.record import Knobs, unit_cap_mb
from trials.workload import load_workload

from .harness import HERE, OPTIMIZER, SEQ_LEN, make_spec, run_script

pytest.importorskip("transformers")

NUM_LAYERS = 3
NUM_STEPS = 3
BATCH_PER_RANK = 4
SIZES = {
    "vocab_size": 257,
    "hidden_size": 32,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
MODELS = {
    "llama": {"model_type": "llama", **SIZES},
    "qwen2": {"model_type": "qwen2", **SIZES, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 16},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 257,
        "n_embd": 32,
        "n_layer": NUM_LAYERS,
        "n_head": 4,
        "n_positions": SEQ_LEN,
        **NO_DROPOUT,
    },
    "mixtral": {"model_type": "mixtral", **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
}
WAYS = {
    "plain": {},
    "all-at-once": {"sync": False, "reshard": False, "blocks": 2, "checkpointing": "selective_op"},
    "checkpointed": {"checkpointing": "full"},
    "bf16": {"precision": "bf16"},
}
# Every model in each engine; and bf16 where a token cannot go to another expert than in fp32.
POINTS = {
    f"{model}-{engine}-{way}": {"model": model, "engine": engine, "way": way}
    for engine in ("fsdp2", "fsdp1")
    for way, models in {"plain": MODELS, "all-at-once": MODELS, "checkpointed": ["gpt2"], "bf16": ["llama"]}.items()
    for model in models
}
# bf16 keeps 8 bits of each activation.
GRADIENT_TOLERANCE = {"fp32": 2e-5, "bf16": 5e-2}
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3}


def knobs_of(point):
    way = WAYS[point["way"]]
    workload = load_workload("hf", {"seq_len": SEQ_LEN, "config": MODELS[point["model"]]})
    with torch.device("meta"):
        sizes_mib = wrap.block_mib(workload.blocks(workload.build_model()), way.get("precision", "fp32"))
    size = way.get("blocks", 1)
    fsdp1 = {"limit_all_gathers": True, "backward_prefetch": "pre", "forward_prefetch": False}
    return Knobs(
        micro_batch_size=2,
        grad_accum_steps=2,
        sync_each_micro_batch=way.get("sync", True),
        reshard_after_forward=way.get("reshard", True),
        bucket_cap_mb=unit_cap_mb(sizes_mib, [2, 1] if size == 2 else [1] * NUM_LAYERS),
        blocks_per_unit=size,
        activation_checkpointing=way.get("checkpointing", "none"),
        num_workers=0,
        prefetch_factor=None,
        engine=point["engine"],
        **(fsdp1 if point["engine"] == "fsdp1" else {}),
    )


@pytest.fixture(scope="module")
def both_ranks(tmp_path_factory, text_folder):
    order = {
        "workload": "hf",
        "seq_len": SEQ_LEN,
        "source": str(text_folder),
        "optimizer": OPTIMIZER,
        "seed": 3,
        "num_steps": NUM_STEPS,
        "global_batch_size": 2 * BATCH_PER_RANK,
        "models": MODELS,
        "configs": {
            key: {
                "model": point["model"],
                "precision": WAYS[point["way"]].get("precision", "fp32"),
                "reduce_dtype": "fp32",
                "knobs": dataclasses.asdict(knobs_of(point)),
            }
            for key, point in POINTS.items()
        },
    }
    return run_script(HERE / "conformance_rank.py", order, 2, tmp_path_factory.mktemp("hf"))


@pytest.mark.parametrize("key", POINTS)
def test_a_sharded_model_trains_as_it_does_alone(both_ranks, key):
    precision = WAYS[POINTS[key]["way"]].get("precision", "fp32")
    asked = dataclasses.asdict(knobs_of(POINTS[key]))
    for rank in both_ranks:
        found = rank["configs"][key]
        assert found["different_weights"] == []
        wrong = {
            name: error
            for name, error in found["gradient_errors"].items()
            if not error <= GRADIENT_TOLERANCE[precision]
        }
        assert not wrong
        assert found["losses"] == pytest.approx(found["reference_losses"], rel=LOSS_TOLERANCE[precision])
        assert found["applied"] == asked


@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_a_whole_trial_measures_speed_memory_and_flops(ranks, text_folder, model):
    knobs = knobs_of({"model": model, "engine": "fsdp2", "way": "checkpointed"})
    spec = make_spec(text_folder, knobs, workload="hf", model={"config": MODELS[model]}, hardware_flops_per_token=None)
    gang = ranks.run(spec)
    assert gang.outcome is Outcome.OK, str(gang)
    first = gang.reports[0]
    assert first.warnings == []
    assert first.allocated_bytes > 0
    assert first.hardware_flops_per_token > 0


def test_its_survey_knows_sizes_and_flops(ranks, text_folder):
    spec = dataclasses.replace(
        make_spec(text_folder, knobs_of({"model": "gpt2", "engine": "fsdp2", "way": "plain"})),
        workload="hf",
        model={"config": MODELS["gpt2"]},
        knobs=None,
    )
    gang = ranks.run(spec)
    assert gang.outcome is Outcome.OK, str(gang)
    survey = gang.reports[0].survey
    assert survey["num_blocks"] == NUM_LAYERS
    assert survey["flops_convention"] == "counted-on-meta,full-attn"


def test_blocks_that_take_different_masks_are_not_grouped_by_fsdp1(ranks, text_folder):
    layers = ["full_attention", "sliding_attention", "full_attention"]
    config = {"model_type": "gemma3_text", **SIZES, "head_dim": 8, "layer_types": layers}
    knobs = dataclasses.replace(
        knobs_of({"model": "llama", "engine": "fsdp1", "way": "all-at-once"}), bucket_cap_mb=100.0
    )
    gang = ranks.run(make_spec(text_folder, knobs, workload="hf", model={"config": config}))
    assert gang.outcome is Outcome.INVALID, str(gang)
    assert "this model's blocks take different ones" in gang.reports[0].reason
