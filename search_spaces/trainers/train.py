"""A training script like many: plain PyTorch, FSDP2, and nothing of fsdp-autotune in it. It trains a small decoder on
the source of Python's own library, a byte a token.

    torchrun --nproc-per-node 2 train.py --micro-batch-size 2 --accumulation 4
"""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SEQ_LEN, HIDDEN, HEADS, LAYERS = 128, 128, 4, 4


class Texts(Dataset[Tensor]):
    def __init__(self) -> None:
        sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
        text = b"".join(source.read_bytes() for source in sources)
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.tokens) // SEQ_LEN - 1

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index * SEQ_LEN : (index + 1) * SEQ_LEN + 1].long()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        scores = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(scores.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, HIDDEN), nn.Embedding(SEQ_LEN, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=8)
    parser.add_argument("--checkpointing", choices=["none", "full"], default="full")
    parser.add_argument("--reshard", choices=["true", "false"], default="true")
    parser.add_argument("--steps", type=int, default=10_000)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    torch.manual_seed(0)
    model = Decoder().to(device)
    for index, block in enumerate(model.blocks):
        wrapped = checkpoint_wrapper(block) if args.checkpointing == "full" else block
        model.blocks[index] = fully_shard(wrapped, reshard_after_forward=args.reshard == "true")
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    texts = Texts()
    loader = DataLoader(texts, args.micro_batch_size, sampler=DistributedSampler(texts), drop_last=True)
    batches = iter(loader)
    for step in range(args.steps):
        for micro_step in range(args.accumulation):
            model.set_requires_gradient_sync(micro_step == args.accumulation - 1)
            batch = next(batches, None)
            if batch is None:
                batches = iter(loader)
                batch = next(batches)
            logits = model(batch[:, :-1].to(device))
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten().to(device))
            (loss / args.accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
