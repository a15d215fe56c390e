"""A loop with accelerate, as its documentation has it."""

from __future__ import annotations

import os

import shim
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from toy import Model, Rows, loss_of, options, tell, workers

parser = options()
parser.add_argument("--as-shipped", action="store_true")
args = parser.parse_args()
os.environ.setdefault("RANK", "0")
if not args.as_shipped:
    shim.allow_cpu()
torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=args.accum, cpu=True)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Rows(), batch_size=args.mbs, **workers(args))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps = 0
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        steps += accelerator.sync_gradients
    if steps == args.steps:
        break
tell(steps=steps, world=accelerator.num_processes, type=str(accelerator.distributed_type))
