# Tuned FSDP settings in plain PyTorch, written by fsdp-autotune.
# For 16 ranks, bf16, and 256 sequences of 2048 tokens per optimizer step over all ranks.
# measured: 1234 tokens/s per rank, MFU 0.31 (95 % interval 0.30 to 0.32), 2026-11-29
# job: "quickstart": 4 ranks
# What each key does was checked with torch 2.13.
#
# mesh = init_device_mesh("cuda", (world_size,))
# autotune_best.apply(model, list(model.layers), mesh)
# optimizer = torch.optim.AdamW(model.parameters())
# batches = autotune_best.micro_batches(autotune_best.make_loader(dataset))
# for step in range(num_steps):
#     autotune_best.train_step(model, optimizer, batches, loss_fn)

"""Tuned FSDP2 settings in plain PyTorch: `apply` to a model, `make_loader`, `train_step`."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

# bf16 or fp32
PRECISION = "bf16"
# of the gradient reduction
REDUCE_DTYPE = "fp32"
# sequences per rank and micro-step
MICRO_BATCH_SIZE = 8
# micro-steps per optimizer step
GRAD_ACCUM_STEPS = 2
# whether gradients are reduced after every micro-step, not just the last
SYNC_EACH_MICRO_BATCH = False
# whether a unit's weights are freed after forward, gathered anew for backward
RESHARD_AFTER_FORWARD = False
# MiB of unsharded weights, in the gathered dtype, that one FSDP unit may hold
BUCKET_CAP_MB = 0.05
# blocks that bucket_cap_mb puts in one FSDP unit
BLOCKS_PER_UNIT = 1
# none, full, every_K (each K-th block), selective_op (keeps matmuls, SDPA)
ACTIVATION_CHECKPOINTING = "full"
# DataLoader worker processes per rank
NUM_WORKERS = 2
# batches that each worker keeps ready; none without workers
PREFETCH_FACTOR = 4
# fsdp2: torch.distributed.fsdp.fully_shard; fsdp1: FullyShardedDataParallel; ddp
ENGINE = "fsdp2"

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


def group_blocks(blocks: Sequence[nn.Module]) -> list[int]:
    """Blocks in each FSDP unit: consecutive ones, as many as BUCKET_CAP_MB holds. Call before sharding."""
    bytes_each = 2 if PRECISION == "bf16" else 4
    units: list[int] = []
    filled = 0.0
    for block in blocks:
        size_mib = sum(p.numel() for p in block.parameters()) * bytes_each / 2**20
        if units and filled + size_mib <= BUCKET_CAP_MB:
            units[-1] += 1
            filled += size_mib
        else:
            units.append(1)
            filled = size_mib
    if max(units) != BLOCKS_PER_UNIT:
        raise ValueError(
            f"BUCKET_CAP_MB = {BUCKET_CAP_MB} puts {max(units)} of these blocks in a unit, not "
            f"{BLOCKS_PER_UNIT}: the model is not the one that was tuned. Tune it, or change both."
        )
    return units


def apply(model: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh) -> FSDPModule:
    """Checkpoints and shards `model` in place. Call it before the optimizer is made.

    Args:
        model: the whole model, with fp32 parameters.
        blocks: its transformer blocks, in order of execution.
        mesh: of one dimension, over all ranks: `init_device_mesh("cuda", (world_size,))`.
    """
    units = group_blocks(blocks)
    wrapped = checkpoint_blocks(model, blocks)
    policy = MixedPrecisionPolicy()
    if PRECISION == "bf16":
        reduce_dtype = torch.bfloat16 if REDUCE_DTYPE == "bf16" else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    remaining = iter(wrapped)
    for size in units:
        unit = list(itertools.islice(remaining, size))
        fully_shard(unit, mesh=mesh, reshard_after_forward=RESHARD_AFTER_FORWARD, mp_policy=policy)
    # The rest is the root's own unit, which torch keeps gathered from forward to backward.
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def train_step(
    model: FSDPModule,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Any],
    loss_fn: Callable[[Any, Any], Tensor],
) -> Tensor:
    """One optimizer step of GRAD_ACCUM_STEPS micro-batches; the mean loss on this rank.

    Args:
        batches: from `micro_batches`.
        loss_fn: (model, batch) -> mean loss; moves the batch to the device with `non_blocking=True`.
    """
    losses = []
    for micro_step in range(GRAD_ACCUM_STEPS):
        last = micro_step == GRAD_ACCUM_STEPS - 1
        model.set_requires_gradient_sync(last or SYNC_EACH_MICRO_BATCH)
        model.set_is_last_backward(last)
        loss = loss_fn(model, next(batches)) / GRAD_ACCUM_STEPS
        loss.backward()
        losses.append(loss.detach())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return torch.stack(losses).sum()
