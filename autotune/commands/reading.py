"""What is shown while a history is read: thousands of files take minutes, before `autotune compact` makes them one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.history import Told


@contextmanager
def reading() -> Iterator[Told]:
    """Takes how many files were read of how many; shown on a terminal alone."""
    from rich.console import Console

    with Console(stderr=True).status("reading the history") as status:
        yield lambda done, of: status.update(f"reading the history: {done:,} of {of:,} files")
