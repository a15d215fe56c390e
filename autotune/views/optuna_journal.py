"""The search of a run as an Optuna journal, for optuna-dashboard.

It shows what the search was told: baseline and exploration, with memory as a constraint.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from autotune.history import Told, to_nobody
from autotune.loaded import load
from autotune.rows import Attempt
from autotune.search.observed import CONSTRAINT, OUTCOME
from autotune.stages import BASELINE, SIDE_BY_SIDE
from autotune.waterfall.flat import DERIVED, flat
from trials.files import write_whole
from trials.outcome import OUT_OF_MEMORY, Outcome

FILE_NAME = "optuna.journal"
DASHBOARDS_CONSTRAINTS = "constraints"
"""The system attribute that optuna-dashboard (0.21) reads. Optuna 5 keeps each constraint under a key of its own, which
the dashboard does not know: without it, all trials would be shown as feasible."""
STUDIED = (BASELINE, SIDE_BY_SIDE)


def write_journal(run: Path, path: Path, told: Told = to_nobody) -> list[str]:
    """Writes the journal, in place of an earlier one.

    Args:
        told: how far the reading of the history is.

    Returns:
        A line on each file and row of the history that says nothing.

    Raises:
        UserError: no run there, or one that has measured nothing.
    """
    loaded = load(run, told)
    trials = trials_of([attempt for attempt in loaded.attempts if attempt.stage in STUDIED])
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / FILE_NAME
        storage = JournalStorage(JournalFileBackend(str(whole)))
        verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            study = optuna.create_study(storage=storage, study_name=run.resolve().name, direction="maximize")
        finally:
            optuna.logging.set_verbosity(verbosity)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names(["tokens/s per rank"])
        study.add_trials(trials)
        write_whole(path, whole.read_bytes())
    return loaded.unreadable


def trials_of(attempts: Sequence[Attempt]) -> list[FrozenTrial]:
    """Each attempt as a trial; its params are the knobs that were not the same in all of them."""
    settings = [flat(one.knobs.to_dict()) | {DERIVED: one.knobs.grad_accum_steps} for one in attempts]
    values = {name: list(dict.fromkeys(one[name] for one in settings)) for name in (settings[0] if settings else {})}
    searched: dict[str, BaseDistribution] = {
        name: CategoricalDistribution(found) for name, found in values.items() if len(found) > 1
    }
    return [_trial(attempt, knobs, searched) for attempt, knobs in zip(attempts, settings, strict=True)]


def _trial(attempt: Attempt, knobs: dict[str, Any], searched: dict[str, BaseDistribution]) -> FrozenTrial:
    over = _over_limit(attempt)
    state = TrialState.FAIL
    if attempt.outcome is Outcome.OK:
        state = TrialState.COMPLETE
    elif over is not None:
        state = TrialState.PRUNED
    row = attempt.row
    trial = optuna.trial.create_trial(
        state=state,
        value=attempt.tokens_per_s_per_rank if state is TrialState.COMPLETE else None,
        params={name: knobs[name] for name in searched},
        distributions=searched,
        constraints={} if over is None else {CONSTRAINT: over},
        system_attrs={} if over is None else {DASHBOARDS_CONSTRAINTS: [over]},
        user_attrs={
            "trial": attempt.trial,
            "stage": attempt.stage,
            OUTCOME: attempt.outcome.value,
            "reason": attempt.reason,
            "mfu": row["mfu"],
            "memory_gib": attempt.memory_gib,
            "simulated": bool(row["simulated"]),
        },
    )
    trial.datetime_start, trial.datetime_complete = _local(row["started_at"]), _local(row["ended_at"])
    return trial


def _over_limit(attempt: Attempt) -> float | None:
    """Above 0 where it did not fit, in units of the usable memory; None: nothing is known of its memory."""
    if attempt.outcome is Outcome.OK or attempt.outcome in OUT_OF_MEMORY:
        return attempt.told.memory_over_limit
    return 1e-6 if attempt.outcome is Outcome.PREDICTED_OOM else None


def _local(at: datetime | None) -> datetime:
    """Optuna's times have no zone, and are local; a finished trial must have both."""
    return (at or datetime.fromtimestamp(0, UTC)).astimezone().replace(tzinfo=None)
