"""Text as sequences of one length: read, tokenised and cut when a sample is asked for, as a training loader does."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trials.data.documents import Documents
from trials.data.errors import DataError
from trials.data.index import Array, TextIndex, cached_index, index_of_files
from trials.data.jsonl import JsonlDocuments
from trials.data.parquet import ParquetDocuments
from trials.data.sequences import Sequences
from trials.data.source import Source
from trials.data.text import TextDocuments
from trials.data.tokenizers import ByteTokenizer, make_tokenizer
from trials.formats import DEFAULTS, SUFFIXES

_MIB = 2**20
_LEAST_PIECE_BYTES = 256
_WORTH_SAYING_S = 2.0


class PackedText(Sequences):
    """The documents' tokens, each document with its end token, end to end.

    Raises:
        DataError: a file is not what it should be, or the text is too short for one sequence.
    """

    def __init__(self, source: Source, data: dict[str, Any], seq_len: int, vocab_size: int) -> None:
        self.seq_len, self.source = seq_len, source
        text_field = data.get("text_field") or DEFAULTS["text_field"]
        self.documents = _documents(source, text_field)
        self.tokenizer = make_tokenizer(
            data.get("tokenizer") or DEFAULTS["tokenizer"], vocab_size, b"" if source.format == "text" else b"\n"
        )
        max_mib = data.get("max_mib") or DEFAULTS["max_mib"]
        most_bytes = max(1, round(max_mib * _MIB))
        started = time.perf_counter()
        self.index = self._index(text_field, most_bytes)
        spent_s = time.perf_counter() - started
        total = self.index.num_tokens
        self.num_sequences = (total - 1) // seq_len
        is_cut = self.index.text_bytes >= most_bytes
        if self.num_sequences < 1:
            suffixes = ", ".join(SUFFIXES[source.format])
            raise DataError(
                f"data.source = {source.name!r}: {self._amount()}; one sequence takes {seq_len + 1} tokens: "
                + (f"raise data.max_mib = {max_mib:g}" if is_cut else f"give more text ({suffixes} files)")
                + ", or shorten model.seq_len"
            )
        self.description = self._amount()
        if is_cut:
            self.description += f" (data.max_mib = {max_mib:g}; what comes after is not read)"
        if spent_s > _WORTH_SAYING_S:
            self.description += f"; indexed in {spent_s:.0f} s, which later trials find done"

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.seq_len
        stop = start + self.seq_len + 1
        first = int(np.searchsorted(self.index.token_end, start, side="right"))
        last = int(np.searchsorted(self.index.token_end, stop, side="left"))
        if isinstance(self.tokenizer, ByteTokenizer):
            tokens = np.concatenate([self._bytes(piece, start, stop) for piece in range(first, last + 1)])
        else:
            tokens = self._encoded(first, last)[start - self._token_start(first) :][: stop - start]
        return torch.from_numpy(tokens)

    def order(self, seed: int) -> Tensor:
        """Shuffled, but for what is read as a stream: going back and forth would read a row group a sample."""
        return torch.arange(self.num_sequences) if self.documents.are_sequential else super().order(seed)

    def _index(self, text_field: str, most_bytes: int) -> TextIndex:
        source, bytes_only = self.source, isinstance(self.tokenizer, ByteTokenizer)
        if source.format == "text" and bytes_only:
            return index_of_files(source.sizes, most_bytes)
        # A sample tokenises whole pieces: with these, an eighth more than it needs, at four bytes a token.
        piece_bytes = None if bytes_only else max(self.seq_len // 2, _LEAST_PIECE_BYTES)
        field = None if source.format == "text" else text_field
        return cached_index(source, self.documents, field, self.tokenizer, piece_bytes, most_bytes)

    def _bytes(self, piece: int, start: int, stop: int) -> Array:
        """Those tokens of a piece that lie in start .. stop of the whole; nothing else is read."""
        before, tail = self._token_start(piece), self._tail(piece)
        num_of_text = int(self.index.token_end[piece]) - before - len(tail)
        begin, end = max(start - before, 0), min(stop - before, num_of_text)
        text = self._read(piece, begin, end) if begin < end else b""
        if len(text) != max(0, end - begin):
            raise self._changed(piece)
        rest = tail[max(0, start - before - num_of_text) : max(0, stop - before - num_of_text)]
        return np.concatenate([np.frombuffer(text, np.uint8).astype(np.int64), np.array(rest, np.int64)])

    def _encoded(self, first: int, last: int) -> Array:
        """All tokens of the pieces first .. last."""
        pieces = range(first, last + 1)
        tokens: list[int] = []
        for piece, ids in zip(pieces, self.tokenizer.encode([self._read(piece) for piece in pieces]), strict=True):
            tokens += [*ids, *self._tail(piece)]
            if len(tokens) != self.index.token_end[piece] - self._token_start(first):
                raise self._changed(piece)
        return np.array(tokens, np.int64)

    def _token_start(self, piece: int) -> int:
        return int(self.index.token_end[piece - 1]) if piece else 0

    def _tail(self, piece: int) -> tuple[int, ...]:
        return self.tokenizer.end if self.index.is_last[piece] else ()

    def _read(self, piece: int, begin: int = 0, end: int | None = None) -> bytes:
        """Text of a piece, or bytes begin .. end of it."""
        at = self.index
        first, last = int(at.begin[piece]), int(at.end[piece])
        stop = last if end is None else first + end
        return self.documents.read(int(at.file[piece]), int(at.position[piece]), first + begin, stop)

    def _changed(self, piece: int) -> DataError:
        return DataError(f"{self.source.files[int(self.index.file[piece])]} changed while it was used")

    def _amount(self) -> str:
        num_files = len(self.source.files)
        files = f"{num_files} {self.source.format} file{'s' if num_files > 1 else ''}"
        return f"{files}, {self.index.text_bytes:,} bytes of text, {self.index.num_tokens:,} tokens"


def _documents(source: Source, text_field: str) -> Documents:
    if source.format == "text":
        return TextDocuments(source.files)
    if source.format == "jsonl":
        return JsonlDocuments(source.files, text_field)
    return ParquetDocuments(source.files, text_field)
