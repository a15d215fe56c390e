"""The part of the exported file that trains where gradients are held back by `no_sync`."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

GRAD_ACCUM_STEPS: int = 1
SYNC_EACH_MICRO_BATCH: bool = True


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
            loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return torch.stack(losses).sum()
