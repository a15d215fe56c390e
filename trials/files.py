"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes aside under a name that starts with a dot, syncs, renames: a reader never sees half a file."""
    aside = path.with_name(f".{path.name}.part")  # no *.parquet, which pathlib would find under any name
    try:
        with aside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    except OSError:
        aside.unlink(missing_ok=True)  # a full disk is not helped by half a file
        raise
