"""Text as sequences of one length: read, tokenised and cut when a sample is asked for, as a training loader does."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trials.data.documents import Documents
from trials.data.errors import DataError
from trials.data.index import TextIndex, cached_index, index_of_files
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
        started = time.perf_counter()
        self.index = self._index(text_field, round(max_mib * _MIB))
        spent_s = time.perf_counter() - started
        total = self.index.num_tokens
        self.num_sequences = (total - 1) // seq_len
        if self.num_sequences < 1:
            suffixes = ", ".join(SUFFIXES[source.format])
            raise DataError(
                f"data.source = {source.name!r}: {self._amount()}; one sequence takes {seq_len + 1} tokens: give "
                f"more text ({source.format} files end in {suffixes}), or shorten model.seq_len"
            )
        self.description = self._amount()
        if self.index.text_bytes >= max_mib * _MIB:
            self.description += f" (data.max_mib = {max_mib:g}; what comes after is not read)"
        if spent_s > _WORTH_SAYING_S:
            self.description += f"; indexed in {spent_s:.0f} s, which later trials find done"

    def __getitem__(self, index: int) -> Tensor:
        position, missing = index * self.seq_len, self.seq_len + 1
        piece = int(np.searchsorted(self.index.token_end, position, side="right"))
        parts = []
        while missing:
            first = position - (int(self.index.token_end[piece - 1]) if piece else 0)
            part = self._tokens(piece, first, missing)
            parts.append(part)
            position, missing, piece = position + len(part), missing - len(part), piece + 1
        return torch.from_numpy(np.concatenate(parts) if len(parts) > 1 else parts[0])

    def order(self, seed: int) -> Tensor:
        """Shuffled, but for what is read as a stream: going back and forth would read a row group a sample."""
        return torch.arange(self.num_sequences) if self.documents.are_sequential else super().order(seed)

    def _index(self, text_field: str, most_bytes: int) -> TextIndex:
        source, bytes_only = self.source, isinstance(self.tokenizer, ByteTokenizer)
        if source.format == "text" and bytes_only:
            return index_of_files(source.sizes, most_bytes)
        # A sample tokenises whole pieces: with these, a quarter more than it needs, at four bytes a token.
        piece_bytes = None if bytes_only else max(self.seq_len, _LEAST_PIECE_BYTES)
        field = None if source.format == "text" else text_field
        return cached_index(source, self.documents, field, self.tokenizer, piece_bytes, most_bytes)

    def _tokens(self, piece: int, first: int, most: int) -> np.ndarray[Any, Any]:
        """Tokens of a piece from the `first` on, and not more than `most`."""
        file, position, begin, end, is_last = (
            int(column[piece])
            for column in (self.index.file, self.index.position, self.index.begin, self.index.end, self.index.is_last)
        )
        tail = np.array(self.tokenizer.end if is_last else (), np.int64)
        before = int(self.index.token_end[piece - 1]) if piece else 0
        num_of_text = int(self.index.token_end[piece]) - before - len(tail)
        wanted = max(0, min(most, num_of_text - first))
        if isinstance(self.tokenizer, ByteTokenizer):  # only what is needed is read
            text = self.documents.read(file, position, begin + first, begin + first + wanted) if wanted else b""
            tokens = np.frombuffer(text, np.uint8).astype(np.int64)
            is_as_indexed = len(tokens) == wanted
        else:
            (ids,) = self.tokenizer.encode([self.documents.read(file, position, begin, end)])
            tokens = np.array(ids, np.int64)[first : first + wanted]
            is_as_indexed = len(ids) == num_of_text
        if not is_as_indexed:
            raise DataError(f"{self.source.files[file]} changed while it was used")
        if wanted == most or not len(tail):
            return tokens
        return np.concatenate([tokens, tail[max(0, first - num_of_text) :]])[:most]

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
