"""JSON Lines: one JSON object a line, whose text is under one key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from trials.data.documents import WholeDocuments
from trials.data.errors import DataError


class JsonlDocuments(WholeDocuments):
    """A document's position is the byte where its line starts."""

    def __init__(self, files: tuple[Path, ...], text_field: str) -> None:
        super().__init__(files)
        self.text_field = text_field

    def documents(self, file: int) -> Iterator[tuple[int, bytes]]:
        position = 0
        with self.files[file].open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if not line.isspace():
                    yield position, self._text(line, f"{self.files[file]}, line {number}")
                position += len(line)

    def read_document(self, file: int, position: int) -> bytes:
        with self.files[file].open("rb") as stream:
            stream.seek(position)
            return self._text(stream.readline(), f"{self.files[file]}, byte {position}")

    def _text(self, line: bytes, where: str) -> bytes:
        try:
            values = json.loads(line)
        except ValueError as error:  # also what is no UTF-8
            raise DataError(f"{where}: not JSON: {error}; a JSONL file has one JSON object a line") from error
        if not isinstance(values, dict):
            raise DataError(f"{where}: a {type(values).__name__}; expected an object with the key {self.text_field!r}")
        if self.text_field not in values:
            keys = ", ".join(repr(key) for key in values) or "none"
            raise DataError(f"{where}: no key {self.text_field!r}; its keys: {keys}. Say data.text_field")
        text = values[self.text_field]
        if text is not None and not isinstance(text, str):
            raise DataError(f"{where}: {self.text_field!r} is a {type(text).__name__}, not text. Say data.text_field")
        return (text or "").encode(errors="replace")
