"""The folder of a run: job.yaml, study.yaml, best.yaml, history/, logs/."""

from __future__ import annotations

import itertools
from pathlib import Path

from autotune.errors import UserError
from autotune.job import Job


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
