"""The plain export: the YAML reads back, and FSDP2's snippet does what it says, on one gloo rank."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import TensorDataset

from autotune.export import Best, export
from autotune.export.plain import SNIPPET_NAME, YAML_NAME
from autotune.export.snippet import MEANING
from trials import wrap
from trials.engines import ddp as ddp_engine
from trials.engines import fsdp2
from trials.models import DecoderWorkload
from trials.record import FSDP1_KNOBS, KNOB_NAMES, Knobs, group_blocks, unit_cap_mb

from .conftest import FSDP, ddp, fsdp1

NUM_LAYERS = 4
SEQ_LEN = 16


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def workload() -> DecoderWorkload:
    shape = {"vocab_size": 256, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "ffn_size": 48}
    return DecoderWorkload(SEQ_LEN, config={**shape, "num_layers": NUM_LAYERS})


def build(workload: DecoderWorkload) -> nn.Module:
    torch.manual_seed(0)
    model = workload.build_model()
    workload.init_buffers(model)
    return model


def fitted(best: Best, workload: DecoderWorkload, blocks_per_unit: int) -> Knobs:
    """The settings of `best`, with the cap that puts so many of the model's blocks in a unit."""
    sizes = wrap.block_mib(workload.blocks(build(workload)), best.precision)
    units = group_blocks(sizes, sizes[0] * blocks_per_unit + 1e-6)
    return replace(best.knobs, bucket_cap_mb=unit_cap_mb(sizes, units), blocks_per_unit=max(units))


def load_snippet(best: Best, folder: Path) -> ModuleType:
    path = folder / SNIPPET_NAME
    path.write_text(export("plain", best).files[SNIPPET_NAME], encoding="utf-8")
    spec = importlib.util.spec_from_file_location("exported_snippet", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_yaml_reads_back_into_the_same_knobs(best: Best) -> None:
    without_workers = replace(best.knobs, num_workers=0, prefetch_factor=None, bucket_cap_mb=0.01)
    for knobs in (best.knobs, without_workers, fsdp1(best).knobs):
        text = export("plain", replace(best, knobs=knobs)).files[YAML_NAME]
        values = yaml.safe_load(text)
        assert Knobs.from_dict(values.pop("knobs")) == knobs
        assert values == {"precision": "bf16", "reduce_dtype": "fp32", "world_size": 16, "seq_len": 2048}
        for name in MEANING:
            known = knobs.engine == "fsdp1" or name not in FSDP1_KNOBS
            assert (f"  # {MEANING[name]}\n  {name}: " in text) == known


@pytest.mark.parametrize("engine", FSDP)
def test_nothing_is_lost(engine: str, best: Best) -> None:
    exported = export("plain", best if engine == "fsdp2" else fsdp1(best))
    assert exported.lost == {} and exported.carried == KNOB_NAMES


@pytest.mark.parametrize("engine", FSDP)
def test_snippet_imports_only_torch_and_has_every_knob_of_its_engine(engine: str, best: Best) -> None:
    best = best if engine == "fsdp2" else fsdp1(best)
    tree = ast.parse(export("plain", best).files[SNIPPET_NAME])
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported - sys.stdlib_module_names == {"torch"}
    constants = {
        node.targets[0].id.lower(): ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id.lower() in (*KNOB_NAMES, "precision")
    }
    knobs = best.knobs.to_dict()
    expected = {name: knobs[name] for name in MEANING if engine == "fsdp1" or name not in FSDP1_KNOBS}
    assert constants == {**expected, "precision": "bf16", "reduce_dtype": "fp32"}


@pytest.mark.parametrize("checkpointing", ["none", "full", "every_2", "every_4", "selective_op"])
@pytest.mark.parametrize("blocks_per_unit", [1, 3])
@pytest.mark.parametrize(("precision", "reshard"), [("bf16", True), ("fp32", False)])
def test_snippet_wraps_as_the_trials_do(
    checkpointing: str,
    blocks_per_unit: int,
    precision: str,
    reshard: bool,
    best: Best,
    workload: DecoderWorkload,
    mesh: DeviceMesh,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    best = replace(best, precision=precision)
    knobs = replace(
        fitted(best, workload, blocks_per_unit),
        activation_checkpointing=checkpointing,
        reshard_after_forward=reshard,
    )
    snippet = load_snippet(replace(best, knobs=knobs), tmp_path)
    model = build(workload)
    names = wrap.block_names(model, workload.blocks(model))
    snippet.apply(model, workload.blocks(model), mesh)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [float(snippet.train_step(model, optimizer, tokens(), workload.loss)) for _ in range(3)]
    assert losses[-1] < losses[0]

    # selective_op is recognised by the function that chooses; the snippet has its own, for the same ops.
    monkeypatch.setattr(wrap, "selective_contexts", snippet.selective_contexts)
    assert set(snippet.KEPT_OPS) == wrap.KEPT_OPS
    blocks = [model.get_submodule(name) for name in names]
    read = fsdp2.read(model, blocks) | {"activation_checkpointing": wrap.read_checkpointing(blocks)}
    assert read == {name: getattr(knobs, name) for name in read}
    policies = {fsdp2.param_groups(module)[0].mp_policy for module in (model, model.get_submodule(names[0]))}
    assert {(policy.param_dtype, policy.reduce_dtype) for policy in policies} == {
        (torch.bfloat16, torch.float32) if precision == "bf16" else (None, None)
    }


def tokens() -> Iterator[Tensor]:
    """The same two micro-batches each time."""
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randint(256, (2, SEQ_LEN + 1), generator=generator)


@pytest.mark.parametrize("sync", [True, False])
def test_train_step_syncs_and_accumulates(
    sync: bool, best: Best, workload: DecoderWorkload, mesh: DeviceMesh, tmp_path: Path
) -> None:
    best = replace(best, precision="fp32")
    knobs = replace(fitted(best, workload, 1), sync_each_micro_batch=sync, grad_accum_steps=3)
    snippet = load_snippet(replace(best, knobs=knobs), tmp_path)
    model, reference = build(workload), build(workload)
    snippet.apply(model, workload.blocks(model), mesh)
    synced: list[bool] = []

    def loss_fn(sharded: nn.Module, batch: Tensor) -> Tensor:
        synced.extend(group.reduce_grads for group in fsdp2.param_groups(sharded))
        return workload.loss(sharded, batch)

    snippet.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), tokens(), loss_fn)
    assert synced == [sync, sync, True]

    batches = tokens()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        (workload.loss(reference, next(batches)) / 3).backward()
    optimizer.step()
    for expected, sharded in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(sharded.full_tensor(), expected)  # type: ignore[attr-defined]


def test_another_model_than_tuned_is_refused(
    best: Best, workload: DecoderWorkload, mesh: DeviceMesh, tmp_path: Path
) -> None:
    knobs = replace(fitted(best, workload, 1), blocks_per_unit=2)
    snippet = load_snippet(replace(best, knobs=knobs), tmp_path)
    model = build(workload)
    with pytest.raises(ValueError, match="the model is not the one that was tuned"):
        snippet.apply(model, workload.blocks(model), mesh)


@pytest.mark.parametrize(("num_workers", "prefetch_factor"), [(2, 4), (0, None)])
def test_loader(num_workers: int, prefetch_factor: int | None, best: Best, mesh: DeviceMesh, tmp_path: Path) -> None:
    knobs = replace(best.knobs, num_workers=num_workers, prefetch_factor=prefetch_factor)
    snippet = load_snippet(replace(best, knobs=knobs), tmp_path)
    loader = snippet.make_loader(TensorDataset(torch.arange(20)))
    assert (loader.batch_size, loader.num_workers, loader.prefetch_factor) == (
        8,
        num_workers,
        prefetch_factor,
    )
    if num_workers == 0:
        batches: Iterator[Any] = snippet.micro_batches(loader)
        epochs = [torch.cat([next(batches)[0], next(batches)[0]]).tolist() for _ in range(2)]
        assert epochs[0] != epochs[1] and all(len(set(epoch)) == 16 for epoch in epochs)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("checkpointing", ["full", "every_2"])
def test_snippet_of_ddp_wraps_and_trains_as_the_trials_do(
    checkpointing: str, precision: str, best: Best, workload: DecoderWorkload, mesh: DeviceMesh, tmp_path: Path
) -> None:
    knobs = replace(
        ddp(best).knobs,
        bucket_cap_mb=12.5,
        activation_checkpointing=checkpointing,
        sync_each_micro_batch=False,
        grad_accum_steps=3,
    )
    exported = replace(best, knobs=knobs, precision=precision)
    assert export("plain", exported).lost == {}
    snippet = load_snippet(exported, tmp_path)
    model, reference = build(workload), build(workload)
    names = wrap.block_names(model, workload.blocks(model))
    wrapped = snippet.apply(model, workload.blocks(model), torch.device("cpu"))

    blocks = [model.get_submodule(name) for name in names]
    read = ddp_engine.read(wrapped, blocks) | {"activation_checkpointing": wrap.read_checkpointing(blocks)}
    assert read == {name: getattr(knobs, name) for name in read}
    assert wrapped.gradient_as_bucket_view

    synced: list[bool] = []

    def loss_fn(replica: Any, batch: Tensor) -> Tensor:
        synced.append(replica.require_backward_grad_sync)
        return workload.loss(replica, batch)

    snippet.train_step(wrapped, torch.optim.SGD(model.parameters(), lr=0.1), tokens(), loss_fn)
    assert synced == [False, False, True]

    batches = tokens()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = workload.loss(reference, next(batches))
        (loss / 3).backward()
    optimizer.step()
    for expected, trained in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(trained, expected, rtol=0.05, atol=1e-3 if precision == "bf16" else 1e-6)


def test_yaml_of_ddp_has_the_knobs_of_its_engine(best: Best) -> None:
    values = yaml.safe_load(export("plain", ddp(best)).files[YAML_NAME])["knobs"]
    absent = {"reshard_after_forward": None, "blocks_per_unit": None}
    assert not set(values) & set(absent)
    assert Knobs.from_dict(values | absent) == ddp(best).knobs
