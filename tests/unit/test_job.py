"""The job file: what it accepts, and what it says about what it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from autotune.errors import UserError
from autotune.job_file import load_job, shipped
from autotune.measure import overrides_of
from tests.unit.conftest import QUICK, make_job


@pytest.mark.parametrize("name", sorted(shipped("jobs")))
def test_every_shipped_job_loads(name: str) -> None:
    assert load_job(name).batch.target_world_size > 0


def test_the_resolved_job_loads_again_as_the_same_job(tmp_path: Path) -> None:
    job = load_job("quickstart", ("budget.trials=3",))
    (tmp_path / "job.yaml").write_text(job.to_yaml())
    assert load_job(str(tmp_path / "job.yaml")) == job
    assert job.budget.trials == 3


def test_all_problems_are_told_at_once_with_key_value_and_hint(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        yaml.safe_dump(QUICK | {"budget": {"trails": 3}, "measure": {"rel_ci": 2}, "model": {"preset": "tiny"}})
    )
    with pytest.raises(UserError) as caught:
        load_job(str(path))
    text = str(caught.value)
    assert f"{path}: 3 problems" in text
    assert "budget.trails: unknown key" in text
    assert "did you mean trials?" in text
    assert "measure.rel_ci = 2: should be less than 1" in text
    assert "model.seq_len: missing" in text


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        (
            "space.limit_all_gathers=[true]",
            "space.limit_all_gathers: fsdp2 has no such knob; it is FSDP1's rate limiter",
        ),
        ("space.grad_accum_steps=[2]", "accumulation is derived"),
        ("space.activation_checkpointing=[some]", "activation_checkpointing = 'some'"),
        ("space.micro_batch_size=[]", "give at least one candidate"),
        ("space.num_workers=[1, 1]", "the same candidate twice"),
        ("batch.target_world_size=3", "no multiple of batch.target_world_size = 3"),
        ("batch.global_batch_tokens=4096", "give either global_batch_size (sequences) or global_batch_tokens"),
        ("model.config={}", "give either preset or config"),
        ("model.preset=huge", "no such preset; known: llama2-13b"),
        ("model.preset=llama3-7b", "no such preset; did you mean llama3-"),
        ("model.workload=hub", "workload = 'hub': decoder, hf, or package.module:factory"),
        ("training.engines=[zero]", "training.engines.0 = 'zero'"),
        ("cluster.ranks_per_node=0", "cluster.ranks_per_node = 0: should be greater than 0"),
        ("cluster.memory_limit_gib=a", "hint: Per rank. On CUDA the caching allocator's cap"),
        ("cluster.nodes_per_trial=2", "one machine is one node; start Ray on every node"),
        ("cluster.parallel_trials=2", "trials that share a machine slow each other down"),
        ("cluster.labels={pool: tune}", "a Ray that is started here has no labelled nodes"),
        ("cluster.labels={pool: 1}", "cluster.labels.pool = 1: should be a valid string"),
        ("cluster.address=ray://head:10001", "address = 'ray://head:10001': expected local, auto or HOST:PORT"),
        ("cluster.address=head", "expected local, auto or HOST:PORT"),
        ("cluster.ranks_per_node=two", "cluster.ranks_per_node = 'two'"),
        ("measure.compose_above=3", "compose_above = 3: a short step has 4 micro-steps itself"),
        ("measure.min_steps=99", "min_steps = 99 is more than max_steps = 8"),
        ("training.reduce_dtype=bf16", "needs training.precision = bf16"),
    ],
)
def test_a_bad_value_is_named(override: str, complaint: str) -> None:
    with pytest.raises(UserError, match=r"problem") as caught:
        load_job("quickstart", (override,))
    assert complaint in str(caught.value)


def test_every_problem_of_the_decoders_shape_is_told() -> None:
    with pytest.raises(UserError) as caught:
        make_job(model={"config": {"hidden": 8, "num_layers": 0, "vocab_size": 256, "num_heads": 2}, "seq_len": 8})
    text = str(caught.value)
    assert "config.hidden: unknown key; did you mean hidden_size" in text
    assert "config.ffn_size: missing" in text
    assert "config.num_layers = 0: should be a positive whole number" in text


def test_a_global_batch_in_tokens_that_is_no_whole_number_of_sequences_names_the_nearest() -> None:
    with pytest.raises(UserError, match="nearest: 4096 or 4352"):
        make_job(batch={"global_batch_tokens": 4100, "target_world_size": 2})
    assert make_job(batch={"global_batch_tokens": 4096, "target_world_size": 2}).global_batch_size == 16


@pytest.mark.parametrize("text", ["- a\n- b\n", "", "just words", "a: [1\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=str(path)):
        load_job(str(path))


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"model: \xff\xfe")
    with pytest.raises(UserError, match="UTF-8"):
        load_job(str(path))


@pytest.mark.parametrize(("name", "hint"), [("quickstrat", "quickstart"), ("missing.yaml", "known")])
def test_a_name_that_is_neither_file_nor_shipped_offers_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(UserError, match=hint):
        load_job(name)


@pytest.mark.parametrize("override", ["budget.trials", "=3", "data.source.x=3", "budget.trials=[1"])
def test_a_malformed_override_is_refused(override: str) -> None:
    with pytest.raises(UserError, match=r"--set"):
        load_job("quickstart", (override,))


def test_a_space_named_by_override_can_have_its_knobs_overridden() -> None:
    job = load_job("quickstart", ("space.num_workers=[0]", "space=default"))
    assert job.space.num_workers == (0,)
    assert job.space.prefetch_factor == (2, 4)


def test_yaml_cannot_run_code(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("model: !!python/object/apply:os.system ['touch hacked']\n")
    with pytest.raises(UserError, match="not YAML"):
        load_job(str(path))


def test_data_paths_are_relative_to_the_job_file(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(QUICK | {"data": {"source": "texts"}}))
    assert load_job(str(path)).data.source == str(tmp_path / "texts")


def test_a_users_module_is_looked_for_beside_the_job_from_wherever_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(QUICK | {"model": {"workload": "mine:make", "seq_len": 256}}))
    job = load_job(str(path))
    assert job.model.import_path == str(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.yaml").write_text(job.to_yaml())
    assert load_job(str(tmp_path / "run" / "job.yaml")) == job


def test_a_folder_with_a_shipped_jobs_name_is_not_in_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quickstart").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_job("quickstart").output == "runs/quickstart"


def test_a_space_may_be_a_file_beside_the_job(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("num_workers: [0, 3]\n")
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(QUICK | {"space": "mine.yaml"}))
    assert load_job(str(path)).space.num_workers == (0, 3)


@pytest.mark.parametrize("trainer", ["accelerate", "transformers"])
def test_exporting_bf16_reduces_as_the_trainer_does(trainer: str) -> None:
    job = make_job(training={"precision": "bf16"}, export_for=trainer)
    assert job.reduce_dtype == "bf16"
    assert make_job(training={"precision": "bf16"}).reduce_dtype == "fp32"
    with pytest.raises(UserError, match=f"{trainer}'s bf16 reduces gradients in bf16 .*; leave it at auto"):
        make_job(training={"precision": "bf16", "reduce_dtype": "fp32"}, export_for=trainer)


def test_a_trainer_that_decides_no_dtype_leaves_it_to_the_job() -> None:
    assert make_job(training={"precision": "bf16"}, export_for="torchtitan").reduce_dtype == "fp32"
    assert (
        make_job(training={"precision": "bf16", "reduce_dtype": "bf16"}, export_for="lightning").reduce_dtype == "bf16"
    )
    with pytest.raises(UserError, match="torchtitan's bf16 reduces gradients in fp32"):
        make_job(training={"precision": "bf16", "reduce_dtype": "bf16"}, export_for="torchtitan")


def test_a_trainer_that_is_not_known_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"export_for: 'torchtitian': no such trainer; did you mean torchtitan\?"):
        make_job(export_for="torchtitian")


def hf_job(tmp_path: Path, config: object) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(QUICK | {"model": {"workload": "hf", "config": config, "seq_len": 256}}))
    return path


@pytest.mark.parametrize("name", ["llama", "llama/config.json"])
def test_a_models_config_file_becomes_part_of_the_job(tmp_path: Path, name: str) -> None:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "llama", "hidden_size": 64, "rope_theta": 1e4}')
    job = load_job(str(hf_job(tmp_path, name)))
    config = {"model_type": "llama", "hidden_size": 64, "rope_theta": 1e4}
    assert job.model.factory_arguments() == {"config": config}
    (tmp_path / "resolved.yaml").write_text(job.to_yaml())
    assert load_job(str(tmp_path / "resolved.yaml")) == job


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ("meta-llama/Llama-3.1-8B", "models are not looked up or downloaded by name"),
        ("broken", "is UTF-8 JSON"),
        ("other.json", "names no model_type"),
        ({"hidden_size": 64}, "at least model_type"),
        (None, "at least model_type"),
    ],
)
def test_what_is_no_models_config_is_refused(tmp_path: Path, config: object, complaint: str) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(UserError, match=complaint):
        load_job(str(hf_job(tmp_path, config)))


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("keep_last_units=1", "baseline.keep_last_units: ddp has no such knob"),
        ("limit_all_gathers=false", "baseline.limit_all_gathers: ddp has no such knob"),
        ("reshard_after_forward=false", "baseline.reshard_after_forward: ddp has no such knob"),
        ("reduce_dtype=bf16", "ddp reduces gradients in fp32"),
    ],
)
def test_a_knob_that_the_measured_engine_has_not_is_an_error(setting: str, complaint: str) -> None:
    """Also in a job whose other engines have it."""
    engines = "training.engines=[fsdp2, fsdp1, ddp]", "training.precision=bf16"
    with pytest.raises(UserError) as refused:
        load_job("quickstart", [*engines, *overrides_of(("engine=ddp", setting))])
    assert complaint in str(refused.value)
