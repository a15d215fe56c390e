"""The search space: exact batches, derived candidates, one spelling for what is the same."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.canonical import Facts
from autotune.errors import UserError
from autotune.job_file import load_job
from autotune.space import SearchSpace, batch_pairs
from tests.unit.conftest import QUICK, make_job, make_space
from trials.record import ENGINE_KNOBS, FSDP1_KNOBS, Knobs, group_blocks, unit_cap_mb


def test_accumulation_is_derived_so_that_the_global_batch_is_exact() -> None:
    assert batch_pairs(1024, 64) == [(1, 16), (2, 8), (4, 4), (8, 2), (16, 1)]


@given(st.integers(1, 5000), st.integers(1, 64))
def test_every_pair_gives_the_global_batch_exactly(per_rank: int, world_size: int) -> None:
    pairs = batch_pairs(per_rank * world_size, world_size)
    assert all(micro * accumulation * world_size == per_rank * world_size for micro, accumulation in pairs)
    assert [micro for micro, _ in pairs] == sorted({math.gcd(micro, per_rank) for micro in range(1, per_rank + 1)})


@pytest.mark.parametrize(("batch", "ranks"), [(10, 4), (2, 4)])
def test_a_batch_that_does_not_divide_over_the_ranks_is_refused(batch: int, ranks: int) -> None:
    with pytest.raises(UserError, match="nothing is rounded"):
        batch_pairs(batch, ranks)


def test_every_micro_batch_that_does_not_divide_is_named_with_the_divisors() -> None:
    with pytest.raises(UserError, match="divisors: 1, 2, 4, 8") as caught:
        make_space(space={"micro_batch_size": [3, 4]}, baseline={"micro_batch_size": 5})
    assert "baseline.micro_batch_size = 5 and space.micro_batch_size = 3" in str(caught.value)


def test_bucket_caps_are_derived_from_the_blocks(space: SearchSpace) -> None:
    assert space.candidates["bucket_cap_mb"] == (2.82, 5.63, 11.26)
    assert [group_blocks(space.facts.block_mib, cap) for cap in space.candidates["bucket_cap_mb"]] == [
        [1, 1, 1, 1],
        [2, 2],
        [4],
    ]


def test_a_model_of_one_block_has_one_unit_whatever_the_cap() -> None:
    for caps in ("auto", [0.1, 25, 1000]):
        space = make_space(num_blocks=1, space={"bucket_cap_mb": caps})
        assert space.candidates["bucket_cap_mb"] == (2.82,)
        assert space.baseline.blocks_per_unit == 1


def test_caps_that_group_alike_are_one_candidate() -> None:
    space = make_space(space={"bucket_cap_mb": [0.5, 2.9, 25, 100]})
    assert space.candidates["bucket_cap_mb"] == (2.82, 11.26)


def test_worker_candidates_come_from_the_cpus_a_rank_may_use() -> None:
    assert make_space(cpus_allowed=16, space={"num_workers": "auto"}).candidates["num_workers"] == (0, 1, 2, 4, 8)
    assert make_space(cpus_allowed=2, space={"num_workers": "auto"}).candidates["num_workers"] == (0, 1)


def test_a_knob_that_is_left_out_keeps_the_baselines_value() -> None:
    space = make_space(space={"micro_batch_size": [2]}, baseline={"reshard_after_forward": False})
    (config,) = space.configs()
    assert (config.micro_batch_size, config.grad_accum_steps) == (2, 4)
    assert config.activation_checkpointing == "full"
    assert not config.reshard_after_forward


def test_knobs_without_effect_have_one_spelling(space: SearchSpace) -> None:
    for config in space.configs():
        assert config.sync_each_micro_batch or config.grad_accum_steps > 1
        assert (config.prefetch_factor is None) == (config.num_workers == 0)


def test_a_stride_beyond_the_blocks_is_the_same_as_the_last_one_that_differs() -> None:
    assert make_space(space={"activation_checkpointing": ["every_4", "every_9"]}).candidates[
        "activation_checkpointing"
    ] == ("every_4",)
    assert make_space(num_blocks=1, space={"activation_checkpointing": ["every_2", "full"]}).candidates[
        "activation_checkpointing"
    ] == ("full",)


@pytest.mark.parametrize("trainer", ["accelerate", "transformers", "axolotl", "torchtitan"])
def test_export_for_pins_what_the_trainer_decides(trainer: str) -> None:
    configs = list(make_space(export_for=trainer).configs())
    assert {c.activation_checkpointing for c in configs} == {"none", "full"}
    assert {c.blocks_per_unit for c in configs} == {1}
    # torchtitan reduces after every micro-step, the others after the last.
    on_every = trainer == "torchtitan"
    assert all(c.sync_each_micro_batch == (c.grad_accum_steps == 1 or on_every) for c in configs)


@pytest.mark.parametrize("trainer", ["lightning", "deepspeed"])
def test_export_for_leaves_alone_what_the_trainer_can_be_handed(trainer: str) -> None:
    configs = list(make_space(export_for=trainer).configs())
    assert {c.activation_checkpointing for c in configs} == {"none", "selective_op", "every_2", "full"}
    assert len({c.blocks_per_unit for c in configs}) > 1
    assert all(c.sync_each_micro_batch for c in configs)


def test_export_for_plain_pins_nothing() -> None:
    assert list(make_space(export_for="plain").configs()) == list(make_space().configs())


@pytest.mark.parametrize("trainer", ["accelerate", "transformers"])
def test_export_for_refuses_a_space_that_the_trainer_cannot_take(trainer: str) -> None:
    with pytest.raises(UserError, match="it has none and full"):
        make_space(export_for=trainer, space={"activation_checkpointing": ["every_2"]})
    with pytest.raises(
        UserError, match=r"none of space.sync_each_micro_batch = \[True\] can be handed to it\n.*it has False"
    ):
        make_space(export_for=trainer, space={"sync_each_micro_batch": [True]})


def test_what_export_for_leaves_out_of_a_list_is_said() -> None:
    space = make_space(
        export_for="torchtitan", space={"keep_last_units": [0, 1], "sync_each_micro_batch": [True, False]}
    )
    assert "space.keep_last_units: torchtitan cannot be handed 1" in space.notes
    assert "space.sync_each_micro_batch: torchtitan cannot be handed False" in space.notes
    assert {config.keep_last_units for config in space.configs()} == {0}


def test_engines_of_one_trainer_that_reduce_at_different_times_each_get_their_own() -> None:
    """Lightning holds gradients back under DDP, and cannot under FSDP2."""
    space = make_space(export_for="lightning", training={"engines": ["fsdp2", "ddp"]})
    configs = [config for config in space.configs() if config.grad_accum_steps > 1]
    assert {(config.engine, config.sync_each_micro_batch) for config in configs} == {("fsdp2", True), ("ddp", False)}
    for config in configs:
        assert space.contains(config)
        assert all(
            other.sync_each_micro_batch == (other.engine == "fsdp2") or other.grad_accum_steps == 1
            for other in space.neighbours(config)
        )


@pytest.mark.parametrize(("trainer", "sync"), [("accelerate", False), ("torchtitan", True), (None, True)])
def test_the_baseline_reduces_as_the_trainer_does_unless_it_says_otherwise(trainer: str | None, sync: bool) -> None:
    assert make_space(export_for=trainer).baseline.sync_each_micro_batch is sync
    given = make_space(export_for=trainer, baseline={"sync_each_micro_batch": not sync})
    assert given.baseline.sync_each_micro_batch is not sync


BOTH: dict[str, Any] = {
    "training": {"engines": ["fsdp2", "fsdp1"]},
    "space": QUICK["space"]
    | {
        "limit_all_gathers": [True, False],
        "backward_prefetch": ["pre", "none"],
        "forward_prefetch": [False, True],
    },
}


def two_engines(device: str = "cuda", world_size: int = 2, **sections: Any) -> SearchSpace:
    facts = Facts(device, 4, (2.8145,) * 4, 2, world_size)
    return SearchSpace(make_job(**(BOTH | {"cluster": {"ranks_per_node": world_size}} | sections)), facts)


def test_the_knobs_of_an_engine_exist_only_under_it() -> None:
    configs = list(two_engines().configs())
    fsdp1 = [config for config in configs if config.engine == "fsdp1"]
    fsdp2 = [config for config in configs if config.engine == "fsdp2"]
    assert len(fsdp1) == 8 * len(fsdp2)
    assert {tuple(getattr(config, name) for name in FSDP1_KNOBS) for config in fsdp2} == {(None, None, None)}
    assert {config.limit_all_gathers for config in fsdp1} == {True, False}


def test_a_knob_of_fsdp1_that_is_left_out_keeps_torchs_default() -> None:
    space = two_engines(space={"micro_batch_size": [1]})
    assert {tuple(getattr(c, name) for name in FSDP1_KNOBS) for c in space.configs() if c.engine == "fsdp1"} == {
        (True, "pre", False)
    }


def test_on_a_cpu_limit_all_gathers_has_no_effect_which_is_said() -> None:
    space = two_engines(device="cpu")
    assert {config.limit_all_gathers for config in space.configs()} == {True, None}
    assert any("limit_all_gathers: a CPU queues" in note for note in space.notes)


def test_on_one_rank_fsdp1_has_nothing_to_reshard() -> None:
    configs = list(two_engines(world_size=1, batch={"global_batch_size": 8, "target_world_size": 1}).configs())
    assert {config.reshard_after_forward for config in configs if config.engine == "fsdp1"} == {False}
    assert {config.reshard_after_forward for config in configs if config.engine == "fsdp2"} == {True, False}


def test_the_baseline_may_be_of_an_engine_that_is_not_searched() -> None:
    space = make_space(baseline={"engine": "fsdp1", "limit_all_gathers": True, "backward_prefetch": "post"})
    assert (space.baseline.engine, space.baseline.backward_prefetch) == ("fsdp1", "post")
    assert not space.contains(space.baseline)
    assert {config.engine for config in space.configs()} == {"fsdp2"}


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"space": {"forward_prefetch": [True]}}, "space.forward_prefetch"),
        ({"baseline": {"limit_all_gathers": False}}, "baseline.limit_all_gathers"),
    ],
)
def test_a_knob_of_fsdp1_without_fsdp1_is_an_error(sections: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=rf"{key}: fsdp2 has no such knob[\s\S]*add fsdp1 to training.engines"):
        make_space(**sections)


EVERYTHING: dict[str, Any] = {
    "training": {"engines": ["fsdp2", "fsdp1", "ddp"], "precision": "bf16"},
    "space": {
        "micro_batch_size": [2, 8],
        "sync_each_micro_batch": [True, False],
        "reshard_after_forward": [True, False],
        "bucket_cap_mb": "auto",
        "keep_last_units": [0, 1, 9],
        "reshard_group_size": [0, 2],
        "forward_prefetch_units": [0, 3],
        "backward_prefetch_units": [0, 3],
        "reduce_dtype": ["fp32", "bf16"],
        "backward_prefetch": ["pre", "none"],
        "compile": [False, True],
    },
    "batch": {"global_batch_size": 32, "target_world_size": 4},
    "cluster": {"ranks_per_node": 4},
}


def test_every_config_has_the_knobs_of_its_engine_and_no_others() -> None:
    for config in two_engines(world_size=4, **EVERYTHING).configs():
        for name, knob in ENGINE_KNOBS.items():
            assert (getattr(config, name) is not None) == (config.engine in knob.engines)
        assert (config.blocks_per_unit is None) == (config.engine == "ddp")


def test_under_ddp_the_bucket_cap_is_its_own() -> None:
    configs = list(make_space(training={"engines": ["ddp"]}, space={"bucket_cap_mb": "auto"}).configs())
    assert {config.bucket_cap_mb for config in configs} == {10, 25, 50, 100, 200}
    assert make_space(training={"engines": ["ddp"]}, space={}).baseline.bucket_cap_mb == 25


def test_units_that_are_all_kept_are_a_model_that_is_not_resharded() -> None:
    space = two_engines(world_size=4, **EVERYTHING)
    kept = space.canonical(replace(space.baseline, reshard_after_forward=True, keep_last_units=4))
    assert (kept.reshard_after_forward, kept.keep_last_units, kept.reshard_group_size) == (False, 0, 0)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"space": {"replicate_degree": [3]}}, "3 copies of a model that is still sharded do not come out of 2 ranks"),
        ({"space": {"replicate_degree": [2]}}, "2 copies"),
        ({"space": {"reshard_group_size": [2]}}, "2 is no divisor between 1 and the 2 ranks"),
        ({"space": {"cpu_offload": [True]}}, "there is none on cpu"),
        ({"space": {"attention_backend": ["cudnn"]}}, "a CPU has no cudnn; it has flash and math"),
        ({"space": {"compile": [True]}}, "the compiler's own memory"),
        ({"space": {"reduce_dtype": ["bf16"]}, "training": {"precision": "fp32"}}, "needs training.precision"),
    ],
)
def test_what_the_machine_has_not_is_an_error_and_not_ignored(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        make_space(**changes)


SPACES = {"everything": two_engines(world_size=4, **EVERYTHING), "fsdp2": make_space(), "both engines": two_engines()}
KNOBS = st.sampled_from([(name, knobs) for name, space in SPACES.items() for knobs in space.configs()])


@given(KNOBS)
def test_canonical_is_idempotent(case: tuple[str, Knobs]) -> None:
    space, knobs = SPACES[case[0]], case[1]
    assert space.canonical(space.canonical(knobs)) == space.canonical(knobs) == knobs


@given(KNOBS)
def test_a_config_survives_the_way_through_optuna(case: tuple[str, Knobs]) -> None:
    space, knobs = SPACES[case[0]], case[1]
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study()
    study.enqueue_trial(space.params(knobs))
    assert space.suggest(study.ask()) == knobs
    assert set(space.distributions(knobs)) == set(space.params(knobs))


@given(KNOBS)
def test_knobs_survive_json(case: tuple[str, Knobs]) -> None:
    knobs = case[1]
    assert Knobs.from_dict(knobs.to_dict()) == knobs


def test_the_hash_changes_with_the_candidates_and_not_otherwise() -> None:
    assert make_space().hash == make_space().hash
    assert make_space().hash != make_space(space={"num_workers": [0, 1]}).hash


def test_a_value_outside_the_space_is_refused(space: SearchSpace) -> None:
    knobs = next(space.configs())
    with pytest.raises(ValueError, match="no candidate"):
        space.params(Knobs(**{**knobs.to_dict(), "num_workers": 7}))


@given(st.lists(st.floats(0.1, 50), min_size=1, max_size=40), st.floats(0.05, 500))
def test_units_hold_at_most_the_cap_and_their_own_cap_groups_them_alike(sizes: list[float], cap: float) -> None:
    units = group_blocks(sizes, cap)
    assert sum(units) == len(sizes)
    starts = [sum(units[:i]) for i in range(len(units))]
    for start, count in zip(starts, units, strict=True):
        assert count == 1 or sum(sizes[start : start + count]) <= cap + 1e-9
    assert unit_cap_mb(sizes, units) >= max(sum(sizes[s : s + n]) for s, n in zip(starts, units, strict=True)) - 1e-9


def test_the_last_unit_kept_of_one_is_a_config_like_any_other() -> None:
    space = make_space(space={"bucket_cap_mb": "auto", "keep_last_units": [0, 1]})
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    for config in space.configs():
        study = optuna.create_study()
        study.enqueue_trial(space.params(config))
        assert space.suggest(study.ask()) == config
        assert space.contains(config)
    assert any(config.reshard_after_forward is False for config in space.configs())


def test_a_cap_that_is_left_out_keeps_the_baselines_of_its_own_engine() -> None:
    ddp = make_space(training={"engines": ["ddp"]}, space={}, baseline={"bucket_cap_mb": 100})
    assert {config.bucket_cap_mb for config in ddp.configs()} == {100}
    assert ddp.contains(ddp.baseline)
    other = make_space(space={}, baseline={"engine": "ddp", "bucket_cap_mb": 25})
    assert {config.blocks_per_unit for config in other.configs()} == {1}


def test_a_baseline_that_the_machine_has_not_is_an_error() -> None:
    with pytest.raises(UserError, match=r"baseline.attention_backend = cudnn: a CPU has no cudnn"):
        make_space(baseline={"attention_backend": "cudnn"})


def test_a_job_of_ddp_alone_can_be_read_again_as_it_is_written(tmp_path: Path) -> None:
    job = make_job(training={"engines": ["ddp"]}, space={})
    (tmp_path / "job.yaml").write_text(job.to_yaml())
    assert load_job(str(tmp_path / "job.yaml")) == job


def test_an_engine_that_the_trainer_has_not_cannot_be_tuned_for_it() -> None:
    with pytest.raises(
        UserError, match=r"export_for = torchtitan: it has fsdp2, so settings of ddp \(training.engines\)"
    ):
        make_job(training={"engines": ["fsdp2", "ddp"]}, export_for="torchtitan")
    assert make_job(training={"engines": ["fsdp2", "ddp"]}, export_for="accelerate").export_for == "accelerate"
