# Tuned settings for a LightningModule, written by fsdp-autotune.
# For 16 ranks, bf16, and 256 sequences of 2048 tokens per optimizer step over all ranks.
# measured: 1234 tokens/s per rank, MFU 0.31 (95 % interval 0.30 to 0.32), 2026-11-29
# job: "quickstart": 4 ranks
# What each key does was checked with lightning 2.6 and torch 2.13.
#
# In the LightningModule, whose `self.model` is the model (train_step and micro_batches below are the Trainer's part):
#
#     def __init__(self, model):  # DDPStrategy does the rest
#         super().__init__()
#         self.model = model
#         autotune_best.checkpoint_blocks(model, list(model.layers))
#
#     def configure_optimizers(self):
#         return torch.optim.AdamW(self.model.parameters())
#
#     def train_dataloader(self):
#         return autotune_best.make_loader(dataset)

"""Tuned DDP settings in plain PyTorch: `apply` to a model, `make_loader`, `train_step`."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

# bf16 or fp32
PRECISION = "bf16"
# sequences per rank and micro-step
MICRO_BATCH_SIZE = 8
# micro-steps per optimizer step
GRAD_ACCUM_STEPS = 2
# whether gradients are reduced after every micro-step, not just the last
SYNC_EACH_MICRO_BATCH = False
# MiB of gradients in one all-reduce
BUCKET_CAP_MB = 25.0
# none, full, every_K (each K-th block), selective_op (keeps matmuls, SDPA)
ACTIVATION_CHECKPOINTING = "full"
# DataLoader worker processes per rank
NUM_WORKERS = 2
# batches that each worker keeps ready; none without workers
PREFETCH_FACTOR = 4
# fsdp2: torch.distributed.fsdp.fully_shard; fsdp1: FullyShardedDataParallel; ddp
ENGINE = "ddp"

aten = torch.ops.aten
# What `selective_op` keeps instead of computing it again: matmuls, and attention on whichever device.
KEPT_OPS = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._grouped_mm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)


def _keep_matmuls(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_matmuls)


def checkpoint_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Wraps the blocks that ACTIVATION_CHECKPOINTING names; returns all blocks, those wrapped or not."""
    if ACTIVATION_CHECKPOINTING == "none":
        return list(blocks)
    every = int(ACTIVATION_CHECKPOINTING[6:]) if ACTIVATION_CHECKPOINTING.startswith("every_") else 1
    kwargs = {"context_fn": selective_contexts} if ACTIVATION_CHECKPOINTING == "selective_op" else {}
    names = {module: name for name, module in model.named_modules()}
    found = list(blocks)
    for index in range(0, len(found), every):
        wrapper = checkpoint_wrapper(found[index], **kwargs)
        model.set_submodule(names[found[index]], wrapper)
        found[index] = wrapper
    return found


def make_loader(dataset: Dataset[Any], sampler: Sampler[int] | None = None) -> DataLoader[Any]:
    """Micro-batches of this rank, from its own part of `dataset` unless `sampler` says otherwise."""
    return DataLoader(
        dataset,
        batch_size=MICRO_BATCH_SIZE,
        sampler=DistributedSampler(dataset) if sampler is None else sampler,
        drop_last=True,
        num_workers=NUM_WORKERS,
        prefetch_factor=PREFETCH_FACTOR,
        persistent_workers=NUM_WORKERS > 0,
        pin_memory=torch.cuda.is_available(),
    )


def micro_batches(loader: DataLoader[Any]) -> Iterator[Any]:
    """The micro-batches of `loader` for ever, shuffled anew each epoch."""
    for epoch in itertools.count():
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        yield from loader


def apply(model: nn.Module, blocks: Sequence[nn.Module], device: torch.device) -> DistributedDataParallel:
    """Checkpoints `model` and wraps it in DDP; train what is returned. Call it before the optimizer is made.

    Args:
        model: the whole model, with fp32 parameters.
        blocks: its transformer blocks, in order of execution.
        device: of this rank: `torch.device("cuda", local_rank)`, or `torch.device("cpu")`.
    """
    checkpoint_blocks(model, blocks)
    if PRECISION == "bf16":
        # Around the forward alone: over a backward, autocast would keep its bf16 copies of all weights.
        model.forward = torch.autocast(device.type, torch.bfloat16)(model.forward)
    return DistributedDataParallel(
        model.to(device),
        device_ids=[device] if device.type == "cuda" else None,
        bucket_cap_mb=BUCKET_CAP_MB,
        gradient_as_bucket_view=True,  # else each gradient is held twice
    )


def train_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Any],
    loss_fn: Callable[[Any, Any], Tensor],
) -> Tensor:
    """One optimizer step of GRAD_ACCUM_STEPS micro-batches; the mean loss on this rank.

    Args:
        model: what `apply` returned.
        batches: from `micro_batches`.
        loss_fn: (model, batch) -> mean loss; moves the batch to the device with `non_blocking=True`.
    """
    losses = []
    for micro_step in range(GRAD_ACCUM_STEPS):
        last = micro_step == GRAD_ACCUM_STEPS - 1
        with contextlib.nullcontext() if last or SYNC_EACH_MICRO_BATCH else model.no_sync():
            loss = loss_fn(model, next(batches)) / GRAD_ACCUM_STEPS
            loss.backward()
        losses.append(loss.detach())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return torch.stack(losses).sum()
