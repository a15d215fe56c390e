"""Jobs that can come to nothing: told before more is spent on them. Over modelled trials."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.best import read_best
from autotune.errors import NothingFitsError, UserError
from autotune.history import History
from autotune.run import Run
from tests.modelled import ModelledRunner, Silent
from tests.unit.conftest import make_job
from trials.outcome import Outcome
from trials.record import TrialSpec

SPACE = {"activation_checkpointing": ["none", "selective_op", "full"]}


def out_of_memory(spec: TrialSpec) -> Any:
    return Outcome.OOM_DEVICE, "out of memory in build: DefaultCPUAllocator: can't allocate memory"


def only_the_baseline_fits(spec: TrialSpec) -> Any:
    assert spec.knobs is not None
    return 100.0 if spec.knobs.activation_checkpointing == "full" else out_of_memory(spec)


class HalfAMinuteEach:
    """The clock of a run in which each trial, and the survey, takes 30 s."""

    def __init__(self, runner: ModelledRunner) -> None:
        self._runner = runner

    def monotonic(self) -> float:
        return 30.0 * len(self._runner.specs)

    def time(self) -> float:
        return 1e9 + self.monotonic()


def run(
    out: Path, behave: Callable[[TrialSpec], Any] = lambda _: 100.0, resume: bool = False, **job: Any
) -> ModelledRunner:
    (out / "logs").mkdir(exist_ok=True)
    runner = ModelledRunner(behave)
    runner.clock = HalfAMinuteEach(runner)
    asked = {"space": SPACE, "measure": {"rounds": 3}} | job
    Run(make_job(**asked), out, runner, Silent(), resume).go()
    return runner


@pytest.mark.parametrize("space", [{}, {"activation_checkpointing": ["full"]}, {"micro_batch_size": [1]}])
def test_a_space_of_the_baseline_alone_is_nothing_to_tune(tmp_path: Path, space: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="space: no config in it differs from the baseline") as refused:
        run(tmp_path, space=space)
    assert "autotune measure" in str(refused.value)
    assert History(tmp_path / "history").rows() == ([], [])


def test_a_space_without_the_baseline_can_be_searched(tmp_path: Path) -> None:
    runner = run(tmp_path, space={"activation_checkpointing": ["none"]})
    assert sum(spec.stage == "explore" for spec in runner.specs) == 1


def test_a_budget_that_the_baseline_uses_up_is_told_and_can_be_raised(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"budget.minutes = 0.5 is used up: survey and baseline alone took 1 min"
    ) as refused:
        run(tmp_path, budget={"minutes": 0.5, "trials": 4})
    assert "the 4 trials of budget.trials take about 1 min 40 s more" in str(refused.value)
    assert [row["stage"] for row in History(tmp_path / "history").rows()[0]] == ["baseline"]
    goes_on = run(tmp_path, resume=True, budget={"minutes": 60.0, "trials": 4})
    assert "baseline" not in {spec.stage for spec in goes_on.specs}
    assert read_best(tmp_path)["complete"] is True


def test_a_budget_that_allows_one_trial_is_no_error(tmp_path: Path) -> None:
    runner = run(tmp_path, budget={"minutes": 1.1, "trials": 4})
    assert sum(spec.stage == "explore" for spec in runner.specs) == 1


def test_if_nothing_fits_at_all_the_run_says_what_the_states_alone_take(tmp_path: Path) -> None:
    with pytest.raises(NothingFitsError, match="even the config that takes least ran out of memory") as refused:
        run(tmp_path, out_of_memory, baseline={"micro_batch_size": 4, "activation_checkpointing": "none"})
    assert "23 MiB per rank" in str(refused.value), "16 bytes x 3 million / 2 ranks"
    rows, _ = History(tmp_path / "history").rows()
    assert [(row["stage"], row["outcome"]) for row in rows] == [("baseline", "oom_device")] * 2


def test_if_all_else_runs_out_of_memory_the_baseline_is_kept_and_the_verdict_says_why(tmp_path: Path) -> None:
    run(tmp_path, only_the_baseline_fits)
    best = read_best(tmp_path)
    assert best["verdict"] == "all that was tried beside the baseline ran out of memory: keep your baseline"
    assert best["settings"]["activation_checkpointing"] == "full"
    assert best["fallback"] is None
