"""`autotune doctor` by the command line: what it says of this machine is true of it, and its exit code follows."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster.conftest import rank_processes, write_job
from tests.cluster.raylets import raylets
from tests.cluster.test_run import AUTOTUNE, autotune

OPEN_FILES = 5000


def doctor(*arguments: str, cwd: Path, as_told: Callable[[], None] | None = None) -> tuple[int, dict[str, Any]]:
    """Exit code, and what it says; `as_told` changes the process that it runs in."""
    done = subprocess.run(
        [AUTOTUNE, "doctor", *arguments, "--json"],
        cwd=cwd,
        preexec_fn=as_told,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    print(done.stdout, done.stderr)
    return done.returncode, json.loads(done.stdout)


def names(told: dict[str, Any], status: str) -> list[str]:
    return [finding["name"] for finding in told["findings"] if finding["status"] == status]


def fewer_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))


def one_cpu() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two CPUs")
def test_a_job_that_can_run_here_exits_0_and_the_ranks_facts_are_this_machines(tmp_path: Path) -> None:
    write_job(tmp_path)
    before, ranks_before = sorted(path.name for path in tmp_path.iterdir()), rank_processes()
    code, told = doctor("job.yaml", cwd=tmp_path, as_told=fewer_files)
    assert (code, told["exit_code"], names(told, "problem")) == (0, 0, [])
    (node,) = told["nodes"]
    machine = node["machine"]
    assert machine["host"] == socket.gethostname()
    assert machine["cpus_affinity"] == len(os.sched_getaffinity(0))
    assert machine["limits"]["nofile"] == OPEN_FILES
    soft_as, _ = resource.getrlimit(resource.RLIMIT_AS)
    assert machine["limits"]["as"] == (None if soft_as == resource.RLIM_INFINITY else soft_as)
    assert machine["shm_free_mib"] <= shutil.disk_usage("/dev/shm").total / 2**20
    assert machine["memory_gib"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    assert machine["versions"]["torch"] == node["torch"]["version"] == torch.__version__
    assert len(node["torch"]["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1]
    for rank in told["ranks"]:
        assert rank["matmul"]["model_tflops_per_s"] > 0
        assert rank["bandwidth"]["copy_gb_per_s"] > 0
        assert rank["bandwidth"]["all_gather_gb_per_s"] > 0
    assert told["peak"]["source"] == "cpu probe"
    assert rank_processes() - ranks_before == set()
    assert sorted(path.name for path in tmp_path.iterdir()) == before, "it leaves nothing"


def test_more_ranks_than_cpus_exit_3_and_none_is_started(tmp_path: Path) -> None:
    write_job(tmp_path)
    code, told = doctor("job.yaml", cwd=tmp_path, as_told=one_cpu)
    assert (code, names(told, "problem"), told["ranks"]) == (3, ["CPUs"], [])
    assert told["nodes"][0]["machine"]["cpus_affinity"] == 1
    (problem,) = (finding for finding in told["findings"] if finding["status"] == "problem")
    assert "cluster.ranks_per_node to 1" in problem["advice"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_job_for_gpus_exits_3_without_one_and_says_so(tmp_path: Path) -> None:
    write_job(tmp_path)
    done = autotune("doctor", "job.yaml", "--set", "cluster.device=cuda", cwd=tmp_path)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "Ray sees no GPU" in done.stdout
    assert "job.yaml cannot run here as it is" in done.stdout
    assert all(" -> " in line for line in done.stdout.splitlines() if line.startswith("problem"))


def test_a_model_that_does_not_build_exits_2_and_the_machine_is_looked_at_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def make(seq_len):\n    raise ValueError('no such layer')\n")
    write_job(tmp_path, model={"workload": "broken:make", "seq_len": 32})
    code, told = doctor("job.yaml", cwd=tmp_path)
    assert (code, names(told, "problem")) == (2, ["job"])
    assert "no such layer" in told["findings"][0]["value"]
    assert told["nodes"][0]["machine"]["cpus_online"] == os.cpu_count()


def test_a_job_file_that_is_wrong_exits_2_at_once(tmp_path: Path) -> None:
    code, told = doctor("quickstart", "--set", "cluster.ranks=2", cwd=tmp_path)
    assert (code, names(told, "problem"), told["nodes"]) == (2, ["job"], [])


def test_on_a_cluster_it_looks_at_the_nodes_that_trials_would_run_on(tmp_path: Path) -> None:
    write_job(tmp_path, cluster={"address": "auto", "device": "cpu", "nodes_per_trial": 2, "ranks_per_node": 1})
    with raylets({"num_cpus": 2}, {"num_cpus": 3}):
        code, told = doctor("job.yaml", cwd=tmp_path)
    assert (code, names(told, "problem")) == (0, [])
    assert len(told["nodes"]) == 2
    assert told["ranks"][1]["bandwidth"]["all_gather_gb_per_s"] > 0
    (ray,) = (finding["value"] for finding in told["findings"] if finding["name"] == "Ray")
    assert ray.startswith("2 nodes at auto: [")
    assert "3 CPU" in ray


def test_a_calibrated_peak_is_recorded_beside_the_peak(tmp_path: Path) -> None:
    write_job(tmp_path)
    done = autotune("measure", "job.yaml", "--set", "cluster.calibrate_peak=true", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(done.stdout)
    assert row["achievable_tflops_per_s"] > 0
    assert row["share_of_achievable"] == row["model_tflops_per_s_per_rank"] / row["achievable_tflops_per_s"]
    assert row["mfu"] == row["model_tflops_per_s_per_rank"] / row["peak_tflops_per_s"]
    assert "achievable in the model's matmuls" in done.stderr
