"""Parquet: the documents are the rows of one column of text. Streamed, some rows at a time."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trials.data.documents import WholeDocuments
from trials.data.errors import DataError

_BATCH_ROWS = 64
"""Held at a time."""


class ParquetDocuments(WholeDocuments):
    """A document's position is its row. Rows are reached by reading on from the start of their row group."""

    are_sequential = True

    def __init__(self, files: tuple[Path, ...], text_field: str) -> None:
        super().__init__(files)
        self.text_field = text_field
        self._cursor: _Cursor | None = None  # opened by the process that reads: a worker has its own

    def documents(self, file: int) -> Iterator[tuple[int, bytes]]:
        cursor = _Cursor(self.files[file], self.text_field)
        for row in range(cursor.num_rows):
            yield row, cursor.text(row)

    def read_document(self, file: int, position: int) -> bytes:
        if self._cursor is None or self._cursor.path != self.files[file]:
            self._cursor = _Cursor(self.files[file], self.text_field)
        return self._cursor.text(position) if position < self._cursor.num_rows else b""


class _Cursor:
    """Reads rows of one file; going on is fast, going back starts the row group anew."""

    def __init__(self, path: Path, text_field: str) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path, self.text_field = path, text_field
        try:
            self._file = pq.ParquetFile(path)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{path}: not a Parquet file: {error}") from error
        schema = self._file.schema_arrow
        if text_field not in schema.names:
            columns = ", ".join(repr(name) for name in schema.names) or "none"
            raise DataError(f"{path}: no column {text_field!r}; its columns: {columns}. Say data.text_field")
        kind = schema.field(text_field).type
        value_type = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not any(check(value_type) for check in (pa.types.is_string, pa.types.is_large_string)):
            raise DataError(f"{path}: column {text_field!r} is {kind}, not text. Say data.text_field")
        metadata = self._file.metadata
        self.num_rows: int = metadata.num_rows
        sizes = (metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
        self._group_ends = list(itertools.accumulate(sizes))
        self._group = -1
        self._batches: Iterator[Any] = iter(())
        self._column: Any = ()
        self._first = 0
        """Row of the file that is first in `_column`."""

    def text(self, row: int) -> bytes:
        group = bisect.bisect_right(self._group_ends, row)
        if group != self._group or row < self._first:
            self._group, self._column = group, ()
            self._first = self._group_ends[group - 1] if group else 0
            # Arrow's threads would not survive a fork, and a loader has its own processes.
            self._batches = self._file.iter_batches(
                _BATCH_ROWS, row_groups=[group], columns=[self.text_field], use_threads=False
            )
        while row >= self._first + len(self._column):
            self._first += len(self._column)
            self._column = next(self._batches).column(0)
        text = self._column[row - self._first].as_py()
        return (text or "").encode()
