"""Real text as fixed-length token sequences, through a real DataLoader.

Which sequences an optimizer step trains on depends only on (seed, step, index in the global batch): not on the
number of ranks, the micro-batch or the workers. So every config of a study warms up on the same data; after that,
configs with loader queues of different depth have skipped different steps.
"""

from __future__ import annotations

import bisect
import itertools
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from trials.outcome import Outcome, TrialError
from trials.record import PYTHON_STDLIB, Knobs

TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".py"})
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib"})


class ByteTextDataset(Dataset[Tensor]):
    """The text files under a folder, end to end, one token a byte; sample i is int64 of shape (seq_len + 1,).

    Args:
        source: a folder, a file, or `python-stdlib` for this interpreter's own library source.
        seq_len: tokens per sequence; each sample carries one more, the last target.

    Raises:
        TrialError: outcome `invalid`; no text, or too little for one sequence.
    """

    def __init__(self, source: str, seq_len: int) -> None:
        self.seq_len = seq_len
        self.paths, sizes = find_text_files(source)
        self.ends = list(itertools.accumulate(sizes))
        total = self.ends[-1] if self.ends else 0
        self.num_sequences = (total - 1) // seq_len
        if self.num_sequences < 1:
            raise TrialError(
                Outcome.INVALID,
                f"data.source = {source!r}: {total} bytes in {len(self.paths)} text files; "
                f"one sequence takes {seq_len + 1} (text files end in {', '.join(sorted(TEXT_SUFFIXES))})",
            )

    def __len__(self) -> int:
        return self.num_sequences

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.seq_len
        return torch.frombuffer(self._read(start, self.seq_len + 1), dtype=torch.uint8).to(torch.int64)

    def _read(self, start: int, length: int) -> bytearray:
        text = bytearray()
        file = bisect.bisect_right(self.ends, start)
        while len(text) < length:
            offset = start + len(text) - (self.ends[file - 1] if file else 0)
            with self.paths[file].open("rb") as stream:
                stream.seek(offset)
                part = stream.read(length - len(text))
            if not part:
                raise TrialError(Outcome.INVALID, f"{self.paths[file]} became shorter while it was read")
            text += part
            file += 1
        return text


def find_text_files(source: str) -> tuple[list[Path], list[int]]:
    """Paths in a fixed order, and their sizes in bytes.

    Raises:
        TrialError: outcome `invalid`; `source` does not exist or cannot be read.
    """
    root = Path(sysconfig.get_path("stdlib")) if source == PYTHON_STDLIB else Path(source)
    if root.is_file():
        return [root], [root.stat().st_size]
    if not root.is_dir():
        raise TrialError(Outcome.INVALID, f"data.source = {source!r}: no such file or folder")
    found: list[tuple[str, int]] = []
    pending = [os.fspath(root)]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        if entry.name not in _SKIPPED_FOLDERS and not entry.name.startswith("."):
                            pending.append(entry.path)
                    elif os.path.splitext(entry.name)[1] in TEXT_SUFFIXES:  # noqa: PTH122 (called per file)
                        found.append((entry.path, entry.stat().st_size))
        except OSError as error:
            raise TrialError(Outcome.INVALID, f"data.source = {source!r}: {error}") from error
    found = sorted(item for item in found if item[1])
    return [Path(path) for path, _ in found], [size for _, size in found]


class MicroBatchSampler(Sampler[list[int]]):
    """The sample indices of this rank's micro-batches, for ever, step after step.

    Step s of the global batch G takes positions s*G .. (s+1)*G - 1 of a fixed shuffled order of the data (which
    wraps around); rank r trains on the r-th run of G / world_size of them.
    """

    def __init__(self, num_samples: int, knobs: Knobs, rank: int, world_size: int, seed: int) -> None:
        self.order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed)).tolist()
        self.micro_batch_size = knobs.micro_batch_size
        self.per_rank = knobs.micro_batch_size * knobs.grad_accum_steps
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[list[int]]:
        for step in itertools.count():
            first = (step * self.world_size + self.rank) * self.per_rank
            for micro in range(first, first + self.per_rank, self.micro_batch_size):
                yield [self.order[i % len(self.order)] for i in range(micro, micro + self.micro_batch_size)]


def make_dataset(data: dict[str, Any], seq_len: int, vocab_size: int) -> ByteTextDataset:
    """The data a job names.

    Raises:
        TrialError: outcome `invalid`; the vocabulary has no room for the tokens, or there is no text.
    """
    if vocab_size < 256:
        raise TrialError(
            Outcome.INVALID, f"data.tokenizer = byte needs a vocabulary of 256; the model's is {vocab_size}"
        )
    return ByteTextDataset(data["source"], seq_len)


def make_loader(
    dataset: Dataset[Tensor], knobs: Knobs, rank: int, world_size: int, seed: int, device: str
) -> DataLoader[Tensor]:
    """Batches int64 of shape (micro_batch_size, seq_len + 1), without end.

    Workers are forked here, before the model and its memory limit exist: a loader's memory is the host's.
    """
    return DataLoader(
        dataset,
        batch_sampler=MicroBatchSampler(len(dataset), knobs, rank, world_size, seed),  # type: ignore[arg-type]
        num_workers=knobs.num_workers,
        prefetch_factor=knobs.prefetch_factor if knobs.num_workers else None,
        pin_memory=device == "cuda",
        persistent_workers=knobs.num_workers > 0,
        multiprocessing_context="fork" if knobs.num_workers else None,
    )
