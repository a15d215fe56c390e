"""What a confirmation measures, and which config holds: over modelled trials on the real run's number of ranks."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.best import note_confirmed, read_best
from autotune.confirm.measuring import Found, OtherModelError, confirm
from autotune.confirm.tuned import read_tuned
from autotune.errors import InfrastructureError, UserError
from autotune.folder import prepare_folder
from autotune.history import History
from autotune.run import Run
from tests.modelled import ModelledRunner, Silent
from tests.unit.conftest import make_job
from trials.outcome import Outcome
from trials.record import TrialSpec

RATES = {"full": 100.0, "every_2": 110.0, "none": 130.0}
OOM = (Outcome.OOM_DEVICE, "out of memory in backward: DefaultCPUAllocator")
LOST = (Outcome.NODE_LOST, "a node's agent died")
MODES = {"best": "none", "fallback": "every_2", "baseline": "full"}
"""Of activation checkpointing, by the role that a config has."""


def mode(spec: TrialSpec) -> str:
    assert spec.knobs is not None
    return spec.knobs.activation_checkpointing


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run: tuned on one rank, for two."""
    out = tmp_path_factory.mktemp("tuned") / "run"
    job = make_job(
        cluster={"ranks_per_node": 1, "device": "cpu", "memory_limit_gib": 0.25},
        space={"activation_checkpointing": list(RATES)},
        measure={"rounds": 3},
    )
    prepare_folder(out, job)
    memory = {"full": 0.1, "every_2": 0.11, "none": 0.15}
    runner = ModelledRunner(
        lambda spec: RATES[mode(spec)], reserved_gib=lambda knobs: memory[knobs.activation_checkpointing]
    )
    runner.world_size = 1
    Run(job, out, runner, Silent()).go()
    best = read_best(out)
    assert {role: best_mode(best, role) for role in MODES} == MODES
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def best_mode(best: dict[str, Any], role: str) -> str:
    settings = best["settings"] if role == "best" else best[role]["settings"]
    return str(settings["activation_checkpointing"])


def confirmed(
    run: Path,
    behave: Callable[[TrialSpec], Any] = lambda spec: RATES[mode(spec)],
    *,
    ranks: int | None = None,
    within_s: float = 1e6,
    clock: Any = None,
    reserved_gib: float = 0.1,
    model: dict[str, Any] | None = None,
    overrides: tuple[str, ...] = (),
) -> tuple[Found, ModelledRunner]:
    """What a confirmation of `run` on modelled ranks finds out."""
    tuned = read_tuned(run, ranks, overrides, None)
    runner = ModelledRunner(behave, model, reserved_gib=lambda _: reserved_gib)
    runner.world_size = tuned.world_size
    runner.clock = clock or runner.clock
    notes: list[Found] = []
    confirm(tuned, runner, Silent(), run / "logs" / "confirm", within_s, notes.append)
    return notes[-1], runner


def order(runner: ModelledRunner) -> list[str]:
    roles = {mode: role for role, mode in MODES.items()}
    return [roles[mode(spec)] for spec in runner.specs if spec.stage == "confirm"]


def held(found: Found) -> tuple[str, str]:
    assert found.decision is not None
    assert found.decision["settings"]["activation_checkpointing"] == MODES[found.decision["held"]]
    return found.decision["held"], found.decision["why"]


def files(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


# --- what is measured ---------------------------------------------------------------------------------------------


def test_all_run_in_the_first_round_and_then_the_best_in_pairs_with_the_baseline(run: Path) -> None:
    found, runner = confirmed(run)
    first, second, third = ["best", "baseline", "fallback"], ["baseline", "best"], ["best", "baseline"]
    assert order(runner) == [*first, *second, *third]
    assert held(found)[0] == "best"
    assert "+30.0 % tokens/s over the baseline" in held(found)[1]
    assert "3 paired rounds" in held(found)[1]
    assert not found.failed
    assert {spec.world_size for spec in runner.specs} == {2}


def test_rows_are_added_as_confirm_and_nothing_that_was_there_changes(run: Path) -> None:
    before, logs = files(run / "history"), {path.name for path in (run / "logs").iterdir()}
    texts = {name: (run / name).read_bytes() for name in ("job.yaml", "study.yaml", "best.yaml")}
    confirmed(run)
    confirmed(run)  # another time, on another allocation
    after = files(run / "history")
    assert before.items() <= after.items()
    rows, skipped = History(run / "history").rows()
    new = [row for row in rows if row["stage"] == "confirm"]
    assert skipped == []
    assert len(new) == 14
    assert len({row["trial"] for row in rows}) == len(rows), "each has a number of its own"
    assert {row["study_id"] for row in new} == {rows[0]["study_id"]}
    assert {row["world_size"] for row in new} == {2}
    assert {row["world_size"] for row in rows if row["stage"] != "confirm"} == {1}
    assert logs < {path.name for path in (run / "logs").iterdir()}
    assert texts == {name: (run / name).read_bytes() for name in texts}


def test_on_more_ranks_the_accumulation_makes_the_same_global_batch(run: Path) -> None:
    _, runner = confirmed(run, ranks=4)
    tuned = read_best(run)
    for spec in runner.specs:
        if spec.knobs is not None:
            assert spec.global_batch_size == tuned["training"]["global_batch_size"] == 16
            assert spec.knobs.micro_batch_size * spec.knobs.grad_accum_steps * 4 == 16


def test_the_timeouts_of_trials_never_go_beyond_the_time_given(run: Path) -> None:
    _, runner = confirmed(run, within_s=90.0)
    assert all(spec.process_group_timeout_s <= 90.0 for spec in runner.specs if spec.knobs is not None)


# --- which config holds -------------------------------------------------------------------------------------------


def test_if_the_best_runs_out_of_memory_there_the_fallback_is_measured_and_held(run: Path) -> None:
    found, runner = confirmed(run, lambda spec: OOM if mode(spec) == "none" else RATES[mode(spec)])
    assert order(runner) == ["best", "baseline", "fallback", "baseline", "fallback", "fallback", "baseline"]
    role, why = held(found)
    assert role == "fallback"
    assert "best: oom_device in trial" in why
    assert "+10.0 %" in why


def test_if_the_best_is_no_faster_there_and_the_fallback_is_not_either_the_baseline_is_kept(run: Path) -> None:
    found, runner = confirmed(run, lambda _: 100.0)
    assert order(runner).count("best") == 3
    assert order(runner).count("fallback") == 3
    role, why = held(found)
    assert role == "baseline"
    assert "no win beyond noise" in why


def test_a_best_that_fails_in_a_later_round_does_not_hold(run: Path) -> None:
    def behave(spec: TrialSpec) -> Any:
        return OOM if mode(spec) == "none" and spec.round == 1 else RATES[mode(spec)]

    assert held(confirmed(run, behave)[0])[0] == "fallback"


def test_where_the_baseline_does_not_run_what_runs_holds(run: Path) -> None:
    found, runner = confirmed(run, lambda spec: OOM if mode(spec) == "full" else RATES[mode(spec)])
    assert order(runner) == ["best", "baseline", "fallback"]
    assert held(found) == ("best", "best: runs, which the baseline does not")


def test_where_nothing_runs_it_is_the_baseline_with_every_reason(run: Path) -> None:
    role, why = held(confirmed(run, lambda _: OOM)[0])
    assert role == "baseline"
    for other in MODES:
        assert f"{other}: oom_device in trial" in why
    assert why.endswith("nothing else ran either")


def test_what_trains_otherwise_than_the_baseline_does_not_hold(run: Path) -> None:
    class Astray(ModelledRunner):
        def _report(self, spec: TrialSpec, rank: int, rate: float) -> Any:
            report = super()._report(spec, rank, rate)
            if spec.knobs is not None and mode(spec) == "none":
                report.losses = [5.0, 6.0, 7.0]
            return report

    tuned = read_tuned(run, None, (), None)
    notes: list[Found] = []
    confirm(tuned, Astray(lambda spec: RATES[mode(spec)]), Silent(), run / "logs" / "c", 1e6, notes.append)
    assert held(notes[-1])[0] == "fallback"
    assert "best: wrong_numerics in trial" in held(notes[-1])[1]


def test_memory_is_judged_again_on_other_ranks_and_not_on_as_many(run: Path) -> None:
    found, _ = confirmed(run, reserved_gib=0.24)
    assert found.decision is not None
    assert "takes 246 MiB of 256 MiB" in held(found)[1]
    study = yaml.safe_load((run / "study.yaml").read_text())
    (run / "study.yaml").write_text(yaml.safe_dump(study | {"world_size": 2}))
    assert held(confirmed(run, reserved_gib=0.24)[0])[0] == "best"


def test_a_baseline_that_was_kept_is_only_seen_to_run(run: Path) -> None:
    best = yaml.safe_load((run / "best.yaml").read_text())
    (run / "best.yaml").write_text(yaml.safe_dump(best | {"settings": best["baseline"]["settings"]}))
    found, runner = confirmed(run)
    assert order(runner) == ["baseline"]
    assert held(found) == ("baseline", "tuning found nothing faster than the baseline, which runs here")
    found, runner = confirmed(run, lambda spec: OOM if mode(spec) == "full" else RATES[mode(spec)])
    assert order(runner) == ["baseline", "fallback"]
    assert held(found)[0] == "fallback"


# --- time and failures --------------------------------------------------------------------------------------------


class Ticking:
    """A clock that goes on only when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


def takes(clock: Ticking, seconds: float, behave: Callable[[TrialSpec], Any]) -> Callable[[TrialSpec], Any]:
    def behave_slowly(spec: TrialSpec) -> Any:
        clock.now += seconds
        return behave(spec)

    return behave_slowly


def test_no_round_is_begun_that_would_not_end_in_time_and_what_is_measured_decides(run: Path) -> None:
    clock = Ticking()
    # A first round of three, and one pair.
    found, runner = confirmed(run, takes(clock, 10.0, lambda spec: RATES[mode(spec)]), clock=clock, within_s=69.0)
    assert order(runner) == ["best", "baseline", "fallback", "baseline", "best"]
    assert found.ended == "the time of --within was over"
    assert not found.failed
    assert held(found)[0] == "best"
    assert (
        "+30.0 % and +30.0 % tokens/s over the baseline in 2 paired rounds, too few for an interval" in held(found)[1]
    )


def test_few_pairs_that_show_less_than_a_tie_do_not_win(run: Path) -> None:
    clock = Ticking()
    rates = {"none": 101.0, "every_2": 100.5, "full": 100.0}
    found, _ = confirmed(run, takes(clock, 10.0, lambda spec: rates[mode(spec)]), clock=clock, within_s=45.0)
    role, why = held(found)
    assert role == "baseline"
    assert "+1.0 % tokens/s over the baseline in 1 paired round" in why
    assert "no more than a tie" in why


def test_a_trial_that_the_end_of_the_time_cuts_says_nothing_of_its_config(run: Path) -> None:
    clock = Ticking()

    def hangs(spec: TrialSpec) -> Any:
        if spec.round == 1:
            clock.now += spec.process_group_timeout_s
            return Outcome.TIMEOUT, f"no end after {spec.process_group_timeout_s:.0f} s"
        clock.now += 10.0
        return RATES[mode(spec)]

    found, runner = confirmed(run, hangs, clock=clock, within_s=60.0)
    assert order(runner)[-1] == "baseline"
    rows, _ = History(run / "history").rows()
    assert (rows[-1]["outcome"], rows[-1]["reason"]) == ("interrupted", "the time given for the measuring was over")
    assert held(found)[0] == "best"
    assert not found.failed


def test_a_trial_that_hangs_with_time_left_fails_its_config(run: Path) -> None:
    def hangs(spec: TrialSpec) -> Any:
        return (Outcome.TIMEOUT, "no end after 600 s") if mode(spec) == "none" else RATES[mode(spec)]

    found, _ = confirmed(run, hangs)
    assert held(found)[0] == "fallback"
    assert "best: timeout in trial" in held(found)[1]


def test_if_nodes_fail_before_a_verdict_it_is_the_baseline_and_the_reason_is_said(run: Path) -> None:
    found, _ = confirmed(run, lambda spec: LOST if spec.round == 1 else RATES[mode(spec)])
    assert found.failed
    assert "node_lost 3 times: a node's agent died" in found.ended
    role, why = held(found)
    assert role == "baseline"
    assert "broke off before a verdict" in why


def test_if_nodes_fail_after_the_rounds_of_a_verdict_it_stands(run: Path) -> None:
    found, _ = confirmed(
        run, lambda spec: LOST if spec.round == 4 else RATES[mode(spec)], overrides=("measure.rounds=5",)
    )
    assert found.failed
    assert held(found)[0] == "best"


def test_a_node_that_is_lost_once_costs_an_attempt(run: Path) -> None:
    found, runner = confirmed(run, lambda spec: LOST if spec.round == 1 and spec.attempt == 0 else RATES[mode(spec)])
    assert not found.failed
    assert held(found)[0] == "best"
    assert len(runner.specs) == 1 + 7 + 2


def test_a_pair_whose_slot_was_lost_between_its_halves_is_none(run: Path) -> None:
    class Losing(ModelledRunner):
        def run(self, spec: TrialSpec, log_dir: Path, timeout_s: float) -> Any:
            self.num_lost += spec.round == 1 and mode(spec) == "none"
            return super().run(spec, log_dir, timeout_s)

    tuned = read_tuned(run, None, (), None)
    notes: list[Found] = []
    confirm(tuned, Losing(lambda spec: RATES[mode(spec)]), Silent(), run / "logs" / "c", 1e6, notes.append)
    assert notes[-1].decision is not None
    assert notes[-1].decision["num_pairs"] == 2


def test_the_survey_of_another_model_is_refused(run: Path) -> None:
    with pytest.raises(OtherModelError, match=r"tuned for another model: 3,000,000 parameters .* 4,000,000") as raised:
        confirmed(run, model={"num_params": 4_000_000})
    assert "tune it again" in raised.value.hint
    rows, _ = History(run / "history").rows()
    assert "confirm" not in {row["stage"] for row in rows}


def test_a_survey_that_fails_is_a_failure_of_the_infrastructure(run: Path) -> None:
    class Broken(ModelledRunner):
        def run(self, spec: TrialSpec, log_dir: Path, timeout_s: float) -> Any:
            result = super().run(spec, log_dir, timeout_s)
            result.outcome, result.reason = Outcome.CRASHED, "no network"
            return result

    tuned = read_tuned(run, None, (), None)
    with pytest.raises(InfrastructureError, match="no network"):
        confirm(tuned, Broken(lambda _: 1.0), Silent(), run / "logs" / "c", 1e6, lambda _: None)


# --- a run that cannot be confirmed -------------------------------------------------------------------------------


def refused(run: Path, ranks: int | None = None, *overrides: str, simulate: str | None = None) -> UserError:
    with pytest.raises(UserError) as raised:
        read_tuned(run, ranks, overrides, simulate)
    return raised.value


def test_a_run_that_has_not_ended_is_refused(run: Path) -> None:
    best = yaml.safe_load((run / "best.yaml").read_text())
    (run / "best.yaml").write_text(yaml.safe_dump(best | {"complete": False}))
    error = refused(run)
    assert "has not ended" in error.message
    assert f"autotune run {run}/job.yaml --resume" in error.hint


def test_a_number_of_ranks_that_the_batch_does_not_divide_over_is_refused(run: Path) -> None:
    error = refused(run, 3)
    assert "3 ranks: a global batch of 16 sequences" in error.message
    assert "1, 2, 4, 8, 16" in error.hint


def test_ranks_that_fill_no_whole_nodes_of_a_cluster_are_refused(run: Path) -> None:
    overrides = ("cluster.address=auto", "cluster.ranks_per_node=8")
    assert read_tuned(run, 16, overrides, None).job.cluster.nodes_per_trial == 2
    assert read_tuned(run, 4, overrides, None).job.cluster.ranks_per_node == 4
    job = yaml.safe_load((run / "job.yaml").read_text())
    job["batch"]["global_batch_size"] = 48
    (run / "job.yaml").write_text(yaml.safe_dump(job))
    assert "12 ranks do not fill whole nodes of 8" in refused(run, 12, *overrides).message


def test_what_was_tuned_cannot_be_overridden(run: Path) -> None:
    error = refused(run, None, "model.preset=llama3-8b")
    assert "--set model.preset=llama3-8b: that would measure something else" in error.message


def test_simulated_and_measured_are_not_mixed(run: Path) -> None:
    assert "leave out --simulate" in refused(run, simulate="nodes=1").hint
    study = yaml.safe_load((run / "study.yaml").read_text())
    (run / "study.yaml").write_text(yaml.safe_dump(study | {"simulated": "nodes=8"}))
    assert "was simulated (nodes=8): nothing was measured" in refused(run).message


def test_a_fallback_that_does_not_divide_is_left_out(run: Path) -> None:
    best = yaml.safe_load((run / "best.yaml").read_text())
    best["fallback"]["settings"] |= {"micro_batch_size": 8, "grad_accum_steps": 1}
    (run / "best.yaml").write_text(yaml.safe_dump(best))
    assert set(read_tuned(run, 2, (), None).contenders) == {"best", "fallback", "baseline"}
    assert set(read_tuned(run, 4, (), None).contenders) == {"best", "baseline"}


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    assert "no best.yaml there" in refused(tmp_path).message


@pytest.mark.parametrize("text", ["[", "study_id: 3", "study_id: s\nworld_size: 2"])
def test_a_study_that_is_not_ours_is_refused(run: Path, text: str) -> None:
    (run / "study.yaml").write_text(text)
    assert "not a study.yaml of fsdp-autotune" in refused(run).message


# --- and afterwards -----------------------------------------------------------------------------------------------


def test_a_confirmed_run_is_resumed_as_before_and_keeps_what_was_confirmed(run: Path) -> None:
    found, _ = confirmed(run)
    assert found.decision is not None
    figures = dict.fromkeys(["tokens_per_s_per_rank", "tokens_per_s_per_rank_low", "tokens_per_s_per_rank_high"], 1.0)
    section = {"held": "best", "why": "w", "at": "2026-11-30", "world_size": 2, "settings": found.decision["settings"]}
    before = read_best(run)
    note_confirmed(run, section | figures)
    assert read_best(run) | {"confirmed": None} == before

    job = make_job(
        cluster={"ranks_per_node": 1, "device": "cpu", "memory_limit_gib": 0.25},
        space={"activation_checkpointing": list(RATES)},
        measure={"rounds": 3},
    )
    runner = ModelledRunner(lambda spec: RATES[mode(spec)])
    runner.world_size = 1
    Run(job, run, runner, Silent(), resume=True).go()
    assert runner.specs == [], "nothing is run again"
    after = read_best(run)
    assert after["confirmed"]["held"] == "best"
    assert after["settings"] == before["settings"]
    assert after["gain"] == before["gain"]
