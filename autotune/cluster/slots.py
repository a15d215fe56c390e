"""Slots: one placement group with a bundle a node, held for the whole study, and an agent in each bundle."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from autotune.cluster.agent import NodeFacts, as_actor
from autotune.cluster.nodes import Demand, alive_nodes, bundle, describe, fitting, selector, shortage
from autotune.errors import InfrastructureError, UserError
from autotune.logs import send_to_file

READY_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 15.0
"""An agent that has not ended its ranks by then is lost, and its node with it."""


@dataclass(frozen=True)
class NodeHandle:
    agent: Any
    """Ray actor handle of a NodeAgent."""
    facts: NodeFacts


@dataclass(frozen=True, eq=False)
class Slot:
    """Nodes that run one gang at a time."""

    nodes: tuple[NodeHandle, ...]
    ranks_per_node: int
    placement_group: Any

    @property
    def world_size(self) -> int:
        return len(self.nodes) * self.ranks_per_node

    @property
    def node_ids(self) -> set[str]:
        return {node.facts.node_id for node in self.nodes}

    def ranks(self, index: int) -> list[int]:
        """Global ranks of the node at `index`."""
        return list(range(index * self.ranks_per_node, (index + 1) * self.ranks_per_node))

    def close(self) -> set[str]:
        """Ends agents and ranks, and gives the nodes back.

        Returns:
            Ids of nodes that did not answer: Ray may take a minute to find out that a node is gone.
        """
        import ray

        closing = {node.agent.close.remote(): node for node in self.nodes}
        _, late = ray.wait(list(closing), num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
        silent = set()
        for answer, node in closing.items():
            if answer in late or _is_dead(answer):
                silent.add(node.facts.node_id)
            ray.kill(node.agent)
        ray.util.remove_placement_group(self.placement_group)
        return silent


def _is_dead(answer: Any) -> bool:
    import ray

    try:
        ray.get(answer)
    except ray.exceptions.RayTaskError:
        return False  # it answered, if only with an error of its own
    except ray.exceptions.RayError:
        return True
    return False


@contextlib.contextmanager
def ray_session(address: str, ranks_per_node: int, log: Path) -> Iterator[None]:
    """Ray for the length of a study: started here for `local`, joined otherwise. Its messages go to `log`.

    A cluster that was joined is left as it was found: actors and placement groups end with the driver.

    Raises:
        InfrastructureError: Ray does not start, or there is no cluster at `address`.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address == "local":
        # Ray would kill the agent, and the study's slot with it, for a trial's own use of the host's memory.
        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
        # Added to ours, 15 by default: where the machine does anything besides, trials would measure what that leaves.
        os.environ.setdefault("RAY_worker_niceness", "0")
    import ray

    _refuse_a_dead_address(address)
    send_to_file("ray", log)
    options: dict[str, Any] = {"address": address, "log_to_driver": False}
    if address == "local":
        # A rank may need more CPUs than Ray counts (a container's quota): ranks share what there is.
        options.update(include_dashboard=False, num_cpus=max(ranks_per_node, os.cpu_count() or 1))
    try:
        # Ray puts the driver's folder on its workers' sys.path, where a user's own trials/ would hide ours: the log
        # folder holds no modules.
        with contextlib.chdir(log.parent), _sigterm_is_ours():
            ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise InfrastructureError(
            f"Ray did not start (cluster.address = {address!r}): {error}",
            "the cluster asks for its token: set RAY_AUTH_MODE=token"
            if "authentication" in str(error.__cause__)
            else "is another cluster running, or the address wrong? `ray status` shows what there is",
        ) from error
    # A node's death would cover the screen with a dump of its state, for which Ray has no public switch.
    ray._private.worker._worker_logs_enabled = False
    if address == "local":
        _end_daemons_at_once(ray._private.worker._global_node)
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _sigterm_is_ours() -> Iterator[None]:
    """Around the start of Ray: a SIGTERM to the whole process group, as Slurm sends it, reaches the driver alone.

    Ray's daemons would end at once, and the driver, which has trials to end and a history to write, would hang for a
    minute without them. They inherit a mask that holds it back, as Ray does with SIGINT, and end with the driver.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGTERM, handler)  # Ray takes it, and would leave without a word


def _end_daemons_at_once(node: Any) -> None:
    """`ray.shutdown` asks each of its five daemons by SIGTERM, which they do not hear, and gives it a second; what a
    raylet that is killed leaves behind would live on for half a minute."""
    kill = node.kill_all_processes

    def end(**_: Any) -> None:
        left = []
        for raylet in node.all_processes.get("raylet", []):
            with contextlib.suppress(psutil.NoSuchProcess):
                left += psutil.Process(raylet.process.pid).children()
        kill(check_alive=False, allow_graceful=False)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    node.kill_all_processes = end


def _refuse_a_dead_address(address: str) -> None:
    """Ray itself tries for more than a minute."""
    host, colon, port = address.partition(":")
    if not colon:
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise InfrastructureError(
            f"cluster.address = {address!r}: nothing answers there: {error}",
            "it is the address that `ray start --head` shows, on a machine that this one can reach",
        ) from error


def make_slots(demand: Demand, num_slots: int) -> list[Slot]:
    """All slots of a study, or none.

    Raises:
        UserError: the cluster has less than that, or too much of it is in use.
        InfrastructureError: an agent does not start.
    """
    nodes = alive_nodes()
    if len(fitting(demand, nodes)) < demand.num_nodes * num_slots:
        raise shortage(demand, num_slots, nodes)
    slots: list[Slot] = []
    try:
        for _ in range(num_slots):
            taken = set().union(*(slot.node_ids for slot in slots))
            slots.append(make_slot(demand, taken, READY_TIMEOUT_S))
    except BaseException:
        for slot in slots:
            slot.close()
        raise
    return slots


def make_slot(demand: Demand, without: AbstractSet[str], wait_s: float) -> Slot:
    """Reserves nodes and starts their agents.

    Args:
        without: ids of nodes that must not be used: those of other slots, those that do not answer.
        wait_s: how long to wait for nodes that somebody else is using.

    Raises:
        UserError: the cluster has less than that.
        InfrastructureError: an agent does not start.
    """
    import ray

    nodes = alive_nodes()
    able = [node for node in fitting(demand, nodes) if node.node_id not in without]
    if len(able) < demand.num_nodes:
        raise shortage(demand, 1, [node for node in nodes if node.node_id not in without])
    bundles = [bundle(demand, able)] * demand.num_nodes
    group = ray.util.placement_group(
        bundles,
        strategy="STRICT_SPREAD",  # a bundle a node
        bundle_label_selector=[selector(demand, able, without)] * demand.num_nodes,
    )
    try:
        if not group.wait(wait_s):
            raise UserError(
                f"cluster: no {demand.num_nodes} whole node(s) of {describe(able)} were free within {wait_s:.0f} s: "
                f"each trial reserves {bundles[0]} a node; free in all: {_free()}",
                "`ray status` shows who uses the rest; wait for it to end, or choose other nodes by cluster.labels",
            )
        return Slot(_start_agents(demand, group, bundles[0]), demand.ranks_per_node, group)
    except BaseException:
        ray.util.remove_placement_group(group)  # and with it the agents
        raise


def _start_agents(demand: Demand, group: Any, reserved: dict[str, float]) -> tuple[NodeHandle, ...]:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    actor = as_actor()
    agents = [
        actor.options(
            num_cpus=0,
            num_gpus=reserved.get("GPU", 0),
            max_concurrency=1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        ).remote(demand.device, demand.launcher, interpreter=demand.interpreter)
        for index in range(demand.num_nodes)
    ]
    try:
        facts: list[NodeFacts] = ray.get([agent.describe.remote() for agent in agents], timeout=2 * READY_TIMEOUT_S)
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise InfrastructureError(
            f"a node's agent did not start: {error}",
            "every node needs the same environment, with fsdp-autotune installed in it, and the same RAY_AUTH_MODE",
        ) from error
    return tuple(NodeHandle(agent, fact) for agent, fact in zip(agents, facts, strict=True))


def _free() -> dict[str, float]:
    import ray

    free = ray.available_resources()
    return {name: free.get(name, 0.0) for name in ("CPU", "GPU") if name in ray.cluster_resources()}
