"""A resumed study goes on as if it had not been interrupted: the same seeds, the same proposals, nothing twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.history import History
from autotune.run import Run
from autotune.search.observed import ANSWERED, FOR_GOOD
from autotune.search.study import Search, Told
from autotune.space import SearchSpace
from tests.modelled import ModelledRunner, Silent
from tests.unit.conftest import make_job, make_space
from tests.unit.test_residual import HEADROOM, LIMIT_GIB, Made, measured, search, step_s
from trials.outcome import Outcome
from trials.record import Knobs, TrialSpec

NUM_TRIALS = 14


def found(place: int, knobs: Knobs) -> Told:
    """What became of the trial in this place; one in five fails for no reason that memory knows."""
    return Told(Outcome.CRASHED, None, 0.0) if place % 5 == 3 else measured(knobs)


def num_ended(num_asked: int, num_parallel: int) -> int:
    """Trials that have ended when one more is asked for, of `num_parallel` slots."""
    return max(0, num_asked - num_parallel + 1)


def one_life(searching: Search, num_parallel: int) -> tuple[list[Knobs], list[list[Knobs]]]:
    """What is asked for until the end, and what had been left out by then."""
    asked: list[Knobs] = []
    left_out: list[list[Knobs]] = []
    while len(asked) < NUM_TRIALS:
        if (place := num_ended(len(asked), num_parallel) - 1) >= 0:
            searching.tell(asked[place], found(place, asked[place]))
        knobs = searching.ask()
        if knobs is None:
            break
        asked.append(knobs)
        left_out.append([*(left_out[-1] if left_out else []), *searching.take_rejected()])
    return asked, left_out


@pytest.mark.parametrize("num_parallel", [1, 4])
@pytest.mark.parametrize("predictor", [None, Made(), Made(3.0)], ids=["no predictor", "close", "too large"])
def test_the_next_proposal_is_the_one_of_a_study_that_goes_on(
    predictor: Made | None, num_parallel: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"predictor": predictor, "num_parallel": num_parallel}
    space = make_space()
    asked, left_out = one_life(search(space, tmp_path, **options), num_parallel)
    assert len(asked) == NUM_TRIALS
    for num_begun in range(1, NUM_TRIALS):
        resumed = search(space, tmp_path, num_begun=num_begun, **options)
        for knobs in asked[:num_begun]:
            resumed.take_up(knobs)
        for knobs in left_out[num_begun - 1]:
            resumed.take_up_rejected(knobs)
        for place in range(num_ended(num_begun, num_parallel)):
            resumed.tell(asked[place], found(place, asked[place]))
        assert resumed.ask() == asked[num_begun], f"after {num_begun}"


@pytest.mark.parametrize("sampler", ["residual", "tpe", "random"])
def test_seeds_that_were_tried_are_not_replaced_by_others(sampler: str, tmp_path: Path) -> None:
    space = make_space()
    whole = search(space, tmp_path, sampler, predictor=Made(), num_parallel=4)
    seeds = [knobs for knobs in (whole.ask() for _ in range(4)) if knobs is not None]
    for num_begun in range(1, 4):
        resumed = search(space, tmp_path, sampler, predictor=Made(), num_parallel=4, num_begun=num_begun)
        for knobs in seeds[:num_begun]:
            resumed.take_up(knobs)
            resumed.tell(knobs, measured(knobs))
        assert [resumed.ask() for _ in range(4 - num_begun)] == seeds[num_begun:]


def test_the_rest_of_a_small_space_comes_in_the_same_order(tmp_path: Path) -> None:
    """The sampler has nothing left to propose: more workers are screened, and drawn at the very end."""
    space = make_space(cpus_allowed=16, space={"num_workers": "auto"}, baseline={"num_workers": 2})
    asked, _ = one_life(search(space, tmp_path), 1)
    assert set(asked) == set(space.configs()) - {space.baseline}
    for num_begun in range(1, len(asked)):
        resumed = search(space, tmp_path, num_begun=num_begun)
        for place, knobs in enumerate(asked[:num_begun]):
            resumed.take_up(knobs)
            resumed.tell(knobs, found(place, knobs))
        assert resumed.ask() == asked[num_begun]


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_samplers_that_draw_on_do_not_draw_again_what_they_drew_at_first(sampler: str, tmp_path: Path) -> None:
    space = make_space()
    first = search(space, tmp_path, sampler).ask()
    assert first is not None
    resumed = search(space, tmp_path, sampler, num_begun=1)
    resumed.take_up(first)
    resumed.tell(first, measured(first))
    resumed.ask()
    assert [trial for trial in resumed._study.trials if ANSWERED in trial.user_attrs] == []


@pytest.mark.parametrize("sampler", ["residual", "tpe"])
def test_what_was_left_out_stays_so_and_is_told_once(sampler: str, tmp_path: Path) -> None:
    space = make_space()
    resumed = search(space, tmp_path, sampler, predictor=Made(), num_begun=1)
    hopeless = max(space.configs(), key=lambda knobs: knobs.micro_batch_size)
    resumed.take_up_rejected(hopeless)
    assert resumed.take_rejected() == []
    (told,) = [trial for trial in resumed._study.trials if trial.user_attrs.get(ANSWERED) == FOR_GOOD]
    assert told.params == space.params(hopeless)
    assert resumed._observed().settled == {resumed._pool._index[space.baseline], resumed._pool._index[hopeless]}
    assert hopeless not in [resumed.ask() for _ in range(10)]


class Interrupted(ModelledRunner):
    """Is interrupted when it is given its n-th order of the exploration."""

    def __init__(self, after: int | None) -> None:
        super().__init__(self._rate, reserved_gib=lambda knobs: 0.02 * knobs.micro_batch_size)
        self._after = after

    def _rate(self, spec: TrialSpec) -> float:
        assert spec.knobs is not None
        if self._after is not None and len(self.explored) > self._after:
            raise KeyboardInterrupt
        return 1000 / step_s(spec.knobs)

    @property
    def explored(self) -> list[Knobs]:
        return [spec.knobs for spec in self.specs if spec.knobs is not None and spec.stage == "explore"]


def go(out: Path, after: int | None = None, resume: bool = False) -> list[Knobs]:
    (out / "logs").mkdir(parents=True, exist_ok=True)
    runner = Interrupted(after)
    job = make_job(budget={"trials": NUM_TRIALS}, measure={"rounds": 3}, sampler="residual")
    try:
        Run(job, out, runner, Silent(), resume).go()
    except KeyboardInterrupt:
        assert after is not None
    return runner.explored


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Knobs]:
    return go(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("after", [0, 2, 7])
def test_a_run_that_was_interrupted_explores_what_it_would_have_explored(
    after: int, whole: list[Knobs], tmp_path: Path
) -> None:
    first = go(tmp_path / "run", after)
    rest = go(tmp_path / "run", resume=True)
    assert len(whole) == NUM_TRIALS
    assert first == whole[: after + 1]
    assert rest == whole[after:], "the one that was interrupted first"
    rows, _ = History(tmp_path / "run" / "history").rows()
    assert sum(row["stage"] == "explore" and row["outcome"] == "ok" for row in rows) == NUM_TRIALS


def test_predictions_that_were_corrected_open_what_was_left_out_for_now(tmp_path: Path) -> None:
    """By `tpe`, which is answered so; the trials show that all takes half as much as predicted."""
    space: SearchSpace = make_space()
    searching = Search(space, "tpe", 0, tmp_path / "log", predictor=Made(1.15), limit_gib=LIMIT_GIB, headroom=HEADROOM)
    before = searching._fit()
    risky = [i for i, p in enumerate(before.roughly()) if 0.02 < p < 0.5 and not searching._pool.always_allowed[i]]
    index = risky[0]
    told, for_how_long = searching._answer_by_prediction(searching._pool.configs[index], before)
    assert told is not None
    searching._add(searching._pool.configs[index], told, {ANSWERED: for_how_long})
    assert index not in searching._observed().settled
    for knobs in [k for k in space.configs() if k.micro_batch_size == 1][::20]:
        predicted = searching.prediction(knobs)
        assert predicted is not None
        half = predicted.reserved_gib / 2 / (LIMIT_GIB * (1 - HEADROOM)) - 1
        searching.tell(knobs, Told(Outcome.OK, 1000 / step_s(knobs), half))
    assert searching._answer_by_prediction(searching._pool.configs[index], searching._fit())[0] is None
