"""Text files: each is a document, and is read where it is needed, never as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trials.data.documents import Documents, Piece, cut

_CHUNK_BYTES = 1 << 20


class TextDocuments(Documents):
    """A file's position is always 0."""

    def __init__(self, files: tuple[Path, ...]) -> None:
        self.files = files

    def pieces(self, piece_bytes: int | None) -> Iterator[Piece]:
        assert piece_bytes is not None, "a file as one piece is known by its size"
        for file, path in enumerate(self.files):
            with path.open("rb") as stream:
                held, at, start = b"", 0, 0  # held[at] is the file's byte start + at
                while True:
                    if len(held) - at <= piece_bytes:
                        # One byte more than a piece can take, or this is the end of the file.
                        start, held, at = start + at, held[at:] + stream.read(_CHUNK_BYTES + piece_bytes), 0
                        if not held:
                            break
                    end = cut(held, at, piece_bytes)
                    is_last = end == len(held)
                    yield Piece(file, 0, start + at, start + end, held[at:end], is_last)
                    at = end
                    if is_last:
                        break

    def read(self, file: int, position: int, begin: int, end: int) -> bytes:
        with self.files[file].open("rb") as stream:
            stream.seek(begin)
            return stream.read(end - begin)
