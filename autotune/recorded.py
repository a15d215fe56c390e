"""Attempts of a run, judged from its folder alone: its driver may be another process, or long gone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.history import History
from autotune.job_file import load_job
from autotune.rows import Attempt, Limits, attempt_from_row


def limits_of(row: dict[str, Any], headroom: float) -> Limits:
    """What the attempt of a row had to fit in."""
    is_gpu = row["driver_version"] or row["nccl_version"]
    return Limits("cuda" if is_gpu else "cpu", row["limit_gib"], headroom)


def headroom_of(run: Path) -> float:
    """The share of memory that the run's configs must leave free.

    Raises:
        UserError: its job cannot be read.
    """
    return load_job(str(run / "job.yaml")).cluster.memory_headroom


def recorded_attempts(run: Path, stages: Iterable[str] | None = None) -> tuple[list[Attempt], list[str]]:
    """All attempts of a run (of some stages), and a line on each file and row that is none.

    Raises:
        UserError: no run there, or one that has measured nothing.
    """
    rows, skipped = History(run / "history").rows()
    if not rows:
        raise UserError(f"{run}: no run there that has measured anything", "give a run's folder: its job's `output`")
    headroom, attempts = headroom_of(run), []
    for row in rows:
        if stages is not None and row["stage"] not in stages:
            continue
        try:
            attempts.append(attempt_from_row(row, limits_of(row, headroom)))
        except (ValueError, TypeError) as error:
            skipped.append(f"trial {row['trial']}: not an attempt of fsdp-autotune: {error}")
    return attempts, skipped
