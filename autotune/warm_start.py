"""Earlier runs as prior data for the search: where good settings lay, and what ran out of memory.

What another run measured is no measurement of this one: it can be proposed first, and is then measured like any other.
Only ratios are taken over, each to its own run's baseline, and they count for less the more differs.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from autotune.errors import UserError
from autotune.history import History
from autotune.job_file import UNPARSABLE
from autotune.rows import Attempt, Study, attempt_from_row
from autotune.search.study import Told
from autotune.space import SearchSpace
from autotune.survey import FILE_NAME as STUDY_FILE
from trials.outcome import OUT_OF_MEMORY, Outcome
from trials.record import Knobs

DISCOUNT = 0.5
"""What each kind of difference leaves of a log ratio."""
SEARCHED = ("baseline", "explore", "finalist", "round")
"""Stages whose throughputs can be compared."""
OPTION, OTHER_MODEL_OPTION = "--warm-start", "--warm-start-other-model"
_KINDS: dict[str, tuple[str, ...]] = {
    "workload": ("workload_digest",),
    "versions": ("torch_version", "driver_version", "nccl_version"),
    "cluster": ("device_name", "world_size", "simulated"),
}
"""Columns by kind of difference; each kind counts once."""
_DECIDE_MEMORY = ("workload_digest", "device_name", "world_size", "simulated", "limit_gib")


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)


class _Model(_Part):
    num_params: int
    flops_per_token: float | None


class _Study(_Part):
    study_id: str
    model: _Model


class _JobModel(_Part):
    workload: str = "decoder"


class _Trainer(_Part):
    command: list[str]


class _Job(_Part):
    model: _JobModel = _JobModel()
    trainer: _Trainer | None = None


NOT_MEASURED = -1.0
"""Of a prior's memory over the limit: on other ranks, devices or models it says nothing about this run's."""


@dataclass(frozen=True)
class Prior:
    """A config of this space, as an earlier run found it."""

    knobs: Knobs
    ratio: float | None
    """Throughput over that run's own baseline, discounted towards 1; None: it ran out of memory."""
    memory_over_limit: float
    """By this run's limit."""

    def told(self, baseline_rate: float) -> Told:
        """In the units of this run's trials."""
        if self.ratio is None:
            return Told(Outcome.OOM_DEVICE, None, self.memory_over_limit)
        return Told(Outcome.OK, baseline_rate * self.ratio, self.memory_over_limit)


@dataclass(frozen=True)
class Priors:
    """What one earlier run has to say."""

    run: Path
    priors: list[Prior]
    differences: list[str]
    weight: float
    """Of its log ratios: 1 where nothing differs."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "run": str(self.run),
            "num_configs": len(self.priors),
            "weight": self.weight,
            "differences": self.differences,
        }

    def describe(self) -> str:
        differs = f", at weight {self.weight:g}: {'; '.join(self.differences)}" if self.differences else ""
        return f"  warm start: {len(self.priors)} configs of this space from {self.run}{differs}"


class WarmStart:
    """The history of one earlier run, seen to be of this run's model.

    Args:
        run: its folder.
        study: this run's.
        other_model: take it although the model is another.

    Raises:
        UserError: no history there; it is not of fsdp-autotune; it is of another model; its baseline never ran.
    """

    def __init__(self, run: Path, study: Study, *, other_model: bool = False) -> None:
        self.run, self._study = run, study
        self._attempts = self._read()
        self._survey: _Study = _checked(_Study, run / STUDY_FILE)
        self._model_differences = self._compare_models()
        if self._model_differences and not other_model:
            raise UserError(
                f"{OPTION} {run}: it measured another model: {'; '.join(self._model_differences)}",
                f"{OTHER_MODEL_OPTION} takes its settings all the same, for half as much",
            )
        self._baseline = self._find_baseline()

    @property
    def study_id(self) -> str:
        return self._survey.study_id

    def _read(self) -> list[Attempt]:
        refuse_without_history(self.run)
        rows, skipped = History(self.run / "history").rows()
        attempts = []
        for row in rows:
            try:
                attempts.append(attempt_from_row(row, self._study.limits))
            except (ValueError, TypeError) as error:
                skipped.append(f"trial {row['trial']}: {error}")
        if not attempts:
            why = skipped[0] if skipped else "it is empty"
            raise UserError(f"{OPTION} {self.run}: no attempt in its history can be read: {why}")
        return [attempt for attempt in attempts if attempt.stage in SEARCHED]

    def _compare_models(self) -> list[str]:
        job, model = _checked(_Job, self.run / "job.yaml"), self._survey.model
        own = self._study.job.trainer
        there = {
            "workload": " ".join(job.trainer.command) if job.trainer else job.model.workload,
            "parameters": model.num_params,
            "FLOPs per token": model.flops_per_token,
        }
        here = {
            "workload": " ".join(own.command) if own else self._study.job.workload,
            "parameters": self._study.model.num_params,
            "FLOPs per token": self._study.model.flops_per_token,
        }
        return [
            f"{name} {_shown(there[name])}, here {_shown(here[name])}" for name in here if there[name] != here[name]
        ]

    def _find_baseline(self) -> Attempt:
        for attempt in self._attempts:
            if attempt.stage == "baseline" and attempt.outcome is Outcome.OK:
                return attempt
        raise UserError(
            f"{OPTION} {self.run}: its baseline never ran to the end, so its throughputs compare with nothing",
            "leave it out",
        )

    def priors(self, space: SearchSpace, reference: Attempt) -> Priors:
        """Its configs that are in `space`.

        Args:
            reference: this run's baseline, which shows what it runs on.
        """
        differences = [f"model: {text}" for text in self._model_differences]
        weight = DISCOUNT if differences else 1.0
        there, here = self._baseline.row, reference.row
        for kind, columns in _KINDS.items():
            changed = [name for name in columns if there.get(name) != here.get(name)]
            # Digests say nothing to people.
            texts = [f"{name} {there.get(name)} -> {here.get(name)}" for name in changed if name != "workload_digest"]
            if changed:
                weight *= DISCOUNT
                differences.append(f"{kind}: {', '.join(texts) or 'data, batch, precision or optimizer'}")
        same_memory = not self._model_differences and all(there.get(n) == here.get(n) for n in _DECIDE_MEMORY)
        rates = _mean_rates(self._attempts, lambda knobs: _spelled(knobs, space))
        # Where that run measured this one's baseline, whatever its own was, ratios to it are the ones meant.
        own_rate = _mean_rates(self._attempts, lambda knobs: knobs)[self._baseline.knobs]
        baseline_rate = rates.get(reference.knobs, own_rate)
        found: dict[Knobs, Prior] = {}
        for attempt in self._attempts:
            knobs = _spelled(attempt.knobs, space)
            if knobs is None or knobs in found or not space.contains(knobs):
                continue
            over, full = attempt.told.memory_over_limit, attempt.told.allocator_was_full
            if attempt.outcome is Outcome.OK and not full:  # beginning anew takes an allocator time of its own
                ratio = (rates[knobs] / baseline_rate) ** weight
                found[knobs] = Prior(knobs, ratio, over if same_memory else NOT_MEASURED)
            elif attempt.outcome in OUT_OF_MEMORY and same_memory:
                found[knobs] = Prior(knobs, None, over)
        return Priors(self.run, list(found.values()), differences, weight)


def refuse_without_history(run: Path) -> None:
    """Refuses a folder that cannot be a warm start.

    Raises:
        UserError: no run in `run` that has measured anything.
    """
    why = ""
    try:
        has_history = any((run / "history").glob("*.parquet"))
    except (OSError, ValueError) as error:  # a name that no folder can have
        has_history, why = False, f": {getattr(error, 'strerror', None) or error}"
    if not has_history:
        raise UserError(
            f"{OPTION} {run}: no history there{why}",
            "give the folder of a run (its job's `output`) that has measured something",
        )


def _checked(kind: Any, path: Path) -> Any:
    try:
        return kind.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (*UNPARSABLE, ValidationError, OSError) as error:
        raise UserError(f"{OPTION} {path.parent}: {path.name}: {error}", "is it the folder of a run?") from error


def _spelled(knobs: Knobs, space: SearchSpace) -> Knobs | None:
    """The config as this run would spell it, whose accumulation may be another; None: its micro-batch does not divide.

    Ratios to a baseline are of one run, and so of one global batch: accumulation cancels in them, but for what both
    pay once a step.
    """
    if knobs.micro_batch_size not in space.pairs or not space.knows(knobs.custom):
        return None
    return space.canonical(replace(knobs, grad_accum_steps=space.accumulation(knobs)))


def _mean_rates(attempts: Sequence[Attempt], spell: Callable[[Knobs], Knobs | None]) -> dict[Knobs | None, float]:
    """Geometric mean of each config's throughputs, in tokens/s per rank, by its spelling.

    Of those that compare best alone: whole steps before those put together from parts, whose error is of another kind
    than noise, and both before those of an allocator that had to begin anew.
    """
    logs: dict[Knobs | None, dict[tuple[bool, bool], list[float]]] = defaultdict(lambda: defaultdict(list))
    for attempt in attempts:
        if attempt.tokens_per_s_per_rank is not None:
            kind = (attempt.told.allocator_was_full, attempt.is_composed)
            logs[spell(attempt.knobs)][kind].append(math.log(attempt.tokens_per_s_per_rank))
    return {knobs: math.exp(statistics.fmean(kinds[min(kinds)])) for knobs, kinds in logs.items()}


def _shown(figure: Any) -> str:
    return f"{figure:,.10g}" if isinstance(figure, int | float) else str(figure)
