"""Documents of text, however they are stored: read once from end to end in pieces, and later a piece at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Piece:
    """A part of a document that is tokenised by itself."""

    file: int
    """Number of the file."""
    position: int
    """Where the document is in its file, as its format counts."""
    begin: int
    end: int
    """In the document's text, bytes of UTF-8."""
    text: bytes
    is_last: bool
    """Of its document."""


class Documents(ABC):
    """The documents of some files, in a fixed order."""

    are_sequential = False
    """True: going back is slow, so they are read in the files' order."""

    @abstractmethod
    def pieces(self, piece_bytes: int | None) -> Iterator[Piece]:
        """All text in order, streamed. Empty documents have no piece.

        Args:
            piece_bytes: no piece is longer; None: a document is one piece.

        Raises:
            DataError: a file is not what it should be.
        """

    @abstractmethod
    def read(self, file: int, position: int, begin: int, end: int) -> bytes:
        """The text of a piece, or of a part of it; shorter, if the file is no longer what it was."""


class WholeDocuments(Documents):
    """Of a format in which a document is read as a whole."""

    def __init__(self, files: tuple[Path, ...]) -> None:
        self.files = files
        self._kept: tuple[int, int, bytes] | None = None

    @abstractmethod
    def documents(self, file: int) -> Iterator[tuple[int, bytes]]:
        """Position and text of each of the file's documents."""

    @abstractmethod
    def read_document(self, file: int, position: int) -> bytes: ...

    def pieces(self, piece_bytes: int | None) -> Iterator[Piece]:
        for file in range(len(self.files)):
            for position, text in self.documents(file):
                begin = 0
                while begin < len(text):
                    end = len(text) if piece_bytes is None else cut(text, begin, piece_bytes)
                    yield Piece(file, position, begin, end, text[begin:end], end == len(text))
                    begin = end

    def read(self, file: int, position: int, begin: int, end: int) -> bytes:
        # The pieces of a document are read one after the other.
        if self._kept is None or self._kept[:2] != (file, position):
            self._kept = (file, position, self.read_document(file, position))
        return self._kept[2][begin:end]


def cut(text: bytes, begin: int, most: int) -> int:
    """Where a piece that starts at `begin` ends: before white space where there is some, and never inside a character.

    Tokenizers split at white space first, so that cutting there changes no token, or next to none.
    """
    if len(text) - begin <= most:
        return len(text)
    end = max(text.rfind(b" ", begin + 1, begin + most + 1), text.rfind(b"\n", begin + 1, begin + most + 1))
    if end > begin:
        return end
    end = begin + most
    while end > begin + most - 4 and text[end] & 0xC0 == 0x80:
        end -= 1
    return end
