"""Earlier runs as prior data: what of them is taken over, how far, and what is refused. Over modelled trials."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from click.testing import CliRunner

from autotune.best import read_best
from autotune.cli import cli
from autotune.errors import UserError
from autotune.folder import prepare_folder
from autotune.history import History
from autotune.run import Run
from autotune.search.study import CONSTRAINT, PRIOR
from tests.modelled import ModelledRunner, Silent
from tests.unit.conftest import make_job, make_space
from tests.unit.test_residual import Made, needs_gib, search
from trials.outcome import Outcome
from trials.record import COMPOSED, WHOLE, TrialSpec

MODES = ("none", "selective_op", "every_2", "full")
"""The baseline recomputes all."""


class Machine(ModelledRunner):
    """Runs each config at the rate of its checkpointing mode; a rate of 0 is out of memory."""

    def __init__(self, rates: dict[str, float], device_name: str = "modelled", **model: Any) -> None:
        super().__init__(self._rate, model)
        self.rates, self.device_name = rates, device_name

    def _rate(self, spec: TrialSpec) -> float | tuple[Outcome, str]:
        assert spec.knobs is not None
        return self.rates[spec.knobs.activation_checkpointing] or (Outcome.OOM_DEVICE, "out of memory")

    def _report(self, spec: TrialSpec, rank: int, rate: float) -> Any:
        report = super()._report(spec, rank, rate)
        report.device_name = self.device_name
        return report

    @property
    def explored(self) -> list[str]:
        return [spec.knobs.activation_checkpointing for spec in self.specs if spec.knobs and spec.stage == "explore"]


def study(out: Path, machine: Machine, trials: int = 3, warm_start: tuple[Path, ...] = (), **others: Any) -> Run:
    """A finished run; `others` are of the job, or of Run."""
    of_run = {name: others.pop(name) for name in ("other_model",) if name in others}
    space = others.pop("space", {"activation_checkpointing": list(MODES)})
    job = make_job(
        space=space,
        budget={"trials": trials},
        measure={"rounds": 3, "num_finalists": 1},
        sampler="random",  # which learns nothing: what is measured first was proposed
        **others,
    )
    prepare_folder(out, job)
    run = Run(job, out, machine, Silent(), warm_start=warm_start, **of_run)
    run.go()
    return run


def rates(best: str) -> dict[str, float]:
    return dict.fromkeys(MODES, 100.0) | {best: 130.0}


def priors(run: Run) -> dict[str, optuna.trial.FrozenTrial]:
    """What the sampler was told of earlier runs, by checkpointing mode."""
    modes = run.space.candidates["activation_checkpointing"]
    found = [trial for trial in run.search._study.trials if PRIOR in trial.user_attrs]
    assert len({trial.params["activation_checkpointing"] for trial in found}) == len(found)
    return {modes[trial.params["activation_checkpointing"]]: trial for trial in found}


@pytest.fixture
def first_draw(tmp_path: Path) -> str:
    """The mode that the sampler would draw first, of itself."""
    machine = Machine(rates("none"))
    study(tmp_path / "alone", machine, trials=1)
    return machine.explored[0]


def test_what_was_best_there_is_measured_first_here(tmp_path: Path, first_draw: str) -> None:
    best = next(mode for mode in MODES if mode not in (first_draw, "full"))
    study(tmp_path / "earlier", Machine(rates(best)))
    machine = Machine(rates(best))
    study(tmp_path / "now", machine, trials=1, warm_start=(tmp_path / "earlier",))
    assert machine.explored == [best]
    (told,) = read_best(tmp_path / "now")["warm_start"]
    assert told == {"run": str(tmp_path / "earlier"), "num_configs": 4, "weight": 1.0, "differences": []}


def test_only_what_is_measured_here_counts(tmp_path: Path) -> None:
    study(tmp_path / "earlier", Machine(rates("none")))
    now = Machine(rates("full"))  # here nothing beats the baseline
    run = study(tmp_path / "now", now, trials=1, warm_start=(tmp_path / "earlier",))
    assert now.explored == ["none"]
    best = read_best(tmp_path / "now")
    assert best["settings"]["activation_checkpointing"] == "full"
    rows, _ = History(tmp_path / "now" / "history").rows()
    assert {row["study_id"] for row in rows} == {run.study.study_id}
    assert {row["knobs"]["activation_checkpointing"] for row in rows} == {"none", "full"}
    assert best["fallback"]["settings"]["activation_checkpointing"] == "none", "the only other that ran here"


def test_throughputs_are_taken_as_ratios_to_their_own_baseline(tmp_path: Path) -> None:
    study(tmp_path / "earlier", Machine(rates("none")))
    faster_machine = Machine({mode: 10 * rate for mode, rate in rates("none").items()})
    found = priors(study(tmp_path / "now", faster_machine, warm_start=(tmp_path / "earlier",)))
    assert found["none"].value == pytest.approx(1300)
    assert found["full"].value == pytest.approx(1000)


class Composing(Machine):
    """Steps that are put together from parts look 1.5 times as fast as they are."""

    def _rate(self, spec: TrialSpec) -> float | tuple[Outcome, str]:
        rate = super()._rate(spec)
        return rate * 1.5 if isinstance(rate, float) and spec.composed else rate

    def _report(self, spec: TrialSpec, rank: int, rate: float) -> Any:
        report = super()._report(spec, rank, rate)
        report.timing = COMPOSED if spec.composed else WHOLE
        return report


LONG = {"batch": {"global_batch_size": 64, "target_world_size": 2}}
"""32 micro-steps of one sequence: trials of the search are composed."""


def test_whole_steps_count_before_those_put_together_from_parts(tmp_path: Path) -> None:
    machine = Composing(rates("none"))
    study(tmp_path / "earlier", machine, **LONG)
    assert {spec.composed for spec in machine.specs if spec.stage == "explore"} == {True}
    found = priors(study(tmp_path / "now", Machine(rates("none")), warm_start=(tmp_path / "earlier",), **LONG))
    assert found["none"].value == pytest.approx(130), "measured whole as a finalist"
    assert found["full"].value == pytest.approx(100)
    assert found["every_2"].value == pytest.approx(150), "known from its parts alone"


def test_the_reference_is_found_there_whatever_the_accumulation(tmp_path: Path) -> None:
    """There the baseline was another config; this one's was measured beside it, with half the micro-steps."""
    study(tmp_path / "earlier", Machine(rates("none")), baseline={"activation_checkpointing": "none"})
    batch = {"global_batch_size": 32, "target_world_size": 2}
    run = study(tmp_path / "now", Machine(rates("none")), warm_start=(tmp_path / "earlier",), batch=batch)
    found = priors(run)
    assert found["none"].value == pytest.approx(100 * 1.3**0.5), "at the weight of another batch"
    assert found["full"].value == pytest.approx(100)


def test_what_is_told_of_a_failed_trial_is_no_rate(tmp_path: Path) -> None:
    study(tmp_path / "earlier", Machine(rates("every_2") | {"none": 0.0}))
    history = History(tmp_path / "earlier" / "history")
    for row in history.rows()[0]:
        if row["outcome"] == "oom_device":
            history.append(row | {"tokens_per_s_per_rank": math.nan})
    run = study(tmp_path / "now", Machine(rates("none")), warm_start=(tmp_path / "earlier",))
    assert priors(run)["none"].state is optuna.trial.TrialState.PRUNED


def test_what_would_not_fit_here_is_not_proposed_however_fast_it_was_there(tmp_path: Path) -> None:
    space = make_space()
    hopeless = max(space.configs(), key=needs_gib)
    fitting = min(set(space.configs()) - {space.baseline}, key=lambda knobs: (needs_gib(knobs), knobs.num_workers))
    searching = search(space, tmp_path, "random", predictor=Made())
    searching.propose([hopeless, fitting], 1)
    assert searching.ask() == fitting


@pytest.mark.parametrize(
    ("change", "weight", "word"),
    [
        ({"machine": {"device_name": "another"}}, 0.5, "cluster: device_name modelled -> another"),
        ({"job": {"training": {"precision": "fp32"}}}, 0.5, "workload: data, batch, precision or optimizer"),
        (
            {"machine": {"num_params": 7, "device_name": "another"}, "run": {"other_model": True}},
            0.25,
            "model: parameters 3,000,000, here 7",
        ),
    ],
    ids=["cluster", "workload", "model and cluster"],
)
def test_each_kind_of_difference_halves_what_a_ratio_counts(
    tmp_path: Path, change: dict[str, Any], weight: float, word: str
) -> None:
    study(tmp_path / "earlier", Machine(rates("none")))
    machine = Machine(rates("none"), **change.get("machine", {}))
    others = change.get("job", {}) | change.get("run", {})
    run = study(tmp_path / "now", machine, warm_start=(tmp_path / "earlier",), **others)
    (told,) = read_best(tmp_path / "now")["warm_start"]
    assert told["weight"] == weight
    assert word in told["differences"]
    assert priors(run)["none"].value == pytest.approx(100 * 1.3**weight)


def test_out_of_memory_is_taken_over_where_memory_is_the_same_and_rules_nothing_out(tmp_path: Path) -> None:
    study(tmp_path / "earlier", Machine(rates("every_2") | {"none": 0.0}))
    again = Machine(rates("none"))
    run = study(tmp_path / "now", again, warm_start=(tmp_path / "earlier",))
    assert priors(run)["none"].state is optuna.trial.TrialState.PRUNED
    assert priors(run)["none"].constraints[CONSTRAINT] > 0
    assert "none" in again.explored, "it was not measured here"
    more = {"cluster": {"ranks_per_node": 2, "device": "cpu", "memory_limit_gib": 8.0}}
    run = study(tmp_path / "roomy", Machine(rates("none")), warm_start=(tmp_path / "earlier",), **more)
    assert "none" not in priors(run)


def test_several_runs_can_be_told(tmp_path: Path) -> None:
    for name, best in (("a", "none"), ("b", "every_2")):
        study(tmp_path / name, Machine(rates(best)))
    machine = Machine(rates("none"))
    study(tmp_path / "now", machine, trials=2, warm_start=(tmp_path / "a", tmp_path / "b"))
    assert set(machine.explored) == {"none", "every_2"}


def test_another_model_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    study(tmp_path / "earlier", Machine(rates("none")))
    machine = Machine(rates("none"), flops_per_token=3e7)
    with pytest.raises(UserError, match=r"another model: FLOPs per token 20,?000,?000, here 30,?000,?000") as refused:
        study(tmp_path / "now", machine, warm_start=(tmp_path / "earlier",))
    assert "--warm-start-other-model" in str(refused.value)
    assert [spec.stage for spec in machine.specs] == ["survey"]


def no_baseline(run: Path) -> None:
    for path in sorted((run / "history").glob("*.parquet"))[:1]:
        path.unlink()


def foreign(run: Path) -> None:
    for path in (run / "history").glob("*.parquet"):
        path.write_bytes(b"PAR1")


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda run: shutil.rmtree(run / "history"), "no history there"),
        (shutil.rmtree, "no history there"),
        (foreign, "no attempt in its history can be read: trial-0000-attempt-0.parquet: unreadable"),
        (no_baseline, "its baseline never ran to the end"),
        (lambda run: (run / "study.yaml").unlink(), "study.yaml"),
        (lambda run: (run / "job.yaml").write_text("[]"), "job.yaml"),
    ],
    ids=["no history", "no folder", "foreign", "no baseline", "no survey", "no job"],
)
def test_a_folder_that_tells_nothing_is_refused(tmp_path: Path, damage: Callable[[Path], Any], word: str) -> None:
    study(tmp_path / "earlier", Machine(rates("none")))
    damage(tmp_path / "earlier")
    machine = Machine(rates("none"))
    with pytest.raises(UserError) as refused:
        study(tmp_path / "now", machine, warm_start=(tmp_path / "earlier",))
    assert f"--warm-start {tmp_path / 'earlier'}" in str(refused.value)
    assert word in str(refused.value)
    assert [spec.stage for spec in machine.specs] == ["survey"]


def test_the_command_line_refuses_before_ray_is_started(tmp_path: Path) -> None:
    def refusal(*options: str) -> str:
        result = CliRunner().invoke(cli, ["run", "quickstart", "--output", str(tmp_path / "out"), *options])
        assert isinstance(result.exception, UserError)
        assert not (tmp_path / "out").exists() or "itself" in str(result.exception)
        return str(result.exception)

    assert "no history there" in refusal("--warm-start", str(tmp_path))
    assert "no history there: File name too long" in refusal("--warm-start", "x" * 300)
    assert "has no effect" in refusal("--warm-start-other-model")
    study(tmp_path / "out", Machine(rates("none")))
    assert "the folder of this run itself" in refusal("--warm-start", str(tmp_path / "out"))
    assert (tmp_path / "out" / "history").is_dir(), "nothing was moved"
