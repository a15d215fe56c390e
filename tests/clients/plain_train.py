"""A user's training script as torch's tutorial has it: fully_shard, a DataLoader, accumulation. Knows no tuner.

Prints what such scripts print: tokens/s of this rank, by its own clock over its last steps.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--mbs", type=int, default=2)
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--seq-len", type=int, default=32)
parser.add_argument("--reshard", default="true")
parser.add_argument("--checkpoint-every", type=int, default=0)
parser.add_argument("--sync-each", default="false")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--prefetch", type=int, default=2)
args = parser.parse_args()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.ffn = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.ffn(self.norm(x))


class Model(nn.Module):
    def __init__(self, vocab: int = 64, width: int = 32, num_layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Rows(Dataset):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(64, (args.seq_len + 1,), generator=torch.Generator().manual_seed(index))


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model()
    for index in range(len(model.layers)):
        if args.checkpoint_every and index % args.checkpoint_every == 0:
            model.layers[index] = checkpoint_wrapper(model.layers[index])
    shard = partial(fully_shard, reshard_after_forward=args.reshard == "true")
    for layer in model.layers:
        shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    workers = {"num_workers": args.workers, "prefetch_factor": args.prefetch} if args.workers else {}
    loader = DataLoader(Rows(), batch_size=args.mbs, sampler=DistributedSampler(Rows()), drop_last=True, **workers)
    batches = iter(loader)
    started, tokens = time.perf_counter(), 0
    for step in range(args.steps):
        for micro in range(args.accum):
            last = micro == args.accum - 1
            model.set_requires_gradient_sync(last or args.sync_each == "true")
            batch = next(batches)
            logits = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            (loss / args.accum).backward()
            tokens += batch[:, 1:].numel()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(
                f"rank {os.environ['RANK']} step {step} tokens/s {tokens / (time.perf_counter() - started):.0f}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
