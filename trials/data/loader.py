"""Which sample comes when, and the DataLoader that brings it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from trials.data.sequences import Sequences
from trials.record import Knobs


class MicroBatchSampler(Sampler[list[int]]):
    """The sample numbers of this rank's micro-batches, for ever, step after step.

    Step s of the global batch G takes positions s*G .. (s+1)*G - 1 of `order` (which wraps around); rank r trains on
    the r-th run of G / world_size of them.
    """

    def __init__(self, order: Tensor, knobs: Knobs, rank: int, world_size: int) -> None:
        self.order = order
        self.micro_batch_size = knobs.micro_batch_size
        self.per_rank = knobs.micro_batch_size * knobs.grad_accum_steps
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[list[int]]:
        for step in itertools.count():
            first = (step * self.world_size + self.rank) * self.per_rank
            for micro in range(first, first + self.per_rank, self.micro_batch_size):
                positions = torch.arange(micro, micro + self.micro_batch_size) % len(self.order)
                yield self.order[positions].tolist()


def make_loader(
    dataset: Sequences, knobs: Knobs, rank: int, world_size: int, seed: int, device: str
) -> DataLoader[Tensor]:
    """Batches int64 of shape (micro_batch_size, seq_len + 1), without end.

    Workers are forked here, before the model and its memory limit exist: a loader's memory is the host's.
    """
    return DataLoader(
        dataset,
        batch_sampler=MicroBatchSampler(dataset.order(seed), knobs, rank, world_size),
        num_workers=knobs.num_workers,
        prefetch_factor=knobs.prefetch_factor if knobs.num_workers else None,
        pin_memory=device == "cuda",
        persistent_workers=knobs.num_workers > 0,
        multiprocessing_context="fork" if knobs.num_workers else None,
    )


def read_loader(loader: DataLoader[Tensor], batches: Iterator[Tensor]) -> dict[str, Any]:
    """The loader knobs, read from the loader in use: worker processes that are alive, not a number that was passed."""
    workers = getattr(batches, "_workers", [])
    return {
        "num_workers": sum(worker.is_alive() for worker in workers),
        "prefetch_factor": loader.prefetch_factor if workers else None,
    }
