"""The same cluster in several sizes: a runner for each number of ranks, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.job import Job

Opener = Callable[[Job], AbstractContextManager[Any]]
"""Opens the runner of a job, on the ranks that it asks for."""


@contextmanager
def real_sizes(largest: Job, ray_log: Path) -> Iterator[Opener]:
    """Ray for the length of a scaling, with slots of each size in turn: two of them need not fit beside each other.

    Args:
        largest: the job of the most ranks; what it asks for is looked at first.

    Raises:
        UserError: the cluster has less than that.
        InfrastructureError: Ray or an agent does not start.
    """
    from autotune.cluster.runner import SlotRunner, device_of, refuse_a_crowd
    from autotune.cluster.slots import ray_session

    cluster = largest.cluster
    if cluster.device == "cpu" and cluster.address == "local":  # known before Ray is started
        with _too_many(largest):
            refuse_a_crowd(cluster.ranks_per_node)
    with ray_session(cluster.address, cluster.ranks_per_node, ray_log):
        device = device_of(largest)
        with _too_many(largest):
            if device == "cpu" and cluster.address == "local":
                refuse_a_crowd(cluster.ranks_per_node)

        @contextmanager
        def opened(job: Job) -> Iterator[SlotRunner]:
            with _too_many(job):
                runner = SlotRunner(job, device)
            try:
                yield runner
            finally:
                runner.close()

        yield opened


@contextmanager
def _too_many(job: Job) -> Iterator[None]:
    """What the cluster has less of than the job asks for, said in words of --ranks."""
    try:
        yield
    except UserError as error:
        raise UserError(
            f"--ranks {job.cluster.world_size}: {error.message}",
            'give fewer by --ranks; more than there are only on a modelled cluster: --simulate "nodes=8 gpus=8 ..."',
        ) from error


@contextmanager
def simulated_sizes(largest: Job, simulate: str, history: Path) -> Iterator[Opener]:
    """The modelled cluster in each size; its clock goes on from one to the next.

    Raises:
        UserError: `simulate` describes no cluster, or one that has less than `largest` asks for.
    """
    from autotune.simulate.cluster import parse_cluster
    from autotune.simulate.runner import SimulatedRunner, last_end_s, make_world

    cluster = parse_cluster(simulate)
    make_world(largest, cluster)
    now_s = last_end_s(history)

    @contextmanager
    def opened(job: Job) -> Iterator[SimulatedRunner]:
        nonlocal now_s
        runner = SimulatedRunner(make_world(job, cluster), now_s)
        yield runner
        now_s = runner.clock.time()

    yield opened
