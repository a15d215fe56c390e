"""The folder of a run: job.yaml, study.yaml, best.yaml, history/, logs/."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from autotune.errors import UserError
from autotune.job import Job


@contextlib.contextmanager
def sole_driver(out: Path) -> Iterator[None]:
    """Holds the right to write to `out`; given back when this process ends, however it ends.

    Raises:
        UserError: another driver holds it, or the folder's parent cannot be written.
    """
    lock = FileLock(out.with_name(f".{out.name}.lock"))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:
        raise UserError(
            f"{out}: another autotune is running into this folder", "wait for it, or give another folder by --output"
        ) from None
    except OSError as error:
        raise UserError(f"{out}: {error.strerror or error}", "give a folder you can write to by --output") from error
    try:
        yield
    finally:
        lock.release()


def prepare_folder(out: Path, job: Job) -> Path | None:
    """Makes the run's folder with the resolved job in it; an earlier run there is moved aside, never overwritten.

    Returns:
        Where the earlier run lies now, if there was one.

    Raises:
        UserError: the folder holds something else, or cannot be written.
    """
    try:
        moved = _move_aside(out)
        (out / "logs").mkdir(parents=True, exist_ok=True)
        (out / "job.yaml").write_text(job.to_yaml())
    except OSError as error:
        raise UserError(f"{out}: {error.strerror or error}", "give a folder you can write to by --output") from error
    return moved


def _move_aside(out: Path) -> Path | None:
    if not out.exists() or not any(out.iterdir()):
        return None
    if not (out / "job.yaml").exists():
        raise UserError(f"{out}: the folder holds something that is no run", "give another folder by --output")
    free = (out.with_name(f"{out.name}.{number}") for number in itertools.count(1))
    moved = next(path for path in free if not path.exists())
    out.rename(moved)
    return moved
