"""Tuned FSDP2 settings in plain PyTorch: `apply` to a model, `make_loader`, `train_step`."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from autotune.export.snippet_common import PRECISION, checkpoint_blocks
from autotune.export.snippet_units import group_blocks

REDUCE_DTYPE: str = "fp32"
GRAD_ACCUM_STEPS: int = 1
SYNC_EACH_MICRO_BATCH: bool = True
RESHARD_AFTER_FORWARD: bool = True


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
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return torch.stack(losses).sum()
