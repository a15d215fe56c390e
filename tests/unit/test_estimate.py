"""What a study is said to take before it runs, beside what the simulated clock says that it took."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.estimate import BLOCK_SPREAD, Forecast, Gang, Guess, Stage, estimate, num_timed_steps, trial_s
from autotune.job import Job, MeasureSettings
from autotune.job_file import load_job
from autotune.outlook import make_outlook
from autotune.plan import make_plan
from autotune.preflight.closed_form import closed_form
from autotune.preflight.prediction import Prediction
from autotune.run import Run
from autotune.simulate.cluster import parse_cluster
from autotune.simulate.runner import SimulatedRunner, make_world
from autotune.survey import load_survey
from tests.modelled import ModelledRunner, Silent
from tests.unit.conftest import make_job
from trials.record import Knobs, TrialSpec

GPUS = "nodes=16 gpus=8 device='NVIDIA H100 80GB HBM3'"
FACTOR = 1.5


class Watching(Silent):
    """Keeps what was said to be left when each trial began."""

    def __init__(self, runner: SimulatedRunner) -> None:
        super().__init__()
        self.runner, self.left = runner, []

    left: list[tuple[str, float, float]]

    def trial_started(self, spec: TrialSpec, remaining_s: float | None) -> None:
        assert remaining_s is not None
        self.left.append((spec.stage, self.runner.clock.time(), remaining_s))


STUDIES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "a node": ("llama3-8b", GPUS, ()),
    "long accumulation": ("llama3-8b", GPUS, ("batch.global_batch_tokens=33554432", "measure.trial_timeout_s=3000")),
    "four at once": ("llama3-8b", GPUS, ("cluster.nodes_per_trial=2", "cluster.parallel_trials=4")),
    "compiled": ("llama3-8b", GPUS, ("space.compile=[true]", "baseline.compile=true", "measure.endurance=false")),
    "a limit of minutes": ("llama3-8b", GPUS, ("budget.trials=30", "budget.minutes=15")),
    "one GPU": ("one-gpu", "nodes=1 gpus=1 device='NVIDIA A100-SXM4-80GB'", ()),
    "tiny": (
        "quickstart",
        "nodes=1 gpus=2 device='NVIDIA A100-SXM4-80GB'",
        ("cluster.device=cuda", "cluster.memory_limit_gib=null"),
    ),
}


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_takes_what_was_said_before(name: str, tmp_path: Path) -> None:
    shipped, cluster, overrides = STUDIES[name]
    job = load_job(shipped, ("budget.trials=10", "budget.patience=0", "measure.rounds=3", *overrides))
    runner = SimulatedRunner(make_world(job, parse_cluster(f"{cluster} seed=11")))
    watching = Watching(runner)
    run = Run(job, tmp_path, runner, watching)
    run.go()
    began, ended = watching.left[0][1], runner.clock.time()
    said = run.outlook.estimate
    assert (ended - began) / FACTOR < said.seconds < (ended - began) * FACTOR
    assert watching.left[0][2] == pytest.approx(said.seconds)
    assert any(line.startswith("  estimate: about") and "simulated" in line for line in watching.messages)
    for stage, at, left_s in watching.left[len(watching.left) // 2 : -4]:  # what trials took has corrected it
        if stage != "endurance" and ended - at > 60:
            assert (ended - at) / FACTOR < left_s < (ended - at) * FACTOR, stage
    if cluster is GPUS:
        planned = make_plan(job).estimate()
        assert planned is not None
        assert planned.seconds == pytest.approx(said.seconds, rel=0.1), "the plan knows the same device by its name"


def test_a_search_with_patience_ends_between_the_fewest_and_the_most(tmp_path: Path) -> None:
    job = load_job("llama3-8b", ("budget.trials=20", "measure.rounds=3"))
    silent = Silent()
    run = Run(job, tmp_path, SimulatedRunner(make_world(job, parse_cluster(GPUS))), silent)
    explored = run.go().num_trials - 1
    stage = run.outlook.estimate.stages["explore"]
    assert (stage.fewest, stage.most) == (16, 20)
    assert stage.fewest <= explored <= stage.most
    why = "budget.trials = 20 is used up" if explored == stage.most else "no gain over 0.5% in the last"
    assert any(line.startswith(f"  the search ends: {why}") for line in silent.messages)


def gang(num_slots: int = 1) -> Gang:
    return Gang("cuda", 8, num_slots)


def knobs(micro: int = 1, accum: int = 8, **others: Any) -> Knobs:
    return Knobs(micro, accum, True, True, 10.0, 1, "full", 0, None, **others)


def seconds(stage: str, config: Knobs, step_s: float = 10.0, **measure: Any) -> float:
    return trial_s(MeasureSettings(**measure), stage, Guess(config, step_s), gang(), num_params=10**9)


def test_each_stage_is_charged_as_it_is_measured() -> None:
    whole, composed = seconds("round", knobs(accum=64)), seconds("explore", knobs(accum=64))
    assert whole > (3 + 8) * 10
    assert composed < whole / 2, "short steps of four micro-steps"
    assert seconds("explore", knobs(accum=8)) > whole - 20, "accumulation that is not long is run whole"
    assert seconds("endurance", knobs()) > 100 * 10
    assert seconds("endurance", knobs(), endurance_steps=10) < seconds("round", knobs()) + 100
    assert seconds("finalist", knobs()) > seconds("round", knobs()) + 10, "the profile"
    assert seconds("round", knobs(compile=True)) > seconds("round", knobs()) + 30
    deep = Knobs(1, 8, True, True, 10.0, 1, "full", 8, 16)
    assert seconds("round", deep) > seconds("round", knobs()) + 250, "three times its queue, as far as its time goes"


def test_timing_is_taken_to_end_in_its_time() -> None:
    assert seconds("round", knobs(), step_s=50.0, trial_timeout_s=300) == pytest.approx(20 + (1.5 + 3) * 50 + 8 * 50), (
        "the steps that are asked for come first"
    )
    assert seconds("endurance", knobs(), trial_timeout_s=60) < 60 * (1 + 100 / 40)


@pytest.mark.parametrize(
    ("step_s", "rel_ci", "expected"), [(2.0, 0.5, 8), (2.0, 1e-4, 40), (0.1, 0.5, 15), (1e-6, 0.5, 30)]
)
def test_the_number_of_timed_steps_follows_the_blocks(step_s: float, rel_ci: float, expected: int) -> None:
    assert num_timed_steps(MeasureSettings(rel_ci=rel_ci), step_s, 0, BLOCK_SPREAD["cuda"]) == expected


def study(job: Job, num_slots: int = 1, num_configs: int = 1000) -> dict[str, Stage]:
    return estimate(job, gang(num_slots), Guess(knobs(), 1.0), [], 10**9, num_configs).stages


def test_budgets_bound_the_exploration() -> None:
    free = study(make_job(budget={"trials": 40}))["explore"]
    assert (free.fewest, free.most) == (16, 40)
    assert study(make_job(budget={"trials": 40, "patience": 30}))["explore"].fewest == 30
    assert study(make_job(budget={"trials": 40, "patience": 0}))["explore"].fewest == 40
    assert study(make_job(budget={"trials": 40}), num_configs=5)["explore"].most == 4, "all but the baseline"
    minutes = study(make_job(budget={"trials": 4000, "minutes": 30}))["explore"]
    assert 1800 - 120 < minutes.most * minutes.trial_s < 1800 + 60
    hours = study(make_job(budget={"trials": 4000, "gpu_hours": 8}), num_slots=2)["explore"]
    assert 1800 - 120 < hours.most * hours.trial_s / 2 < 1800 + 60, "8 GPU-hours of 2 x 8 ranks"


def test_a_forecast_counts_down_and_learns() -> None:
    forecast = Forecast({"explore": Stage(8, 8, 60.0, at_once=4), "round": Stage(2, 2, 100.0)})
    assert forecast.left_s() == pytest.approx(2 * 60 + 200)
    forecast.learn("explore", 90.0)
    forecast.count("explore")
    assert forecast.left_s() == pytest.approx(1.5 * (1.75 * 60 + 200))
    forecast.end("explore")
    for _ in range(3):
        forecast.count("round")
    assert forecast.left_s() == 0
    rough = Forecast({"measure": Stage(3, 3, 1.0)}, is_rough=True)
    assert rough.left_s() is None
    rough.learn("measure", 7.0)
    assert rough.left_s() == pytest.approx(21)


class Failing:
    def predict(self, _: Knobs) -> Prediction | None:
        raise ZeroDivisionError


def test_without_a_prediction_half_the_peak_is_assumed(tmp_path: Path) -> None:
    job = load_job("llama3-8b", ("budget.trials=1", "measure.rounds=3", "measure.num_finalists=1"))
    runner = SimulatedRunner(make_world(job, parse_cluster(GPUS)))
    Run(job, tmp_path, runner, Silent()).go()
    outlook = make_outlook(load_survey(job, runner, tmp_path), 1, Failing())
    assert outlook.estimate.baseline_step_s == pytest.approx(7.7, rel=0.1)
    (line,) = outlook.describe([])
    assert "assuming half the peak" in line


def test_on_a_busy_cpu_steps_are_taken_to_take_longer_and_that_is_said(tmp_path: Path) -> None:
    job = make_job()
    runner = ModelledRunner(lambda _: 100.0)
    (tmp_path / "logs").mkdir()
    Run(job, tmp_path, runner, Silent()).go()
    survey = load_survey(job, runner, tmp_path)
    predictor = closed_form(job, survey.shape, "cpu", survey.device_name, 2)
    alone, busy = (make_outlook(replace(survey, cpu_share=share), 1, predictor) for share in (1.0, 0.5))
    assert busy.estimate.baseline_step_s == pytest.approx(2 * alone.estimate.baseline_step_s)
    assert len(alone.describe([])) == 1
    assert "the ranks had 50% of theirs" in busy.describe([])[1]


def test_what_is_done_is_left_out_when_a_run_goes_on(tmp_path: Path) -> None:
    job = load_job("llama3-8b", ("budget.trials=2", "measure.rounds=3", "measure.num_finalists=1"))
    runner = SimulatedRunner(make_world(job, parse_cluster(GPUS)))
    run = Run(job, tmp_path, runner, Silent())
    run.go()
    assert "for 12 runs of a trial" in run.outlook.describe([])[0]
    assert "for 9 runs of a trial" in run.outlook.describe(["baseline", "explore", "explore"])[0]


def test_a_baseline_that_cannot_end_in_time_is_said_by_plan_and_run(tmp_path: Path) -> None:
    slow = ("batch.global_batch_tokens=33554432", "budget.trials=1")
    job = load_job("llama3-8b", slow)
    planned = make_plan(job).estimate()
    assert planned is not None
    assert planned.longest_s > job.measure.trial_timeout_s
