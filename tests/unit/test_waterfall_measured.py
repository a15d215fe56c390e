"""A waterfall from beginning to end, over modelled trials: what is measured, in what order, and what goes on."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from autotune.afterwards import read_ended
from autotune.best import read_best, write_best
from autotune.errors import InfrastructureError, UserError
from autotune.folder import prepare_folder
from autotune.history import History
from autotune.run import Run
from autotune.waterfall.measuring import measure_waterfall, num_trials
from autotune.waterfall.steps import Waterfall
from tests.modelled import ModelledRunner, Silent
from tests.unit.conftest import make_job
from trials.outcome import Outcome
from trials.record import Knobs, TrialSpec

SPEED = {"full": 1.0, "none": 1.3}
OOM = (Outcome.OOM_DEVICE, "out of memory in backward: DefaultCPUAllocator")


def speed(spec: TrialSpec) -> float:
    knobs = spec.knobs
    assert knobs is not None
    wobble = math.sin(7.0 * spec.trial) * 0.002
    return (
        1000.0
        * math.exp(wobble)
        * SPEED[knobs.activation_checkpointing]
        * (1.15 if knobs.micro_batch_size == 4 else 1.0)
        * (1.5 if knobs.num_workers == 1 else 1.0)
    )


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose winner differs from its baseline in three changes."""
    out = tmp_path_factory.mktemp("tuned") / "run"
    cluster = {"ranks_per_node": 2, "device": "cpu", "memory_limit_gib": 8.0}
    space = {"activation_checkpointing": list(SPEED), "micro_batch_size": [1, 4], "num_workers": [0, 1]}
    job = make_job(
        space=space,
        cluster=cluster,
        baseline={"num_workers": 0},
        measure={"rounds": 3, "endurance": False},
        sampler="random",
    )
    prepare_folder(out, job)
    Run(job, out, ModelledRunner(speed), Silent()).go()
    best = read_best(out)
    names = ("micro_batch_size", "num_workers", "activation_checkpointing")
    assert [best["settings"][name] for name in names] == [4, 1, "none"]
    return out


@pytest.fixture
def ended(tuned: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tuned, tmp_path / "run"))


def walked(folder: Path, behave: Any = speed, repeats: int = 3) -> tuple[Waterfall, ModelledRunner, Silent]:
    run, runner, said = read_ended(folder), ModelledRunner(behave), Silent()
    made = measure_waterfall(run.job, run.folder, run.baseline, run.winner, runner, said, repeats)
    return made, runner, said


def of_stage(folder: Path) -> list[dict[str, Any]]:
    rows, skipped = History(folder / "history").rows()
    assert skipped == []
    return [row for row in rows if row["stage"] == "waterfall"]


def test_changes_are_measured_alone_and_then_on_top_of_each_other_in_order_of_gain(ended: Path) -> None:
    made, runner, said = walked(ended)
    assert len(runner.specs) == num_trials(3, 3) == 27
    assert [step.changes for step in made.steps] == [
        ("num_workers+prefetch_factor",),
        ("activation_checkpointing",),
        ("micro_batch_size",),
    ]
    assert made.gain.value == pytest.approx(1.3 * 1.15 * 1.5 - 1, rel=0.02)
    rows = of_stage(ended)
    assert {row["round"] for row in rows} == set(range(6))
    for number in range(6):
        of_round = [len(row["changes"]) for row in rows if row["round"] == number]
        assert sorted(of_round) == ([0, 1, 1, 1, 3] if number % 2 == 0 else [0, 1, 2, 3])
    assert any("27 trials" in line for line in said.messages)
    assert made.is_complete and not made.simulated


def test_what_is_there_already_is_not_measured_again_and_more_repeats_add_to_it(ended: Path) -> None:
    first, _, _ = walked(ended, repeats=2)
    again, runner, _ = walked(ended, repeats=2)
    assert not runner.specs
    assert again == first
    more, runner, _ = walked(ended, repeats=3)
    assert len(runner.specs) == 9
    assert more.num_rounds == 6


def test_an_interrupted_waterfall_goes_on(ended: Path) -> None:
    def interrupted(spec: TrialSpec) -> float:
        if len(of_stage(ended)) == 7:
            raise KeyboardInterrupt
        return speed(spec)

    with pytest.raises(KeyboardInterrupt):
        walked(ended, interrupted)
    made, runner, _ = walked(ended)
    assert len(runner.specs) == 27 - 7
    assert made.is_complete


def test_a_config_that_runs_out_of_memory_is_tried_once_and_merges(ended: Path) -> None:
    def behave(spec: TrialSpec) -> Any:
        knobs = spec.knobs
        assert knobs is not None
        return OOM if knobs.activation_checkpointing == "none" and knobs.micro_batch_size == 1 else speed(spec)

    made, _, _ = walked(ended, behave)
    assert [step.changes for step in made.steps] == [
        ("num_workers+prefetch_factor",),
        ("micro_batch_size",),
        ("activation_checkpointing",),
    ]
    failed = [row for row in of_stage(ended) if row["outcome"] != "ok"]
    assert [row["changes"] for row in failed] == [["activation_checkpointing"]]
    assert "oom_device" in next(one.problem for one in made.alone if one.change == "activation_checkpointing")


def test_a_winner_that_does_not_run_any_more_ends_it(ended: Path) -> None:
    winner = Knobs.from_dict(read_best(ended)["settings"])
    with pytest.raises(InfrastructureError, match="the winner itself ended in oom_device"):
        walked(ended, lambda spec: OOM if spec.knobs == winner else speed(spec))


def test_a_run_that_is_going_on_or_kept_its_baseline_is_refused(ended: Path) -> None:
    content = read_best(ended)
    write_best(ended / "best.yaml", content | {"settings": content["baseline"]["settings"]})
    with pytest.raises(UserError, match="nothing beat the baseline"):
        walked(ended)
    write_best(ended / "best.yaml", content | {"complete": False})
    with pytest.raises(UserError, match="has not ended"):
        read_ended(ended)
    write_best(ended / "best.yaml", content)
    with pytest.raises(UserError, match="something else than what was tuned"):
        read_ended(ended, ("model.seq_len=8",))


def test_a_run_that_is_resumed_leaves_the_waterfall_out(ended: Path) -> None:
    walked(ended)
    run = read_ended(ended)
    runner, said = ModelledRunner(speed), Silent()
    Run(run.job, ended, runner, said, resume=True).go()
    assert not runner.specs, "nothing is measured again"
    assert not any("skipped" in line for line in said.messages)
