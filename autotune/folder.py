"""The folder of a run: job.yaml, study.yaml, best.yaml, history/, logs/."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from autotune.errors import UserError
from autotune.job import Job
from autotune.job_file import UNPARSABLE, load_job
from trials.files import write_whole


def lock_path(out: Path) -> Path:
    """What the driver of the run in `out` holds locked."""
    return out.with_name(f".{out.name}.lock")


@contextlib.contextmanager
def sole_driver(out: Path) -> Iterator[None]:
    """Holds the right to write to `out`; given back when this process ends, however it ends.

    Raises:
        UserError: another driver holds it, or the folder's parent cannot be written.
    """
    try:
        lock = FileLock(lock_path(out))
        out.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:
        raise UserError(
            f"{out}: another autotune is running into this folder", "wait for it to end, or work in another folder"
        ) from None
    except (OSError, ValueError) as error:  # a root has no name, and a name no zero byte
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{out}: {reason}", "give a folder you can write to by --output") from error
    try:
        yield
    finally:
        lock.release()


def has_driver(out: Path) -> bool:
    """Whether a driver on this host is at work in `out`. It is read from the kernel's list of locks: nothing is made,
    and nobody is kept out meanwhile."""
    try:
        found = lock_path(out.absolute()).stat()
    except OSError:
        return False
    name = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    # `1: FLOCK  ADVISORY  WRITE 4242 fe:00:1234 0 EOF`
    return any(name in line.split() for line in Path("/proc/locks").read_text().splitlines())


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
        write_whole(out / "job.yaml", job.to_yaml())
    except OSError as error:
        raise UserError(f"{out}: {error.strerror or error}", "give a folder you can write to by --output") from error
    return moved


MAY_CHANGE = frozenset({"budget", "output", "cluster.parallel_trials", "measure.checkpoint_dir"})
"""Sections and keys that a resumed run may have otherwise: they decide how long it takes, not what it measures."""


def check_resumable(out: Path, job: Job, simulated: str = "") -> None:
    """Refuses to go on with another job's run, or on another cluster where one of both is simulated.

    Args:
        simulated: the modelled cluster; empty for a real one.

    Raises:
        UserError: no run in `out`, or one of another job, with each difference; or it cannot be written.
    """
    path = out / "job.yaml"
    if not path.exists():
        raise UserError(f"{out}: no run there to resume", "start it without --resume")
    then, now = (leaves(j.model_dump(mode="json")) for j in (load_job(str(path)), job))
    different = [
        f"  {key}: was {then.get(key, 'absent')!r}, now {now.get(key, 'absent')!r}"
        for key in sorted(then.keys() | now.keys())
        if not MAY_CHANGE & {key, key.partition(".")[0]} and then.get(key) != now.get(key)
    ]
    if different:
        raise UserError(
            "\n".join([f"{out} holds the run of another job:", *different]),
            f"resume it as it was (autotune run {path} --resume), or start anew without --resume",
        )
    _check_same_cluster(out, path, simulated)
    try:
        write_whole(path, job.to_yaml())
    except OSError as error:
        raise UserError(f"{out}: {error.strerror or error}", "give a folder you can write to by --output") from error


def run_of(job: str) -> Path | None:
    """The run whose own job.yaml `job` is; None: it is another file, or a shipped job. A run may have been moved or
    copied since, and its `output` is relative to where it was started: to resume it is to go on where it lies."""
    path = Path(job)
    return path.parent if path.name == "job.yaml" and (path.parent / "study.yaml").is_file() else None


def resume_command(out: Path, simulated: str = "") -> str:
    """What goes on with the run in `out`.

    Args:
        simulated: its modelled cluster; empty for a real one.
    """
    again = f"autotune run {shlex.quote(str(out / 'job.yaml'))} --resume"
    return f'{again} --simulate "{simulated}"' if simulated else again


def _check_same_cluster(out: Path, job_path: Path, simulated: str) -> None:
    """What is simulated and what is measured never stand in one history."""
    path = out / "study.yaml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None
    except (*UNPARSABLE, OSError):
        return  # whoever reads it whole says what is wrong with it
    then = content.get("simulated") or "" if isinstance(content, dict) else simulated
    if then != simulated:
        again = resume_command(out, then)
        raise UserError(
            f"{out} holds a run {_on(then)}, which cannot be resumed {_on(simulated)}",
            f"resume it as it was ({again}), or start anew without --resume",
        )


def _on(simulated: str) -> str:
    return f"on a simulated cluster ({simulated})" if simulated else "on a real cluster"


def leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` -> `{"a.b": 1}`."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


OWN_ENTRIES = frozenset(
    {"job.yaml", "study.yaml", "best.yaml", "history", "logs", "export", "optuna.journal", "tensorboard"}
)
"""All that a run leaves in its folder; a folder with anything else in it is somebody's, and is not touched."""

HALF_WRITTEN = frozenset(name for entry in OWN_ENTRIES for name in (f".{entry}.part", f".{entry}"))
"""What `write_whole` leaves if it is killed (an earlier version without `.part`); the next writing takes its place."""


def _move_aside(out: Path) -> Path | None:
    names = {path.name for path in out.iterdir()} - HALF_WRITTEN if out.exists() else set()
    if not names or (names == {"logs"} and not any((out / "logs").iterdir())):
        return None  # nothing, or what a run leaves that is killed while it makes its folder
    if not {"job.yaml", "logs"} <= names <= OWN_ENTRIES:
        raise UserError(f"{out}: the folder holds something that is no run", "give another folder by --output")
    if not any((out / "history").glob("*.parquet")):
        shutil.rmtree(out)  # it ended before it had measured anything
        return None
    moved = next(path for path in _moved_names(out) if not path.exists())
    out.rename(moved)
    return moved


def _moved_names(out: Path) -> Iterator[Path]:
    return (out.with_name(f"{out.name}.{number}") for number in itertools.count(1))


def latest_moved(out: Path) -> Path | None:
    """The last run that was moved aside from `out`, if there is one."""
    found = list(itertools.takewhile(Path.exists, _moved_names(out)))
    return found[-1] if found else None
