"""What `autotune doctor` makes of facts, kind and hostile; each problem says what to do."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from autotune.doctor import checks  # noqa: F401 (puts the checks on the list)
from autotune.doctor.command import Diagnosis
from autotune.doctor.examine import _all_of
from autotune.doctor.findings import (
    CHECKS,
    EXIT_JOB,
    EXIT_MACHINE,
    Examination,
    Finding,
    NodeFacts,
    RankFacts,
    exit_code,
    run_checks,
)
from autotune.hardware import Peak
from autotune.job_file import load_job
from autotune.report.findings import print_findings
from autotune.rows import Limits, ModelFacts, Study
from autotune.survey import Survey
from tests.unit.conftest import make_job, make_space
from tests.unit.test_oom_killer import V1, V2, Host
from trials import cgroup, machine, matmul_rate
from trials.facts import Bandwidth, Gpu, Machine, MatmulRate, TorchFacts
from trials.flops import matmul_params
from trials.models import DecoderWorkload

H100 = Gpu("NVIDIA H100 80GB HBM3", 132, 79.1, "9.0", True)
V100 = Gpu("Tesla V100-SXM2-16GB", 80, 15.8, "7.0", False)
UNKNOWN = Gpu("NVIDIA Q1", 99, 80.0, "12.0", True)
SLICE = Gpu("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 42, 19.5, "8.0", True)
FREE = {"as": None, "data": None, "nofile": 65536, "nproc": None, "memlock": None}
MACHINE = Machine(
    host="node-a",
    cpus_online=96,
    cpus_affinity=96,
    cpu_quota=None,
    memory_gib=512.0,
    memory_available_gib=500.0,
    cgroup_memory_gib=None,
    shm_free_mib=65536.0,
    limits=FREE,
    max_tasks=None,
    is_root=False,
    has_gpu=True,
    compiler="/usr/bin/c++",
    python="3.11.7",
    versions={"torch": "2.13.0", "ray": "2.60.0", "optuna": "5.0.0", "pyarrow": "26.0.1"},
)
TORCH = TorchFacts("2.13.0+cu128", "cuda 12.8", "2.28.9", "570.86", "AMD EPYC 9654", True, [H100] * 8)
RATE = MatmulRate(700.0, 760.0, (8192, 8192, 8192), 610.0, (8192, 4096, 1024), 8192, False, None)


def examination(
    node: dict[str, Any] | None = None, torch_: dict[str, Any] | None = None, device: str = "cuda", **job: Any
) -> Examination:
    """A job on a node of eight H100, or on its CPUs, that nothing is wrong with, but for what is changed."""
    sections: dict[str, Any] = {"cluster": {"ranks_per_node": 2, "device": device}, "training": {"precision": "bf16"}}
    facts = NodeFacts(replace(MACHINE, **(node or {})), replace(TORCH, **(torch_ or {})))
    return Examination(make_job(**(sections | job)), "job.yaml", False, device, (facts,))


def surveyed(exam: Examination, num_params: int = 10**9, **peak: Any) -> Examination:
    given = {"tflops_per_s": 989.4, "dtype": "bf16", "source": "device table: H100 SXM (dense bf16)"} | peak
    limit_gib = exam.job.cluster.memory_limit_gib or (exam.nodes[0].torch.gpus[0].memory_gib)
    study = Study(
        study_id="s",
        job=exam.job,
        model=ModelFacts(num_params, num_params, 6e9, 6e9, "palm-matmul,full-attn"),
        peak=Peak(**given),
        limits=Limits(exam.device, limit_gib, 0.05),
        space_hash="h",
        world_size=exam.job.cluster.world_size,
    )
    return replace(exam, survey=Survey(study, make_space(), "d", 4, "text", None))


def measured(exam: Examination, *rates: MatmulRate) -> Examination:
    bandwidth = Bandwidth(3000.0, 400.0, 416.0)
    return replace(exam, ranks=tuple(RankFacts(n, "node-a", rate, bandwidth) for n, rate in enumerate(rates)))


def named(exam: Examination, name: str) -> Finding:
    (found,) = [finding for finding in run_checks(exam) if finding.name == name]
    return found


def problems(exam: Examination) -> list[str]:
    return [finding.name for finding in run_checks(exam) if finding.status == "problem"]


def test_a_healthy_gpu_node_has_nothing_to_mend() -> None:
    found = run_checks(measured(surveyed(examination()), RATE, RATE))
    assert {finding.status for finding in found} == {"ok"}, [f for f in found if f.status != "ok"]
    assert exit_code(found) == 0
    values = {finding.name: finding.value for finding in found}
    assert values["devices"].startswith("8 x NVIDIA H100 80GB HBM3 (79.1 GiB, 132 multiprocessors")
    assert values["achievable"].startswith("700 TFLOP/s per rank = 70.7 % of the peak in the matmuls of 8,192 tokens")
    assert values["all-gather"].startswith("400 GB/s bus bandwidth, 2 ranks over NCCL, 416 MiB")
    assert values["peak"] == "989.4 TFLOP/s per rank in bf16: device table: H100 SXM (dense bf16)"


CPU_LIMIT = {"ranks_per_node": 2, "device": "cpu", "memory_limit_gib": 4.0}


@pytest.mark.parametrize(
    ("facts", "name", "value", "advice"),
    [
        ({"node": {"shm_free_mib": None}}, "/dev/shm", "missing", "--shm-size"),
        ({"node": {"shm_free_mib": 0.01}}, "/dev/shm", "MiB of batches", "--shm-size"),
        ({"node": {"limits": FREE | {"nofile": 64}}}, "open files", "RLIMIT_NOFILE is 64", "ulimit -n"),
        ({"node": {"limits": FREE | {"nproc": 100}}}, "processes", "RLIMIT_NPROC is 100", "ulimit -u"),
        ({"node": {"max_tasks": 128}}, "processes", "pids.max is 128", "--pids-limit"),
        ({"node": {"limits": FREE | {"as": 2**36}}}, "address space", "RLIMIT_AS is 64.00 GiB", "ulimit -v"),
        ({"node": {"limits": FREE | {"data": 2**30}}}, "address space", "RLIMIT_DATA is 1.00 GiB", "ulimit -d"),
        ({"torch_": {"gpus": []}, "node": {"has_gpu": False}}, "devices", "no GPU", "on a node with a GPU"),
        ({"torch_": {"gpus": [], "gpu_build": ""}}, "devices", "no GPU", "is a CPU build"),
        ({"torch_": {"gpus": [], "problem": "driver too old"}}, "devices", "no GPU", "driver too old: update"),
        ({"torch_": {"gpus": [H100]}}, "devices", "ranks_per_node = 2, and a process sees 1", "ranks_per_node to 1"),
        ({"torch_": {"gpus": [SLICE]}}, "devices", "MIG slices", "CUDA_VISIBLE_DEVICES"),
        ({"torch_": {"gpus": [V100] * 2}}, "dtype", "Tesla V100-SXM2-16GB has not in hardware", "fp32"),
        ({"node": {"versions": {"torch": "2.11.0"}}}, "versions", "torch 2.11.0 is not", "install"),
        ({"node": {"compiler": None}, "baseline": {"compile": True}}, "compiler", "no C++ compiler", "g++"),
        ({"device": "cpu", "node": {"cpus_affinity": 1}}, "CPUs", "1 of 96 allowed", "at least 2 CPUs"),
        ({"device": "cpu", "node": {"cpu_quota": 1.5}}, "CPUs", "quota 1.5", "at least 2 CPUs"),
        (
            {"device": "cpu", "cluster": CPU_LIMIT, "node": {"cgroup_memory_gib": 6.0}},
            "host memory",
            "2 ranks of cluster.memory_limit_gib = 4.0 do not fit",
            "below 3.00",
        ),
        (
            {"device": "cpu", "cluster": CPU_LIMIT, "node": {"limits": FREE | {"data": 2**31}}},
            "address space",
            "RLIMIT_DATA is 2.00 GiB",
            "ulimit -d",
        ),
    ],
)
def test_what_is_in_the_way_is_a_problem_with_a_way_out(
    facts: dict[str, Any], name: str, value: str, advice: str
) -> None:
    exam = examination(**facts)
    found = named(exam, name)
    assert found.status == "problem"
    assert value in found.value
    assert advice in found.advice
    assert problems(exam) == [name], "and nothing else is"
    assert exit_code(run_checks(exam)) == EXIT_MACHINE


@pytest.mark.parametrize(
    ("facts", "name", "value"),
    [
        ({"torch_": {"gpus": [UNKNOWN] * 2}}, "peak", 'no peak known for device "NVIDIA Q1"'),
        ({"torch_": {"gpus": [H100, SLICE]}}, "devices", "1 x NVIDIA H100 80GB HBM3"),
        ({"node": {"shm_free_mib": 64.0}}, "/dev/shm", "NCCL's ranks share it"),
        ({"node": {"cpu_quota": 8.0}}, "CPUs", "8 of 96 allowed"),
        ({"node": {"cpus_affinity": 1}}, "CPUs", "which would wait for each other"),
        ({"device": "cpu", "torch_": {"gpus": []}, "node": {"has_gpu": False}}, "no GPU", "do not transfer to GPUs"),
        ({"device": "cpu", "torch_": {"gpus": [], "gpu_build": ""}}, "no GPU used", "over gloo"),
        ({"device": "cpu", "torch_": {"cpu_has_bf16": False}}, "dtype", "bf16 is emulated"),
        ({"device": "cpu"}, "host memory", "cgroup limit none"),
    ],
)
def test_what_only_matters_is_a_note(facts: dict[str, Any], name: str, value: str) -> None:
    exam = examination(**facts)
    found = named(exam, name)
    assert (found.status, problems(exam)) == ("note", [])
    assert value in found.value
    assert found.advice


def test_a_gpu_that_others_use_is_a_problem_since_trials_refuse_it() -> None:
    ranks = [RankFacts(n, "node-a", RATE, None, used_gib) for n, used_gib in enumerate((0.5, 30.0))]
    exam = replace(examination(), ranks=tuple(ranks))
    assert problems(exam) == ["GPU memory"]
    assert "rank 1 on node-a 30.00 GiB" in named(exam, "GPU memory").value
    assert named(replace(exam, ranks=(ranks[0],)), "GPU memory").status == "ok"


def test_locked_memory_matters_between_nodes() -> None:
    limited = {"limits": FREE | {"memlock": 65536}}
    several = {"address": "auto", "nodes_per_trial": 2, "ranks_per_node": 1, "device": "cuda"}
    assert named(examination(limited, cluster=several), "locked memory").status == "note"
    assert not [f for f in run_checks(examination(limited)) if f.name == "locked memory"]


@pytest.mark.parametrize(
    ("gpus", "device", "ranks", "precision"),
    [([], "cpu", 2, "fp32"), ([H100] * 4, "cuda", 4, "bf16"), ([V100], "cuda", 1, "fp32")],
)
def test_without_a_job_all_gpus_of_the_machine_are_looked_at(
    gpus: list[Gpu], device: str, ranks: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cpus_allowed", lambda: 64)
    job = load_job("quickstart", tuple(_all_of(NodeFacts(MACHINE, replace(TORCH, gpus=gpus)))))
    found = (job.cluster.device, job.cluster.ranks_per_node, job.batch.target_world_size, job.training.precision)
    assert found == (device, ranks, ranks, precision)


def test_a_slice_has_its_share_of_the_peak_and_can_run_one_rank() -> None:
    exam = examination(torch_={"gpus": [SLICE]}, cluster={"ranks_per_node": 1, "device": "cuda"})
    assert named(exam, "devices").status == "ok"
    assert "42 of 108 multiprocessors" in named(exam, "peak").value


def test_a_v100_is_well_in_fp32() -> None:
    exam = examination(torch_={"gpus": [V100] * 2}, training={"precision": "fp32"})
    assert problems(exam) == []
    assert named(exam, "peak").value.startswith("15.7 TFLOP/s per rank in fp32")


def test_states_that_cannot_fit_are_a_problem_and_offloaded_ones_are_not() -> None:
    assert problems(surveyed(examination(), num_params=70 * 10**9)) == ["states"]
    offloaded = examination(baseline={"cpu_offload": True})
    assert problems(surveyed(offloaded, num_params=70 * 10**9)) == []


@pytest.mark.parametrize(
    ("rates", "name", "status", "value"),
    [
        ([RATE, RATE], "achievable", "ok", "70.7 %"),
        ([RATE, replace(RATE, best_tflops_per_s=1100.0), RATE], "achievable", "note", "best 1100"),
        ([replace(RATE, best_tflops_per_s=300.0)], "achievable", "note", "best 300"),
        ([RATE, RATE, replace(RATE, model_tflops_per_s=630.0)], "slow rank", "note", "rank 2 on node-a at 90.0 %"),
    ],
)
def test_a_rate_that_does_not_go_with_the_peak_or_the_other_ranks_is_told(
    rates: list[MatmulRate], name: str, status: str, value: str
) -> None:
    found = named(measured(surveyed(examination()), *rates), name)
    assert (found.status, value in found.value) == (status, True), found


def test_one_rank_and_a_busy_cpu_are_told() -> None:
    exam = examination(device="cpu")
    rank = RankFacts(0, "node-a", replace(RATE, busy_share=0.4), Bandwidth(4.0, None, 2.8))
    exam = replace(exam, ranks=(rank,))
    assert named(exam, "quiet").status == "note"
    assert "one rank" in named(exam, "all-gather").value


def test_nodes_that_differ_are_named_and_alike_are_said_once() -> None:
    exam = examination()
    other = replace(exam.nodes[0], machine=replace(MACHINE, host="node-b", shm_free_mib=None))
    both = replace(exam, nodes=(*exam.nodes, other))
    found = [finding for finding in run_checks(both) if finding.name == "/dev/shm"]
    assert [(finding.status, finding.value.split(":")[0]) for finding in found] == [
        ("ok", "node-a"),
        ("problem", "node-b"),
    ]
    assert len([finding for finding in run_checks(both) if finding.name == "open files"]) == 1


def test_a_wrong_job_is_told_before_a_machine_that_lacks_something() -> None:
    wrong = Finding("problem", "job", "no such text", "give one", of_the_job=True)
    exam = replace(examination({"shm_free_mib": None}), troubles=(wrong,))
    assert exit_code(run_checks(exam)) == EXIT_JOB
    assert Diagnosis([wrong], None).to_dict()["exit_code"] == EXIT_JOB


def test_every_check_has_a_name_of_its_own_and_every_problem_a_way_out() -> None:
    assert len({function.__name__ for function in CHECKS}) == len(CHECKS)
    with pytest.raises(AssertionError, match="without a way out"):
        Finding("problem", "x", "y")


def test_the_screen_has_a_line_a_finding_and_no_words_that_steer_a_terminal() -> None:
    console = Console(width=80, record=True)
    found = [Finding("problem", "peak", "a \x1b[31mname\nthat goes on", "set it"), Finding("ok", "x", "[bold]y")]
    print_findings(console, found, "job.yaml")
    lines = console.export_text().splitlines()
    assert lines[0].startswith("problem  peak  a ")
    assert lines[1].endswith("that goes on -> set it")
    assert "[bold]y" in lines[2]
    assert lines[3] == "job.yaml cannot run here as it is: 1 problem, 0 notes"


# --- cgroups -----------------------------------------------------------------------------------------------------


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_the_tightest_limit_of_v2_and_its_parents_holds(host: Host) -> None:
    host.describe(V2.format(root="/"), "0::/user.slice/job\n")
    for path, text in {
        "user.slice/job/memory.max": "max\n",
        "user.slice/memory.max": "8589934592\n",
        "user.slice/memory.current": "589934592\n",
        "user.slice/job/cpu.max": "250000 100000\n",
        "user.slice/cpu.max": "max 100000\n",
        "user.slice/job/pids.max": "300\n",
        "user.slice/pids.max": "4000\n",
    }.items():
        host.count(path, text)
    assert cgroup.memory_limit_bytes(host.proc) == 2**33
    assert cgroup.memory_left_bytes(host.proc) == 8_000_000_000
    assert cgroup.cpu_quota(host.proc) == 2.5
    assert cgroup.max_tasks(host.proc) == 300


def test_v1_keeps_each_controller_in_a_tree_of_its_own(host: Host) -> None:
    host.describe(V1.format(root="/"), "4:memory:/job\n1:cpu:/other\n0::/\n")
    host.count("memory/job/memory.limit_in_bytes", "1073741824\n")
    host.count("memory/job/memory.usage_in_bytes", "73741824\n")
    host.count("memory/memory.limit_in_bytes", "9223372036854771712\n")
    host.count("memory/memory.usage_in_bytes", "2073741824\n")
    host.count("cpu/other/cpu.cfs_quota_us", "150000\n")
    host.count("cpu/other/cpu.cfs_period_us", "100000\n")
    host.count("cpu/cpu.cfs_quota_us", "-1\n")
    host.count("cpu/cpu.cfs_period_us", "100000\n")
    assert cgroup.memory_limit_bytes(host.proc) == 2**30
    assert cgroup.memory_left_bytes(host.proc) == 1_000_000_000
    assert cgroup.cpu_quota(host.proc) == 1.5
    assert cgroup.max_tasks(host.proc) is None


def test_no_cgroup_at_all_limits_nothing(host: Host) -> None:
    limits = cgroup.memory_limit_bytes, cgroup.memory_left_bytes, cgroup.cpu_quota, cgroup.max_tasks
    assert [limit(host.proc) for limit in limits] == [None] * 4


# --- matmuls -----------------------------------------------------------------------------------------------------


def test_the_models_matmuls_are_those_of_the_flop_formula() -> None:
    workload = DecoderWorkload(64, preset="tiny")
    with torch.device("meta"):
        num_params = matmul_params(workload.build_model())
    shapes = matmul_rate.model_matmuls(workload, 64, micro_batch_size=3)
    assert sum(count * matmul_rate.flops(shape) for shape, count in shapes.items()) == 6 * num_params * 3 * 64


def test_the_shapes_that_most_flops_go_to_are_timed_and_cut_for_a_cpu() -> None:
    shapes = Counter({(4, 4, 4): 1000, (100, 100, 100): 3, (1, 1, 1): 5})
    assert matmul_rate.largest(shapes) == {(100, 100, 100): 3}
    many = Counter({(n, 64, 64): 1 for n in range(64, 84)})
    assert len(matmul_rate.largest(many)) == matmul_rate.MAX_SHAPES
    assert matmul_rate.cut_shape((8192, 4096, 14336)) == (2048, 2048, 1792)
    assert matmul_rate.cut_shape((256, 256, 704)) == (256, 256, 704)


def test_a_model_without_matmuls_has_no_rate() -> None:
    assert matmul_rate.measure(Counter(), 64, "fp32", "cpu") is None


def test_the_rate_lies_between_its_extremes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matmul_rate.BUDGET_S, "cpu", 0.05)
    found = matmul_rate.measure(Counter({(64, 256, 256): 4, (256, 64, 256): 2}), 64, "fp32", "cpu")
    assert found is not None
    assert 0 < found.worst_tflops_per_s <= found.model_tflops_per_s <= found.best_tflops_per_s
    assert found.worst_shape in ((64, 256, 256), (256, 64, 256))
    assert not found.is_cut
