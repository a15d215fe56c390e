"""Trials side by side: what the driver does while some are under way. Over modelled trials."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from autotune import run as run_module
from autotune.history import History
from autotune.preflight.prediction import Prediction
from autotune.run import Run
from tests.modelled import ModelledRunner, Silent
from tests.unit.conftest import make_job
from trials.outcome import Outcome
from trials.record import Knobs, TrialSpec

LIMIT_GIB = 8.0
PREDICTED_GIB = {("full", 1): 2.0, ("none", 1): 6.0, ("none", 2): 16.0}
"""Without checkpointing, twice to three times too much."""
TRUE_GIB = {("full", 1): 2.0, ("none", 1): 2.5, ("none", 2): 4.0}


def kind(knobs: Knobs) -> tuple[str, int]:
    return knobs.activation_checkpointing, knobs.micro_batch_size


class Wrong:
    """Sure that what has never run does not fit."""

    def predict(self, knobs: Knobs) -> Prediction:
        size = PREDICTED_GIB.get(kind(knobs), 3.0)
        return Prediction({}, size, size, {}, 1.0)


class Slots(ModelledRunner):
    """As many trials at once as there are slots; the first that began ends first."""

    def __init__(self, behave: Any, num_slots: int) -> None:
        super().__init__(behave, reserved_gib=lambda knobs: TRUE_GIB.get(kind(knobs), 3.0))
        self.num_slots = num_slots

    def is_free(self) -> bool:
        return len(self._ended) < self.num_slots

    def next_ended(self) -> Any:
        return self._ended.pop(0)


def explored(out: Path, num_slots: int, behave: Any = lambda _: 100.0) -> list[tuple[str, int]]:
    (out / "logs").mkdir(parents=True)
    job = make_job(
        cluster={"ranks_per_node": 2, "device": "cpu", "memory_limit_gib": LIMIT_GIB},
        space={"micro_batch_size": [1, 2], "activation_checkpointing": ["none"]},
        sampler="residual",
        measure={"rounds": 3},
    )
    runner = Slots(behave, num_slots)
    Run(job, out, runner, Silent()).go()
    return [kind(spec.knobs) for spec in runner.specs if spec.stage == "explore" and spec.knobs is not None]


@pytest.mark.parametrize("num_slots", [1, 4])
def test_what_a_trial_under_way_shows_to_fit_is_tried_after_it(
    num_slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "closed_form", lambda *_: Wrong())
    assert explored(tmp_path / "run", num_slots) == [("none", 1), ("none", 2)]


def test_the_search_ends_when_nothing_is_under_way_and_nothing_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "closed_form", lambda *_: Wrong())

    def none_fits(spec: TrialSpec) -> Any:
        assert spec.knobs is not None
        return 100.0 if kind(spec.knobs)[0] == "full" else (Outcome.OOM_DEVICE, "out of memory")

    assert explored(tmp_path / "run", 4, none_fits) == [("none", 1)]
    rows, _ = History(tmp_path / "run" / "history").rows()
    assert "predicted_oom" not in {row["outcome"] for row in rows if kind(Knobs.from_dict(row["knobs"])) == ("none", 1)}


class Interrupted(Slots):
    """Four slots, until so many trials have ended."""

    def __init__(self, num_ended: int) -> None:
        super().__init__(lambda spec: 100.0 + len(str(spec.knobs)) % 7, 4)
        self._left = num_ended

    def next_ended(self) -> Any:
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt
        return super().next_ended()


def go(out: Path, num_ended: int, resume: bool = False) -> list[Knobs]:
    (out / "logs").mkdir(parents=True, exist_ok=True)
    job = make_job(budget={"trials": 12}, measure={"rounds": 3, "endurance": False}, sampler="residual")
    runner = Interrupted(num_ended)
    with contextlib.suppress(KeyboardInterrupt):
        Run(job, out, runner, Silent(), resume).go()
    return [spec.knobs for spec in runner.specs if spec.stage == "explore" and spec.knobs is not None]


def test_a_run_interrupted_with_trials_under_way_knows_of_them_when_it_goes_on(tmp_path: Path) -> None:
    whole = go(tmp_path / "whole", 10**6)
    assert len(whole) == len(set(whole)) == 12
    num_ended = 6  # of them the baseline
    first = go(tmp_path / "run", num_ended)
    assert first == whole[: num_ended - 1 + 4]
    assert go(tmp_path / "run", 10**6, resume=True) == whole[num_ended - 1 :]
