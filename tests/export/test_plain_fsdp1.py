"""The plain export for FSDP1: the snippet does what it says, on two gloo ranks that run all cases at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autotune.export import Best, export
from autotune.export.plain import SNIPPET_NAME
from trials import wrap
from trials.record import Knobs, group_blocks, unit_cap_mb

from .conftest import fsdp1, run_ranks
from .fsdp1_rank import WORLD_SIZE, build, load_snippet, make_workload

CASES: dict[str, dict[str, Any]] = {
    "case_plain": {},
    "case_reshard": {"reshard_after_forward": True, "backward_prefetch": "pre", "limit_all_gathers": True},
    "case_no_prefetch": {"backward_prefetch": "none", "forward_prefetch": False},
    "case_no_checkpointing": {"activation_checkpointing": "none"},
    "case_every_3": {"activation_checkpointing": "every_3"},
    "case_selective": {"activation_checkpointing": "selective_op", "reshard_after_forward": True},
    "case_sync_each": {"sync_each_micro_batch": True, "grad_accum_steps": 3},
    "case_accumulate": {"grad_accum_steps": 3, "reshard_after_forward": True},
    "case_three_blocks": {"blocks_per_unit": 3},
    "case_two_blocks_every_2": {"blocks_per_unit": 2, "activation_checkpointing": "every_2"},
    "case_bf16": {"precision": "bf16"},
    "case_bf16_reduction": {"precision": "bf16", "reduce_dtype": "bf16", "blocks_per_unit": 2},
}


def settings(name: str, best: Best) -> Best:
    """The settings of a case, with the cap that puts so many of the toy model's blocks in a unit."""
    changes = dict(CASES[name])
    best = replace(
        fsdp1(best),
        precision=changes.pop("precision", "fp32"),
    )
    workload = make_workload()
    sizes = wrap.block_mib(workload.blocks(build(workload)), best.precision)
    blocks = changes.get("blocks_per_unit", 1)
    cap = unit_cap_mb(sizes, group_blocks(sizes, sizes[0] * blocks + 1e-6))
    return replace(best, knobs=replace(best.knobs, bucket_cap_mb=cap, **changes))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw, by case."""
    folder = tmp_path_factory.mktemp("fsdp1")
    best = Best(
        knobs=Knobs(8, 2, False, False, 0.0, 1, "full", 0, None),
        precision="fp32",
        world_size=WORLD_SIZE,
        seq_len=16,
        evidence=[],
    )
    for name in CASES:
        (folder / f"{name}.py").write_text(export("plain", settings(name, best)).files[SNIPPET_NAME])
    return run_ranks("fsdp1_rank", folder, WORLD_SIZE)


@pytest.mark.parametrize("name", CASES)
def test_snippet_applies_its_settings(name: str, best: Best, seen: list[dict[str, Any]]) -> None:
    tuned = settings(name, best)
    knobs = tuned.knobs
    for rank in seen:
        root, *units = rank[name]["units"]
        assert root["blocks"] == 4
        sizes = {1: [1, 1, 1, 1], 2: [2, 2], 3: [3, 1]}[knobs.blocks_per_unit]
        assert [unit["blocks"] for unit in units] == sizes
        for unit in (root, *units):
            assert unit["strategy"] == ("FULL_SHARD" if knobs.reshard_after_forward else "SHARD_GRAD_OP")
            assert unit["limit_all_gathers"] is knobs.limit_all_gathers
            prefetch = knobs.backward_prefetch
            assert unit["backward_prefetch"] == (None if prefetch == "none" else f"BACKWARD_{str(prefetch).upper()}")
            assert unit["forward_prefetch"] is knobs.forward_prefetch
            assert unit["use_orig_params"] is True
            reduction = "torch.bfloat16" if tuned.reduce_dtype == "bf16" else "torch.float32"
            bf16 = ["torch.bfloat16", reduction, "None"]
            assert unit["dtypes"] == (bf16 if tuned.precision == "bf16" else ["None"] * 3)


@pytest.mark.parametrize("name", CASES)
def test_snippet_wraps_as_the_trials_do(name: str, best: Best, seen: list[dict[str, Any]]) -> None:
    knobs = settings(name, best).knobs
    for rank in seen:
        read = rank[name]["read_by_the_trials"]
        assert read == {knob: getattr(knobs, knob) for knob in read}


@pytest.mark.parametrize("name", CASES)
def test_snippet_checkpoints_inside_the_unit(name: str, best: Best, seen: list[dict[str, Any]]) -> None:
    mode = settings(name, best).knobs.activation_checkpointing
    every = {"none": 5, "full": 1, "selective_op": 1, "every_2": 2, "every_3": 3}[mode]
    for rank in seen:
        assert rank[name]["checkpointed"] == [mode != "none" and i % every == 0 for i in range(4)]
        assert rank[name]["selective"] is (mode == "selective_op")
        assert rank[name]["unit_holds_wrapper"]


@pytest.mark.parametrize("name", CASES)
def test_train_step_syncs_and_accumulates(name: str, best: Best, seen: list[dict[str, Any]]) -> None:
    tuned = settings(name, best)
    knobs = tuned.knobs
    for rank in seen:
        early = [knobs.sync_each_micro_batch] * (knobs.grad_accum_steps - 1)
        assert rank[name]["synced"] == [*early, True]
        # lr x gradient: the weights move by far more than this.
        assert rank[name]["difference"] < (2e-6 if tuned.precision == "fp32" else 2e-3)


def test_blocks_that_share_a_unit_get_other_names_and_the_header_says_so(
    best: Best, seen: list[dict[str, Any]]
) -> None:
    def plain(case: str) -> set[str]:
        return {name.replace("_fsdp_wrapped_module.", "") for name in seen[0][case]["names"]}

    assert any(name.startswith("layers.3._checkpoint_wrapped_module.attention.") for name in plain("case_plain"))
    assert any(name.startswith("layers.1.blocks.0.") for name in plain("case_three_blocks"))
    assert not any(name.startswith("layers.2.") for name in plain("case_three_blocks"))
    renamed = "get other names (layers.3.x -> layers.1.blocks.1.x)"
    for case, said in (("case_plain", False), ("case_three_blocks", True)):
        assert (renamed in export("plain", settings(case, best)).files[SNIPPET_NAME]) is said


def test_blocks_of_two_lists_cannot_share_a_unit(best: Best, tmp_path: Path) -> None:
    (tmp_path / "snippet.py").write_text(export("plain", settings("case_plain", best)).files[SNIPPET_NAME])
    snippet = load_snippet(tmp_path / "snippet.py")

    def two_lists() -> nn.ModuleDict:
        return nn.ModuleDict({name: nn.ModuleList(nn.Linear(2, 2) for _ in range(3)) for name in ("first", "second")})

    model = two_lists()
    with pytest.raises(ValueError, match=r"must follow each other in one nn\.ModuleList"):
        snippet.join_blocks(model, [*model["first"], *model["second"]], [2, 2, 2])

    model = two_lists()
    blocks = [*model["first"], *model["second"]]
    joined = snippet.join_blocks(model, blocks, [3, 2, 1])
    assert [len(unit.blocks) for unit in joined] == [3, 2, 1]
    assert list(model["first"]) == joined[:1] and list(model["second"]) == joined[1:]
    x = torch.ones(1, 2)
    assert torch.equal(joined[0](x), blocks[2](blocks[1](blocks[0](x))))
