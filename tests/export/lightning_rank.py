"""One rank of test_lightning_run: exported files in a real Trainer of Lightning, unmodified, on gloo.

Each case is a folder with the two files as exported; what its head says about the LightningModule is `Module` here.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from autotune.export.lightning import FILE_NAME
from autotune.export.snippet import NAME
from trials import wrap
from trials.engines import ddp, fsdp2
from trials.models import DecoderWorkload

SEQ_LEN = 16
NUM_LAYERS = 4
MAX_STEPS = 2
SHAPE = {"vocab_size": 256, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "ffn_size": 48}

best: ModuleType
"""The exported Python file of the case."""
lines = ""
"""For the module's body, as a user writes them who does what the lost knobs say."""


def make_workload() -> DecoderWorkload:
    return DecoderWorkload(SEQ_LEN, config={**SHAPE, "num_layers": NUM_LAYERS})


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.workload = make_workload()
        self.model = self.workload.build_model()
        self.workload.init_buffers(self.model)
        self.block_names = wrap.block_names(self.model, self.workload.blocks(self.model))
        self.micro_batches: list[int] = []
        self.synced: list[bool] = []
        if best.ENGINE == "ddp":
            best.checkpoint_blocks(self.model, self.workload.blocks(self.model))

    def configure_model(self) -> None:
        if best.ENGINE == "fsdp2" and not isinstance(self.model, FSDPModule):
            best.apply(self.model, self.workload.blocks(self.model), self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        rows = torch.randint(256, (64, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1))
        return best.make_loader(TensorDataset(rows))  # type: ignore[no-any-return]

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        (rows,) = batch
        self.micro_batches.append(len(rows))
        loss = self.workload.loss(self.model, rows)
        wrapped = self.trainer.strategy.model
        if isinstance(wrapped, DistributedDataParallel):
            self.synced.append(wrapped.require_backward_grad_sync)
        else:
            self.synced.append(fsdp2.param_groups(self.model)[0].reduce_grads)
        return loss

    def on_train_end(self) -> None:
        """What the trained model really is; afterwards the strategy takes DDP off."""
        blocks = [self.model.get_submodule(name) for name in self.block_names]
        wrapped = self.trainer.strategy.model
        if isinstance(wrapped, DistributedDataParallel):
            self.found = ddp.read(wrapped, blocks)
        else:
            parameters = list(self.model.parameters())
            sharded = all(isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in parameters)
            self.found = fsdp2.read(self.model, blocks) | {"sharded": sharded}
        loader = self.trainer.train_dataloader
        self.found |= {
            "activation_checkpointing": wrap.read_checkpointing(blocks),
            "micro_batches": self.micro_batches,
            "synced": self.synced,
            "steps": self.trainer.global_step,
            "num_workers": loader.num_workers,
            "prefetch_factor": loader.prefetch_factor,
            "precision": self.trainer.precision,
        }


def train(folder: Path) -> dict[str, Any]:
    global best  # noqa: PLW0603
    spec = importlib.util.spec_from_file_location(f"best_{folder.name}", folder / NAME)
    assert spec is not None and spec.loader is not None
    best = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(best)
    names: dict[str, Any] = {}
    exec((folder / "lines.py").read_text(), names)
    kind = type("Module", (Module,), {name: value for name, value in names.items() if name.startswith("on_")})
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    cli = LightningCLI(
        kind,
        save_config_callback=None,
        seed_everything_default=False,
        args=[
            "fit",
            f"--config={folder / FILE_NAME}",
            "--trainer.accelerator=cpu",
            f"--trainer.devices={os.environ['WORLD_SIZE']}",
            f"--trainer.max_steps={MAX_STEPS}",
            f"--trainer.default_root_dir={folder}",
            *(f"--trainer.{name}=false" for name in quiet),
        ],
    )
    found: dict[str, Any] = cli.model.found
    return found


def main(folder: Path) -> None:
    faulthandler.dump_traceback_later(180)  # a hang says where
    found = {path.parent.name: train(path.parent) for path in sorted(folder.glob(f"*/{NAME}"))}
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
