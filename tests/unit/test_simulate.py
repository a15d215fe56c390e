"""The simulated cluster: what it is told, its model, its clock, and its outcomes."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.canonical import Facts
from autotune.errors import InfrastructureError, UserError
from autotune.measuring import make_spec
from autotune.simulate.cluster import SimulatedCluster, parse_cluster
from autotune.simulate.machine import shape_of
from autotune.simulate.reports import hardware_flops_per_token, survey_facts
from autotune.simulate.runner import EPOCH_S, SimulatedRunner, make_world
from autotune.simulate.world import World
from autotune.space import SearchSpace
from tests.unit.conftest import make_job
from trials.breakdown import FRACTIONS
from trials.flops import counted_flops_per_token
from trials.outcome import Outcome
from trials.record import ENGINE_KNOBS, Knobs
from trials.survey import survey_model
from trials.workload import load_workload

H100 = "nodes=4 gpus=8 device='NVIDIA H100 80GB HBM3'"
GPU_JOB: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "seq_len": 4096},
    "batch": {"global_batch_size": 128, "target_world_size": 16},
    "cluster": {"address": "auto", "device": "cuda", "ranks_per_node": 8, "nodes_per_trial": 2},
    "training": {"engines": ["fsdp2", "fsdp1", "ddp"]},
}


def gpu_job(**sections: Any) -> Any:
    return make_job(**(GPU_JOB | sections))


def world_of(text: str = H100, **sections: Any) -> World:
    return make_world(gpu_job(**sections), parse_cluster(text))


def space_of(world: World) -> SearchSpace:
    shape = world.shape
    block_mib = (shape.block_bytes / 2**20,) * shape.num_layers
    return SearchSpace(world.job, Facts("cuda", shape.num_layers, block_mib, 96, world.world_size))


def test_a_cluster_is_read_and_written_in_one_form() -> None:
    cluster = parse_cluster("gpus=8  nodes=2 device='NVIDIA A100-SXM4-80GB' seed=3 node_loss=0.1")
    assert (cluster.nodes, cluster.gpus, cluster.seed, cluster.cpus_per_node) == (2, 8, 3, 96)
    assert parse_cluster(str(cluster)) == cluster
    assert str(cluster) == "nodes=2 gpus=8 device='NVIDIA A100-SXM4-80GB' seed=3 node_loss=0.1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "nodes is missing; gpus is missing; device is missing"),
        ("nodes=2 gpus=8", "device is missing"),
        (f"{H100} gpu=4", "gpu: unknown key; did you mean gpus"),
        (f"{H100} seed=1 seed=2", "seed is given twice"),
        ("64 H100", "'64' is no KEY=VALUE"),
        ("nodes=two gpus=8 device='NVIDIA H200'", "nodes = 'two'"),
        ("nodes=0 gpus=8 device='NVIDIA H200'", "nodes = '0'"),
        (f"{H100} noise=2", "noise = '2'"),
        (f"{H100} network_gb_per_s=nan", "network_gb_per_s = 'nan'"),
        ("nodes=2 gpus=8 device='NVIDIA H200", "no closing quotation"),
        ("nodes=2 gpus=8 device=H9000", "no bandwidth and memory known"),
        ("nodes=1 gpus=1 device=H9000 memory_gib=9 memory_gb_per_s=9 link_gb_per_s=9", "no peak known"),
    ],
)
def test_what_describes_no_cluster_is_refused_with_what_to_write(text: str, said: str) -> None:
    with pytest.raises(UserError) as raised:
        parse_cluster(text)
    assert said in raised.value.message
    assert "nodes=64 gpus=8 device=" in raised.value.hint


@pytest.mark.parametrize(
    ("text", "sections", "said"),
    [
        ("nodes=1 gpus=8 device='NVIDIA H200'", {}, "needs 2 nodes"),
        ("nodes=4 gpus=4 device='NVIDIA H200'", {}, "a simulated node has 4 GPUs"),
        (H100, {"cluster": GPU_JOB["cluster"] | {"device": "cpu"}}, "cluster.device = cpu"),
        (H100, {"cluster": GPU_JOB["cluster"] | {"labels": {"pool": "a"}}}, "labels"),
        (H100, {"model": {"workload": "my.module:make", "seq_len": 64}}, "only the built-in decoder"),
        (
            "nodes=4 gpus=8 device='Tesla V100-SXM2-32GB' memory_gib=32 memory_gb_per_s=900 link_gb_per_s=150",
            {},
            "bf16",
        ),
    ],
)
def test_what_the_cluster_has_not_is_refused(text: str, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        world_of(text, **sections)


SMALL = {"vocab_size": 300, "hidden_size": 64, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 96}


@pytest.mark.parametrize(
    "extra", [{}, {"tie_embeddings": True, "qkv_bias": True}, {"qk_norm": True, "head_size": 32}], ids=str
)
def test_the_sizes_are_those_that_the_real_survey_finds(extra: dict[str, Any]) -> None:
    job = gpu_job(model={"config": SMALL | extra, "seq_len": 64})
    workload = load_workload("decoder", {"seq_len": 64, "config": SMALL | extra}, ())
    real, found = survey_model(workload, 64, "bf16"), survey_facts(job, shape_of(job))
    assert {name: found[name] for name in real} == real
    for mode in ("selective_op", "every_2"):
        counted = counted_flops_per_token(workload, 64, mode)
        assert hardware_flops_per_token(shape_of(job), mode) == pytest.approx(counted, rel=0.02)


def test_equal_seeds_make_equal_worlds_in_whatever_order_they_are_asked() -> None:
    one, other, third = world_of(), world_of(), world_of(f"{H100} seed=1")
    configs = random.Random(0).sample(list(space_of(one).configs()), 40)
    truths = {knobs: one.truth(knobs) for knobs in configs}
    assert all(other.truth(knobs) == truths[knobs] for knobs in reversed(configs))
    assert any(third.truth(knobs) != truths[knobs] for knobs in configs)


def test_without_hidden_effects_more_kept_takes_more_memory_and_recomputing_takes_more_time() -> None:
    world = world_of(f"{H100} effects=0")
    base = replace(space_of(world).baseline, micro_batch_size=2, grad_accum_steps=4)

    def truth(**changes: Any) -> Any:
        return world.truth(replace(base, **changes))

    full, none = truth(), truth(activation_checkpointing="none")
    assert full.allocated_gib < truth(activation_checkpointing="selective_op").allocated_gib < none.allocated_gib
    assert full.parts["compute"] > truth(activation_checkpointing="every_2").parts["compute"] > none.parts["compute"]
    assert truth(reshard_after_forward=False).allocated_gib > full.allocated_gib
    held = truth(sync_each_micro_batch=False)
    assert held.allocated_gib > full.allocated_gib + 20, "whole gradients of 8 billion parameters"
    assert held.comm_s < full.comm_s
    assert truth(micro_batch_size=4, grad_accum_steps=2).allocated_gib > full.allocated_gib
    assert truth(compile=True).step_s < full.step_s


ALTERNATIVES: dict[str, list[Any]] = {
    "keep_last_units": [1], "reshard_group_size": [8], "forward_prefetch_units": [2], "backward_prefetch_units": [2],
    "replicate_degree": [2], "reduce_dtype": ["bf16"], "cpu_offload": [True], "limit_all_gathers": [False],
    "backward_prefetch": ["post", "none"], "forward_prefetch": [True], "reshard_after_forward": [False],
}  # fmt: skip


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "ddp"])
def test_every_knob_has_an_effect_and_the_parts_of_a_step_add_up(engine: str) -> None:
    assert set(ALTERNATIVES) == set(ENGINE_KNOBS), "a knob that is not modelled"
    # A small vocabulary, whose loss does not hide the rest of the memory.
    world = world_of(f"{H100} effects=0", model={"preset": "llama2-7b", "seq_len": 1024})
    base = replace(
        space_of(world).baseline, engine=engine, num_workers=2, prefetch_factor=2, activation_checkpointing="none"
    )
    base = Knobs(**{**base.to_dict(), "bucket_cap_mb": 25.0 if engine == "ddp" else base.bucket_cap_mb})
    own = {name: values for name, values in ALTERNATIVES.items() if engine in ENGINE_KNOBS[name].engines}
    changes = own | {"num_workers": [0], "compile": [True], "attention_backend": ["math"], "fused_optimizer": [True]}
    plain = world.truth(base)
    for name, values in changes.items():
        for value in values:
            truth = world.truth(Knobs(**{**base.to_dict(), name: value}))
            assert set(truth.parts) == set(FRACTIONS)
            assert min(truth.parts.values()) >= 0
            assert sum(truth.parts.values()) == pytest.approx(truth.step_s)
            assert (truth.step_s, truth.allocated_gib, truth.reserved_gib) != (
                plain.step_s, plain.allocated_gib, plain.reserved_gib,
            ), f"{name} = {value}"  # fmt: skip


def test_the_clock_goes_on_by_what_trials_take_and_nothing_sleeps(tmp_path: Path) -> None:
    world = world_of()
    runner = SimulatedRunner(world)
    spec = make_spec(world.job, runner, space_of(world).baseline, "explore", 0)
    began = time.perf_counter()
    result = runner.run(spec, tmp_path, 3600)
    assert time.perf_counter() - began < 10 < result.ended_at - result.started_at
    assert result.outcome is Outcome.OK
    assert result.started_at == EPOCH_S
    assert runner.clock.time() > result.ended_at
    assert set(result.hosts) == {"simulated-node-0", "simulated-node-1"}
    assert all("simulated" in report.device_name for report in result.reports.values())
    again = runner.run(replace(spec, attempt=1), tmp_path, 3600)
    assert again.reports[0].block_times_s != result.reports[0].block_times_s, "noise between runs"
    assert again.reports[0].losses == result.reports[0].losses
    repeated = SimulatedRunner(world_of()).run(spec, tmp_path, 3600)
    assert repeated.reports[0] == result.reports[0]


def test_trials_side_by_side_end_in_the_order_of_their_lengths(tmp_path: Path) -> None:
    world = world_of(cluster=GPU_JOB["cluster"] | {"parallel_trials": 2})
    runner = SimulatedRunner(world)
    base = space_of(world).baseline
    quick = make_spec(world.job, runner, base, "explore", 1)
    slow = replace(make_spec(world.job, runner, replace(base, compile=True), "explore", 0))
    for spec in (slow, quick):
        assert runner.is_free()
        runner.start(spec, tmp_path, 3600)
    assert not runner.is_free()
    assert [runner.next_ended()[0].trial for _ in range(2)] == [1, 0]


def test_what_does_not_fit_runs_out_of_memory_and_what_takes_too_long_times_out(tmp_path: Path) -> None:
    world = world_of()
    runner = SimulatedRunner(world)
    base = space_of(world).baseline
    large = replace(base, micro_batch_size=8, grad_accum_steps=1, activation_checkpointing="none")
    died = runner.run(make_spec(world.job, runner, large, "explore", 0), tmp_path, 3600)
    assert died.outcome is Outcome.OOM_DEVICE
    assert died.reports[died.failed_rank or 0].outcome == "oom_device"
    assert "CUDA out of memory" in died.reason
    late = runner.run(make_spec(world.job, runner, base, "explore", 1), tmp_path, 20)
    assert late.outcome is Outcome.TIMEOUT
    assert late.ended_at - late.started_at == pytest.approx(20)


def test_a_nearly_full_allocator_retries_and_is_slower() -> None:
    world = world_of()
    truths = [world.truth(knobs) for knobs in space_of(world).configs()]
    edge = [truth for truth in truths if truth.retries and not truth.out_of_memory]
    assert edge
    assert all(truth.reserved_gib == truth.capacity_gib for truth in edge)
    assert all(truth.parts["idle"] > 0.05 * truth.step_s for truth in edge)


def test_lost_nodes_are_replaced_until_there_are_none(tmp_path: Path) -> None:
    world = world_of(f"{H100} node_loss=0.999")
    runner = SimulatedRunner(world)
    spec = make_spec(world.job, runner, space_of(world).baseline, "explore", 0)
    outcomes = []
    with pytest.raises(InfrastructureError, match="1 simulated nodes are left"):
        for attempt in range(9):
            outcomes.append(runner.run(replace(spec, attempt=attempt), tmp_path, 3600).outcome)
    assert outcomes == [Outcome.NODE_LOST] * 3
    assert runner.num_lost == 3


def test_a_cluster_of_one_gpu_has_no_network() -> None:
    text = "nodes=1 gpus=1 device='NVIDIA H200'"
    alone = {"batch": {"global_batch_size": 4, "target_world_size": 1}, "cluster": {"ranks_per_node": 1}}
    world = world_of(text, **alone, model={"preset": "qwen3-0.6b", "seq_len": 512}, training={"engines": ["fsdp2"]})
    truth = world.truth(space_of(world).baseline)
    assert truth.comm_s == truth.parts["exposed_comm"] == 0
    assert isinstance(world.cluster, SimulatedCluster)
