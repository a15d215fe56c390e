"""`data.source` -> the files to read, in a fixed order, and their format."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trials.data.errors import DataError
from trials.formats import SUFFIXES, inapplicable
from trials.record import PYTHON_STDLIB, SYNTHETIC

_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib"})
_FORMAT_OF = {suffix: name for name, suffixes in SUFFIXES.items() for suffix in suffixes}


@dataclass(frozen=True)
class Source:
    """What a job trains on."""

    name: str
    """As the job says it, for messages."""
    format: str
    """A key of `trials.formats.OPTIONS`; never `auto`."""
    files: tuple[Path, ...]
    sizes: tuple[int, ...]
    """Bytes of each file; empty files are left out."""

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes)


def find_source(data: dict[str, Any]) -> Source:
    """The files of a job's `data` section.

    Raises:
        DataError: there is no such file or folder, it holds nothing of the format, or a key has no meaning in it.
    """
    name, format_ = data["source"], data.get("format") or "auto"
    if name == SYNTHETIC:
        source = Source(name, SYNTHETIC, (), ())
    elif name == PYTHON_STDLIB:
        source = _folder(name, Path(sysconfig.get_path("stdlib")), "text")
    elif Path(name).is_file():
        source = _file(name, Path(name), format_)
    elif Path(name).is_dir():
        source = _folder(name, Path(name), format_)
    else:
        raise DataError(f"data.source = {name!r}: no such file or folder")
    unreadable = next((path for path in source.files if not os.access(path, os.R_OK)), None)
    if unreadable is not None:
        raise DataError(f"data.source = {name!r}: {unreadable} cannot be read: permission denied")
    complaint = inapplicable(source.format, data)
    if complaint:
        raise DataError(f"data.{complaint}")
    return source


def _file(name: str, path: Path, format_: str) -> Source:
    if format_ == "auto":
        if path.suffix not in _FORMAT_OF:
            known = ", ".join(_FORMAT_OF)
            raise DataError(f"data.source = {name!r}: its suffix names no format ({known}): say data.format")
        format_ = _FORMAT_OF[path.suffix]
    size = path.stat().st_size
    if not size:
        raise DataError(f"data.source = {name!r}: the file is empty")
    return Source(name, format_, (path,), (size,))


def _folder(name: str, root: Path, format_: str) -> Source:
    found: dict[str, list[tuple[str, int]]] = {}
    try:
        for path, size in _walk(root):
            kind = _FORMAT_OF.get(os.path.splitext(path)[1])  # noqa: PTH122 (called per file)
            if kind and size:
                found.setdefault(kind, []).append((path, size))
    except OSError as error:
        raise DataError(f"data.source = {name!r}: {error}") from error
    if format_ == "auto":
        if len(found) > 1:
            counts = ", ".join(f"{len(files)} {kind}" for kind, files in sorted(found.items()))
            raise DataError(f"data.source = {name!r}: holds files of several formats ({counts}): say data.format")
        format_ = next(iter(found), "auto")
    if format_ not in found:
        wanted = _FORMAT_OF if format_ == "auto" else SUFFIXES[format_]
        raise DataError(f"data.source = {name!r}: the folder has no file, other than empty, in {', '.join(wanted)}")
    files = sorted(found[format_])
    return Source(name, format_, tuple(Path(path) for path, _ in files), tuple(size for _, size in files))


def _walk(root: Path) -> Iterator[tuple[str, int]]:
    """Path and size of each file under `root`, but for hidden folders and those of tests and installed packages."""
    pending = [os.fspath(root)]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if entry.name not in _SKIPPED_FOLDERS and not entry.name.startswith("."):
                        pending.append(entry.path)
                elif not entry.is_dir():
                    yield entry.path, entry.stat().st_size  # a link that leads nowhere raises, and is named
