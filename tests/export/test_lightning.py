"""The Lightning export, read by the parser of LightningCLI: what arrives, not what parses."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import yaml

from autotune.export import Best, export
from autotune.export.lightning import CHECKED, FILE_NAME
from autotune.export.snippet import NAME
from trials.record import ENGINES

from .conftest import settings

lightning = pytest.importorskip("lightning")
jsonargparse = pytest.importorskip("jsonargparse")

from lightning.pytorch import Trainer  # noqa: E402
from lightning.pytorch.strategies import (  # noqa: E402
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
)
from torch.nn.parallel import DistributedDataParallel  # noqa: E402


def parsed(text: str) -> Any:
    """As LightningCLI parses the section of its Trainer, whose keys and types are checked."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Trainer, "trainer")
    return parser.parse_string(text).trainer


def strategy_of(text: str) -> Any:
    """The strategy itself; a Trainer would want a GPU for FSDP1."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Strategy, "strategy")
    section = {"strategy": yaml.safe_load(text)["trainer"]["strategy"]}
    return parser.instantiate(parser.parse_object(section)).strategy


def test_this_is_the_version_whose_meaning_was_checked() -> None:
    assert lightning.__version__.startswith(f"{CHECKED['lightning']}.")


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("engine", ENGINES)
def test_settings_arrive_in_the_trainer_and_its_strategy(engine: str, precision: str, best: Best) -> None:
    best = replace(settings(best, engine), precision=precision)
    exported = export("lightning", best)
    text = exported.files[FILE_NAME]
    trainer, strategy = parsed(text), strategy_of(text)
    assert trainer.accumulate_grad_batches == 2
    assert (trainer.devices, trainer.num_nodes) == ("auto", 1)
    assert trainer.precision == ("bf16-mixed" if (engine, precision) == ("ddp", "bf16") else "32-true")
    kind = {"fsdp2": ModelParallelStrategy, "fsdp1": FSDPStrategy, "ddp": DDPStrategy}[engine]
    assert type(strategy) is kind
    if engine == "fsdp2":
        # Left at auto they shard over one rank, without a word.
        assert (strategy._data_parallel_size, strategy._tensor_parallel_size) == (16, 1)
    if engine == "ddp":
        given = strategy._ddp_kwargs
        assert (given["bucket_cap_mb"], given["gradient_as_bucket_view"]) == (25.0, True)
        # The rest, which the parser fills in, is torch's own.
        own = inspect.signature(DistributedDataParallel).parameters
        others = set(given) - {"bucket_cap_mb", "gradient_as_bucket_view"}
        assert {name: given[name] for name in others} == {name: own[name].default for name in others}
    assert "mixed_precision" not in text and NAME in exported.files


@pytest.mark.parametrize(("engine", "lost_where"), [("fsdp2", False), ("fsdp1", False), ("ddp", True)])
def test_only_what_the_loop_decides_is_lost(engine: str, lost_where: bool, best: Best) -> None:
    best = settings(best, engine)
    for sync in (True, False):
        lost = export("lightning", replace(best, knobs=replace(best.knobs, sync_each_micro_batch=sync))).lost
        assert set(lost) == ({"sync_each_micro_batch"} if sync is lost_where else set())
    once = replace(best.knobs, grad_accum_steps=1, sync_each_micro_batch=lost_where)
    assert export("lightning", replace(best, knobs=once)).lost == {}


def test_fsdp1_wrapped_in_configure_model_is_left_alone_by_its_strategy() -> None:
    """The exported code wraps, so that Lightning's own wrapping, which has no key for all knobs, must not."""
    source = inspect.getsource(FSDPStrategy._setup_model)
    assert "if any(isinstance(mod, FullyShardedDataParallel) for mod in model.modules()):" in source


def test_a_trainer_argument_that_lightning_does_not_know_is_refused(best: Best) -> None:
    text = export("lightning", best).files[FILE_NAME].replace("accumulate_grad_batches", "accumulate_gradients")
    with pytest.raises(jsonargparse.ArgumentError, match="accumulate_gradients"):
        parsed(text)
