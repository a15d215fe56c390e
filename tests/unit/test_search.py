"""Ask and tell: nothing twice, nothing that surely does not fit, out of memory as a constraint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.canonical import Facts
from autotune.search.feasible import dominating_oom, takes_no_less_memory
from autotune.search.pool import Pool
from autotune.search.residual.acquisition import SAFE
from autotune.search.samplers import SAMPLERS, make_sampler
from autotune.search.study import CONSTRAINT, Search, Told
from autotune.space import SearchSpace
from tests.unit.conftest import make_job, make_space
from tests.unit.test_residual import Made
from trials.outcome import Outcome
from trials.record import Knobs

ALL = list(make_space().configs())
KNOBS = st.sampled_from(ALL)
OOM = Told(Outcome.OOM_DEVICE, None, 0.05)


def ok(rate: float, over: float = -0.2) -> Told:
    return Told(Outcome.OK, rate, over)


def needs(knobs: Knobs) -> float:
    """A made-up memory that grows in every memory coordinate; the shape of a real one."""
    kept = {"none": 1.0, "selective_op": 0.6, "every_2": 0.55, "full": 0.2}[knobs.activation_checkpointing]
    held = knobs.grad_accum_steps > 1 and not knobs.sync_each_micro_batch
    return knobs.micro_batch_size * kept + 0.05 * knobs.bucket_cap_mb + held + (not knobs.reshard_after_forward)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_search_runs_nothing_twice_and_nothing_dominated(sampler: str, tmp_path: Path) -> None:
    space = make_space()
    search = Search(space, sampler, seed=1, log=tmp_path / "optuna.log")
    asked: list[Knobs] = []
    failed: list[Knobs] = []
    for _ in range(12 if sampler == "gp" else 60):
        knobs = search.ask()
        assert knobs is not None
        assert knobs not in asked
        assert dominating_oom(knobs, failed) is None
        asked.append(knobs)
        if needs(knobs) > 1.5:
            failed.append(knobs)
            search.tell(knobs, OOM)
        else:
            search.tell(knobs, ok(1000 / needs(knobs)))
    assert failed, "the test's own limit must be met"


def test_the_search_ends_when_the_space_is_used_up(tmp_path: Path) -> None:
    space = make_space(space={"num_workers": [0, 1], "reshard_after_forward": [True, False]})
    search = Search(space, "tpe", seed=0, log=tmp_path / "optuna.log")
    for _ in range(sum(1 for _ in space.configs())):
        knobs = search.ask()
        assert knobs is not None
        search.tell(knobs, ok(1.0))
    assert search.ask() is None


def test_optuna_is_told_the_states_that_samplers_read_rightly(tmp_path: Path) -> None:
    search = Search(make_space(), "tpe", seed=0, log=tmp_path / "optuna.log")
    told = [ok(10.0), OOM, Told(Outcome.CRASHED, None, 0.0), Told(Outcome.NODE_LOST, None, 0.0), ok(5.0, over=0.1)]
    for answer in told:
        knobs = search.ask()
        assert knobs is not None
        search.tell(knobs, answer)
    trials = [t for t in search._study.trials if t.state.is_finished()]
    states = [t.state.name for t in trials]
    assert states == ["COMPLETE", "PRUNED", "FAIL", "FAIL", "COMPLETE"]
    assert [t.constraints.get(CONSTRAINT) for t in trials] == [-0.2, 0.05, None, None, 0.1]
    assert search._study.best_trial.value == 10.0, "a config over the limit cannot be best"


def test_infrastructure_failures_teach_nothing_and_may_be_asked_again(tmp_path: Path) -> None:
    space = make_space(space={"num_workers": [0, 1]})
    search = Search(space, "random", seed=0, log=tmp_path / "optuna.log")
    lost = search.ask()
    assert lost is not None
    search.tell(lost, Told(Outcome.NODE_LOST, None, 0.0))
    later = {search.ask(), search.ask()}
    assert lost in later


def test_the_baseline_is_told_without_having_been_asked(tmp_path: Path) -> None:
    space = make_space()
    search = Search(space, "tpe", seed=0, log=tmp_path / "optuna.log")
    search.tell(space.baseline, ok(7.0))
    assert search._study.best_value == 7.0
    assert all(search.ask() != space.baseline for _ in range(20))


def test_a_baseline_outside_the_space_is_known_but_not_told(tmp_path: Path) -> None:
    space = make_space(space={"micro_batch_size": [2, 4]})
    search = Search(space, "tpe", seed=0, log=tmp_path / "optuna.log")
    search.tell(space.baseline, ok(7.0))
    assert search._study.trials == []
    assert space.baseline in search.known


def test_unknown_samplers_are_refused() -> None:
    with pytest.raises(ValueError, match="known are"):
        make_sampler("grid", 0, Pool(make_space()))


@given(KNOBS, KNOBS)
def test_dominance_never_contradicts_a_memory_that_grows_in_every_coordinate(a: Knobs, b: Knobs) -> None:
    if takes_no_less_memory(a, b):
        assert needs(a) >= needs(b)


@given(KNOBS)
def test_a_config_dominates_itself(knobs: Knobs) -> None:
    assert takes_no_less_memory(knobs, knobs)


def test_dominance_knows_what_decides_memory(space: SearchSpace) -> None:
    def config(**changes: object) -> Knobs:
        return space.canonical(Knobs(**{**space.baseline.to_dict(), **changes}))

    small = config(micro_batch_size=4, grad_accum_steps=2, activation_checkpointing="every_2")
    assert takes_no_less_memory(config(micro_batch_size=4, grad_accum_steps=2, activation_checkpointing="none"), small)
    assert not takes_no_less_memory(small, config(micro_batch_size=4, grad_accum_steps=2, bucket_cap_mb=12))
    selective = config(micro_batch_size=4, grad_accum_steps=2, activation_checkpointing="selective_op")
    assert not takes_no_less_memory(selective, small), "no order that holds for all models"
    held = config(micro_batch_size=4, grad_accum_steps=2, sync_each_micro_batch=False)
    assert takes_no_less_memory(held, config(micro_batch_size=4, grad_accum_steps=2))
    assert not takes_no_less_memory(config(micro_batch_size=4, grad_accum_steps=2), held)


def test_dominance_compares_the_bytes_of_a_unit_and_not_the_count_of_its_blocks() -> None:
    space = SearchSpace(make_job(), Facts("cpu", 4, (10.0, 10.0, 1.0, 1.0), 2))
    small, large = (
        space.canonical(Knobs(**{**space.baseline.to_dict(), "bucket_cap_mb": cap})) for cap in (10.0, 20.0)
    )
    assert small.blocks_per_unit == large.blocks_per_unit == 2
    assert takes_no_less_memory(large, small)
    assert not takes_no_less_memory(small, large)


def test_dominance_between_engines_is_not_known_and_within_fsdp1_follows_what_is_gathered_ahead(
    space: SearchSpace,
) -> None:
    def fsdp1(**changes: object) -> Knobs:
        return replace(space.baseline, engine="fsdp1", **({**calm, **changes}))  # type: ignore[arg-type]

    calm = {"limit_all_gathers": True, "backward_prefetch": "none", "forward_prefetch": False}
    for eager in ({"limit_all_gathers": False}, {"backward_prefetch": "pre"}, {"forward_prefetch": True}):
        assert takes_no_less_memory(fsdp1(**eager), fsdp1())
        assert not takes_no_less_memory(fsdp1(), fsdp1(**eager))
    assert not takes_no_less_memory(fsdp1(), space.baseline)
    assert not takes_no_less_memory(space.baseline, fsdp1())


def test_dominance_leaves_open_what_has_no_known_direction(space: SearchSpace) -> None:
    def config(**changes: object) -> Knobs:
        return replace(space.baseline, **({"bucket_cap_mb": 3.0, "num_workers": 1} | changes))  # type: ignore[arg-type]

    assert not takes_no_less_memory(
        config(bucket_cap_mb=7.0, blocks_per_unit=7), config(bucket_cap_mb=6.0, blocks_per_unit=6)
    ), "units that are not made of whole ones"
    assert takes_no_less_memory(
        config(bucket_cap_mb=12.0, blocks_per_unit=12), config(bucket_cap_mb=6.0, blocks_per_unit=6)
    )
    every_3, every_2 = config(activation_checkpointing="every_3"), config(activation_checkpointing="every_2")
    assert not takes_no_less_memory(every_3, every_2), "other blocks, which may be larger"
    assert takes_no_less_memory(config(activation_checkpointing="every_4"), every_2)
    assert not takes_no_less_memory(config(), config(num_workers=0)), "whose rank loads in its own memory"
    assert not takes_no_less_memory(config(engine="ddp"), config(engine="ddp", bucket_cap_mb=1.0))
    assert not takes_no_less_memory(config(fused_optimizer=True), config())


def test_a_host_out_of_memory_rules_out_nothing_but_itself(tmp_path: Path) -> None:
    space = make_space()
    search = Search(space, "random", seed=0, log=tmp_path / "optuna.log")
    search.tell(space.baseline, Told(Outcome.OOM_HOST, None, 0.05))
    asked = [search.ask() for _ in range(20)]
    assert None not in asked
    assert space.baseline not in asked


def test_optunas_messages_go_to_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "optuna.log"
    search = Search(make_space(), "tpe", seed=0, log=log)
    search.ask()
    optuna.logging.get_logger("optuna.test").warning("hello")
    assert "hello" in log.read_text()
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_what_is_drawn_is_all_that_may_fit_once_and_the_risky_after_the_safe(tmp_path: Path) -> None:
    space = make_space()

    def orders(seed: int) -> list[Knobs]:
        searching = Search(space, "random", seed, tmp_path / "log", predictor=Made(), limit_gib=3.0, headroom=0.05)
        searching.tell(space.baseline, ok(1.0))
        searching.tell(next(k for k in space.configs() if needs(k) > 6.0), OOM)
        fit = searching._fit()
        drawn = list(iter(lambda: searching._draw_untried(fit), None))
        safe = [bool(fit.roughly()[searching._pool._index[knobs]] >= SAFE) for knobs in drawn]
        assert safe == sorted(safe, reverse=True)
        possible = {knobs for knobs, may in zip(searching._pool.configs, fit.may_fit(), strict=True) if may}
        open_ = {
            knobs for knobs in possible - {space.baseline} if dominating_oom(knobs, searching._out_of_memory) is None
        }
        assert len(drawn) == len(set(drawn))
        assert 0 < len(open_) < len(possible) - 1
        assert set(drawn) == open_
        return drawn

    assert orders(0) == orders(0) != orders(1)
