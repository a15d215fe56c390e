"""A job with the user's own command: what may be written, what reaches the command, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.canonical import Facts
from autotune.errors import UserError
from autotune.job import Job
from autotune.job_file import load_job, validate
from autotune.space import SearchSpace
from autotune.trainer.handed import carried_by, untouched
from autotune.trainer.order import make_order
from tests.unit.conftest import make_job
from trials.record import Knobs, Measure, TrialSpec, digest

COMMAND = ["python", "{probe}", "train.py", "--mbs", "{micro_batch_size}", "--accum", "{grad_accum_steps}"]
TRAINER: dict[str, Any] = {
    "trainer": {"command": COMMAND},
    "batch": {"global_batch_size": 16, "target_world_size": 4},
    "cluster": {"ranks_per_node": 2, "device": "cpu"},
    "space": {"micro_batch_size": [1, 2, 4]},
}


def trainer_job(trainer: dict[str, Any] | None = None, **sections: Any) -> Job:
    return validate(Job, TRAINER | {"trainer": TRAINER["trainer"] | (trainer or {})} | sections, "test.yaml")


def space_of(job: Job) -> SearchSpace:
    return SearchSpace(job, Facts("cpu", 1, (1.0,), 2))


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        ({"command": [*COMMAND, "{micro_batchsize}"]}, "no such placeholder; did you mean micro_batch_size"),
        ({"command": [*COMMAND, "{wat}"]}, "known: .*master_port.*micro_batch_size"),
        ({"command": [*COMMAND, "{a b}"]}, "write {{ and }} for braces"),
        ({"command": [*COMMAND, "--json={"]}, "write {{ and }} for braces"),
        ({"command": ["python", "train.py", "{micro_batch_size}", "{grad_accum_steps}"]}, "nothing measures it"),
        ({"command": ["{probe}", *COMMAND]}, "more than once"),
        ({"attach": "explicit"}, "attach the probe twice"),
        ({"command": [*COMMAND, "--auto_find_batch_size", "true"]}, "looks for a batch size itself"),
        ({"command": [*COMMAND, "--trainer.auto_scale_batch_size=power"]}, "looks for a batch size itself"),
        ({"render": {"conf": "acelerate"}}, "did you mean accelerate"),
        ({"render": {"conf": "accelerate"}}, "nothing takes that file; write {conf}"),
        ({"via": {"compil": "env"}}, "did you mean compile"),
        ({"custom": {"tp": [1, 2]}}, "custom.tp: nothing takes it"),
        ({"custom": {"tp": ["a"]}, "via": {"tp": "env"}}, "expected a number of ranks"),
        ({"custom": {"float8": [True, False]}, "via": {"float8": "env"}}, "quote what your command is given"),
        ({"custom": {"a": [1, "1"]}, "via": {"a": "env"}}, "the same value twice"),
        ({"custom": {"probe": ["x"]}}, "that name is taken"),
        ({"launcher": "node"}, "launcher"),
    ],
)
def test_a_bad_trainer_section_is_named(trainer: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        trainer_job(trainer)


def test_a_finder_of_batch_sizes_that_is_off_is_let_through() -> None:
    assert trainer_job({"command": [*COMMAND, "--auto_find_batch_size", "false"]}).trainer is not None


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"space": {"micro_batch_size": [1], "compile": [False, True]}}, "space.compile: nothing hands it"),
        ({"baseline": {"activation_checkpointing": "none"}}, "baseline.activation_checkpointing: nothing hands it"),
        ({"training": {"engines": ["fsdp2", "ddp"]}}, "training.engines: nothing hands it"),
        ({"data": {"source": "python-stdlib"}}, "your trainer reads its own"),
        ({"batch": {"global_batch_tokens": 4096, "target_world_size": 4}}, "depends on their length"),
        ({"trainer": {"command": COMMAND[:-2]}}, "nothing takes the accumulation"),
    ],
)
def test_what_nothing_would_take_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        validate(Job, TRAINER | sections, "test.yaml")


def test_a_job_without_model_data_and_trainer_says_what_is_missing() -> None:
    with pytest.raises(UserError, match="model and data: missing"):
        validate(Job, {name: section for name, section in TRAINER.items() if name != "trainer"}, "test.yaml")


def test_what_counts_blocks_needs_a_declared_model() -> None:
    command = [*COMMAND, "{activation_checkpointing}"]
    space = {"activation_checkpointing": ["none", "every_2"]}
    with pytest.raises(UserError, match="which only your trainer knows"):
        trainer_job({"command": command}, space=space)
    model = {"preset": "tiny", "seq_len": 256}
    assert trainer_job({"command": command}, space=space, model=model).model is not None


def test_the_space_defaults_to_what_the_command_takes(tmp_path: Path) -> None:
    job = {name: section for name, section in TRAINER.items() if name != "space"}
    command = [*COMMAND, "{reshard_after_forward}"]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job | {"trainer": {"command": command}}))
    loaded = load_job(str(tmp_path / "job.yaml"))
    searched = {name for name, values in loaded.space if values is not None}
    assert searched == {"micro_batch_size", "reshard_after_forward"}
    assert loaded.trainer is not None
    assert loaded.trainer.folder == str(tmp_path)


def test_words_that_yaml_1_1_takes_for_booleans_stay_words(tmp_path: Path) -> None:
    text = yaml.safe_dump(TRAINER | {"trainer": {"command": [*COMMAND, "{float8}"]}})
    text = text.replace("trainer:\n", "trainer:\n  custom: {float8: [off, rowwise]}\n")
    (tmp_path / "job.yaml").write_text(text)
    job = load_job(str(tmp_path / "job.yaml"))
    assert job.trainer is not None
    assert job.trainer.custom == {"float8": ("off", "rowwise")}
    (tmp_path / "again.yaml").write_text(job.to_yaml())
    assert load_job(str(tmp_path / "again.yaml")) == job


def test_knobs_of_ones_own_are_searched_and_part_the_ranks() -> None:
    trainer = {"command": [*COMMAND, "{tp}", "{float8}"], "custom": {"tp": [1, 2], "float8": ["off", "rowwise"]}}
    space = space_of(trainer_job(trainer))
    configs = list(space.configs())
    assert len(configs) == 3 * 2 * 2
    assert space.baseline.custom == (("float8", "off"), ("tp", "1"))
    for knobs in configs:
        data_parallel_ranks = 4 // knobs.model_parallel_ranks
        assert knobs.micro_batch_size * knobs.grad_accum_steps * data_parallel_ranks == 16
        assert space.contains(knobs)
        assert Knobs.from_dict(knobs.to_dict()) == knobs
    assert {knobs.custom for knobs in configs} == {
        (("float8", float8), ("tp", tp)) for float8 in ("off", "rowwise") for tp in ("1", "2")
    }
    assert space.hash != space_of(trainer_job()).hash


@pytest.mark.parametrize(
    ("tp", "words"), [([3], "does not divide batch.target_world_size"), ([4], "does not divide a trial's world size")]
)
def test_ranks_that_do_not_part_are_refused(tp: list[int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        trainer_job({"command": [*COMMAND, "{tp}"], "custom": {"tp": tp}})


def test_what_the_trainer_decides_is_null_in_files_and_comes_back_the_same() -> None:
    job = trainer_job({"command": [*COMMAND, "{reshard_after_forward}"]})
    for knobs in space_of(job).configs():
        told = untouched(knobs.to_dict(), job.handed)
        assert told["activation_checkpointing"] is None
        assert told["num_workers"] is None
        assert told["reshard_after_forward"] is not None
        assert Knobs.from_dict(told) == knobs


@pytest.mark.parametrize("custom", [{"a": 1}, ["a"], {"tp": "0"}, {"tp": "x"}])
def test_knobs_of_ones_own_that_nobody_wrote_are_refused(custom: Any) -> None:
    with pytest.raises(ValueError, match="custom"):
        Knobs.from_dict(space_of(trainer_job()).baseline.to_dict() | {"custom": custom})


def test_knobs_of_ones_own_change_what_is_measured() -> None:
    job = trainer_job({"command": [*COMMAND, "{tp}"], "custom": {"tp": [1, 2]}})
    orders = [make_order(job, knobs, 2) for knobs in space_of(job).configs() if knobs.micro_batch_size == 4]
    assert [order["values"]["tp"] for order in orders] == ["1", "2"]
    assert [order["values"]["global_batch_size"] for order in orders] == ["8", "8"]
    assert len({digest(order) for order in orders}) == 2


def test_an_exporter_carries_what_changes_its_file() -> None:
    assert {"reshard_after_forward", "activation_checkpointing"} <= carried_by("accelerate")
    assert not {"micro_batch_size", "grad_accum_steps", "num_workers"} & carried_by("accelerate")
    assert {"micro_batch_size", "grad_accum_steps", "num_workers"} <= carried_by("transformers")


def test_a_rendered_file_is_part_of_the_order() -> None:
    job = trainer_job(
        {"command": ["python", "{probe}", "train.py", "{trainer_args}"], "render": {"trainer_args": "transformers"}},
        space={"micro_batch_size": [1, 2], "reshard_after_forward": [True, False]},
        export_for="transformers",
    )
    knobs = [knobs for knobs in space_of(job).configs() if knobs.micro_batch_size == 2]
    files = [make_order(job, one, 2)["files"]["trainer_args"] for one in knobs]
    (first, *_), (second, *_) = (list(found.values()) for found in files)
    assert "per_device_train_batch_size: 2" in first
    assert first != second


def test_what_a_rendered_file_cannot_carry_is_refused() -> None:
    job = trainer_job(
        {
            "command": ["python", "{probe}", "train.py", "{trainer_args}"],
            "render": {"trainer_args": "transformers"},
        },
        model={"preset": "tiny", "seq_len": 256},
        training={"precision": "bf16", "reduce_dtype": "bf16"},
        space={"activation_checkpointing": ["none", "every_2"]},
        baseline={"activation_checkpointing": "none"},
    )
    (knobs,) = (
        k for k in SearchSpace(job, Facts("cpu", 4, (2.0,) * 4, 2)).configs() if "2" in k.activation_checkpointing
    )
    with pytest.raises(UserError, match="transformers cannot carry activation_checkpointing = every_2"):
        make_order(job, knobs, 2)


def test_an_order_travels_as_json() -> None:
    job = trainer_job()
    knobs = space_of(job).baseline
    spec = TrialSpec(
        trial=1, stage="explore", workload="trainer", model={}, seq_len=0, data={"source": "trainer"},
        global_batch_size=8, precision="fp32", optimizer={}, world_size=2, device="cpu", seed=0,
        measure=Measure(), knobs=knobs, trainer=make_order(job, knobs, 2),
    )  # fmt: skip
    assert TrialSpec.from_json(spec.to_json()) == spec
    assert TrialSpec.from_json(spec.to_json()).digest() == spec.digest()


def test_a_built_in_job_is_as_it_was() -> None:
    job = make_job()
    assert "micro_batch_size" in job.handed
    assert SearchSpace(job, Facts("cpu", 4, (2.8,) * 4, 2)).baseline.custom is None
