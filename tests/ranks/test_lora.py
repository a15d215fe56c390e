"""Frozen weights on two real gloo ranks: what is trained trains as it does alone, and nothing else changes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from trials import wrap
from trials.record import Knobs, unit_cap_mb
from trials.workload import load_workload

from .harness import HERE, OPTIMIZER, SEQ_LEN, TINY, run_script

CONFIG = {**TINY, "num_layers": 2}
POINTS = [(engine, way) for engine in ("fsdp2", "fsdp1") for way in ("plain", "all-at-once")]


def knobs_of(engine, way):
    workload = load_workload("lora_model:make", {"seq_len": SEQ_LEN, "config": CONFIG}, [str(HERE)])
    with torch.device("meta"):
        sizes_mib = wrap.block_mib(workload.blocks(workload.build_model()), "fp32")
    plain = way == "plain"
    fsdp1 = {"limit_all_gathers": True, "backward_prefetch": "pre", "forward_prefetch": False}
    return Knobs(
        micro_batch_size=2,
        grad_accum_steps=2,
        sync_each_micro_batch=plain,
        reshard_after_forward=plain,
        bucket_cap_mb=unit_cap_mb(sizes_mib, [1, 1] if plain else [2]),
        blocks_per_unit=1 if plain else 2,
        activation_checkpointing="none" if plain else "full",
        num_workers=0,
        prefetch_factor=None,
        engine=engine,
        **(fsdp1 if engine == "fsdp1" else {}),
    )


@pytest.fixture(scope="module")
def both_ranks(tmp_path_factory, text_folder):
    order = {
        "workload": "lora_model:make",
        "seq_len": SEQ_LEN,
        "source": str(text_folder),
        "optimizer": OPTIMIZER,
        "seed": 3,
        "num_steps": 3,
        "global_batch_size": 8,
        "models": {"lora": CONFIG},
        "configs": {
            f"{engine}-{way}": {
                "model": "lora",
                "precision": "fp32",
                "reduce_dtype": "fp32",
                "knobs": dataclasses.asdict(knobs_of(engine, way)),
            }
            for engine, way in POINTS
        },
    }
    return run_script(HERE / "conformance_rank.py", order, 2, tmp_path_factory.mktemp("lora"))


@pytest.mark.parametrize(("engine", "way"), POINTS)
def test_adapters_train_as_they_do_alone(both_ranks, engine, way):
    for rank in both_ranks:
        found = rank["configs"][f"{engine}-{way}"]
        assert found["different_weights"] == []
        assert all(".down." in name or ".up." in name for name in found["gradient_errors"])
        assert max(found["gradient_errors"].values()) <= 1e-5
        assert found["losses"] == pytest.approx(found["reference_losses"], rel=1e-5)
        assert found["applied"] == dataclasses.asdict(knobs_of(engine, way))
