"""The model, the data and the options that the scripts here share, as a user's own modules lie beside a script."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import Dataset

VOCAB, WIDTH, NUM_LAYERS, SEQ_LEN = 64, 32, 4, 32
NUM_PARAMETERS = 2 * VOCAB * WIDTH + NUM_LAYERS * (2 * WIDTH + 2 * 4 * WIDTH**2 + 5 * WIDTH)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.ffn = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class Rows(Dataset):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(VOCAB, (SEQ_LEN + 1,), generator=torch.Generator().manual_seed(index))


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mbs", type=int, default=2)
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--reshard", choices=("True", "False"), default="True")
    parser.add_argument("--checkpoint-every", type=int, default=0)
    parser.add_argument("--blocks-per-unit", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--prefetch", type=int, default=2)
    return parser


def shard(model: Model, args: argparse.Namespace, mesh: Any = None) -> None:
    for index, layer in enumerate(model.layers):
        if args.checkpoint_every and index % args.checkpoint_every == 0:
            model.layers[index] = checkpoint_wrapper(layer)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else MixedPrecisionPolicy()
    layers = list(model.layers)
    for first in range(0, NUM_LAYERS, args.blocks_per_unit):
        unit = layers[first : first + args.blocks_per_unit]
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=args.reshard == "True")
    fully_shard(model, mesh=mesh, mp_policy=policy)


def workers(args: argparse.Namespace) -> dict[str, int]:
    return {"num_workers": args.workers, "prefetch_factor": args.prefetch} if args.workers else {}


def tell(**values: Any) -> None:
    """Prints what the trainer itself says, for the test."""
    print("TELL", json.dumps({"rank": int(os.environ["RANK"]), **values}), flush=True)
