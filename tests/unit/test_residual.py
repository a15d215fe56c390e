"""The residual sampler, and what all samplers have from predictions: valid, distinct, safe, the same by seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune import space as space_module
from autotune.preflight.prediction import Prediction
from autotune.search import pool as pool_module
from autotune.search.correct import Zone
from autotune.search.feasible import dominating_oom
from autotune.search.residual.sampler import SCREENED
from autotune.search.study import Search, Told
from autotune.space import SearchSpace
from tests.unit.conftest import make_space
from trials.outcome import Outcome
from trials.record import FSDP1_KNOBS, Knobs

LIMIT_GIB = 3.0
HEADROOM = 0.05
MANY_KNOBS = {
    "micro_batch_size": "auto",
    "sync_each_micro_batch": [True, False],
    "reshard_after_forward": [True, False],
    "bucket_cap_mb": "auto",
    "activation_checkpointing": ["none", "selective_op", "full"],
    "num_workers": [0, 1],
    "prefetch_factor": [2, 4],
    "keep_last_units": [0, 1],
    "limit_all_gathers": [True, False],
    "backward_prefetch": ["pre", "none"],
}

FSDP2_KNOBS = {name: values for name, values in MANY_KNOBS.items() if name not in FSDP1_KNOBS}


def needs_gib(knobs: Knobs) -> float:
    """A made-up memory that grows in every memory coordinate; the shape of a real one."""
    kept = {"none": 1.0, "selective_op": 0.6, "every_2": 0.55, "full": 0.2}[knobs.activation_checkpointing]
    held = knobs.grad_accum_steps > 1 and not knobs.sync_each_micro_batch
    return 0.2 + knobs.micro_batch_size * kept + 0.05 * knobs.bucket_cap_mb + held + (not knobs.reshard_after_forward)


def step_s(knobs: Knobs) -> float:
    recomputed = {"none": 1.0, "selective_op": 1.1, "every_2": 1.17, "full": 1.33}[knobs.activation_checkpointing]
    waits = 0.3 if knobs.num_workers == 0 else 0.0
    return recomputed + 0.5 / knobs.micro_batch_size + waits + 0.1 * knobs.sync_each_micro_batch


@dataclass
class Made:
    """A predictor that is wrong by factors, or not one at all."""

    memory_factor: float = 1.0
    answer: Callable[[Knobs], Any] | None = None

    def predict(self, knobs: Knobs) -> Any:
        if self.answer is not None:
            return self.answer(knobs)
        size, seconds = self.memory_factor * needs_gib(knobs), 0.7 * step_s(knobs)
        return Prediction({"all": size}, size, size, {"all": seconds}, seconds)


def broken(knobs: Knobs) -> Any:
    raise ZeroDivisionError("no layers")


def with_figures(size: float, seconds: float) -> Callable[[Knobs], Prediction]:
    return lambda _: Prediction({}, size, size, {}, seconds)


NO_PREDICTIONS: dict[str, Callable[[Knobs], Any]] = {
    "nothing": lambda _: None,
    "error": broken,
    "nan": with_figures(math.nan, 1.0),
    "negative": with_figures(-1.0, 1.0),
    "infinite": with_figures(1.0, math.inf),
}


def measured(knobs: Knobs) -> Told:
    size = needs_gib(knobs)
    if size > LIMIT_GIB:
        return Told(Outcome.OOM_DEVICE, None, 1 / (1 - HEADROOM) - 1)
    over = size / (LIMIT_GIB * (1 - HEADROOM)) - 1
    return Told(Outcome.OK, 1000 / step_s(knobs), over, 0.3 if knobs.num_workers == 0 else 0.0)


def search(space: SearchSpace, log: Path, sampler: str = "residual", seed: int = 0, **options: Any) -> Search:
    made = Search(space, sampler, seed, log / "optuna.log", limit_gib=LIMIT_GIB, headroom=HEADROOM, **options)
    made.tell(space.baseline, measured(space.baseline))
    return made


def explore(search_: Search, num_trials: int) -> list[Knobs]:
    tried: list[Knobs] = []
    for _ in range(num_trials):
        knobs = search_.ask()
        if knobs is None:
            break
        search_.tell(knobs, measured(knobs))
        tried.append(knobs)
    return tried


@pytest.mark.parametrize("predictor", [None, Made(), Made(0.4), Made(3.0)])
def test_what_is_proposed_is_valid_new_and_not_dominated(predictor: Made | None, tmp_path: Path) -> None:
    space = make_space(space=MANY_KNOBS, training={"engines": ["fsdp2", "fsdp1"]})
    searching = search(space, tmp_path, predictor=predictor)
    tried: list[Knobs] = [space.baseline]
    failed: list[Knobs] = []
    for _ in range(14):
        knobs = searching.ask()
        assert knobs is not None
        assert space.contains(knobs)
        assert knobs not in tried
        assert dominating_oom(knobs, failed) is None
        tried.append(knobs)
        told = measured(knobs)
        searching.tell(knobs, told)
        if told.outcome is Outcome.OOM_DEVICE:
            failed.append(knobs)


def test_params_of_a_proposal_are_those_of_the_knobs_that_have_an_effect(tmp_path: Path) -> None:
    space = make_space(space=MANY_KNOBS, training={"engines": ["fsdp2", "fsdp1", "ddp"]})
    searching = search(space, tmp_path, predictor=Made())
    tried = explore(searching, 16)
    trials = [trial for trial in searching._study.trials if trial.user_attrs.get("answered_without_trial") is None]
    for knobs, trial in zip([space.baseline, *tried], trials, strict=True):
        assert trial.params == space.params(knobs)
        assert ("backward_prefetch" in trial.params) == (knobs.engine == "fsdp1")
        assert ("prefetch_factor" in trial.params) == (knobs.num_workers > 0)


@pytest.mark.parametrize("sampler", ["residual", "tpe", "random"])
def test_a_seed_decides_everything(sampler: str, tmp_path: Path) -> None:
    one, other = (explore(search(make_space(), tmp_path, sampler, 3, predictor=Made(1.2)), 8) for _ in range(2))
    assert one == other


@pytest.mark.parametrize("kind", NO_PREDICTIONS)
def test_what_is_no_prediction_is_said_once_and_the_trials_alone_are_learned_from(kind: str, tmp_path: Path) -> None:
    said: list[str] = []
    predictor = Made(answer=NO_PREDICTIONS[kind])
    without = search(make_space(), tmp_path, predictor=predictor, say=said.append)
    assert explore(without, 5) == explore(search(make_space(), tmp_path), 5)
    assert len(said) == 1
    assert "no prediction" in said[0]
    assert without.take_rejected() == []


def test_a_prediction_that_fails_for_some_configs_blocks_none_of_them(tmp_path: Path) -> None:
    made = Made()
    space = make_space(space={"micro_batch_size": [1, 2], "activation_checkpointing": ["none", "full"]})
    some = Made(answer=lambda knobs: None if knobs.micro_batch_size == 2 else made.predict(knobs))
    assert set(explore(search(space, tmp_path, predictor=some), 99)) == set(space.configs()) - {space.baseline}


@pytest.mark.parametrize("predictor", [None, Made()])
def test_trials_at_once_differ(predictor: Made | None, tmp_path: Path) -> None:
    searching = search(make_space(), tmp_path, predictor=predictor, num_parallel=6)
    at_once = [searching.ask() for _ in range(6)]
    assert None not in at_once
    assert len(set(at_once)) == 6


@pytest.mark.parametrize("sampler", ["residual", "random"])
def test_a_small_space_is_used_up_and_then_the_search_ends(sampler: str, tmp_path: Path) -> None:
    space = make_space(space={"micro_batch_size": [1, 2], "activation_checkpointing": ["none", "full"]})
    searching = search(space, tmp_path, sampler, predictor=Made())
    assert set(explore(searching, 99)) == set(space.configs()) - {space.baseline}
    assert searching.ask() is None


def test_a_space_of_one_config_is_used_up_at_once(tmp_path: Path) -> None:
    space = make_space(space={"micro_batch_size": [1]}, baseline={"micro_batch_size": 1, "num_workers": 0})
    assert search(space, tmp_path).ask() is None


@pytest.mark.parametrize("sampler", ["residual", "tpe", "random"])
def test_what_surely_does_not_fit_is_not_tried_and_only_what_was_proposed_is_told(sampler: str, tmp_path: Path) -> None:
    space = make_space()
    searching = search(space, tmp_path, sampler, predictor=Made())
    tried = explore(searching, 20)
    assert not [knobs for knobs in tried if needs_gib(knobs) > 1.2 * LIMIT_GIB]
    rejected = searching.take_rejected()
    assert all(needs_gib(knobs) > LIMIT_GIB and knobs not in tried for knobs in rejected)
    assert searching.take_rejected() == [], "told once"
    zones = searching.count_zones()
    assert sum(zones.values()) == space.num_configs
    assert len(rejected) <= zones[Zone.SURE_OOM] < space.num_configs
    assert bool(rejected) == (sampler != "residual"), "it proposes no such thing"


@pytest.mark.parametrize("sampler", ["residual", "tpe"])
def test_the_frugal_configs_are_tried_whatever_is_predicted(sampler: str, tmp_path: Path) -> None:
    space = make_space()
    hopeless = Made(1000.0)
    searching = Search(space, sampler, 0, tmp_path / "log", predictor=hopeless, limit_gib=LIMIT_GIB, headroom=HEADROOM)
    tried = [searching.ask() for _ in range(4)]
    assert None not in tried
    assert {(k.micro_batch_size, k.activation_checkpointing) for k in tried if k} == {(1, "full")}


def test_seeds_are_the_fastest_predicted_that_fit_of_each_checkpointing_mode(tmp_path: Path) -> None:
    space = make_space()
    searching = search(space, tmp_path, predictor=Made(), num_parallel=4)
    first = [knobs for knobs in (searching.ask() for _ in range(4)) if knobs is not None]
    assert len({knobs.activation_checkpointing for knobs in first}) == 4
    assert [step_s(knobs) for knobs in first] == sorted(step_s(knobs) for knobs in first)
    usable_gib = 0.93 * (1 - HEADROOM) * LIMIT_GIB
    for knobs in first:
        alike = [k for k in space.configs() if k.activation_checkpointing == knobs.activation_checkpointing]
        fastest = min(step_s(k) for k in alike if needs_gib(k) <= usable_gib)
        assert needs_gib(knobs) <= usable_gib
        assert step_s(knobs) == pytest.approx(fastest, rel=0.011)
        assert knobs.bucket_cap_mb == space.baseline.bucket_cap_mb, "what is not predicted to matter stays"


def test_more_workers_are_not_searched_once_none_waits(tmp_path: Path) -> None:
    space = make_space(cpus_allowed=16, space=FSDP2_KNOBS | {"num_workers": "auto"}, baseline={"num_workers": 2})
    tried = explore(search(space, tmp_path, predictor=Made()), SCREENED - 1)
    assert {knobs.num_workers for knobs in tried} <= {0, 1, 2}


def test_more_workers_are_open_again_once_the_larger_gains_are_made(tmp_path: Path) -> None:
    space = make_space(cpus_allowed=16, space=FSDP2_KNOBS | {"num_workers": "auto"}, baseline={"num_workers": 2})
    tried = explore(search(space, tmp_path, predictor=Made()), SCREENED + 20)
    assert any(knobs.num_workers > 2 for knobs in tried[SCREENED:])


def test_all_numbers_of_workers_are_open_again_once_a_trial_waits(tmp_path: Path) -> None:
    space = make_space(cpus_allowed=16, space={"num_workers": "auto"}, baseline={"num_workers": 2})
    waits = search(space, tmp_path)
    waits.tell(space.baseline, Told(Outcome.OK, 1.0, -0.5, data_wait_share=0.2))
    assert any(knobs.num_workers > 2 for knobs in explore(waits, 4))


def test_a_space_that_is_not_enumerated_is_searched_by_what_is_drawn_and_by_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space_module, "MAX_ENUMERATED", 10)
    monkeypatch.setattr(pool_module, "NUM_DRAWN", 50)
    space = make_space(space=MANY_KNOBS, training={"engines": ["fsdp2", "fsdp1"]})
    assert not space.is_enumerable
    searching = search(space, tmp_path, predictor=Made())
    tried = explore(searching, 15)
    assert len(set(tried)) == 15
    whole = make_space(space=MANY_KNOBS, training={"engines": ["fsdp2", "fsdp1"]})
    monkeypatch.setattr(space_module, "MAX_ENUMERATED", 10**6)
    assert whole.num_draws >= whole.num_configs
    assert all(whole.contains(knobs) for knobs in tried)


def test_neighbours_differ_in_one_knob_and_are_in_the_space() -> None:
    # Keeping all units is not resharding: a value of one knob that is one of another's.
    searched = {name: values for name, values in MANY_KNOBS.items() if name != "keep_last_units"}
    space = make_space(space=searched, training={"engines": ["fsdp2", "fsdp1"]})
    for knobs in list(space.configs())[::97]:
        around = space.neighbours(knobs)
        assert knobs not in around
        assert len(set(around)) == len(around)
        for other in around:
            assert space.contains(other)
            both = space.params(knobs).keys() & space.params(other).keys()
            assert sum(space.params(knobs)[name] != space.params(other)[name] for name in both) == 1


def test_gains_are_found_that_no_prediction_knows(tmp_path: Path) -> None:
    """A predictor that takes all configs to be alike: what the trials show leads to the best."""
    space = make_space()
    flat = Made(answer=lambda knobs: Prediction({}, needs_gib(knobs), needs_gib(knobs), {}, 1.0))
    tried = explore(search(space, tmp_path, predictor=flat), 30)
    fitting = [k for k in space.configs() if measured(k).outcome is Outcome.OK and measured(k).memory_over_limit <= 0]
    ranked = sorted(fitting, key=step_s)
    best = min((step_s(k) for k in tried if measured(k).memory_over_limit <= 0), default=math.inf)
    assert best <= step_s(ranked[len(ranked) // 20]), "among the best twentieth"
    assert np.isfinite(best)
