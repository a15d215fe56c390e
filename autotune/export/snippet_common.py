"""The part of the exported file that all engines share; plain.py joins it with others, and sets the constants."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

PRECISION: str = "fp32"
MICRO_BATCH_SIZE: int = 1
ACTIVATION_CHECKPOINTING: str = "none"
NUM_WORKERS: int = 0
PREFETCH_FACTOR: int | None = None

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
    return create_selective_checkpoint_contexts(_keep_matmuls)  # type: ignore[no-untyped-call]


def checkpoint_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Wraps the blocks that ACTIVATION_CHECKPOINTING names; returns all blocks, those wrapped or not."""
    if ACTIVATION_CHECKPOINTING == "none":
        return list(blocks)
    every = int(ACTIVATION_CHECKPOINTING[6:]) if ACTIVATION_CHECKPOINTING.startswith("every_") else 1
    kwargs = {"context_fn": selective_contexts} if ACTIVATION_CHECKPOINTING == "selective_op" else {}
    names = {module: name for name, module in model.named_modules()}
    found = list(blocks)
    for index in range(0, len(found), every):
        wrapper = checkpoint_wrapper(found[index], **kwargs)  # type: ignore[arg-type]
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
