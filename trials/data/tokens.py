"""Tokens that were made before: .bin (raw unsigned integers, as nanoGPT and Megatron write) and .npy, memory-mapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trials.data.errors import DataError
from trials.data.sequences import Sequences
from trials.data.source import Source

_HEADER_BYTES = 1024
_HEADERS = {20240520: "uint16", 20240801: "uint32"}
"""The first four bytes of llm.c's .bin files, which have a header, and the type of the tokens behind it."""
_PROBE_TOKENS = 1 << 20
"""Of each file, checked against the vocabulary when it is opened; the others are checked as they are read."""

Array = np.ndarray[Any, Any]


class TokenFiles(Sequences):
    """The files' tokens, end to end in the order of their names.

    Args:
        token_dtype: `uint16` or `uint32`, of a .bin without a header; a .npy says its own.

    Raises:
        DataError: a file that is no array of token ids, too few tokens, or an id outside of the vocabulary.
    """

    def __init__(self, source: Source, token_dtype: str, seq_len: int, vocab_size: int) -> None:
        self.seq_len, self.vocab_size, self.paths = seq_len, vocab_size, source.files
        self._arrays = [_map_bin(p, token_dtype) if source.format == "bin" else _map_npy(p) for p in source.files]
        self._ends = np.cumsum([len(array) for array in self._arrays])
        total = int(self._ends[-1])
        self.num_sequences = (total - 1) // seq_len
        self.description = f"{len(self.paths)} {source.format} files, {total:,} tokens"
        if self.num_sequences < 1:
            raise DataError(
                f"data.source = {source.name!r}: {total} tokens in {len(self.paths)} {source.format} files; one "
                f"sequence takes {seq_len + 1}: give more data, or shorten model.seq_len"
            )
        for number, array in enumerate(self._arrays):
            for start in np.linspace(0, max(0, len(array) - _PROBE_TOKENS // 64), 64).astype(np.int64):
                self._check(number, array[start : start + _PROBE_TOKENS // 64])

    def __getitem__(self, index: int) -> Tensor:
        position, missing = index * self.seq_len, self.seq_len + 1
        number = int(np.searchsorted(self._ends, position, side="right"))
        parts = []
        while missing:
            first = position - (int(self._ends[number - 1]) if number else 0)
            part = self._arrays[number][first : first + missing]
            self._check(number, part)
            parts.append(part.astype(np.int64))
            position, missing, number = position + len(part), missing - len(part), number + 1
        return torch.from_numpy(np.concatenate(parts) if len(parts) > 1 else parts[0])

    def _check(self, number: int, part: Array) -> None:
        if not len(part):
            return
        largest, least = int(part.max()), int(part.min())
        if largest >= self.vocab_size or least < 0:
            wrong = largest if largest >= self.vocab_size else least
            raise DataError(
                f"{self.paths[number]}: token id {wrong}; the model's vocabulary is 0 to {self.vocab_size - 1}: is "
                f"data.token_dtype right ({part.dtype} was read), and were the tokens made for this model?"
            )


def _map_bin(path: Path, token_dtype: str) -> Array:
    with path.open("rb") as stream:
        magic = int.from_bytes(stream.read(4), "little")
    skipped = _HEADER_BYTES if magic in _HEADERS else 0
    found = _HEADERS.get(magic, token_dtype)
    if skipped and found != token_dtype:
        raise DataError(f"{path}: its header says {found} tokens, and data.token_dtype is {token_dtype}")
    size = path.stat().st_size - skipped
    dtype = np.dtype(f"<u{np.dtype(found).itemsize}")
    if size % dtype.itemsize:
        raise DataError(
            f"{path}: {size} bytes are no whole number of {found} tokens; is data.token_dtype right, the file whole?"
        )
    if not size:
        raise DataError(f"{path}: a header and no tokens")
    return np.memmap(path, dtype=dtype, mode="r", offset=skipped)


def _map_npy(path: Path) -> Array:
    try:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{path}: not an array of numpy: {error}") from error
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        shape, dtype = getattr(array, "shape", "?"), getattr(array, "dtype", "?")
        raise DataError(f"{path}: {dtype} of shape {shape}; expected token ids, integers in one dimension")
    return array
