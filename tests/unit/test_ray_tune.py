"""What Tune draws -> the config that is measured."""

from __future__ import annotations

import random
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.integrations.ray_tune import knobs_of, param_space, trainable
from autotune.job_file import load_job, shipped
from autotune.space import SearchSpace


def test_every_draw_is_a_config_of_the_space(space: SearchSpace) -> None:
    rng = random.Random(0)
    for _ in range(200):
        drawn = {name: rng.choice(space.candidates[name]) for name in space.searched}
        knobs = knobs_of(space, drawn)
        assert space.contains(knobs)
        assert knobs.micro_batch_size == drawn["micro_batch_size"]
        assert knobs.num_workers == drawn["num_workers"]
        assert knobs.prefetch_factor == (drawn["prefetch_factor"] if drawn["num_workers"] else None)


@pytest.mark.parametrize("changes", [{"micro_batch_size": 3}, {"activation_checkpointing": None}])
def test_a_value_that_is_no_candidate_is_named(space: SearchSpace, changes: dict[str, Any]) -> None:
    drawn = {name: space.candidates[name][0] for name in space.searched} | changes
    (name,) = changes
    with pytest.raises(UserError, match=f"{name} = .*: no candidate") as raised:
        knobs_of(space, drawn)
    assert str(list(space.candidates[name])) in raised.value.hint


def test_a_trainers_command_is_refused_before_anything_starts() -> None:
    job = load_job(next(name for name in shipped("jobs") if load_job(name).trainer is not None))
    for entry in (param_space, trainable):
        with pytest.raises(UserError, match="not measured under Ray Tune"):
            entry(job)
