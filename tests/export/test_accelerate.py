"""The accelerate export, read by accelerate's own launcher and plugin: what arrives, not what parses."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.export import Best, export, snippet_fsdp1
from autotune.export.accelerate import CHECKED, FILE_NAME

accelerate = pytest.importorskip("accelerate")

from accelerate import FullyShardedDataParallelPlugin  # noqa: E402
from accelerate.commands.config.config_args import load_config_from_file  # noqa: E402
from accelerate.commands.launch import _validate_launch_command, launch_command_parser  # noqa: E402
from accelerate.utils import DistributedDataParallelKwargs  # noqa: E402
from accelerate.utils.launch import prepare_multi_gpu_env  # noqa: E402
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy  # noqa: E402

from .conftest import FSDP, ddp, fsdp1  # noqa: E402


def write(best: Best, folder: Path) -> Path:
    path = folder / FILE_NAME
    path.write_text(export("accelerate", best).files[FILE_NAME], encoding="utf-8")
    return path


def launch(path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[Namespace, dict[str, str]]:
    """What `accelerate launch` resolves for `path`; the variables of its ranks hold until the test ends."""
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_")):
            monkeypatch.delenv(name)
    # Port 0: any free one, so that no other job on this machine matters.
    arguments = ["--config_file", str(path), "--main_process_port", "0", *options, "train.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    environment: dict[str, str] = prepare_multi_gpu_env(args)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return args, environment


def plugin_on_cpu(monkeypatch: pytest.MonkeyPatch) -> FullyShardedDataParallelPlugin:
    """What the ranks would have. To spread rank 0's weights, version 1 wants a GPU at once: only that is put off."""
    monkeypatch.setenv("FSDP_SYNC_MODULE_STATES", "false")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    return FullyShardedDataParallelPlugin()


def test_this_is_the_version_whose_meaning_was_checked() -> None:
    assert accelerate.__version__.startswith(f"{CHECKED['accelerate']}.")


@pytest.mark.parametrize("engine", FSDP)
def test_every_key_is_one_the_launcher_knows(engine: str, best: Best, tmp_path: Path) -> None:
    best = best if engine == "fsdp2" else fsdp1(best)
    config = load_config_from_file(str(write(best, tmp_path)))
    known = {action.dest for action in launch_command_parser()._actions}
    assert config.fsdp_config and set(config.fsdp_config) <= known
    assert config.num_processes == 16


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_settings_arrive_in_the_plugin(
    reshard: bool,
    checkpointing: str,
    precision: str,
    best: Best,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    knobs = replace(best.knobs, reshard_after_forward=reshard, activation_checkpointing=checkpointing)
    exported_best = replace(best, knobs=knobs, precision=precision)
    exported = export("accelerate", exported_best)
    args, environment = launch(write(exported_best, tmp_path), monkeypatch)
    plugin = FullyShardedDataParallelPlugin()

    assert {"engine", "reshard_after_forward", "activation_checkpointing"} <= set(exported.carried)
    assert args.use_fsdp and environment["ACCELERATE_USE_FSDP"] == "true"
    assert args.nproc_per_node == "16"
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is reshard
    assert plugin.activation_checkpointing is (checkpointing == "full")
    assert environment["ACCELERATE_MIXED_PRECISION"] == ("bf16" if precision == "bf16" else "no")


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("limit", [True, False])
@pytest.mark.parametrize(
    ("prefetch", "expected"),
    [("pre", BackwardPrefetch.BACKWARD_PRE), ("post", BackwardPrefetch.BACKWARD_POST), ("none", None)],
)
def test_settings_of_fsdp1_arrive_in_the_plugin(
    reshard: bool,
    limit: bool,
    prefetch: str,
    expected: BackwardPrefetch | None,
    best: Best,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes: dict[str, Any] = {
        "reshard_after_forward": reshard,
        "limit_all_gathers": limit,
        "backward_prefetch": prefetch,
        "forward_prefetch": reshard,
        "activation_checkpointing": "full" if limit else "none",
    }
    best = replace(best, knobs=replace(fsdp1(best).knobs, **changes))
    exported = export("accelerate", best)
    launch(write(best, tmp_path), monkeypatch)
    plugin = plugin_on_cpu(monkeypatch)

    assert set(changes) - set(exported.carried) == (set() if limit else {"limit_all_gathers"})
    assert plugin.fsdp_version == 1
    # The expression by which accelerate's prepare_model chooses.
    strategy = plugin.sharding_strategy or plugin.reshard_after_forward
    assert strategy is (ShardingStrategy.FULL_SHARD if reshard else ShardingStrategy.SHARD_GRAD_OP)
    assert plugin.backward_prefetch is expected
    assert plugin.forward_prefetch is reshard
    assert plugin.activation_checkpointing is limit
    assert plugin.use_orig_params is True
    assert plugin.limit_all_gathers is True


def test_the_line_for_limit_all_gathers_keeps_what_the_file_says(
    best: Best, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = fsdp1(best)
    line = "`Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(limit_all_gathers=False))`"
    assert line in export("accelerate", best).lost["limit_all_gathers"]
    launch(write(best, tmp_path), monkeypatch)
    plugin_on_cpu(monkeypatch)
    plugin = FullyShardedDataParallelPlugin(limit_all_gathers=False)
    assert plugin.limit_all_gathers is False
    assert (plugin.fsdp_version, plugin.sharding_strategy) == (1, ShardingStrategy.SHARD_GRAD_OP)


@pytest.mark.parametrize("engine", FSDP)
def test_bf16_reduces_in_bf16_so_another_dtype_is_lost(
    engine: str, best: Best, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = best if engine == "fsdp2" else fsdp1(best)
    _, environment = launch(write(best, tmp_path), monkeypatch)
    plugin = plugin_on_cpu(monkeypatch)
    plugin.set_mixed_precision(environment["ACCELERATE_MIXED_PRECISION"])
    assert plugin.mixed_precision_policy.param_dtype is torch.bfloat16
    assert plugin.mixed_precision_policy.reduce_dtype is torch.bfloat16
    if engine == "fsdp1":
        assert plugin.mixed_precision_policy.buffer_dtype is torch.bfloat16
        assert any("casts buffers to bf16" in note for note in export("accelerate", best).notes)
    assert "accelerate's bf16 reduces in bf16" in export("accelerate", best).lost["reduce_dtype"]
    for other in (
        replace(best, precision="fp32"),
        replace(best, knobs=replace(best.knobs, reduce_dtype="bf16")),
    ):
        assert "reduce_dtype" in export("accelerate", other).carried

    names = {"torch": torch, "MixedPrecision": MixedPrecision, "MixedPrecisionPolicy": MixedPrecisionPolicy}
    line = export("accelerate", best).lost["reduce_dtype"].split("`")[1]
    assert line.startswith("Accelerator(fsdp_plugin=") and line.endswith(")")
    names["FullyShardedDataParallelPlugin"] = FullyShardedDataParallelPlugin
    plugin = eval(line.removeprefix("Accelerator(fsdp_plugin=").removesuffix(")"), names)
    plugin.set_mixed_precision(environment["ACCELERATE_MIXED_PRECISION"])
    assert plugin.mixed_precision_policy.reduce_dtype is torch.float32


def test_the_block_class_arrives_once_it_is_written(
    best: Best, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(best, tmp_path)
    text = path.read_text().replace("  # fsdp_transformer_layer", "  fsdp_transformer_layer")
    path.write_text(text.replace("YourBlock", "Block,OtherBlock"))
    launch(path, monkeypatch)
    assert FullyShardedDataParallelPlugin().transformer_cls_names_to_wrap == ["Block", "OtherBlock"]


def test_machines_come_from_the_command_line(best: Best, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--num_machines", "4", "--machine_rank", "1", "--main_process_ip", "host0")
    args, _ = launch(write(best, tmp_path), monkeypatch, *options)
    assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("4", "4", 1)


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ({}, set()),
        ({"sync_each_micro_batch": True}, {"sync_each_micro_batch"}),
        ({"sync_each_micro_batch": True, "grad_accum_steps": 1}, set()),
        ({"blocks_per_unit": 2}, {"blocks_per_unit", "bucket_cap_mb"}),
        ({"activation_checkpointing": "every_2"}, {"activation_checkpointing"}),
        ({"activation_checkpointing": "selective_op"}, {"activation_checkpointing"}),
    ],
)
def test_lost_is_what_the_script_sets_and_what_accelerate_cannot_do(
    change: dict[str, Any], lost: set[str], best: Best
) -> None:
    exported = export("accelerate", replace(best, knobs=replace(best.knobs, **change)))
    script = {"micro_batch_size", "grad_accum_steps", "num_workers", "prefetch_factor"}
    assert set(exported.lost) == script | lost | {"reduce_dtype"}


def test_lost_lines_hold_the_tuned_values(best: Best) -> None:
    lost = export("accelerate", best).lost
    assert "`DataLoader(..., batch_size=8)`" in lost["micro_batch_size"]
    assert "`Accelerator(gradient_accumulation_steps=2)`" in lost["grad_accum_steps"]
    assert "num_workers=2, persistent_workers=True" in lost["num_workers"]
    assert "prefetch_factor=4" in lost["prefetch_factor"]


def test_both_accumulation_knobs_are_one_call(best: Best) -> None:
    knobs = replace(best.knobs, sync_each_micro_batch=True)
    lost = export("accelerate", replace(best, knobs=knobs)).lost
    call = "`Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_each_batch=True))`"
    assert call in lost["grad_accum_steps"] and call in lost["sync_each_micro_batch"]


@pytest.mark.parametrize(
    ("mode", "checkpointing"),
    [
        ("none", ""),
        (
            "full",
            "; checkpoint first, by fsdp_activation_checkpointing: false and "
            "`for i in range(len(layers)): layers[i] = checkpoint_wrapper(layers[i])`",
        ),
        ("every_2", "; checkpoint first"),
    ],
)
def test_grouped_blocks_need_three_things(mode: str, checkpointing: str, best: Best) -> None:
    knobs = replace(best.knobs, blocks_per_unit=3, bucket_cap_mb=7.5, activation_checkpointing=mode)
    lost = export("accelerate", replace(best, knobs=knobs, precision="fp32")).lost
    assert lost["blocks_per_unit"] == (
        "`for i in range(0, len(layers), 3): "
        "fully_shard(list(layers[i : i + 3]), reshard_after_forward=False)` "
        "between Accelerator() and accelerator.prepare, and in this file fsdp_auto_wrap_policy: NO_WRAP and "
        f"fsdp_cpu_ram_efficient_loading: false{checkpointing}."
    )
    assert "7.5 MiB" in lost["bucket_cap_mb"]


def test_the_wrap_policy_finds_the_groups_of_fsdp1(best: Best, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = fsdp1(best)
    best = replace(best, knobs=replace(best.knobs, blocks_per_unit=2))
    assert export("accelerate", best).lost["blocks_per_unit"] == (
        "`autotune_best.join_blocks(model, list(layers), autotune_best.group_blocks(layers))`, with autotune_best.py "
        "of the plain export, before accelerator.prepare, and in this file fsdp_transformer_layer_cls_to_wrap: "
        "BlockGroup; checkpoint first, by fsdp_activation_checkpointing: false and "
        "`for i in range(len(layers)): layers[i] = checkpoint_wrapper(layers[i])`. "
        "It renames parameters, as said there."
    )
    path = write(best, tmp_path)
    text = path.read_text().replace("  # fsdp_transformer_layer", "  fsdp_transformer_layer")
    path.write_text(text.replace("YourBlock", "BlockGroup"))
    launch(path, monkeypatch)
    plugin = plugin_on_cpu(monkeypatch)
    layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(4))
    model = torch.nn.ModuleDict({"layers": layers})
    units = snippet_fsdp1.join_blocks(model, list(layers), [2, 2])
    plugin.set_auto_wrap_policy(model)
    found = [
        module
        for module in model.modules()
        if plugin.auto_wrap_policy(module=module, recurse=False, nonwrapped_numel=0)
    ]
    assert found == units


@pytest.mark.parametrize(
    ("mode", "line"),
    [
        ("every_2", "for i in range(0, len(layers), 2): layers[i] = checkpoint_wrapper(layers[i])"),
        (
            "selective_op",
            "for i in range(len(layers)): layers[i] = checkpoint_wrapper(layers[i], context_fn=selective_contexts)",
        ),
    ],
)
def test_partial_checkpointing_is_off_in_the_file_and_a_line_in_the_script(
    mode: str, line: str, best: Best, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = replace(best, knobs=replace(best.knobs, activation_checkpointing=mode))
    assert f"`{line}`" in export("accelerate", best).lost["activation_checkpointing"]
    launch(write(best, tmp_path), monkeypatch)
    assert FullyShardedDataParallelPlugin().activation_checkpointing is False


def test_ddp_is_launched_without_fsdp_and_its_bucket_is_a_line_in_the_script(
    best: Best, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = ddp(best)
    args, environment = launch(write(best, tmp_path), monkeypatch)
    assert args.multi_gpu and not args.use_fsdp and "ACCELERATE_USE_FSDP" not in environment
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    exported = export("accelerate", best)
    script = {"micro_batch_size", "grad_accum_steps", "num_workers", "prefetch_factor"}
    assert set(exported.lost) == script | {"activation_checkpointing", "bucket_cap_mb"}
    handler = exported.lost["bucket_cap_mb"].split("[")[1].split("]")[0]
    kwargs = eval(handler, {"DistributedDataParallelKwargs": DistributedDataParallelKwargs})
    assert (kwargs.bucket_cap_mb, kwargs.gradient_as_bucket_view) == (25.0, True)
