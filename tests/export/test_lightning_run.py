"""The Lightning export in a real Trainer, unmodified, on two gloo ranks: what is read back is what was exported."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from autotune.export import Best, export
from tests.ports import free_port
from trials import wrap
from trials.record import Knobs

from .conftest import run_ranks, settings

pytest.importorskip("lightning")
pytest.importorskip("jsonargparse")

WORLD_SIZE = 2
CASES: dict[str, dict[str, Any]] = {
    "fsdp2": {"num_workers": 1, "prefetch_factor": 3},
    "fsdp2_bf16": {"reshard_after_forward": True, "activation_checkpointing": "none", "reduce_dtype": "bf16"},
    "fsdp2_grouped": {"blocks_per_unit": 2, "activation_checkpointing": "every_2"},
    "fsdp2_last": {"sync_each_micro_batch": False},
    "ddp_bf16": {"engine": "ddp", "bucket_cap_mb": 12.5, "sync_each_micro_batch": False},
}


def case(name: str) -> Best:
    from .lightning_rank import make_workload

    changes = dict(CASES[name])
    workload = make_workload()
    precision = "bf16" if "bf16" in name else "fp32"
    size_mib = wrap.block_mib(workload.blocks(workload.build_model()), precision)[0]
    per_unit = changes.get("blocks_per_unit", 1)
    cap = round(size_mib * per_unit + 0.005, 2)
    best = Best(Knobs(4, 2, True, False, cap, 1, "full", 0, None), precision, WORLD_SIZE, 16, evidence=[])
    best = settings(best, changes.pop("engine", "fsdp2"))
    return replace(best, knobs=replace(best.knobs, **changes))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw, by case."""
    folder = tmp_path_factory.mktemp("lightning")
    for name in CASES:
        exported = export("lightning", case(name))
        (folder / name).mkdir()
        for file_name, text in exported.files.items():
            (folder / name / file_name).write_text(text)
        lines = [line for need in exported.lost.values() for line in re.findall("`(def [^`]*)`", need)]
        (folder / name / "lines.py").write_text("\n".join(lines))
    elastic = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": str(WORLD_SIZE), "GROUP_RANK": "0"}
    return run_ranks(
        "lightning_rank", folder, WORLD_SIZE, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), **elastic
    )


@pytest.mark.parametrize("name", CASES)
def test_lightning_does_what_was_tuned(name: str, seen: list[dict[str, Any]]) -> None:
    best = case(name)
    knobs = best.knobs
    for rank in seen:
        found = rank[name]
        for knob in ("engine", "activation_checkpointing", "bucket_cap_mb", "blocks_per_unit", "num_workers"):
            assert found[knob] == getattr(knobs, knob), knob
        assert found["prefetch_factor"] == knobs.prefetch_factor
        assert found["micro_batches"] == [knobs.micro_batch_size] * 4
        assert found["steps"] == 2
        assert found["synced"] == [knobs.sync_each_micro_batch, True] * 2
        if knobs.engine == "fsdp2":
            assert found["reshard_after_forward"] == knobs.reshard_after_forward
            assert found["sharded"]  # over both ranks, not over one
            assert found["precision"] == "32-true"
            if best.precision == "bf16":
                assert found["reduce_dtype"] == knobs.reduce_dtype
        else:
            assert found["precision"] == "bf16-mixed"
