"""The Axolotl export, read by Axolotl's schema, and on from there by the Trainer that it hands it to."""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.export import Best, export
from autotune.export.axolotl import CHECKED, FILE_NAME

from .conftest import ddp

pytest.importorskip("axolotl")
pytest.importorskip("PIL")
pytest.importorskip("accelerate")

from accelerate import FullyShardedDataParallelPlugin
from axolotl.utils.schemas.config import AxolotlInputConfig
from axolotl.utils.schemas.fsdp import FSDPConfig
from transformers import TrainingArguments

OWN = {"base_model": "own/model", "datasets": [{"path": "own", "type": "completion"}], "learning_rate": 1e-4}


def fragment(best: Best) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(export("axolotl", best).files[FILE_NAME])
    return content


def merged(best: Best) -> AxolotlInputConfig:
    """Among the user's own keys, as `axolotl train` validates them."""
    return AxolotlInputConfig(**OWN, **fragment(best))


def test_this_is_the_version_whose_meaning_was_checked() -> None:
    assert importlib.metadata.version("axolotl").startswith(f"{CHECKED['axolotl']}.")


@pytest.mark.parametrize("make", [lambda best: best, ddp])
def test_every_key_is_one_that_axolotl_knows(make: Any, best: Best) -> None:
    """It takes others without a word."""
    found = fragment(make(best))
    assert set(found) <= set(AxolotlInputConfig.model_fields)
    assert set(found.get("fsdp_config", {})) <= set(FSDPConfig.model_fields)
    assert set(FSDPConfig(no_such_key=1).model_dump(exclude_none=True)) == set()


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_settings_arrive(precision: str, best: Best) -> None:
    config = merged(replace(best, precision=precision))
    assert (config.micro_batch_size, config.gradient_accumulation_steps, config.sequence_len) == (8, 2, 2048)
    assert config.bf16 is (precision == "bf16")
    assert config.optimizer == "adamw_torch"
    assert (config.dataloader_num_workers, config.dataloader_prefetch_factor) == (2, 4)
    assert config.dataloader_pin_memory is True
    assert config.gradient_checkpointing is False
    assert config.fsdp_version == 2


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_settings_of_fsdp_go_on_to_the_plugin(
    reshard: bool, checkpointing: str, best: Best, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    knobs = replace(best.knobs, reshard_after_forward=reshard, activation_checkpointing=checkpointing)
    config = merged(replace(best, knobs=knobs))
    assert config.fsdp_config is not None
    handed_on = config.fsdp_config.model_dump(exclude_none=True)
    # As axolotl's builder does, which hands both on.
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, fsdp=True, fsdp_config=handed_on)
    plugin = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is reshard
    assert plugin.activation_checkpointing is (checkpointing == "full")


def test_settings_of_ddp_arrive(best: Best) -> None:
    config = merged(ddp(best))
    assert config.ddp_bucket_cap_mb == 25 and config.ddp_find_unused_parameters is False
    assert config.gradient_checkpointing is True and config.fsdp_config is None
    half = replace(ddp(best).knobs, bucket_cap_mb=12.5)
    assert set(export("axolotl", replace(best, knobs=half)).lost) == {"bucket_cap_mb"}
    assert "ddp_bucket_cap_mb" not in fragment(replace(best, knobs=half))


def test_copies_and_offloading_arrive(best: Best) -> None:
    config = merged(replace(best, knobs=replace(best.knobs, replicate_degree=4, cpu_offload=True)))
    assert (config.dp_replicate_size, config.dp_shard_size) == (4, 4)
    assert config.fsdp_config is not None and config.fsdp_config.offload_params is True
