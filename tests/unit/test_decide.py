"""What the driver decides of configs that are measured again: whole studies over modelled trials."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from autotune.best import read_best
from autotune.history import History
from autotune.report.tables import print_best
from autotune.run import Run, RunResult
from tests.benchmarks.verdict import tally
from tests.modelled import ModelledRunner, Silent
from tests.unit.conftest import make_job
from trials.outcome import Outcome
from trials.record import TrialSpec

RATES = {"full": 100.0, "every_2": 110.0, "selective_op": 120.0, "none": 130.0}
OOM = (Outcome.OOM_DEVICE, "out of memory in evaluate: DefaultCPUAllocator")


def checkpointing(spec: TrialSpec) -> str:
    assert spec.knobs is not None
    return spec.knobs.activation_checkpointing


def decide(
    tmp_path: Path, in_endurance: Callable[[TrialSpec], Any] = lambda _: None, **measure: Any
) -> tuple[RunResult, dict[str, Any], ModelledRunner]:
    """A study of four configs, each faster the less it recomputes; `in_endurance` may have one end otherwise."""

    def behave(spec: TrialSpec) -> Any:
        return (spec.stage == "endurance" and in_endurance(spec)) or RATES[checkpointing(spec)]

    job = make_job(space={"activation_checkpointing": list(RATES)}, measure=measure)
    (tmp_path / "logs").mkdir()
    runner = ModelledRunner(behave)
    result = Run(job, tmp_path, runner, Silent()).go()
    return result, read_best(tmp_path), runner


def shown(best: dict[str, Any]) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        print_best(console, best)
    return capture.get()


def test_equal_configs_do_not_win_by_luck_and_a_true_gain_is_found() -> None:
    assert tally(0.0, 16, 7, seed=1).num_wins <= 1
    assert tally(0.08, 6, 7, seed=1).num_wins == 6


@pytest.mark.parametrize("rounds", [3, 4])
def test_the_two_of_a_round_run_one_after_the_other_and_take_turns_in_going_first(tmp_path: Path, rounds: int) -> None:
    _, best, runner = decide(tmp_path, rounds=rounds)
    order = [(spec.round, checkpointing(spec)) for spec in runner.specs if spec.stage == "round"]
    pairs = (("none", "full"), ("full", "none"))
    assert order == [(number, mode) for number in range(rounds) for mode in pairs[number % 2]]
    assert best["gain"]["num_paired_rounds"] == rounds


def test_the_winner_runs_longer_and_its_run_is_in_best_yaml(tmp_path: Path) -> None:
    _, best, runner = decide(tmp_path, endurance_steps=33)
    (spec,) = [spec for spec in runner.specs if spec.stage == "endurance"]
    assert (checkpointing(spec), spec.measure.max_steps) == ("none", 33)
    assert spec.measure.rel_ci < 1e-6, "no confidence ends it"
    assert spec.timeout_s > runner.specs[0].timeout_s, "slow steps have the time of their number"
    assert spec.checkpoint_dir == str(tmp_path / "logs" / f"trial-{spec.trial:04d}" / "checkpoint")
    assert (best["endurance"]["status"], best["endurance"]["trial"]) == ("passed", spec.trial)
    assert best["endurance"]["longest_sequence_tokens"] == 256
    assert "Endurance: passed" in shown(best)


def test_a_winner_that_fails_makes_room_for_the_next(tmp_path: Path) -> None:
    _, best, _ = decide(tmp_path, lambda spec: OOM if checkpointing(spec) == "none" else None)
    assert best["settings"]["activation_checkpointing"] == "selective_op"
    assert best["endurance"]["status"] == "passed"
    (failed,) = best["endurance"]["failed"]
    assert (failed["outcome"], failed["settings"]["activation_checkpointing"]) == ("oom_device", "none")
    assert best["fallback"]["settings"]["activation_checkpointing"] == "every_2", "what failed is no fallback"
    assert "failed its own: oom_device" in shown(best)


def test_if_every_winner_fails_the_baseline_is_kept_and_the_reasons_are_told(tmp_path: Path) -> None:
    result, best, _ = decide(tmp_path, lambda _: OOM)
    assert result.best is result.baseline
    assert "failed when it was run again or longer: keep your baseline" in best["verdict"]
    assert len(best["endurance"]["failed"]) == 3
    assert best["endurance"]["status"] == "not_run"


@pytest.mark.parametrize(
    ("failing", "said", "verdict"),
    [
        ("none", "the config of trial 1 failed when run again: on to the next", ""),
        ("full", "the baseline failed when run again: 0 of 7 pairs are left, too few: on to the next", "itself failed"),
    ],
    ids=["the candidate", "the baseline"],
)
def test_of_a_round_that_fails_it_is_said_which_of_the_two_did(
    tmp_path: Path, failing: str, said: str, verdict: str
) -> None:
    def behave(spec: TrialSpec) -> Any:
        return OOM if spec.stage == "round" and checkpointing(spec) == failing else RATES[checkpointing(spec)]

    screen = Silent()
    (tmp_path / "logs").mkdir()
    job = make_job(space={"activation_checkpointing": list(RATES)})
    Run(job, tmp_path, ModelledRunner(behave), screen).go()
    rows, _ = History(tmp_path / "history").rows()
    fastest = next(r["trial"] for r in rows if r["knobs"]["activation_checkpointing"] == "none")
    assert any(said.replace("trial 1", f"trial {fastest}") in message for message in screen.messages)
    best = read_best(tmp_path)
    assert verdict in best["verdict"]
    assert best["settings"]["activation_checkpointing"] == ("full" if verdict else "selective_op")


def test_a_full_disk_is_held_against_no_config(tmp_path: Path) -> None:
    _, best, _ = decide(tmp_path, lambda _: (Outcome.STORAGE_FAILED, "the checkpoint in /x: No space left on device"))
    assert best["settings"]["activation_checkpointing"] == "none"
    assert best["endurance"]["status"] == "not_run"
    assert "No space left on device" in best["endurance"]["reason"]
    assert "Endurance: not run: the checkpoint in /x" in shown(best)


def test_a_full_disk_is_tried_again_when_the_run_is_resumed_and_nothing_else(tmp_path: Path) -> None:
    decide(tmp_path, lambda _: (Outcome.STORAGE_FAILED, "No space left on device"))
    job = make_job(space={"activation_checkpointing": list(RATES)}, measure={"checkpoint_dir": "/elsewhere"})
    runner = ModelledRunner(lambda spec: RATES[checkpointing(spec)])
    Run(job, tmp_path, runner, Silent(), resume=True).go()
    assert [(spec.stage, spec.attempt) for spec in runner.specs] == [("endurance", 1)]
    assert str(runner.specs[0].checkpoint_dir).startswith("/elsewhere/autotune-")
    assert read_best(tmp_path)["endurance"]["status"] == "passed"


def test_without_endurance_nothing_runs_longer(tmp_path: Path) -> None:
    _, best, runner = decide(tmp_path, endurance=False)
    assert "endurance" not in {spec.stage for spec in runner.specs}
    assert (best["endurance"]["status"], best["endurance"]["reason"]) == ("not_run", "measure.endurance = false")


def test_a_best_yaml_of_before_is_still_read(tmp_path: Path) -> None:
    _, best, _ = decide(tmp_path)
    del best["endurance"]
    (tmp_path / "best.yaml").write_text(yaml.safe_dump(best))
    assert "Endurance" not in shown(read_best(tmp_path))
