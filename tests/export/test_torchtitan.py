"""The torchtitan export, read by torchtitan's own parser: what arrives in its config.

Its Trainer's config needs triton and more, which is too much for CI; without it the same is parsed into a container of
torchtitan's own parts.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from autotune.export import Best, export
from autotune.export.torchtitan import CHECKED, MODULE_NAME, OVERRIDES_NAME

tyro = pytest.importorskip("tyro")
pytest.importorskip("torchtitan")
pytest.importorskip("spmd_types")
pytest.importorskip("torchdata")

from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.optimizer import OptimizersContainer, default_adamw  # noqa: E402
from torchtitan.config import CompileConfig, ConfigManager, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.config.manager import custom_registry  # noqa: E402
from torchtitan.distributed.activation_checkpoint import (  # noqa: E402
    ActivationCheckpointingConfig,
    FullAC,
    SelectiveAC,
)

HAS_TRAINER = all(
    importlib.util.find_spec(name) for name in ("triton", "tensorboard", "datasets", "torch_checkpointing")
)


@dataclass(kw_only=True, slots=True)
class Config:
    """The parts of Trainer.Config that the export sets."""

    training: TrainingConfig = field(default_factory=TrainingConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    dataloader: ParallelAwareDataloader.Config = field(default_factory=ParallelAwareDataloader.Config)
    optimizer: OptimizersContainer.Config = field(default_factory=default_adamw)
    activation_checkpoint: ActivationCheckpointingConfig = field(default_factory=SelectiveAC.Config)


def overrides(best: Best) -> list[str]:
    """As the shell hands them over."""
    lines = export("torchtitan", best).files[OVERRIDES_NAME].splitlines()
    return [word for line in lines if not line.startswith("#") for word in shlex.split(line)]


def from_overrides(best: Best, _folder: Path) -> Any:
    ConfigManager()  # registers how lists are parsed
    return tyro.cli(Config, args=overrides(best), default=Config(), registry=custom_registry)


def from_assignments(best: Best, _folder: Path) -> Any:
    """The body of the module's function, on the container."""
    lines = export("torchtitan", best).files[MODULE_NAME].splitlines()
    names: dict[str, Any] = {"config": Config(), "FullAC": FullAC}
    exec("\n".join(line.strip() for line in lines if line.startswith("    config.")), names)
    return names["config"]


def from_trainer_overrides(best: Best, _folder: Path) -> Any:
    return ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_debugmodel", *overrides(best)])


def from_trainer_module(best: Best, folder: Path) -> Any:
    code = export("torchtitan", best).files[MODULE_NAME].replace("llama3_8b", "llama3_debugmodel")
    (folder / MODULE_NAME).write_text(code)
    sys.path.insert(0, str(folder))
    try:
        return ConfigManager().parse_args(["--module", "autotune_torchtitan", "--config", "tuned"])
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("autotune_torchtitan", None)


whole = pytest.mark.skipif(not HAS_TRAINER, reason="needs triton (1 GB) and datasets beside torchtitan")
ways = pytest.mark.parametrize(
    "read",
    [
        from_overrides,
        from_assignments,
        pytest.param(from_trainer_overrides, marks=whole),
        pytest.param(from_trainer_module, marks=whole),
    ],
)


def test_this_is_the_version_whose_meaning_was_checked() -> None:
    assert importlib.metadata.version("torchtitan").startswith(f"{CHECKED['torchtitan']}.")


@ways
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_settings_arrive(read: Callable[[Best, Path], Any], precision: str, best: Best, tmp_path: Path) -> None:
    config = read(replace(best, precision=precision), tmp_path)
    training, parallelism, loader = config.training, config.parallelism, config.dataloader
    dtype = "bfloat16" if precision == "bf16" else "float32"
    assert (training.local_batch_size, training.global_batch_size, training.seq_len) == (8, 256, 2048)
    # The Trainer's own division.
    copies, shards = parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree
    assert (copies, shards) == (1, 16)
    assert training.global_batch_size // (training.local_batch_size * copies * shards) == best.knobs.grad_accum_steps
    assert (training.dtype, training.mixed_precision_param, training.mixed_precision_reduce) == (
        "float32",
        dtype,
        "float32",
    )
    assert parallelism.fsdp_reshard_after_forward == "never"
    assert type(config.activation_checkpoint) is FullAC.Config
    assert (loader.num_workers, loader.prefetch_factor, loader.pin_memory, loader.persistent_workers) == (
        2,
        4,
        True,
        True,
    )
    assert config.optimizer.implementation == "foreach" and config.compile.enable is False
    assert training.disable_cuda_graphs is True and training.enable_cpu_offload is False


@ways
def test_settings_that_others_have_no_key_for_arrive(
    read: Callable[[Best, Path], Any], best: Best, tmp_path: Path
) -> None:
    changed = {"replicate_degree": 4, "cpu_offload": True, "compile": True, "fused_optimizer": True, "num_workers": 0}
    knobs = replace(best.knobs, activation_checkpointing="none", reshard_after_forward=True, **changed)
    best = replace(best, knobs=replace(knobs, prefetch_factor=None))
    assert set(changed) <= set(export("torchtitan", best).carried)
    config = read(best, tmp_path)
    assert config.parallelism.data_parallel_replicate_degree == config.parallelism.data_parallel_shard_degree == 4
    assert config.training.enable_cpu_offload is True
    assert config.compile.enable is True and config.compile.components == ["model"]
    assert config.optimizer.implementation == "fused"
    assert config.activation_checkpoint is None
    assert config.parallelism.fsdp_reshard_after_forward == "default"
    assert (config.dataloader.num_workers, config.dataloader.persistent_workers) == (0, False)


@pytest.mark.parametrize("reshard", [True, False])
def test_the_policy_means_what_was_measured(reshard: bool, best: Best, tmp_path: Path) -> None:
    from torchtitan.distributed.fsdp import get_fsdp_reshard_after_forward_policy

    config = from_overrides(replace(best, knobs=replace(best.knobs, reshard_after_forward=reshard)), tmp_path)
    policy = config.parallelism.fsdp_reshard_after_forward
    assert get_fsdp_reshard_after_forward_policy(policy, pp_enabled=False) is reshard


@pytest.mark.parametrize("option", ["--training.no-such-field 1", "--parallelism.fsdp-reshard-after-forward sometimes"])
def test_the_parser_refuses_what_it_does_not_know(option: str, best: Best) -> None:
    with pytest.raises(SystemExit):
        tyro.cli(Config, args=[*option.split(), *overrides(best)], default=Config(), registry=custom_registry)


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ({"sync_each_micro_batch": True}, set()),
        ({}, {"sync_each_micro_batch"}),
        ({"grad_accum_steps": 1}, set()),
        ({"sync_each_micro_batch": True, "reduce_dtype": "bf16"}, {"reduce_dtype"}),
        ({"sync_each_micro_batch": True, "activation_checkpointing": "selective_op"}, {"activation_checkpointing"}),
        ({"sync_each_micro_batch": True, "blocks_per_unit": 2}, {"blocks_per_unit", "bucket_cap_mb"}),
    ],
)
def test_lost_is_what_its_config_has_no_field_for(change: dict[str, Any], lost: set[str], best: Best) -> None:
    assert set(export("torchtitan", replace(best, knobs=replace(best.knobs, **change))).lost) == lost


def test_the_module_refuses_another_torchtitan(best: Best, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later versions count batches in tokens."""
    code = export("torchtitan", best).files[MODULE_NAME]
    check = code[code.index("from importlib.metadata") : code.index("from torchtitan")]
    check += code[code.index("if not version") : code.index("def tuned")]
    exec(check, {})
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.4.0")
    with pytest.raises(RuntimeError, match=r"this file is for torchtitan 0\.3"):
        exec(check, {})
