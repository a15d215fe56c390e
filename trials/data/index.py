"""Where each piece of text is, and at which token it starts: what makes the n-th sequence of a text reachable.

Text whose tokens are not its bytes must be tokenised once to know that, so the index is kept in the user's cache
folder, where every trial on the machine finds it.
"""

from __future__ import annotations

import fcntl
import io
import itertools
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from trials.data.documents import Documents, Piece
from trials.data.errors import DataError
from trials.data.source import Source
from trials.data.tokenizers import ByteTokenizer, Tokenizer
from trials.files import write_whole
from trials.record import digest

_VERSION = 1
"""Changes when pieces are cut in another way."""
_BATCH_PIECES = 256

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class TextIndex:
    """One entry a piece, in order."""

    file: Array
    position: Array
    begin: Array
    end: Array
    is_last: Array
    token_end: Array
    """Tokens of all pieces up to and with this one; a document's end token is its last piece's."""

    @property
    def num_tokens(self) -> int:
        return int(self.token_end[-1]) if len(self.token_end) else 0

    @property
    def text_bytes(self) -> int:
        return int((self.end - self.begin).sum())


def index_of_files(sizes: Sequence[int], most_bytes: int) -> TextIndex:
    """Of text files whose tokens are their bytes: nothing need be read. Each file is one piece."""
    starts = [0, *itertools.accumulate(sizes)]
    used = [min(size, most_bytes - start) for size, start in zip(sizes, starts, strict=False) if start < most_bytes]
    zeros = np.zeros(len(used), np.int64)
    ends = np.array(used, np.int64)
    return TextIndex(np.arange(len(used)), zeros, zeros, ends, zeros, np.cumsum(ends))


def make_index(documents: Documents, tokenizer: Tokenizer, piece_bytes: int | None, most_bytes: int) -> TextIndex:
    """Reads and tokenises text, from its start until `most_bytes` of it are used."""
    columns = {field.name: array("q") for field in fields(TextIndex)}
    num_tokens = 0

    def add(pieces: list[Piece]) -> None:
        nonlocal num_tokens
        if isinstance(tokenizer, ByteTokenizer):
            counts = [len(piece.text) for piece in pieces]
        else:
            counts = [len(ids) for ids in tokenizer.encode([piece.text for piece in pieces])]
        for piece, count in zip(pieces, counts, strict=True):
            num_tokens += count + (len(tokenizer.end) if piece.is_last else 0)
            for name in ("file", "position", "begin", "end", "is_last"):
                columns[name].append(getattr(piece, name))
            columns["token_end"].append(num_tokens)

    waiting: list[Piece] = []
    used_bytes = 0
    for piece in documents.pieces(piece_bytes):
        if used_bytes >= most_bytes:
            break
        used_bytes += len(piece.text)
        waiting.append(piece)
        if len(waiting) == _BATCH_PIECES:
            add(waiting)
            waiting = []
    add(waiting)
    return TextIndex(**{name: np.array(values, np.int64) for name, values in columns.items()})


def cached_index(
    source: Source,
    documents: Documents,
    text_field: str | None,
    tokenizer: Tokenizer,
    piece_bytes: int | None,
    most_bytes: int,
) -> TextIndex:
    """The index from the cache folder; made first, by one process of the machine, if it is not there.

    Raises:
        DataError: a file is not what it should be, or the cache folder cannot be used.
    """
    stats = [path.stat() for path in source.files]
    files = [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in zip(source.files, stats, strict=True)]
    key = digest(
        [_VERSION, files, source.format, text_field, tokenizer.identity, tokenizer.end, piece_bytes, most_bytes]
    )
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / f"{key}.lock").open("w")
    except OSError as error:
        raise _no_cache(source, folder, error) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        index = _load(folder / f"{key}.npy")
        if index is None:
            index = make_index(documents, tokenizer, piece_bytes, most_bytes)
            try:
                _save(folder / f"{key}.npy", index)
            except OSError as error:
                raise _no_cache(source, folder, error) from error
    return index


def cache_folder() -> Path:
    """Its files may be deleted at any time."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 (never raises)
    return Path(base) / "fsdp-autotune" / "text-index"


def _save(path: Path, index: TextIndex) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.stack([getattr(index, field.name) for field in fields(TextIndex)]))
    write_whole(path, buffer.getvalue())


def _load(path: Path) -> TextIndex | None:
    """None if it is not there, or not whole."""
    try:
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    names = [field.name for field in fields(TextIndex)]
    return TextIndex(**dict(zip(names, rows, strict=True))) if rows.shape[:1] == (len(names),) else None


def _no_cache(source: Source, folder: Path, error: OSError) -> DataError:
    return DataError(
        f"data.source = {source.name!r}: the index of its text cannot be kept in {folder}: {error}; "
        "set XDG_CACHE_HOME to a folder that can be written"
    )
