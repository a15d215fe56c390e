"""Random tokens, made before the clock starts: no file is read, and the loader has nothing to do."""

from __future__ import annotations

import torch
from torch import Tensor

from trials.data.sequences import Sequences
from trials.formats import LOADER_NOT_MEASURED

NUM_SEQUENCES = 256
"""Kept in memory, and given again and again."""


class SyntheticTokens(Sequences):
    """Uniformly random token ids, the same in every trial."""

    def __init__(self, seq_len: int, vocab_size: int) -> None:
        self.seq_len, self.num_sequences = seq_len, NUM_SEQUENCES
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(vocab_size, (NUM_SEQUENCES, seq_len + 1), generator=generator)
        self.description = f"random tokens; {LOADER_NOT_MEASURED}"

    def __getitem__(self, index: int) -> Tensor:
        return self._tokens[index]
