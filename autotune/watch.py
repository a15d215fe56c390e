"""Follows a run by its files alone: what its driver would show, on another terminal.

It writes nothing and takes no lock: whether a driver is at work is read from the kernel's list of locks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from autotune.best import is_settled
from autotune.errors import UserError
from autotune.folder import has_driver
from autotune.history import History
from autotune.job_file import load_job
from autotune.loaded import read_study_file, study_of
from autotune.measuring import Listener
from autotune.rows import Attempt, Limits, attempt_from_row
from autotune.stages import BASELINE, SEARCHED
from trials.record import TrialSpec

POLL_S = 1.0


class Viewer(Listener, Protocol):
    baseline: dict[str, Any]
    """Settings that others are shown against."""


class Follower:
    """What a run's folder has shown so far.

    Args:
        run: absolute.
    """

    def __init__(self, run: Path, viewer: Viewer) -> None:
        self.run, self._viewer = run, viewer
        self._seen: set[str] = set()
        self._ended: set[int] = set()
        self._started: set[str] = set()
        self._best: Attempt | None = None

    def look(self) -> None:
        """Shows what has come since the last look."""
        history = History(self.run / "history")
        present = history.file_names()
        if not self._seen <= present:  # that run was moved aside
            self._viewer.message("  another run has begun in this folder")
            self._seen, self._ended, self._started, self._best = set(), set(), set(), None
        rows, skipped = history.rows(without=self._seen)
        self._seen |= present
        for line in skipped:
            self._viewer.message(f"  skipped {line}")
        self._ended |= {row["trial"] for row in rows}
        if rows:
            limits = study_of(load_job(str(self.run / "job.yaml")), read_study_file(self.run)).limits
            for row in rows:
                self._show(row, limits)
        for spec in self._orders():
            self._viewer.trial_started(spec, None)

    def _show(self, row: dict[str, Any], limits: Limits) -> None:
        try:
            attempt = attempt_from_row(row, limits)
        except (ValueError, TypeError) as error:
            self._viewer.message(f"  skipped trial {row['trial']}: not an attempt of fsdp-autotune: {error}")
            return
        if attempt.stage == BASELINE:
            self._viewer.baseline = attempt.knobs.to_dict()  # as the driver shows them: with those a trainer leaves out
        if attempt.stage in SEARCHED and attempt.is_feasible:
            self._best = max(self._best or attempt, attempt, key=lambda one: one.tokens_per_s_per_rank or 0.0)
        self._viewer.trial_ended(attempt, self._best)

    def _orders(self) -> Iterator[TrialSpec]:
        """Of trials that have begun and have no row yet, each once."""
        ended = {name.split("-attempt-")[0] for name in self._seen} | {f"trial-{trial:04d}" for trial in self._ended}
        for path in sorted((self.run / "logs").glob("trial-*/spec.json")):
            name = path.parent.name
            if name in ended or name in self._started:
                continue
            with contextlib.suppress(ValueError, TypeError, KeyError, OSError):  # not ours, or gone again
                spec = TrialSpec.from_json(path.read_text(encoding="utf-8"))
                self._started.add(name)
                yield spec


def follow(run: Path, viewer: Viewer, wait: bool = False, pause: Callable[[float], None] = time.sleep) -> bool:
    """Shows a run until it ends.

    Args:
        run: absolute.
        wait: for a run that has not begun.
        pause: between two looks, seconds.

    Returns:
        Whether the run came to its end; False: its driver is gone, and has written no result.

    Raises:
        UserError: no run there, and none to wait for.
    """
    if not has_driver(run) and not (run / "job.yaml").exists():
        if not wait:
            raise UserError(
                f"{run}: no run there",
                "give the folder of a run (its job's `output`); with --wait, watch waits for it to begin",
            )
        viewer.message(f"  waiting for a run in {run}")
        while not has_driver(run):
            pause(POLL_S)
    follower = Follower(run, viewer)
    while True:
        driven = has_driver(run)  # before the look: what a driver that has ended by now wrote is seen by it
        follower.look()
        if not driven:
            return is_settled(run)
        pause(POLL_S)
