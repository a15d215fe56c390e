"""The DeepSpeed export, read by DeepSpeed's own config classes; its engine was never run with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.export import Best, export
from autotune.export.deepspeed import CHECKED, COMMENT, FILE_NAME
from trials.record import ENGINES

from .conftest import settings

deepspeed = pytest.importorskip("deepspeed")

from deepspeed.runtime.config import DeepSpeedConfig  # noqa: E402
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # noqa: E402

# Of the top level, where DeepSpeed takes any key without a word; ZeRO's own keys it checks.
KNOWN = {
    COMMENT,
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "bf16",
    "communication_data_type",
    "zero_optimization",
}


def written(best: Best) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(export("deepspeed", best).files[FILE_NAME])
    return content


def parsed(best: Best, folder: Path) -> DeepSpeedConfig:
    """As the engine reads the file; it counts the ranks that there are, so the settings are for one."""
    path = folder / FILE_NAME
    path.write_text(export("deepspeed", replace(best, world_size=1)).files[FILE_NAME])
    return DeepSpeedConfig(str(path))


def test_this_is_the_version_whose_meaning_was_checked() -> None:
    assert deepspeed.__version__.startswith(f"{CHECKED['deepspeed']}.")


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("engine", ENGINES)
def test_batches_and_dtypes_arrive(engine: str, precision: str, best: Best, tmp_path: Path) -> None:
    best = replace(settings(best, engine), precision=precision)
    config = parsed(best, tmp_path)
    assert set(written(best)) == KNOWN and written(best)["train_batch_size"] == 256
    assert (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (8, 2)
    assert config.train_batch_size == 16
    assert config.bfloat16_config.enabled is (precision == "bf16")
    assert config.communication_data_type is torch.float32
    assert config.zero_optimization_stage == (0 if engine == "ddp" else 3)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_dtype_of_the_reduction_arrives(dtype: str, best: Best, tmp_path: Path) -> None:
    config = parsed(replace(best, knobs=replace(best.knobs, reduce_dtype=dtype)), tmp_path)
    assert config.communication_data_type is (torch.bfloat16 if dtype == "bf16" else torch.float32)


@pytest.mark.parametrize(("precision", "bytes_each"), [("bf16", 2), ("fp32", 4)])
@pytest.mark.parametrize("reshard", [True, False])
def test_zero_stands_in_by_the_nearest_keys(reshard: bool, precision: str, bytes_each: int, best: Best) -> None:
    knobs = replace(best.knobs, reshard_after_forward=reshard, bucket_cap_mb=3.0, cpu_offload=True)
    best = replace(best, knobs=knobs, precision=precision)
    zero = DeepSpeedZeroConfig(**written(best)["zero_optimization"])
    assert zero.reduce_bucket_size == zero.prefetch_bucket_size == 3 * 2**20 / bytes_each
    assert zero.max_reuse_distance == (0 if reshard else 10**13)
    assert zero.max_live_parameters == (10**9 if reshard else 10**13)
    assert zero.offload_param.device == zero.offload_optimizer.device == "cpu"
    assert {"engine", "bucket_cap_mb", "blocks_per_unit", "reshard_after_forward", "cpu_offload"} <= set(
        export("deepspeed", best).lost
    )


def test_its_live_default_is_deepspeeds() -> None:
    assert DeepSpeedZeroConfig(stage=3).max_live_parameters == 10**9


def test_a_key_that_zero_does_not_know_is_refused(best: Best) -> None:
    zero = written(best)["zero_optimization"]
    with pytest.raises(ValueError, match="stage3_no_such_key"):
        DeepSpeedZeroConfig(**zero, stage3_no_such_key=1)


def test_it_is_said_to_be_untested_and_is_plain_json_for_those_who_take_no_comments(best: Best) -> None:
    assert any("UNTESTED on DeepSpeed's engine" in line for line in written(best)[COMMENT])
