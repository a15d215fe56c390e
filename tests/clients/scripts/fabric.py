"""Lightning Fabric with ModelParallelStrategy, as its documentation has it."""

from __future__ import annotations

import lightning
import torch
from lightning.fabric.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader
from toy import Model, Rows, loss_of, options, shard, tell, workers

args = options().parse_args()


def parallelize(model: Model, device_mesh: torch.distributed.device_mesh.DeviceMesh) -> Model:
    shard(model, args, device_mesh["data_parallel"])
    return model


fabric = lightning.Fabric(
    accelerator="cpu",
    devices=2,
    strategy=ModelParallelStrategy(parallelize_fn=parallelize, data_parallel_size=2, tensor_parallel_size=1),
)
fabric.launch()
fabric.seed_everything(0, verbose=False)
model = fabric.setup_module(Model())
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
batches = iter(fabric.setup_dataloaders(DataLoader(Rows(), batch_size=args.mbs, **workers(args))))
for _ in range(args.steps):
    for micro in range(args.accum):
        with fabric.no_backward_sync(model, enabled=micro < args.accum - 1):
            fabric.backward(loss_of(model, next(batches)) / args.accum)
    optimizer.step()
    optimizer.zero_grad()
tell(steps=args.steps, world=fabric.world_size)
