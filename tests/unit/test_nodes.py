"""Which nodes a slot may be made of, and what it reserves there."""

from __future__ import annotations

from dataclasses import replace

from autotune.cluster.nodes import NODE_ID, Demand, Node, bundle, fitting, selector, shortage

SMALL = Node("small", 32.0, 4.0, {"pool": "tune"})
BIG = [Node(f"big-{number}", 96.0, 8.0, {"pool": "tune"} if number else {}) for number in range(3)]
HEAD = Node("head", 8.0, 0.0, {})
CLUSTER = [HEAD, SMALL, *BIG]
DEMAND = Demand(device="cuda", launcher="exec", num_nodes=2, ranks_per_node=2, labels={}, claim_cpus=True)


def test_nodes_of_a_cuda_slot_have_equal_numbers_of_gpus_and_are_reserved_whole() -> None:
    assert fitting(DEMAND, CLUSTER) == BIG
    assert bundle(DEMAND, BIG) == {"GPU": 8.0, "CPU": 96.0}, "with fewer ranks than GPUs, too"
    assert fitting(replace(DEMAND, ranks_per_node=9), CLUSTER) == []


def test_labels_must_all_be_carried() -> None:
    assert fitting(replace(DEMAND, labels={"pool": "tune"}), CLUSTER) == BIG[1:]
    assert fitting(replace(DEMAND, labels={"pool": "tune", "rack": "1"}), CLUSTER) == []


def test_a_cpu_slot_claims_all_cpus_of_a_shared_cluster_and_its_ranks_of_its_own() -> None:
    demand = replace(DEMAND, device="cpu", ranks_per_node=16)
    assert fitting(demand, CLUSTER) == [SMALL, *BIG]
    assert bundle(demand, BIG) == {"CPU": 96.0}
    assert bundle(replace(demand, claim_cpus=False), BIG) == {"CPU": 16.0}


def test_nodes_that_are_taken_or_silent_are_not_asked_for() -> None:
    demand = replace(DEMAND, labels={"pool": "tune"})
    assert selector(demand, BIG[1:], {"big-1"}) == {"pool": "tune", NODE_ID: "in(big-2)"}


def test_a_shortage_says_what_was_asked_and_what_there_is() -> None:
    error = shortage(replace(DEMAND, num_nodes=2, labels={"pool": "tune"}), 2, [HEAD, SMALL])
    assert error.message == (
        "cluster: 4 nodes with 2 GPUs, all with the same number of them, and the labels {'pool': 'tune'} are not to be "
        "had; Ray has [8 CPU, 4 GPU 32 CPU {'pool': 'tune'}]"
    )
    assert "Ray sees no GPU" in shortage(DEMAND, 1, [HEAD]).message
