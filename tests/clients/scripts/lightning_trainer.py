"""Lightning's Trainer with ModelParallelStrategy, as its documentation has it."""

from __future__ import annotations

import warnings

import lightning
import torch
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader
from toy import Model, Rows, loss_of, options, shard, tell, workers

parser = options()
parser.add_argument("--data-parallel-size", type=int, default=2)
parser.add_argument("--callback", action="store_true")
args = parser.parse_args()
warnings.filterwarnings("ignore", module="lightning")


class Lit(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def configure_model(self) -> None:
        if not isinstance(self.model, FSDPModule):
            shard(self.model, args, self.device_mesh["data_parallel"])

    def training_step(self, batch: Tensor) -> Tensor:
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


class Tell(lightning.Callback):
    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        batches = trainer.fit_loop.epoch_loop.batch_progress.total.completed
        tell(steps=trainer.global_step, batches=batches, world=trainer.world_size)


monitor = ThroughputMonitor(batch_size_fn=len, length_fn=lambda batch: batch[:, 1:].numel(), window_size=4)
callbacks: list[lightning.Callback] = [Tell(), monitor]
if args.callback:
    import probe

    callbacks.append(probe.lightning_callback())
lightning.seed_everything(0, verbose=False)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=ModelParallelStrategy(data_parallel_size=args.data_parallel_size, tensor_parallel_size=1)
    if args.data_parallel_size == 2
    else ModelParallelStrategy(),
    accumulate_grad_batches=args.accum,
    max_steps=args.steps,
    enable_checkpointing=False,
    enable_model_summary=False,
    enable_progress_bar=False,
    logger=CSVLogger("logs"),
    log_every_n_steps=4,
    callbacks=callbacks,
)
trainer.fit(Lit(), DataLoader(Rows(), batch_size=args.mbs, **workers(args)))
