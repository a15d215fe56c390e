"""What a collective takes: a ring, by the bytes that enter a GPU and a node."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autotune.simulate.machine import Machine

LINK_SHARE, NETWORK_SHARE = 0.80, 0.85
"""Of the nominal bandwidth, with large messages (nccl-tests' busbw on DGX systems)."""
LINK_HALF_BYTES, NETWORK_HALF_BYTES = 96 * 1024, 256 * 1024
"""A rank's chunk at which half of the bandwidth is used."""
START_S = 14e-6
LINK_HOP_S, NETWORK_HOP_S = 1.0e-6, 3.5e-6
FABRIC_LOSS = 0.025
"""Of the network's bandwidth, each time the number of nodes doubles: flows collide."""


@dataclass(frozen=True)
class Group:
    """Ranks that take part."""

    num_ranks: int
    num_nodes: int

    @property
    def ranks_per_node(self) -> float:
        return self.num_ranks / self.num_nodes


class Network:
    """Of one trial's slot."""

    def __init__(self, machine: Machine, world_size: int) -> None:
        self.machine, self.world_size = machine, world_size

    def neighbours(self, num_ranks: int) -> Group:
        """Consecutive ranks: a shard group."""
        return Group(num_ranks, math.ceil(num_ranks / self.machine.gpus_per_node))

    def across(self, num_ranks: int, stride: int) -> Group:
        """Every `stride`-th rank: a replica group."""
        num_nodes = math.ceil(self.world_size / self.machine.gpus_per_node)
        return Group(num_ranks, num_nodes if stride >= self.machine.gpus_per_node else min(num_nodes, num_ranks))

    def gather_s(self, num_bytes: float, group: Group) -> float:
        """All-gather to `num_bytes` on each rank; a reduce-scatter of as many takes the same."""
        if group.num_ranks == 1:
            return 0.0
        chunk = num_bytes / group.num_ranks
        inside = self.machine.link_bytes_per_s * LINK_SHARE * chunk / (chunk + LINK_HALF_BYTES)
        seconds = num_bytes * (1 - 1 / group.num_ranks) / inside
        hops_s = (group.ranks_per_node - 1) * LINK_HOP_S
        if group.num_nodes > 1:
            cards = self.machine.network_bytes_per_s * group.ranks_per_node * NETWORK_SHARE
            cards *= chunk / (chunk + NETWORK_HALF_BYTES) / (1 + FABRIC_LOSS * math.log2(group.num_nodes))
            # The rings run through links and cards at once, so the slower of the two decides.
            seconds = max(seconds, num_bytes * (1 - 1 / group.num_nodes) / cards)
            hops_s += (group.num_nodes - 1) * NETWORK_HOP_S
        return START_S + hops_s + seconds

    def all_reduce_s(self, num_bytes: float, group: Group) -> float:
        return 2 * self.gather_s(num_bytes, group) if group.num_ranks > 1 else 0.0
