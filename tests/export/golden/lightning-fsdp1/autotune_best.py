# Tuned settings for a LightningModule, written by fsdp-autotune.
# For 16 ranks, bf16, and 256 sequences of 2048 tokens per optimizer step over all ranks.
# measured: 1234 tokens/s per rank, MFU 0.31 (95 % interval 0.30 to 0.32), 2026-11-29
# job: "quickstart": 4 ranks
# What each key does was checked with lightning 2.6 and torch 2.13.
#
# In the LightningModule, whose `self.model` is the model (train_step and micro_batches below are the Trainer's part):
#
#     def configure_model(self):  # called more than once
#         if not isinstance(self.model, FullyShardedDataParallel):
#             device = self.trainer.strategy.root_device
#             self.model = autotune_best.apply(self.model, list(self.model.layers), device)
#
#     def configure_optimizers(self):
#         return torch.optim.AdamW(self.model.parameters())
#
#     def train_dataloader(self):
#         return autotune_best.make_loader(dataset)

"""Tuned FSDP1 settings in plain PyTorch: `apply` to a model, `make_loader`, `train_step`."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
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
ENGINE = "fsdp1"
# whether the CPU thread waits before it queues a third all-gather
LIMIT_ALL_GATHERS = False
# when backward gathers the next unit: pre or post this one's gradients, or none
BACKWARD_PREFETCH = "post"
# whether the next unit's all-gather is queued before this one's forward
FORWARD_PREFETCH = True

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


def apply(model: nn.Module, blocks: Sequence[nn.Module], device: torch.device) -> FullyShardedDataParallel:
    """Checkpoints and shards `model`; train what is returned. Call it before the optimizer is made.

    Args:
        model: the whole model, with fp32 parameters that are the same on all ranks.
        blocks: its transformer blocks, in order of execution.
        device: of this rank: `torch.device("cuda", local_rank)`, or `torch.device("cpu")`.
    """
    sizes = group_blocks(blocks)
    units = join_blocks(model, checkpoint_blocks(model, blocks), sizes)
    prefetch = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}
    options: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy.FULL_SHARD if RESHARD_AFTER_FORWARD else ShardingStrategy.SHARD_GRAD_OP,
        "limit_all_gathers": LIMIT_ALL_GATHERS,
        "backward_prefetch": prefetch[BACKWARD_PREFETCH],
        "forward_prefetch": FORWARD_PREFETCH,
        "use_orig_params": True,
        "device_id": device,
    }
    if PRECISION == "bf16":
        # Buffers keep their dtype; what enters a unit is cast, as FSDP2 does.
        reduce_dtype = torch.bfloat16 if REDUCE_DTYPE == "bf16" else torch.float32
        options["mixed_precision"] = MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype, cast_forward_inputs=True
        )
    names = {module: name for name, module in model.named_modules()}
    for unit in units:
        model.set_submodule(names[unit], FullyShardedDataParallel(unit, **options))
    # The rest is the root's own unit, which torch keeps gathered from forward to backward.
    return FullyShardedDataParallel(model, **options)


class BlockGroup(nn.Module):
    """Consecutive blocks that run one after the other: the first argument passes through, the others go to each."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        for block in self.blocks:
            hidden = block(hidden, *args, **kwargs)
        return hidden


def join_blocks(model: nn.Module, blocks: Sequence[nn.Module], sizes: Sequence[int]) -> list[nn.Module]:
    """The modules that become FSDP units: the blocks, or where several share a unit, groups of them.

    FSDP1 makes a unit of one module, so blocks that share one are moved into a BlockGroup. This renames parameters
    (`layers.3.x` -> `layers.1.blocks.1.x`), and so the keys of checkpoints; and the list gets shorter.
    """
    if max(sizes) == 1:
        return list(blocks)
    names = {module: name for name, module in model.named_modules()}
    units: list[nn.Module] = []
    end = len(blocks)
    for size in reversed(sizes):  # from the last on, so that earlier blocks keep their place in the list
        members = list(blocks[end - size : end])
        layers = model.get_submodule(names[members[0]].rpartition(".")[0])
        first = list(layers.children()).index(members[0])
        if not isinstance(layers, nn.ModuleList) or list(layers[first : first + size]) != members:
            raise ValueError("blocks that share a unit must follow each other in one nn.ModuleList")
        unit = BlockGroup(members)
        layers[first] = unit
        del layers[first + 1 : first + size]
        units.insert(0, unit)
        end -= size
    return units


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
