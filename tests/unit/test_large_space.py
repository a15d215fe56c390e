"""Spaces too large to be enumerated: what is drawn is contained, has params that make it again, and nothing else is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune import space as space_module
from autotune.canonical import Facts
from autotune.space import SearchSpace
from tests.unit.conftest import make_job

CLIPPED = {
    "micro_batch_size": "auto",
    "sync_each_micro_batch": [True, False],
    "reshard_after_forward": [True, False],
    "bucket_cap_mb": "auto",
    "activation_checkpointing": ["none", "every_2", "full"],
    "num_workers": [0, 1],
    "prefetch_factor": [2, 4],
    "keep_last_units": [0, 3, 9],
    "reshard_group_size": [2],
    "forward_prefetch_units": [1, 7],
    "backward_prefetch_units": [2, 7],
    "backward_prefetch": ["pre", "none"],
}
"""Depths beyond the units of a model of four blocks."""
ALL_ENGINES = {"engines": ["fsdp2", "fsdp1", "ddp"]}
KINDS: dict[str, dict[str, Any]] = {
    "clipped": {"space": CLIPPED},
    "always resharded": {"space": CLIPPED | {"reshard_after_forward": [True]}},
    "some units always kept": {"space": CLIPPED | {"reshard_after_forward": [True], "keep_last_units": [3, 9]}},
    "never resharded": {"space": CLIPPED | {"reshard_after_forward": [False]}},
    "engines": {"space": CLIPPED, "training": ALL_ENGINES},
    "buckets of DDP": {"space": {"bucket_cap_mb": [3.123456, 10.0, 25.004]}, "training": ALL_ENGINES},
    "one rank": {"space": CLIPPED | {"reshard_group_size": [0]}, "training": ALL_ENGINES},
}


def make(kind: str) -> SearchSpace:
    num_ranks = 1 if kind == "one rank" else 4
    batch = {"global_batch_size": 32, "target_world_size": num_ranks}
    cluster = {"ranks_per_node": num_ranks, "device": "cpu"}
    job = make_job(batch=batch, cluster=cluster, **({"training": {"engines": ["fsdp2", "fsdp1"]}} | KINDS[kind]))
    return SearchSpace(job, Facts("cpu", 4, (2.8145,) * 4, 2, num_ranks))


WHOLE = {kind: make(kind) for kind in KINDS}
for _space in WHOLE.values():
    assert _space.is_enumerable
LARGE = {kind: make(kind) for kind in KINDS}


@pytest.fixture(autouse=True, scope="module")
def _too_large_to_be_enumerated() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for space in WHOLE.values():
            next(space.configs())
        patch.setattr(space_module, "MAX_ENUMERATED", 0)
        yield


@given(st.sampled_from(list(KINDS)), st.integers(0, 2**32))
def test_what_is_drawn_is_in_the_space_and_its_params_make_it_again(kind: str, seed: int) -> None:
    space = LARGE[kind]
    assert not space.is_enumerable
    knobs = space.draw(random.Random(seed))
    assert space.contains(knobs)
    assert space.canonical(knobs) == knobs
    assert space.suggest(optuna.trial.FixedTrial(space.params(knobs))) == knobs
    assert space.suggest_flat(optuna.trial.FixedTrial(space.flat_params(knobs))) == knobs
    assert all(space.contains(other) for other in space.neighbours(knobs))


@pytest.mark.parametrize("kind", KINDS)
def test_a_space_holds_the_same_configs_whether_it_is_enumerated_or_not(kind: str) -> None:
    some = [knobs for space in WHOLE.values() for knobs in [*space._draws][::5]]
    assert [knobs for knobs in some if LARGE[kind].contains(knobs)] == [
        knobs for knobs in some if knobs in WHOLE[kind]._draws
    ]
