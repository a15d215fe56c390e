"""A training loop as torch's tutorial has it: fully_shard, a DataLoader, accumulation.

With --explicit it holds the two lines of the probe; else it knows nothing of one. Prints tokens/s of its rank.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from toy import SEQ_LEN, Model, Rows, loss_of, options, shard, tell, workers

parser = options()
parser.add_argument("--sync-each", action="store_true")
parser.add_argument("--explicit", action="store_true")
args = parser.parse_args()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model()
    shard(model, args)
    if args.explicit:
        import probe

        probe.watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = Rows()
    batches = iter(DataLoader(rows, batch_size=args.mbs, sampler=DistributedSampler(rows), **workers(args)))
    for step in range(1, args.steps + 1):
        started = time.perf_counter()
        for micro in range(args.accum):
            model.set_requires_gradient_sync(args.sync_each or micro == args.accum - 1)
            (loss_of(model, next(batches)) / args.accum).backward()
        optimizer.step()
        optimizer.zero_grad()
        if args.explicit:
            probe.step()
        tokens = args.accum * args.mbs * SEQ_LEN
        tell(step=step, tokens=tokens, tokens_per_s=tokens / (time.perf_counter() - started))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
