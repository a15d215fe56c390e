"""Nodes that die or fall silent while trials run on them: told, replaced by what is left, and the study goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from ray.cluster_utils import Cluster

from autotune.cluster import gang, slots
from autotune.cluster.gang import GangResult
from autotune.history import History
from autotune.job import Job
from tests.cluster.conftest import CONFIG, rank_processes, spec, write_job
from tests.cluster.raylets import agents_of, driver, in_use, raylets, slot_runner
from tests.cluster.test_run import AUTOTUNE, autotune
from tests.faults.test_resume import identity, wait_for, wait_until_gone
from tests.unit.conftest import make_job
from trials.outcome import Outcome
from trials.record import Knobs, TrialSpec

NODE = {"num_cpus": 2}
NUM_NODES = 3
SETTLE_S = 20.0


@pytest.fixture(scope="module")
def lasting_cluster() -> Iterator[Cluster]:
    with raylets(*[NODE] * NUM_NODES) as cluster:
        yield cluster


@pytest.fixture
def cluster(lasting_cluster: Cluster) -> Cluster:
    """Three nodes again, whatever a test has done to them."""
    while len(lasting_cluster.list_all_nodes()) < NUM_NODES:
        lasting_cluster.add_node(**NODE)
    return lasting_cluster


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., Future[Any]]]:
    with driver(cluster.address, tmp_path / "ray.log") as submit:
        yield submit


def worker_with_an_agent(cluster: Cluster, timeout_s: float = 60.0) -> Any:
    """A node that trials run on, and that is not the head, to which the driver is connected."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for node in cluster.worker_nodes:
            if agents_of(node):
                return node
        time.sleep(0.1)
    raise AssertionError("no agent on any worker")


def wait_for_ranks(before: set[int], at_least: int) -> None:
    deadline = time.monotonic() + 60
    while len(rank_processes() - before) < at_least:
        assert time.monotonic() < deadline, "no ranks within a minute"
        time.sleep(0.1)


def one_in_trouble_and_one_well(
    job: Job, troubled: TrialSpec, well: TrialSpec, folder: Path, answers_s: float
) -> tuple[GangResult, set[str], GangResult, set[str], float]:
    """In the driver's process."""
    gang.AGENT_ANSWERS_S, slots.CLOSE_TIMEOUT_S = answers_s, answers_s
    with slot_runner(job) as runner:
        nodes = runner._slots[0].node_ids
        lost = runner.run(troubled, folder, 120)
        started = time.monotonic()
        again = runner.run(well, folder, 120)
        return lost, nodes, again, runner._slots[0].node_ids, time.monotonic() - started


@pytest.mark.parametrize("how", ["killed", "silent"])
def test_a_lost_node_is_told_and_the_next_trial_runs_on_what_is_left(
    cluster: Cluster, submit: Callable[..., Future[Any]], troubled: Path, tmp_path: Path, how: str
) -> None:
    """Silent: the agent is stopped, so that its node lives for Ray and no connection is reset; as in a partition."""
    before = rank_processes()
    job = make_job(cluster={"address": "auto", "device": "cpu", "ranks_per_node": 1, "nodes_per_trial": 2})
    stuck = spec(troubled, workload="troubled_model:make", model={"config": CONFIG, "trouble": "stuck"})
    running = submit(
        one_in_trouble_and_one_well, job, stuck, spec(troubled), tmp_path, 60.0 if how == "killed" else 6.0
    )
    node = worker_with_an_agent(cluster)
    wait_for_ranks(before, 4)  # two ranks, and the process that each is forked from
    time.sleep(2.0)
    (agent,) = agents_of(node)
    if how == "killed":
        cluster.remove_node(node, allow_graceful=False)
    else:
        os.kill(agent, signal.SIGSTOP)
    try:
        lost, nodes, again, other_nodes, took_s = running.result(timeout=120)
    finally:
        if how == "silent" and agent in agents_of(node):
            os.kill(agent, signal.SIGKILL)
    print(f"{how}: {lost.outcome}: {lost.reason.splitlines()[0]}; next trial took {took_s:.1f} s")
    assert lost.outcome is Outcome.NODE_LOST, lost.reason
    assert again.outcome is Outcome.OK, again.reason
    assert len(other_nodes - nodes) == 1, "the node that was lost is not used again"
    wait_until_gone(before)
    assert submit(in_use, SETTLE_S).result() == {}


MEASURE = {"warmup_steps": 2, "min_steps": 8, "max_steps": 12, "rounds": 3, "num_finalists": 1}
TRIALS = 6


def start_run(folder: Path, **cluster: Any) -> subprocess.Popen[str]:
    write_job(
        folder,
        cluster={"device": "cpu", "ranks_per_node": 1, "address": "auto", **cluster},
        budget={"trials": TRIALS},
        measure=MEASURE,
        space="default",
    )
    return subprocess.Popen(
        [AUTOTUNE, "run", "job.yaml"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows, skipped = History(folder / "run" / "history").rows()
    assert skipped == []
    return rows


@pytest.mark.parametrize(
    "section",
    [{"nodes_per_trial": 2}, {"parallel_trials": 3}],
    ids=["a gang over two nodes", "three trials side by side"],
)
def test_a_study_that_loses_a_node_while_it_explores_ends_with_a_right_best(
    cluster: Cluster,
    submit: Callable[..., Future[Any]],
    tmp_path: Path,
    section: dict[str, Any],
) -> None:
    before = rank_processes()
    process = start_run(tmp_path, **section)
    wait_for(tmp_path, 2)  # the baseline and the first that is explored
    node = worker_with_an_agent(cluster)
    deadline = time.monotonic() + 30
    while not any(has_a_rank(agent) for agent in agents_of(node)) and time.monotonic() < deadline:
        time.sleep(0.02)
    cluster.remove_node(node, allow_graceful=False)
    output, errors = process.communicate(timeout=200)
    print(output, errors)
    assert process.returncode == 0
    assert "is tried again" in output
    assert "state-dump" not in output, "Ray's own words on a dead node are not the user's"

    rows = rows_of(tmp_path)
    lost = [row for row in rows if row["outcome"] == "node_lost"]
    assert len(lost) == 1
    (retried,) = [row for row in rows if row["trial"] == lost[0]["trial"] and row["attempt"] == lost[0]["attempt"] + 1]
    assert (retried["knobs"], retried["outcome"]) == (lost[0]["knobs"], "ok")
    explored = [row for row in rows if row["stage"] == "explore" and row["outcome"] != "node_lost"]
    assert len(explored) == TRIALS
    assert len({identity(row) for row in explored}) == TRIALS, "no config twice"

    best = yaml.safe_load((tmp_path / "run" / "best.yaml").read_text())
    assert best["complete"] is True
    settings = Knobs.from_dict(best["settings"])
    measured = {row["stage"] for row in rows if Knobs.from_dict(row["knobs"]) == settings and row["outcome"] == "ok"}
    assert "round" in measured or best["gain"] is None, "the best is a config that was measured, and compared"
    won = best["gain"] is not None and best["gain"]["low"] > 1
    assert best["settings"] == (best["gain"]["settings"] if won else best["baseline"]["settings"])
    wait_until_gone(before)
    assert submit(in_use, SETTLE_S).result() == {}


def has_a_rank(agent: int) -> bool:
    """Whether a rank runs under an agent: its fork server has a child."""
    try:
        return any(server.children() for server in psutil.Process(agent).children())
    except psutil.NoSuchProcess:
        return False


def test_a_signal_with_several_trials_under_way_records_them_and_resumes(
    cluster: Cluster, submit: Callable[..., Future[Any]], tmp_path: Path
) -> None:
    before = rank_processes()
    process = start_run(tmp_path, parallel_trials=3)
    wait_for(tmp_path, 4)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    wait_until_gone(before)
    assert submit(in_use, SETTLE_S).result() == {}
    stopped = rows_of(tmp_path)
    interrupted = [row for row in stopped if row["outcome"] == "interrupted"]
    assert len(interrupted) in (2, 3)  # one may just have ended
    begun = {path.parent.name for path in tmp_path.glob("run/logs/trial-*/spec.json")}
    assert len(begun) == len(stopped), "each that was begun has its row"

    done = autotune("run", "run/job.yaml", "--resume", "--set", "cluster.parallel_trials=2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path)
    explored = [identity(row) for row in rows if row["stage"] == "explore" and row["outcome"] != "interrupted"]
    assert len(explored) == len(set(explored)) == TRIALS
    assert {identity(row) for row in interrupted} <= set(explored)
    assert submit(in_use, SETTLE_S).result() == {}


def test_a_driver_that_is_killed_leaves_nothing_on_a_cluster_that_goes_on(
    cluster: Cluster, submit: Callable[..., Future[Any]], tmp_path: Path
) -> None:
    before = rank_processes()
    process = start_run(tmp_path, nodes_per_trial=3)
    wait_for(tmp_path, 2)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    print(f"ranks gone {wait_until_gone(before):.1f} s after the driver's SIGKILL")
    assert submit(in_use, SETTLE_S).result() == {}
    for node in cluster.list_all_nodes():
        assert node.remaining_processes_alive()
        assert agents_of(node) == []
