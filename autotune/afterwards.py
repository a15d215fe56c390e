"""A run that has ended, opened again to measure more of it: by `autotune waterfall` and `autotune scale`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from autotune.best import read_best
from autotune.confirm.tuned import refuse_other_keys
from autotune.errors import InfrastructureError, UserError
from autotune.folder import has_driver, resume_command, sole_driver
from autotune.history import History
from autotune.job import Job
from autotune.job_file import load_job
from autotune.loaded import StudyFile, read_study_file
from autotune.stages import BASELINE, OF_A_RUN, ROUND
from trials.outcome import Outcome
from trials.record import Knobs


@dataclass(frozen=True)
class Ended:
    """A run that has ended."""

    folder: Path
    content: dict[str, Any]
    """Of best.yaml."""
    study: StudyFile
    job: Job

    @property
    def baseline(self) -> Knobs:
        return Knobs.from_dict(self.content["baseline"]["settings"])

    @property
    def winner(self) -> Knobs:
        """The baseline itself, where it was kept."""
        return Knobs.from_dict(self.content["settings"])


def read_ended(folder: Path, overrides: tuple[str, ...] = ()) -> Ended:
    """The run in `folder`.

    Args:
        overrides: of its job, where and how long it is measured.

    Raises:
        UserError: no run there, or one that is still going; an override of what was tuned.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder", "give the folder of a run: its job's `output`")
    content, study = read_best(folder), read_study_file(folder)
    if not content["complete"]:
        raise UserError(f"{folder}: its run has not ended, so there is no winner yet", to_its_end(folder, study))
    refuse_other_keys(overrides)
    return Ended(folder.absolute(), content, study, load_job(str(folder / "job.yaml"), overrides))


def to_its_end(folder: Path, study: StudyFile) -> str:
    """What to do about a run that has not ended."""
    if has_driver(folder.absolute()):
        return f"it is at work: wait for its end (`autotune watch {folder}` shows it)"
    return f"let it end first: {resume_command(folder, study.simulated)}"


def mean_trial_s(rows: Iterable[dict[str, Any]]) -> float | None:
    """Seconds of a trial as they were: of the paired rounds, else of the baseline; None: there were none."""
    took_s: dict[str, list[float]] = {}
    for row in rows:
        if row["outcome"] == Outcome.OK and row["started_at"] is not None and row["ended_at"] is not None:
            took_s.setdefault(row["stage"], []).append((row["ended_at"] - row["started_at"]).total_seconds())
    known = next((took_s[stage] for stage in (ROUND, BASELINE, *sorted(OF_A_RUN)) if stage in took_s), None)
    return statistics.fmean(known) if known else None


def history_rows(folder: Path) -> list[dict[str, Any]]:
    """All attempts of a run; files that are none are left out."""
    return History(folder / "history").rows()[0]


@contextmanager
def at_work(folder: Path, job: Job, simulated: str, *, to_stderr: bool) -> Iterator[tuple[Any, Any]]:
    """The runner of `job` and the screen, as the only driver of `folder`.

    Args:
        simulated: the modelled cluster to ask instead of a real one; empty for a real one.

    Raises:
        UserError: another driver is there; the cluster has less than the job asks for.
        InfrastructureError: Ray does not start, or the folder cannot be written.
    """
    from rich.console import Console

    from autotune.report.screen import make_screen

    screen = make_screen(Console(highlight=False, stderr=to_stderr))
    with sole_driver(folder), interruptible(folder):
        if simulated:
            from autotune.simulate.cluster import parse_cluster
            from autotune.simulate.runner import SimulatedRunner, last_end_s, make_world

            world = make_world(job, parse_cluster(simulated))
            opened: Any = nullcontext(SimulatedRunner(world, last_end_s(folder / "history")))
        else:
            from autotune.cluster.runner import open_runner

            opened = open_runner(job, folder / "logs" / "ray.log")
        with opened as runner, screen:
            yield runner, screen


@contextmanager
def interruptible(folder: Path) -> Iterator[None]:
    """Says what becomes of a measuring that is interrupted, or whose folder cannot be written.

    Raises:
        InfrastructureError: it cannot be written.
    """
    try:
        yield
    except KeyboardInterrupt:
        click.echo("autotune: the ranks are gone, the history is kept; the same command goes on", err=True)
        raise
    except OSError as error:
        raise InfrastructureError(
            f"{error.filename or folder}: {error.strerror or error}",
            "what was measured before is kept; once the folder can be written, the same command goes on",
        ) from error
