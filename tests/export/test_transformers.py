"""The transformers export, read by transformers' own parser and accelerate's plugin: what arrives, not what parses."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy

from autotune.export import Best, export, snippet_fsdp1
from autotune.export.transformers import CHECKED, FILE_NAME

from .conftest import FSDP, ddp, fsdp1

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate import FullyShardedDataParallelPlugin  # noqa: E402
from accelerate.utils import GradientAccumulationPlugin  # noqa: E402
from transformers import HfArgumentParser, TrainingArguments  # noqa: E402


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of a launcher would stand in for what the file leaves out; transformers sets one itself."""
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_")):
            monkeypatch.delenv(name)


def write(best: Best, folder: Path, **others: Any) -> Path:
    """The exported file with other arguments of the user's added. On this machine use_cpu must be one of them."""
    path = folder / FILE_NAME
    own = yaml.safe_dump({"output_dir": str(folder / "out"), "use_cpu": True, **others})
    path.write_text(export("transformers", best).files[FILE_NAME] + own, encoding="utf-8")
    return path


def parse(path: Path) -> Any:
    (args,) = HfArgumentParser(TrainingArguments).parse_yaml_file(str(path))
    return args


def plugin_of(args: Any) -> FullyShardedDataParallelPlugin:
    """What the Trainer makes. To spread rank 0's weights, version 1 wants a GPU at once: only that is put off."""
    given = dict(args.fsdp_plugin_args)
    if given["fsdp_version"] == 1:
        assert given["sync_module_states"] is True
        given["sync_module_states"] = False
    return FullyShardedDataParallelPlugin(**given)


def strategy_of(plugin: FullyShardedDataParallelPlugin) -> ShardingStrategy:
    """The expression by which accelerate's prepare_model chooses."""
    strategy: ShardingStrategy = plugin.sharding_strategy or plugin.reshard_after_forward
    return strategy


def test_this_is_the_version_whose_meaning_was_checked() -> None:
    assert transformers.__version__.startswith(f"{CHECKED['transformers']}.")


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("engine", FSDP)
def test_batches_loader_and_precision_arrive(
    engine: str, sync: bool, accumulation: int, workers: int, precision: str, best: Best, tmp_path: Path
) -> None:
    knobs = replace(
        (best if engine == "fsdp2" else fsdp1(best)).knobs,
        sync_each_micro_batch=sync,
        grad_accum_steps=accumulation,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
    )
    best = replace(best, knobs=knobs, precision=precision)
    args = parse(write(best, tmp_path))
    carried = {"micro_batch_size", "grad_accum_steps", "sync_each_micro_batch", "num_workers", "prefetch_factor"}
    assert carried <= set(export("transformers", best).carried)
    assert args.train_batch_size == 8  # per rank: it is multiplied by the devices of one process
    assert args.gradient_accumulation_steps == accumulation
    assert args.dataloader_num_workers == workers
    assert args.dataloader_prefetch_factor == (4 if workers else None)
    assert args.dataloader_persistent_workers is (workers > 0)
    assert args.bf16 is (precision == "bf16") and args.fp16 is False
    assert args.mixed_precision == ("bf16" if precision == "bf16" else "no")
    assert args.accelerator_config.non_blocking is True
    assert args.accelerator_config.split_batches is False
    # As the Trainer does: its loop then asks for sync_each_batch.
    accumulate = GradientAccumulationPlugin(**(args.accelerator_config.gradient_accumulation_kwargs or {}), num_steps=1)
    assert accumulate.to_kwargs().get("sync_each_batch", False) is (sync and accumulation > 1)


def test_memory_is_pinned_except_where_transformers_itself_unpins_it(best: Best, tmp_path: Path) -> None:
    assert yaml.safe_load(write(best, tmp_path).read_text())["dataloader_pin_memory"] is True
    assert parse(tmp_path / FILE_NAME).dataloader_pin_memory is False  # use_cpu


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_settings_of_fsdp2_arrive_in_the_plugin(reshard: bool, checkpointing: str, best: Best, tmp_path: Path) -> None:
    knobs = replace(best.knobs, reshard_after_forward=reshard, activation_checkpointing=checkpointing)
    best = replace(best, knobs=knobs)
    assert set(export("transformers", best).lost) == {"reduce_dtype"}
    args = parse(write(best, tmp_path))
    plugin = plugin_of(args)
    assert args.fsdp is True
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is reshard
    assert plugin.activation_checkpointing is (checkpointing == "full")
    assert args.activation_checkpointing is False  # transformers' own, refused beside FSDP's
    assert plugin.cpu_ram_efficient_loading is False


@pytest.mark.parametrize("limit", [True, False])
@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize(
    ("prefetch", "expected"),
    [("pre", BackwardPrefetch.BACKWARD_PRE), ("post", BackwardPrefetch.BACKWARD_POST), ("none", None)],
)
def test_settings_of_fsdp1_arrive_in_the_plugin(
    limit: bool,
    forward: bool,
    checkpointing: str,
    prefetch: str,
    expected: BackwardPrefetch | None,
    best: Best,
    tmp_path: Path,
) -> None:
    changes: dict[str, Any] = {
        "limit_all_gathers": limit,
        "forward_prefetch": forward,
        "backward_prefetch": prefetch,
        "activation_checkpointing": checkpointing,
        "reshard_after_forward": True,
    }
    best = replace(best, knobs=replace(fsdp1(best).knobs, **changes))
    assert set(export("transformers", best).lost) == {"reduce_dtype"}
    plugin = plugin_of(parse(write(best, tmp_path)))
    assert plugin.fsdp_version == 1
    assert strategy_of(plugin) is ShardingStrategy.FULL_SHARD
    assert plugin.limit_all_gathers is limit
    assert plugin.forward_prefetch is forward
    assert plugin.backward_prefetch is expected
    assert plugin.activation_checkpointing is (checkpointing == "full")
    assert plugin.use_orig_params is True


def test_fsdp1_keeps_weights_only_by_the_line_in_the_script(best: Best, tmp_path: Path) -> None:
    best = fsdp1(best)
    line = 'args.fsdp_plugin_args["sharding_strategy"] = "SHARD_GRAD_OP"'
    assert set(export("transformers", best).lost) == {"reshard_after_forward", "reduce_dtype"}
    assert f"`{line}`" in export("transformers", best).lost["reshard_after_forward"]
    args = parse(write(best, tmp_path))
    assert strategy_of(plugin_of(args)) is ShardingStrategy.FULL_SHARD
    exec(line, {"args": args})
    assert strategy_of(plugin_of(args)) is ShardingStrategy.SHARD_GRAD_OP


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (
            {"version": 2, "limit_all_gathers": False, "backward_prefetch": "BACKWARD_PRE", "forward_prefetch": True},
            ["limit_all_gathers", "backward_prefetch", "forward_prefetch"],
        ),
        ({"version": 1, "sharding_strategy": "SHARD_GRAD_OP"}, ["sharding_strategy"]),
        ({"version": 2, "no_such_key": 1}, ["no_such_key"]),
    ],
)
def test_what_fsdp_config_drops_without_a_word(config: dict[str, Any], names: list[str], tmp_path: Path) -> None:
    """Once this fails, transformers carries more than this exporter writes."""
    path = tmp_path / "args.yaml"
    path.write_text(yaml.safe_dump({"use_cpu": True, "fsdp": True, "fsdp_config": config}))
    assert not set(names) & set(parse(path).fsdp_plugin_args)


def test_fsdp1_drops_reshard_after_forward_for_the_default_strategy(tmp_path: Path) -> None:
    """The key reaches the plugin, but is not what accelerate goes by. Once this fails, it can be written."""
    config = {"version": 1, "reshard_after_forward": "SHARD_GRAD_OP"}
    path = tmp_path / "args.yaml"
    path.write_text(yaml.safe_dump({"use_cpu": True, "fsdp": True, "fsdp_config": config}))
    plugin = plugin_of(parse(path))
    assert plugin.reshard_after_forward is ShardingStrategy.SHARD_GRAD_OP
    assert strategy_of(plugin) is ShardingStrategy.FULL_SHARD


def test_an_unknown_argument_is_refused(best: Best, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no_such_argument"):
        parse(write(best, tmp_path, no_such_argument=1))


@pytest.mark.parametrize("engine", FSDP)
def test_bf16_reduces_in_bf16_and_the_line_in_the_script_changes_it(engine: str, best: Best, tmp_path: Path) -> None:
    best = best if engine == "fsdp2" else fsdp1(best)
    args = parse(write(best, tmp_path))
    plugin = plugin_of(args)
    plugin.set_mixed_precision(args.mixed_precision)  # as accelerate's state does
    assert plugin.mixed_precision_policy.param_dtype is torch.bfloat16
    assert plugin.mixed_precision_policy.reduce_dtype is torch.bfloat16

    line = export("transformers", best).lost["reduce_dtype"].split("`")[1]
    names = {"torch": torch, "MixedPrecision": MixedPrecision, "MixedPrecisionPolicy": MixedPrecisionPolicy}
    exec(line, {"args": args, **names})
    plugin = plugin_of(args)
    plugin.set_mixed_precision(args.mixed_precision)
    assert plugin.mixed_precision_policy.reduce_dtype is torch.float32

    in_fp32 = export("transformers", replace(best, precision="fp32"))
    assert "reduce_dtype" in in_fp32.carried and not any("bf16" in note for note in in_fp32.notes)
    assert any("dtype=torch.float32" in note for note in in_fp32.notes)


def test_the_block_class_arrives_once_it_is_written(best: Best, tmp_path: Path) -> None:
    best = fsdp1(best)
    best = replace(best, knobs=replace(best.knobs, blocks_per_unit=2))
    path = write(best, tmp_path)
    assert "  # transformer_layer_cls_to_wrap: YourBlock" in path.read_text()
    text = path.read_text().replace(
        "  # transformer_layer_cls_to_wrap: YourBlock", "  transformer_layer_cls_to_wrap: X"
    )
    path.write_text(text.replace("to_wrap: X", "to_wrap: BlockGroup"))
    plugin = plugin_of(parse(path))
    assert plugin.transformer_cls_names_to_wrap == ["BlockGroup"]
    layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(4))
    model = torch.nn.ModuleDict({"layers": layers})
    units = snippet_fsdp1.join_blocks(model, list(layers), [2, 2])
    plugin.set_auto_wrap_policy(model)
    wanted = [m for m in model.modules() if plugin.auto_wrap_policy(module=m, recurse=False, nonwrapped_numel=0)]
    assert wanted == units


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ({}, set()),
        ({"sync_each_micro_batch": True}, set()),
        ({"blocks_per_unit": 2}, {"blocks_per_unit", "bucket_cap_mb"}),
        ({"activation_checkpointing": "every_2"}, {"activation_checkpointing"}),
        ({"activation_checkpointing": "selective_op"}, {"activation_checkpointing"}),
    ],
)
@pytest.mark.parametrize("engine", FSDP)
def test_lost_is_what_the_arguments_cannot_say(engine: str, change: dict[str, Any], lost: set[str], best: Best) -> None:
    best = best if engine == "fsdp2" else fsdp1(best)
    exported = export("transformers", replace(best, knobs=replace(best.knobs, **change)))
    engine_lacks = {"reshard_after_forward"} if engine == "fsdp1" else set()
    assert set(exported.lost) == lost | engine_lacks | {"reduce_dtype"}


@pytest.mark.parametrize("mode", ["every_2", "selective_op"])
@pytest.mark.parametrize("engine", FSDP)
def test_partial_checkpointing_is_off_in_the_file(engine: str, mode: str, best: Best, tmp_path: Path) -> None:
    best = best if engine == "fsdp2" else fsdp1(best)
    best = replace(best, knobs=replace(best.knobs, activation_checkpointing=mode))
    assert plugin_of(parse(write(best, tmp_path))).activation_checkpointing is False


@pytest.mark.parametrize(("fused", "optim"), [(False, "adamw_torch"), (True, "adamw_torch_fused")])
def test_the_trainers_own_default_optimizer_is_never_left_to_it(
    fused: bool, optim: str, best: Best, tmp_path: Path
) -> None:
    assert TrainingArguments(output_dir=str(tmp_path), use_cpu=True).optim == "adamw_torch_fused"
    args = parse(write(replace(best, knobs=replace(best.knobs, fused_optimizer=fused)), tmp_path))
    assert args.optim == optim


@pytest.mark.parametrize(("mode", "every"), [("none", None), ("full", 1), ("every_3", 3)])
def test_settings_of_ddp_arrive(mode: str, every: int | None, best: Best, tmp_path: Path) -> None:
    best = ddp(best)
    best = replace(best, knobs=replace(best.knobs, activation_checkpointing=mode, bucket_cap_mb=12.5))
    assert export("transformers", best).lost == {}
    args = parse(write(best, tmp_path))
    assert args.fsdp_plugin_args is None
    assert args.ddp_bucket_cap_mb == 12.5 and args.ddp_find_unused_parameters is False
    assert args.activation_checkpointing is (every is not None)
    assert (args.activation_checkpointing_kwargs or {}).get("every_n_layers") == every


def test_selective_checkpointing_under_ddp_is_lost(best: Best) -> None:
    best = ddp(best)
    knobs = replace(best.knobs, activation_checkpointing="selective_op")
    assert set(export("transformers", replace(best, knobs=knobs)).lost) == {"activation_checkpointing"}
