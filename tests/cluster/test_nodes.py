"""Gangs over several nodes, slots side by side, and whole runs on a cluster that was there before."""

from __future__ import annotations

import itertools
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.cluster_utils import Cluster

from autotune.cluster import gang, slots
from autotune.cluster.gang import GangResult
from autotune.errors import UserError
from autotune.history import History
from autotune.job import Job
from tests.cluster.conftest import rank_processes, spec, write_job
from tests.cluster.raylets import agents_of, driver, in_use, raylets, slot_runner
from tests.cluster.test_run import autotune
from tests.unit.conftest import make_job
from trials.outcome import Outcome
from trials.record import Knobs, TrialSpec

NUM_CPUS = 2
"""Of each of the two raylets; only the second has a label."""

SETTLE_S = 20.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with raylets({"num_cpus": NUM_CPUS}, {"num_cpus": NUM_CPUS, "labels": {"pool": "tune"}}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def submit(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Future[Any]]]:
    with driver(cluster.address, tmp_path_factory.mktemp("driver") / "ray.log") as submit:
        yield submit


def job(**cluster: Any) -> Job:
    return make_job(cluster={"address": "auto", "device": "cpu", "ranks_per_node": 1} | cluster)


def two_trials(job: Job, order: TrialSpec, folder: Path) -> dict[str, Any]:
    """In the driver's process: one trial after the other on one slot."""
    environments: list[dict[str, str]] = []
    rendezvous = gang._rendezvous

    def noted(slot: slots.Slot, port: int) -> dict[str, str]:
        environments.append(rendezvous(slot, port))
        return environments[-1]

    gang._rendezvous = noted
    try:
        with slot_runner(job) as runner:
            results = [runner.run(order, folder, 120) for _ in range(2)]
            nodes = [node.facts for node in runner._slots[0].nodes]
            held = in_use()
    finally:
        gang._rendezvous = rendezvous
    return {"results": results, "nodes": nodes, "environments": environments, "held": held, "after": in_use(SETTLE_S)}


def test_a_gang_has_a_rank_on_each_node_and_a_fresh_port_a_trial(
    submit: Callable[..., Future[Any]], texts: Path, tmp_path: Path
) -> None:
    found = submit(two_trials, job(nodes_per_trial=2), spec(texts), tmp_path).result()
    for result in found["results"]:
        assert (result.outcome, result.reason) == (Outcome.OK, "")
        assert sorted(result.reports) == [0, 1]
        assert result.hosts == [result.reports[rank].host for rank in (0, 1)]
        assert result.reports[0].losses == result.reports[1].losses
    first, second = found["nodes"]
    assert first.node_id != second.node_id
    assert first.interface is not None
    assert {env["MASTER_ADDR"] for env in found["environments"]} == {first.address}
    assert len({env["MASTER_PORT"] for env in found["environments"]}) == 2
    assert found["held"]["CPUs"] == 2 * NUM_CPUS, "nodes are reserved whole, with fewer ranks than CPUs"
    assert found["after"] == {}
    assert (tmp_path / "rank-1.log").exists()


def test_several_ranks_on_each_of_several_nodes(
    submit: Callable[..., Future[Any]], texts: Path, tmp_path: Path
) -> None:
    knobs = replace(spec(texts).knobs or pytest.fail(), grad_accum_steps=1)
    order = spec(texts, world_size=4, knobs=knobs)
    found = submit(two_trials, job(nodes_per_trial=2, ranks_per_node=2), order, tmp_path).result()
    for result in found["results"]:
        assert (result.outcome, result.reason) == (Outcome.OK, "")
        assert sorted(result.reports) == [0, 1, 2, 3]


def nodes_by_label(job: Job) -> list[dict[str, str]]:
    import ray

    labels = {node["NodeID"]: node["Labels"] for node in ray.nodes()}
    with slot_runner(job) as runner:
        return [labels[node.facts.node_id] for slot in runner._slots for node in slot.nodes]


def test_labels_choose_the_nodes(submit: Callable[..., Future[Any]]) -> None:
    (node,) = submit(nodes_by_label, job(labels={"pool": "tune"})).result()
    assert node["pool"] == "tune"


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"nodes_per_trial": 3}, r"3 nodes with 1 CPUs are not to be had; Ray has \[2 CPU.*2 CPU"),
        ({"nodes_per_trial": 2, "parallel_trials": 2}, "4 nodes with 1 CPUs are not to be had"),
        ({"ranks_per_node": 3}, "1 node with 3 CPUs is not to be had"),
        ({"nodes_per_trial": 2, "labels": {"pool": "tune"}}, r"2 nodes with 1 CPUs and the labels \{'pool': 'tune'\}"),
        ({"labels": {"pool": "other"}}, r"Ray has \[.*2 CPU \{'pool': 'tune'\}"),
    ],
)
def test_what_the_cluster_has_not_is_refused_at_once(
    submit: Callable[..., Future[Any]], asked: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        submit(nodes_by_label, job(**asked)).result(timeout=20)


def while_somebody_uses_a_node(job: Job) -> None:
    import ray

    group = ray.util.placement_group([{"CPU": 1}])
    ray.get(group.ready())
    before, slots.READY_TIMEOUT_S = slots.READY_TIMEOUT_S, 2.0
    try:
        nodes_by_label(job)
    finally:
        slots.READY_TIMEOUT_S = before
        ray.util.remove_placement_group(group)


def test_nodes_that_somebody_else_uses_are_waited_for_and_then_refused(submit: Callable[..., Future[Any]]) -> None:
    with pytest.raises(UserError, match=r"no 2 whole node\(s\) of .* were free within 2 s.*free in all: \{'CPU': 3"):
        submit(while_somebody_uses_a_node, job(nodes_per_trial=2)).result(timeout=60)
    assert submit(in_use, SETTLE_S).result() == {}


def side_by_side(job: Job, orders: list[TrialSpec], folder: Path) -> tuple[list[set[str]], list[GangResult]]:
    with slot_runner(job) as runner:
        for order in orders:
            assert runner.is_free()
            runner.start(order, folder, 120)
        assert not runner.is_free()
        ended = [runner.next_ended() for _ in orders]
        assert sorted(order.trial for order, _ in ended) == [order.trial for order in orders]
        return [slot.node_ids for slot in runner._slots], [result for _, result in ended]


def test_parallel_trials_run_at_once_on_nodes_of_their_own(
    submit: Callable[..., Future[Any]], texts: Path, tmp_path: Path
) -> None:
    knobs = replace(spec(texts).knobs or pytest.fail(), grad_accum_steps=4)
    orders = [spec(texts, trial=trial, world_size=1, knobs=knobs) for trial in (0, 1)]
    nodes, results = submit(side_by_side, job(parallel_trials=2), orders, tmp_path).result()
    assert [result.outcome for result in results] == [Outcome.OK, Outcome.OK]
    assert max(result.started_at for result in results) < min(result.ended_at for result in results)
    assert not nodes[0] & nodes[1]


def on_a_slot_that_is_elsewhere(job: Job, order: TrialSpec, folder: Path) -> tuple[GangResult, GangResult, int]:
    with slot_runner(job) as runner:
        (slot,) = runner._slots
        first, second = slot.nodes
        moved = replace(second, facts=replace(second.facts, host="elsewhere"))
        runner._slots = [replace(slot, nodes=(first, moved))]
        return runner.run(order, folder, 120), runner.run(order, folder, 120), runner.num_lost


def test_ranks_that_ran_on_another_host_than_asked_are_no_measurement(
    submit: Callable[..., Future[Any]], texts: Path, tmp_path: Path
) -> None:
    wrong, again, num_lost = submit(on_a_slot_that_is_elsewhere, job(nodes_per_trial=2), spec(texts), tmp_path).result()
    assert wrong.outcome is Outcome.NODE_LOST
    assert wrong.reason == f"rank 1 ran on host {wrong.hosts[1]}, asked was elsewhere"
    assert again.outcome is Outcome.OK, "the slot was made anew"
    assert num_lost == 1


def stopped_after(seconds: float, job: Job, order: TrialSpec, folder: Path) -> GangResult:
    with slot_runner(job) as runner:
        stop = threading.Timer(seconds, runner._stop.set)
        stop.start()
        return runner.run(order, folder, 120)


def test_a_gang_that_is_told_to_stop_leaves_nothing(
    submit: Callable[..., Future[Any]], texts: Path, tmp_path: Path
) -> None:
    before = rank_processes()
    result = submit(stopped_after, 4.0, job(nodes_per_trial=2), spec(texts, "hang"), tmp_path).result(timeout=60)
    assert result.outcome is Outcome.INTERRUPTED
    assert rank_processes() <= before


def run_on(cluster: Cluster, folder: Path, **section: Any) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    write_job(folder, cluster={"device": "cpu", "ranks_per_node": 1, **section})
    done = autotune("run", "job.yaml", cwd=folder)
    print(done.stdout, done.stderr)
    rows, skipped = History(folder / "run" / "history").rows()
    assert skipped == []
    for node in cluster.list_all_nodes():
        assert node.remaining_processes_alive(), "the cluster was there before, and stays"
        assert agents_of(node) == []
    return done, rows


def test_address_auto_joins_the_running_cluster_and_leaves_nothing_there(
    cluster: Cluster, submit: Callable[..., Future[Any]], tmp_path: Path
) -> None:
    before = rank_processes()
    done, rows = run_on(cluster, tmp_path, address="auto", nodes_per_trial=2)
    assert done.returncode == 0
    assert "2 ranks on 2 nodes" in done.stdout
    assert {row["outcome"] for row in rows} == {"ok"}
    assert {(row["world_size"], len(row["hosts"])) for row in rows} == {(2, 2)}
    assert submit(in_use, SETTLE_S).result() == {}
    assert rank_processes() <= before


def test_a_run_explores_side_by_side_and_compares_one_at_a_time(
    cluster: Cluster, submit: Callable[..., Future[Any]], tmp_path: Path
) -> None:
    done, rows = run_on(cluster, tmp_path, address=cluster.address, parallel_trials=2)
    assert done.returncode == 0
    assert "2 trials at once while exploring" in done.stdout
    assert yaml.safe_load((tmp_path / "run" / "best.yaml").read_text())["complete"] is True
    explored = [row for row in rows if row["stage"] == "explore"]
    assert len(explored) == 3
    assert len({Knobs.from_dict(row["knobs"]) for row in rows if row["stage"] in ("baseline", "explore")}) == 4
    assert explored[1]["started_at"] < explored[0]["ended_at"], "the first two began together"
    alone = sorted((row for row in rows if row["stage"] != "explore"), key=lambda row: row["started_at"])
    for earlier, later in itertools.pairwise(alone):
        assert earlier["ended_at"] <= later["started_at"]
    assert submit(in_use, SETTLE_S).result() == {}


def test_an_address_where_nothing_answers_is_told_soon(tmp_path: Path) -> None:
    write_job(tmp_path, cluster={"device": "cpu", "ranks_per_node": 1, "address": "127.0.0.1:1"})
    done = autotune("run", "job.yaml", cwd=tmp_path)
    assert done.returncode == 4
    assert "cluster.address = '127.0.0.1:1': nothing answers there" in done.stderr
