"""The transformers export in a real Trainer, on two gloo ranks: the lines for the script work, the keys arrive."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import yaml

from autotune.export import Best, export
from autotune.export.plain import SNIPPET_NAME
from autotune.export.transformers import FILE_NAME
from tests.ports import free_port
from trials.record import Knobs

from .conftest import run_ranks
from .conftest import settings as settings_of

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

WORLD_SIZE = 2
MAX_STEPS = 2
BLOCK_MIB = 0.03
"""Of the toy Llama in trainer_rank, a little more than it really has in fp32."""

CASES: dict[str, dict[str, Any]] = {
    "fsdp2": {"sync_each_micro_batch": True, "num_workers": 1, "prefetch_factor": 3},
    "fsdp2_none": {"reshard_after_forward": True, "activation_checkpointing": "none"},
    "fsdp2_every_2": {"activation_checkpointing": "every_2"},
    "fsdp2_grouped": {"blocks_per_unit": 2, "bucket_cap_mb": 2 * BLOCK_MIB},
    "fsdp2_bf16": {"precision": "bf16"},
    "fsdp1": {"engine": "fsdp1"},
    "fsdp1_reshard": {"engine": "fsdp1", "reshard_after_forward": True, "backward_prefetch": "none"},
    "fsdp1_every_2": {"engine": "fsdp1", "activation_checkpointing": "every_2"},
    "fsdp1_grouped": {"engine": "fsdp1", "blocks_per_unit": 2, "bucket_cap_mb": 2 * BLOCK_MIB},
    "fsdp1_bf16": {"engine": "fsdp1", "precision": "bf16"},
    "ddp": {"engine": "ddp", "bucket_cap_mb": 12.5, "num_workers": 1, "prefetch_factor": 3},
    "ddp_every_2": {"engine": "ddp", "activation_checkpointing": "every_2", "sync_each_micro_batch": True},
}


def settings(name: str) -> Best:
    changes = dict(CASES[name])
    best = Best(
        knobs=Knobs(4, 2, False, False, BLOCK_MIB, 1, "full", 0, None),
        precision=changes.pop("precision", "fp32"),
        world_size=WORLD_SIZE,
        seq_len=16,
        evidence=[],
    )
    best = settings_of(best, changes.pop("engine", "fsdp2"))
    return replace(best, knobs=replace(best.knobs, **changes))


def followed(name: str, text: str, lost: dict[str, str]) -> tuple[str, str]:
    """The file and the script's lines, as a user makes them who does what the lost knobs say."""
    lines = []
    for knob in ("activation_checkpointing", "reshard_after_forward", "blocks_per_unit"):
        found = re.findall("`([^`]*)`", lost.get(knob, ""))
        lines += reversed(found)  # "checkpoint first" comes last
    if "blocks_per_unit" in lost:
        text = text.replace("  activation_checkpointing: true", "  activation_checkpointing: false")
        if "fsdp1" in name:
            text = text.replace(
                "# transformer_layer_cls_to_wrap: YourBlock", "transformer_layer_cls_to_wrap: BlockGroup"
            )
        else:
            text = text.replace("TRANSFORMER_BASED_WRAP", "NO_WRAP")
    return text, "\n".join(lines)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw, by case."""
    folder = tmp_path_factory.mktemp("trainer")
    own = {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "ddp_backend": "gloo",
        "max_steps": MAX_STEPS,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    for name in CASES:
        best = settings(name)
        exported = export("transformers", best)
        text, lines = followed(name, exported.files[FILE_NAME], exported.lost)
        if name == "fsdp1_bf16":
            lines += "\n" + exported.lost["reduce_dtype"].split("`")[1]
        (folder / f"{name}.yaml").write_text(text + yaml.safe_dump(own))
        (folder / f"{name}.lines").write_text(lines)
    (folder / SNIPPET_NAME).write_text(export("plain", settings("fsdp1_grouped")).files[SNIPPET_NAME])
    return run_ranks("trainer_rank", folder, WORLD_SIZE, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))


@pytest.mark.parametrize("name", CASES)
def test_the_trainer_does_what_was_tuned(name: str, seen: list[dict[str, Any]]) -> None:
    knobs = settings(name).knobs
    for rank in seen:
        found = rank[name]
        assert found["engine"] == knobs.engine
        assert found["steps"] == MAX_STEPS
        assert set(found["micro_batches"]) == {knobs.micro_batch_size}
        assert len(found["micro_batches"]) == MAX_STEPS * knobs.grad_accum_steps
        assert found["synced"] == [knobs.sync_each_micro_batch, True] * MAX_STEPS
        assert found["num_workers"] == knobs.num_workers
        assert found["prefetch_factor"] == knobs.prefetch_factor
        every = {"none": 5, "full": 1, "every_2": 2}[knobs.activation_checkpointing]
        assert found["checkpointed"] == [every < 5 and i % every == 0 for i in range(4)]
        if knobs.engine == "ddp":
            assert found["bucket_cap_mb"] == knobs.bucket_cap_mb
            continue
        assert found["blocks"] == [knobs.blocks_per_unit] * (4 // knobs.blocks_per_unit)
        if knobs.engine == "fsdp2":
            assert found["reshard_after_forward"] == [knobs.reshard_after_forward] * 4
        else:
            assert found["strategy"] == ("FULL_SHARD" if knobs.reshard_after_forward else "SHARD_GRAD_OP")
            assert found["limit_all_gathers"] is knobs.limit_all_gathers
            assert found["backward_prefetch"] == (None if knobs.backward_prefetch == "none" else "BACKWARD_POST")
            assert found["forward_prefetch"] is knobs.forward_prefetch


def test_bf16_reduces_in_bf16_unless_the_line_in_the_script_is_written(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert rank["fsdp2_bf16"]["reduce_dtype"] == "torch.bfloat16"
        assert rank["fsdp1_bf16"]["reduce_dtype"] == "torch.float32"


def test_all_cases_learn_the_same(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert [found["loss"] for found in rank.values()] == pytest.approx(
            [rank["fsdp1"]["loss"]] * len(rank), rel=0.01
        )
        losses = [found["loss"] for name, found in rank.items() if "bf16" not in name]
        assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-4)
