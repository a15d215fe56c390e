"""Slots: one placement group with a bundle a node, held for the whole study, and an agent in each bundle."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.cluster.agent import as_actor
from autotune.errors import InfrastructureError, UserError
from autotune.logs import send_to_file

READY_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class NodeHandle:
    agent: Any
    """Ray actor handle of a NodeAgent."""
    host: str
    address: str


@dataclass(frozen=True)
class Slot:
    """Nodes that run one gang at a time."""

    nodes: tuple[NodeHandle, ...]
    ranks_per_node: int
    placement_group: Any

    @property
    def world_size(self) -> int:
        return len(self.nodes) * self.ranks_per_node

    def close(self) -> None:
        import ray

        for node in self.nodes:
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):  # a dead agent has nothing to close
                ray.get(node.agent.close.remote(), timeout=15)
            ray.kill(node.agent)
        ray.util.remove_placement_group(self.placement_group)


@contextlib.contextmanager
def ray_session(address: str, ranks_per_node: int, log: Path) -> Iterator[None]:
    """Ray for the length of a study: started here for `local`, joined otherwise. Its messages go to `log`.

    Raises:
        InfrastructureError: Ray does not start, or there is no cluster at `address`.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address == "local":
        # Ray would kill the agent, and the study's slot with it, for a trial's own use of the host's memory.
        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    import ray

    send_to_file("ray", log)
    options: dict[str, Any] = {"address": address, "log_to_driver": False}
    if address == "local":
        # A rank may need more CPUs than Ray counts (a container's quota): ranks share what there is.
        options.update(include_dashboard=False, num_cpus=max(ranks_per_node, os.cpu_count() or 1))
    try:
        # Ray puts the driver's folder on its workers' sys.path, where a user's own trials/ would hide ours: the log
        # folder holds no modules.
        on_sigterm = signal.getsignal(signal.SIGTERM)
        with contextlib.chdir(log.parent):
            ray.init(**options)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray takes it, and would leave without a word
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise InfrastructureError(
            f"Ray did not start (cluster.address = {address!r}): {error}",
            "is another cluster running, or the address wrong? `ray status` shows what there is",
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def make_slot(device: str, launcher: str, num_nodes: int, ranks_per_node: int) -> Slot:
    """Reserves the nodes and starts their agents.

    Raises:
        UserError: the cluster has less than that.
        InfrastructureError: an agent does not start.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle = {"CPU": float(ranks_per_node)} | ({"GPU": float(ranks_per_node)} if device == "cuda" else {})
    group = ray.util.placement_group([bundle] * num_nodes, strategy="STRICT_SPREAD" if num_nodes > 1 else "PACK")
    if not group.wait(READY_TIMEOUT_S if _could_fit(bundle, num_nodes) else 0.1):
        ray.util.remove_placement_group(group)
        if device == "cuda" and not any(node.get("GPU") for node in _node_resources()):
            raise UserError("cluster.device = cuda: Ray sees no GPU", "use device: cpu or auto, or start on a GPU node")
        raise UserError(
            f"cluster: {num_nodes} node(s) with {bundle} each are not to be had; Ray has {_node_resources()}",
            "lower cluster.ranks_per_node, or start Ray on more nodes",
        )
    actor = as_actor()
    agents = [
        actor.options(
            num_cpus=0,
            num_gpus=bundle.get("GPU", 0),
            max_concurrency=1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        ).remote(device, launcher)
        for index in range(num_nodes)
    ]
    try:
        facts = ray.get([agent.describe.remote() for agent in agents], timeout=2 * READY_TIMEOUT_S)
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise InfrastructureError(f"a node's agent did not start: {error}") from error
    nodes = tuple(NodeHandle(agent, f["host"], f["address"]) for agent, f in zip(agents, facts, strict=True))
    return Slot(nodes, ranks_per_node, group)


def _could_fit(bundle: dict[str, float], num_nodes: int) -> bool:
    fitting = [node for node in _node_resources() if all(node.get(k, 0.0) >= v for k, v in bundle.items())]
    return len(fitting) >= num_nodes


def _node_resources() -> list[dict[str, float]]:
    import ray

    return [
        {name: amount for name, amount in node["Resources"].items() if name in ("CPU", "GPU")}
        for node in ray.nodes()
        if node["Alive"]
    ]
