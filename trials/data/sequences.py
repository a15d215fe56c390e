"""What every kind of data is to the loader: a fixed number of sequences that can be had by number."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Sequences(Dataset[Tensor], ABC):
    """Sample i is int64 of shape (seq_len + 1,): one more than is trained on, the last target.

    The tokens of all files lie end to end, and sample i starts at token i * seq_len: none is padded, and each token
    but the last few is trained on once before any comes again.
    """

    seq_len: int
    num_sequences: int
    description: str
    """For the screen: what is read, and how much of it."""

    def __len__(self) -> int:
        return self.num_sequences

    @abstractmethod
    def __getitem__(self, index: int) -> Tensor: ...

    def order(self, seed: int) -> Tensor:
        """All sample numbers once, in the order of training; after the last comes the first again."""
        return torch.randperm(self.num_sequences, generator=torch.Generator().manual_seed(seed))
