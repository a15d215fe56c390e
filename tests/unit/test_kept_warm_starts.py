"""A resumed run is told of the earlier runs that it began with, and says what has become of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from autotune.best import read_best
from autotune.cli import cli
from autotune.errors import UserError
from autotune.job_file import load_job
from autotune.run import Run
from autotune.simulate.runner import SimulatedRunner
from tests.modelled import Silent
from tests.unit.test_warm_start import Machine, priors, rates, study
from trials.record import TrialSpec

CLUSTER = "nodes=8 gpus=8 device='NVIDIA H100 80GB HBM3' seed=4"


class Interrupted(Machine):
    """In the first trial after the baseline."""

    def _rate(self, spec: TrialSpec) -> Any:
        if spec.stage == "explore":
            raise KeyboardInterrupt
        return super()._rate(spec)


def begin(tmp_path: Path, *warm_start: Path, **others: Any) -> Path:
    """A run that is interrupted once it has measured its baseline."""
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path / "now", Interrupted(rates("every_2")), warm_start=warm_start, **others)
    return tmp_path / "now"


def resume(out: Path, *warm_start: Path, other_model: bool = False, **model: Any) -> tuple[Run, Silent]:
    screen = Silent()
    job, machine = load_job(str(out / "job.yaml")), Machine(rates("every_2"), **model)
    run = Run(job, out, machine, screen, resume=True, warm_start=warm_start, other_model=other_model)
    run.go()
    return run, screen


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    study(tmp_path / "earlier", Machine(rates("none")))
    return tmp_path / "earlier"


@pytest.mark.parametrize("again", [False, True], ids=["kept", "given again"])
def test_a_resumed_run_is_told_of_the_same(tmp_path: Path, earlier: Path, again: bool) -> None:
    out = begin(tmp_path, earlier)
    kept = yaml.safe_load((out / "study.yaml").read_text())["warm_start"]
    assert [one["run"] for one in kept["runs"]] == [str(earlier)]
    run, _ = resume(out, *([earlier] if again else []))
    assert len(priors(run)) == 4
    assert [one["run"] for one in read_best(out)["warm_start"]] == [str(earlier)]


def test_that_another_model_was_accepted_is_kept_too(tmp_path: Path) -> None:
    study(tmp_path / "earlier", Machine(rates("none"), num_params=7))
    out = begin(tmp_path, tmp_path / "earlier", other_model=True)
    run, _ = resume(out)
    assert len(priors(run)) == 4
    with pytest.raises(UserError, match="--warm-start-other-model, which cannot change"):
        resume(out, tmp_path / "earlier")


def test_other_warm_starts_than_at_first_are_refused(tmp_path: Path, earlier: Path) -> None:
    study(tmp_path / "another", Machine(rates("none")))
    for first, said in (
        ((earlier,), f"this run began with --warm-start {earlier}"),
        ((), "began without --warm-start"),
    ):
        out = begin(tmp_path, *first)
        with pytest.raises(UserError, match="which cannot change") as refused:
            resume(out, tmp_path / "another")
        assert said in str(refused.value)
        resume(out)
        shutil.rmtree(out)


def replaced(run: Path) -> None:
    shutil.rmtree(run)
    study(run, Machine(rates("none")))


@pytest.mark.parametrize(("become", "said"), [(shutil.rmtree, "no history there"), (replaced, "it is another run now")])
def test_one_that_is_gone_is_told_and_the_run_goes_on(tmp_path: Path, earlier: Path, become: Any, said: str) -> None:
    out = begin(tmp_path, earlier)
    become(earlier)
    run, screen = resume(out)
    assert priors(run) == {}
    (message,) = [one for one in screen.messages if "going on without a warm start" in one]
    assert f"--warm-start {earlier}: {said}" in message
    assert read_best(out)["complete"] is True


@pytest.mark.parametrize("kept", [7, {"runs": []}, {"other_model": False, "runs": [{"run": "\0", "study_id": "s"}]}])
def test_what_we_did_not_keep_so_is_refused(tmp_path: Path, kept: Any) -> None:
    out = begin(tmp_path)
    content = yaml.safe_load((out / "study.yaml").read_text())
    (out / "study.yaml").write_text(yaml.safe_dump(content | {"warm_start": kept}))
    with pytest.raises(UserError, match=r"study.yaml: warm_start: "):
        resume(out)


def autotune(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments), standalone_mode=False)


@pytest.mark.parametrize("stage", ["survey", "explore"])
def test_the_printed_command_resumes_with_the_warm_start(
    tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ("--trials", "2", "--set", "measure.rounds=3", "--set", "cluster.nodes_per_trial=2")
    tune = ("run", "llama3-8b", "--simulate", CLUSTER, *few, "--output")
    assert autotune(*tune, str(tmp_path / "earlier")).exception is None
    own_next_ended, own_run = SimulatedRunner.next_ended, SimulatedRunner.run

    def interrupted(order: TrialSpec) -> None:
        if order.stage == stage:
            raise KeyboardInterrupt

    def next_ended(self: SimulatedRunner) -> Any:
        ended = own_next_ended(self)
        interrupted(ended[0])
        return ended

    def run(self: SimulatedRunner, spec: TrialSpec, *more: Any) -> Any:
        interrupted(spec)
        return own_run(self, spec, *more)

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedRunner, "next_ended", next_ended)
        patch.setattr(SimulatedRunner, "run", run)
        done = autotune(*tune, str(tmp_path / "now"), "--warm-start", str(tmp_path / "earlier"))
    assert isinstance(done.exception, SystemExit)
    assert done.exception.code == 130
    (printed,) = [line for line in done.stderr.splitlines() if line.startswith("resume: ")]
    # Before the first trial nothing is kept yet.
    assert ("--warm-start" in printed) == (stage == "survey")
    options = ("--warm-start", str(tmp_path / "earlier")) if stage == "survey" else ()
    resumed = autotune("run", str(tmp_path / "now" / "job.yaml"), "--resume", "--simulate", CLUSTER, *options)
    assert resumed.exception is None, resumed.output
    assert [one["run"] for one in read_best(tmp_path / "now")["warm_start"]] == [str(tmp_path / "earlier")]
