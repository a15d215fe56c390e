"""The whole of it, in the order in which the page tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from autotune.cost import Assumptions, Cost, training_cost
from autotune.errors import UserError
from autotune.loaded import LoadedRun
from autotune.report.facts.configs import Config, Export, configs, exports
from autotune.report.facts.environment import Environment, environment, not_measured
from autotune.report.facts.failures import Failure, failures
from autotune.report.facts.headline import Headline, headline
from autotune.report.facts.knobs import Importance, Slice, importance, slices
from autotune.report.facts.predictions import Predictions, predictions
from autotune.report.facts.progress import Progress, progress
from autotune.report.facts.steps import RankTimes, StepParts, rank_times, step_parts
from autotune.report.facts.trials import Trial, pareto_front, trials
from autotune.scaling.points import Scaling
from autotune.scaling.predicted import scaling_of
from autotune.waterfall.steps import Waterfall, waterfall

SUMMARY_VERSION = 1


@dataclass(frozen=True)
class Summary:
    """What summary.json holds."""

    summary_version: int
    run: str
    """Name of its folder."""
    headline: Headline
    configs: list[Config]
    """Baseline, best (unless the baseline is kept) and fallback, as far as there are."""
    exports: list[Export]
    """The best config in each trainer's own format."""
    waterfall: Waterfall | None
    """Null: none was measured (`autotune waterfall RUN`)."""
    trials: list[Trial]
    pareto_trials: list[int]
    """Trials that fit, to each of which no other is both faster and smaller; by memory."""
    progress: list[Progress]
    step_parts: list[StepParts]
    importance: Importance
    slices: list[Slice]
    predictions: Predictions
    rank_times: list[RankTimes]
    failures: list[Failure]
    scaling: Scaling | None
    """Null: none was measured (`autotune scale RUN`)."""
    cost: Cost | None
    """Null: `autotune report` was not told for how many tokens."""
    environment: Environment
    not_measured: list[str]
    unreadable: list[str]
    """Files and rows of the folder that could not be read, or are of another study."""

    def to_json(self) -> str:
        """What is no number in JSON (NaN, the infinities) is null."""
        return TypeAdapter(Summary).dump_json(self).decode()


def summarise(run: LoadedRun, asked: Assumptions | None = None) -> Summary:
    """All facts of a run.

    Args:
        asked: what the cost of training is reckoned for; None: no cost.

    Raises:
        UserError: a cost that cannot be reckoned.
    """
    told = trials(run)
    chosen = configs(run)
    rows = [attempt.row for attempt in run.attempts]
    measured = _waterfall(run, rows)
    points = scaling_of(run.folder, run.job, rows)
    return Summary(
        summary_version=SUMMARY_VERSION,
        run=run.folder.absolute().name,
        headline=headline(run),
        configs=chosen,
        exports=exports(run),
        waterfall=measured,
        trials=told,
        pareto_trials=pareto_front(told),
        progress=progress(run),
        step_parts=step_parts(run),
        importance=importance(told),
        slices=slices(told),
        predictions=predictions(told),
        rank_times=rank_times(run),
        failures=failures(run),
        scaling=points,
        cost=_cost(run, rows, asked),
        environment=environment(run),
        not_measured=not_measured(run, has_waterfall=measured is not None, has_scaling=points is not None),
        unreadable=run.unreadable,
    )


def _waterfall(run: LoadedRun, rows: list[dict[str, Any]]) -> Waterfall | None:
    if run.best is None:
        return None
    return waterfall(rows, run.best["baseline"]["settings"], run.best["settings"])


def _cost(run: LoadedRun, rows: list[dict[str, Any]], asked: Assumptions | None) -> Cost | None:
    if asked is None:
        return None
    if run.best is None:
        raise UserError(f"{run.folder}: no config has been measured and fitted: no cost", "leave out --tokens")
    try:
        return training_cost(run.best, rows, asked)
    except ValueError as error:
        raise UserError(str(error), "`autotune report --help` says what each option takes") from error
