"""A whole study of a user's own command, over modelled trials: history, best.yaml, screen, resumption, a wrong one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autotune.best import read_best, to_exportable
from autotune.confirm.measuring import Found, confirm
from autotune.confirm.tuned import read_tuned
from autotune.errors import UserError
from autotune.folder import prepare_folder
from autotune.history import History
from autotune.job import Job
from autotune.loaded import load
from autotune.report.facts import summarise
from autotune.report.page.figures import make_figures
from autotune.report.tables import print_best, print_trials
from autotune.run import Run, RunResult
from autotune.simulate.cluster import parse_cluster
from autotune.simulate.runner import make_world
from autotune.trainer.counted import CONVENTION
from autotune.waterfall.measuring import measure_waterfall
from tests.modelled import ModelledRunner, Silent
from tests.unit.test_trainer_job import COMMAND, trainer_job
from trials.outcome import Outcome
from trials.record import Knobs, RankReport, TrialSpec
from trials.survey import NOT_DECLARED

NUM_PARAMS = 1_000_000


class Trainers(ModelledRunner):
    """Reports as a command's ranks do."""

    def _report(self, spec: TrialSpec, rank: int, rate: float) -> RankReport:
        report = super()._report(spec, rank, rate)
        if spec.knobs is not None:
            report.tokens_per_step, report.num_trainable_params, report.losses = 1000.0, NUM_PARAMS, []
            report.block_times_s = report.own_step_times_s = [1000.0 / rate] * 3
        return report


def job(**sections: Any) -> Job:
    trainer = {"command": [*COMMAND, "{float8}"], "custom": {"float8": ["off", "rowwise"]}}
    return trainer_job(
        trainer, batch={"global_batch_size": 4, "target_world_size": 2}, space={"micro_batch_size": [1, 2]}, **sections
    )


def rate(spec: TrialSpec) -> float:
    assert spec.knobs is not None
    return 100.0 * spec.knobs.micro_batch_size * (2 if dict(spec.knobs.custom or ())["float8"] == "rowwise" else 1)


def study(folder: Path, behave: Any = rate, resume: bool = False) -> tuple[RunResult, Trainers]:
    (folder / "logs").mkdir(exist_ok=True)
    runner = Trainers(behave, NOT_DECLARED | {"data": "your trainer's own", "cpus_allowed": 2})
    return Run(job(), folder, runner, Silent(), resume=resume).go(), runner


def test_a_report_of_it_marks_its_best_and_leaves_out_what_the_command_decides(tmp_path: Path) -> None:
    prepare_folder(tmp_path, job())
    study(tmp_path)
    told = summarise(load(tmp_path))
    assert all("activation_checkpointing" not in one.settings for one in told.trials)
    assert [one.knob for one in told.slices] == ["micro_batch_size", "custom.float8"]
    (best,) = (trace for trace in make_figures(told)["speed-and-memory"]["data"] if trace["name"].startswith("best"))
    handed = {name: value for name, value in told.configs[1].settings.items() if value is not None}
    assert len(best["customdata"]) == sum(one.settings == handed for one in told.trials)


def test_its_waterfall_is_in_the_report(tmp_path: Path) -> None:
    """best.yaml has null for what the command decides; the waterfall is one of the same configs all the same."""
    prepare_folder(tmp_path, job())
    result, runner = study(tmp_path)
    measured = measure_waterfall(job(), tmp_path, result.baseline.knobs, result.best.knobs, runner, Silent(), repeats=2)
    told = summarise(load(tmp_path)).waterfall
    assert told == measured
    assert [one.change for one in told.alone] == ["micro_batch_size", "custom.float8"]


def test_a_study_of_a_command_ends_with_its_own_knobs(tmp_path: Path) -> None:
    result, runner = study(tmp_path)
    assert (result.best.knobs.micro_batch_size, result.best.knobs.custom) == (2, (("float8", "rowwise"),))
    best = read_best(tmp_path)
    assert best["settings"]["custom"] == {"float8": "rowwise"}
    assert best["baseline"]["settings"]["custom"] == {"float8": "off"}
    assert best["settings"]["activation_checkpointing"] is None
    assert best["endurance"]["status"] == "passed"
    assert best["conventions"]["flops_per_token"] == 6 * NUM_PARAMS
    assert best["conventions"]["flops_convention"] == CONVENTION
    rows, skipped = History(tmp_path / "history").rows()
    assert skipped == []
    assert {tuple(row["knobs"]["custom"].items()) for row in rows} == {(("float8", v),) for v in ("off", "rowwise")}
    assert all(row["knobs"]["compile"] is None and row["hfu"] is None for row in rows)
    assert rows[0]["mfu"] == pytest.approx(100.0 * 6 * NUM_PARAMS / (0.1 * 1e12))
    assert all(spec.trainer is not None and spec.checkpoint_dir is None for spec in runner.specs if spec.knobs)
    (longer,) = (spec.trainer for spec in runner.specs if spec.stage == "endurance")
    assert longer["timed_steps"] == 100  # type: ignore[index]


def test_the_screen_shows_what_was_handed_over_and_nothing_else(tmp_path: Path) -> None:
    study(tmp_path)
    console = Console(width=200)
    with console.capture() as capture:
        print_best(console, read_best(tmp_path))
        print_trials(console, History(tmp_path / "history").rows()[0])
    shown = capture.get()
    assert "float8 rowwise" in shown
    assert "steps of your command" in shown
    assert "activation_checkpointing" not in shown


def test_a_finished_study_is_resumed_without_a_trial(tmp_path: Path) -> None:
    study(tmp_path)
    again, runner = study(tmp_path, resume=True)
    assert [spec for spec in runner.specs if spec.knobs is not None] == []
    assert again.best.knobs.custom == (("float8", "rowwise"),)


@pytest.mark.parametrize("stage", ["baseline", "explore"])
def test_the_first_trial_that_does_not_do_what_was_asked_ends_the_study(tmp_path: Path, stage: str) -> None:
    def behave(spec: TrialSpec) -> Any:
        return (Outcome.MISAPPLIED, "engine: asked fsdp2, applied none") if spec.stage == stage else rate(spec)

    with pytest.raises(UserError, match="engine: asked fsdp2, applied none"):
        study(tmp_path, behave)
    rows, _ = History(tmp_path / "history").rows()
    assert [row["outcome"] for row in rows].count("misapplied") == 1


def test_a_declared_model_is_what_the_ranks_must_train(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    runner = Trainers(rate, {"num_params": 4321})
    Run(job(model={"preset": "tiny", "seq_len": 256}), tmp_path, runner, Silent()).go()
    orders = [spec.trainer for spec in runner.specs if spec.trainer is not None]
    assert {order["expect"]["num_parameters"] for order in orders} == {4321}


def test_a_baseline_that_is_too_short_is_the_users_to_mend(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ended after 3 optimizer steps"):
        study(tmp_path, lambda _: (Outcome.TOO_SHORT, "the script ended after 3 optimizer steps"))


def test_what_was_not_handed_over_is_no_advice_in_an_export(tmp_path: Path) -> None:
    study(tmp_path)
    best = to_exportable(read_best(tmp_path))
    assert isinstance(best.knobs, Knobs)
    assert any("Left to your own trainer" in line and "activation_checkpointing" in line for line in best.evidence)


def test_a_tuned_command_is_confirmed_on_other_ranks(tmp_path: Path) -> None:
    out = tmp_path / "run"
    prepare_folder(out, job())
    study(out)
    tuned = read_tuned(out, 1, ("measure.rounds=3",), None)
    runner = Trainers(rate, NOT_DECLARED | {"data": "your trainer's own", "cpus_allowed": 2})
    runner.world_size = 1
    notes: list[Found] = []
    confirm(tuned, runner, Silent(), out / "logs" / "confirm", 1e6, notes.append)
    decision = notes[-1].decision
    assert decision is not None and decision["held"] == "best"
    assert decision["settings"]["custom"] == {"float8": "rowwise"}
    assert {(spec.world_size, spec.knobs.grad_accum_steps) for spec in runner.specs if spec.knobs} == {(1, 2), (1, 4)}


def test_ranks_that_share_a_model_are_one_data_parallel_rank(tmp_path: Path) -> None:
    trainer = {"command": [*COMMAND, "{tp}"], "custom": {"tp": [2, 1]}}
    batch = {"global_batch_size": 16, "target_world_size": 4}
    parallel = trainer_job(trainer, batch=batch, space={"micro_batch_size": [2]}, baseline={"micro_batch_size": 2})
    prepare_folder(tmp_path / "run", parallel)
    runner = Trainers(lambda _: 100.0, NOT_DECLARED | {"data": "your trainer's own", "cpus_allowed": 2})
    Run(parallel, tmp_path / "run", runner, Silent()).go()
    tuned = read_tuned(tmp_path / "run", 4, (), None)
    accumulation = {(dict(k.custom or ())["tp"], k.grad_accum_steps) for k in tuned.contenders.values()}
    assert accumulation == {("2", 4), ("1", 2)}
    best = to_exportable(read_best(tmp_path / "run"))
    assert best.global_batch_size == 16
    with pytest.raises(UserError, match=r"divides over: 2, 4, 8$"):
        read_tuned(tmp_path / "run", 3, (), None)


def test_a_modelled_cluster_runs_no_command() -> None:
    cluster = parse_cluster("nodes=2 gpus=8 device='NVIDIA H100 80GB HBM3'")
    with pytest.raises(UserError, match="cannot run your command"):
        make_world(job(), cluster)
