"""A LightningCLI with the two exported files, as their heads have it: `fit --config lightning_trainer.yaml`."""

from __future__ import annotations

import warnings

import autotune_best
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader
from toy import Model, Rows, loss_of

warnings.filterwarnings("ignore", module="lightning")


class Lit(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def configure_model(self) -> None:
        if not isinstance(self.model, FSDPModule):
            mesh = self.device_mesh["data_parallel"]
            autotune_best.apply(self.model, list(self.model.layers), mesh)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters())

    def train_dataloader(self) -> DataLoader:
        return autotune_best.make_loader(Rows())

    def training_step(self, batch: Tensor) -> Tensor:
        return loss_of(self.model, batch)


if __name__ == "__main__":
    LightningCLI(Lit, save_config_callback=None, seed_everything_default=0)
