"""Which nodes of a cluster a slot may be made of, and what it reserves on each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from autotune.cluster.interpreter import OURS, Interpreter, interpreter_of
from autotune.errors import UserError
from autotune.job import Cluster

NODE_ID = "ray.io/node-id"
"""The label that Ray puts on every node itself."""


@dataclass(frozen=True)
class Node:
    """A living node, as Ray lists it."""

    node_id: str
    num_cpus: float
    num_gpus: float
    labels: dict[str, str]


@dataclass(frozen=True)
class Demand:
    """What one slot needs.

    Args:
        claim_cpus: reserve all CPUs of a node, so that nothing else of a shared cluster runs beside a trial. A Ray that
            was started for this study alone needs no such claim.
    """

    device: str
    launcher: str
    num_nodes: int
    ranks_per_node: int
    labels: dict[str, str]
    claim_cpus: bool
    interpreter: Interpreter = OURS


def demand_of(cluster: Cluster, device: str, starts_commands: bool = False) -> Demand:
    """What a job's trials need.

    Args:
        starts_commands: ranks are the user's own command, which nothing can fork.
    """
    launcher = "exec" if starts_commands else cluster.launcher
    if launcher == "auto":
        launcher = "fork" if device == "cpu" else "exec"
    return Demand(
        device=device,
        launcher=launcher,
        num_nodes=cluster.nodes_per_trial,
        ranks_per_node=cluster.ranks_per_node,
        labels=dict(cluster.labels),
        claim_cpus=cluster.address != "local",
        interpreter=interpreter_of(cluster),
    )


def alive_nodes() -> list[Node]:
    import ray

    return [
        Node(node["NodeID"], node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0), node["Labels"])
        for node in ray.nodes()
        if node["Alive"]
    ]


def fitting(demand: Demand, nodes: list[Node]) -> list[Node]:
    """Nodes with the labels and room for the ranks; on CUDA only those of the commonest number of GPUs.

    A slot of unequal nodes would measure its smallest one, and could not reserve the others whole.
    """
    carrying = [node for node in nodes if demand.labels.items() <= node.labels.items()]
    if demand.device == "cpu":
        return [node for node in carrying if node.num_cpus >= demand.ranks_per_node]
    able = [node for node in carrying if node.num_gpus >= demand.ranks_per_node]
    counts = Counter(node.num_gpus for node in able)
    commonest = max(counts, key=lambda num_gpus: (counts[num_gpus], num_gpus), default=0.0)
    return [node for node in able if node.num_gpus == commonest]


def bundle(demand: Demand, nodes: list[Node]) -> dict[str, float]:
    """What a slot reserves on each of its nodes, which are any of `nodes`.

    All GPUs, even where a trial has fewer ranks: whoever used the others would share its PCIe, network and host memory.
    """
    num_cpus = min(node.num_cpus for node in nodes) if demand.claim_cpus else float(demand.ranks_per_node)
    if demand.device == "cpu":
        return {"CPU": num_cpus}
    return {"GPU": nodes[0].num_gpus} | ({"CPU": num_cpus} if num_cpus else {})


def selector(demand: Demand, nodes: list[Node], without: AbstractSet[str]) -> dict[str, str]:
    """Ray's label selector for a slot's nodes: any of `nodes` but those `without`."""
    allowed = [node.node_id for node in nodes if node.node_id not in without]
    return demand.labels | {NODE_ID: f"in({','.join(allowed)})"}


def shortage(demand: Demand, num_slots: int, nodes: list[Node]) -> UserError:
    """Says what was asked of the cluster and what it has."""
    if demand.device == "cuda" and not any(node.num_gpus for node in nodes):
        return UserError("cluster.device = cuda: Ray sees no GPU", "use device: cpu or auto, or start on a GPU node")
    unit = "CPU" if demand.device == "cpu" else "GPU"
    needed = demand.num_nodes * num_slots
    asked = f"{needed} node{'s' if needed > 1 else ''} with {demand.ranks_per_node} {unit}s"
    if demand.device == "cuda" and needed > 1:
        asked += ", all with the same number of them,"
    if demand.labels:
        asked += f" and the labels {demand.labels}"
    return UserError(
        f"cluster: {asked} {'are' if needed > 1 else 'is'} not to be had; Ray has {describe(nodes)}",
        "lower cluster.ranks_per_node, nodes_per_trial or parallel_trials, or start Ray on more nodes",
    )


def describe(nodes: list[Node]) -> str:
    """One entry a node, e.g. `[8 GPU 96 CPU {'pool': 'tune'}, 4 CPU]`."""
    texts = []
    for node in nodes:
        own = {name: value for name, value in node.labels.items() if not name.startswith("ray.io/")}
        gpus = f"{node.num_gpus:g} GPU " if node.num_gpus else ""
        texts.append(f"{gpus}{node.num_cpus:g} CPU" + (f" {own}" if own else ""))
    return f"[{', '.join(texts)}]"
