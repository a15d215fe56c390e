"""Which knobs mattered, and what each of their values reached."""

from __future__ import annotations

import random
import statistics
import warnings
from dataclasses import dataclass
from typing import Any

from autotune.report.facts.trials import FOLLOW, RAN_OUT, Trial, comparable, shown
from autotune.stages import BASELINE, SIDE_BY_SIDE

MOST_RECKONED = 1000
"""Configs that the order of the knobs is reckoned from; of more, that many are drawn at random."""
LEAST_MEASURED = 8
"""Configs below which an order of the knobs would be an accident."""


@dataclass(frozen=True)
class Importance:
    """By optuna's PED-ANOVA: how much the values of the fastest trials differ from those of all trials."""

    evaluator: str
    shares: dict[str, float]
    """Knob -> share, which sum to 1; largest first."""
    num_measured: int
    """Configs that ran and fitted, and that it is reckoned from."""
    why_none: str
    """Empty if there are shares."""


@dataclass(frozen=True)
class SliceValue:
    value: str
    num_measured: int
    """Trials that fitted."""
    num_out_of_memory: int
    best_tokens_per_s_per_rank: float | None
    median_tokens_per_s_per_rank: float | None
    best_mfu: float | None


@dataclass(frozen=True)
class Slice:
    """One knob; its values were tried beside different settings of the others, which the search chose."""

    knob: str
    values: list[SliceValue]


def searched(told: list[Trial]) -> list[Trial]:
    """Baseline and explored configs: each once, and none is preferred."""
    return [one for one in comparable(told) if one.stage in (BASELINE, SIDE_BY_SIDE)]


def flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Knobs, those of the user's own with their names."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= {f"{name}.{own}": inner for own, inner in value.items()} if isinstance(value, dict) else {name: value}
    return found


def varied(told: list[Trial]) -> dict[str, list[Any]]:
    """Knobs that took more than one value, and their values in order."""
    values: dict[str, dict[Any, None]] = {}
    for one in told:
        for name, value in flat(one.settings).items():
            values.setdefault(name, {})[value] = None
    return {
        name: sorted(found, key=lambda value: (isinstance(value, str), value))
        for name, found in values.items()
        if len(found) > 1 and name not in FOLLOW
    }


def importance(told: list[Trial]) -> Importance:
    measured = [one for one in searched(told) if one.fits]
    if len(measured) > MOST_RECKONED:
        measured = random.Random(0).sample(measured, MOST_RECKONED)
    candidates = varied(measured)
    if len(measured) < LEAST_MEASURED or len(candidates) < 2:
        why = f"{len(measured)} configs that fitted, {len(candidates)} knobs that varied among them"
        return Importance("PED-ANOVA", {}, len(measured), f"too few to tell: {why}; {LEAST_MEASURED} and 2 are needed")
    shares = _ped_anova(measured, candidates)
    return Importance("PED-ANOVA", shares, len(measured), "" if shares else "the configs do not differ in throughput")


def _ped_anova(measured: list[Trial], candidates: dict[str, list[Any]]) -> dict[str, float]:
    import optuna
    from optuna.distributions import CategoricalDistribution

    # A knob that an engine has not is a value like another: importance needs the same knobs in all trials.
    choices: dict[str, tuple[Any, ...]] = {name: (*values, None) for name, values in candidates.items()}
    distributions = {name: CategoricalDistribution(values) for name, values in choices.items()}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize")
    study.add_trials(
        [
            optuna.trial.create_trial(
                params={name: settings.get(name) for name in choices},
                distributions=dict(distributions),
                value=one.tokens_per_s_per_rank,
            )
            for one, settings in ((one, flat(one.settings)) for one in measured)
        ]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def slices(told: list[Trial]) -> list[Slice]:
    """In the order of the knobs."""
    tried = searched(told)
    flattened = [(one, flat(one.settings)) for one in tried]
    found = []
    for name, values in varied(tried).items():
        by_value: dict[Any, list[Trial]] = {value: [] for value in values}
        for one, own in flattened:
            if name in own:
                by_value[own[name]].append(one)
        found.append(Slice(name, [_value(value, ones) for value, ones in by_value.items()]))
    return found


def _value(value: Any, ones: list[Trial]) -> SliceValue:
    fitting = [one for one in ones if one.fits]
    rates = [one.tokens_per_s_per_rank for one in fitting if one.tokens_per_s_per_rank is not None]
    return SliceValue(
        value=shown(value),
        num_measured=len(fitting),
        num_out_of_memory=sum(one.outcome in RAN_OUT for one in ones),
        best_tokens_per_s_per_rank=max(rates, default=None),
        median_tokens_per_s_per_rank=statistics.median(rates) if rates else None,
        best_mfu=max((one.mfu for one in fitting if one.mfu is not None), default=None),
    )
