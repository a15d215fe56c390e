"""The interface the run measures through, and its real form: the slots of a Ray cluster."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from autotune.clock import Clock
from autotune.cluster.gang import GangResult, run_gang
from autotune.cluster.interpreter import check_interpreter
from autotune.cluster.nodes import demand_of
from autotune.cluster.slots import READY_TIMEOUT_S, Slot, make_slot, make_slots, ray_session
from autotune.errors import AutotuneError, InfrastructureError, UserError
from autotune.job import Job
from trials.outcome import INFRASTRUCTURE
from trials.record import TrialSpec

SPARE_NODE_WAIT_S = 10.0
"""For a lost slot's successor, while other slots may wait for the driver; Ray takes about a second to free a node."""
STOP_TIMEOUT_S = 15.0
"""Gangs that are told to stop need a poll and the end of their processes."""


class SingleRunner(Protocol):
    """Runs one attempt at a time."""

    world_size: int
    device: str
    clock: Clock
    """By which its trials begin and end."""
    simulated: str
    """The modelled cluster that stands in for a real one, as `--simulate` takes it; empty for a real one."""

    def run(self, spec: TrialSpec, log_dir: Path, timeout_s: float) -> GangResult:
        """One attempt, from start to clean-up, with nothing beside it."""
        ...


class Runner(SingleRunner, Protocol):
    """Runs several at once, on slots."""

    num_lost: int
    """Slots given up so far; equal before and after two trials that ran alone: both ran on one slot."""

    @property
    def num_slots(self) -> int:
        """Trials that can run at once."""
        ...

    def is_free(self) -> bool:
        """Whether a trial can be started now."""
        ...

    def start(self, spec: TrialSpec, log_dir: Path, timeout_s: float) -> None:
        """Begins an attempt; needs a free slot."""
        ...

    def next_ended(self) -> tuple[TrialSpec, GangResult]:
        """Waits until one of the attempts is over, and cleaned up after."""
        ...


class SlotRunner:
    """Runs trials on slots, one a slot; a slot that lost an agent or is not clean is replaced.

    Only the gangs run in threads: slots are made, taken and given up by the driver's own.
    """

    simulated = ""

    def __init__(self, job: Job, device: str) -> None:
        self.device = device
        self.clock: Clock = time
        self.world_size = job.cluster.world_size
        self.num_lost = 0
        self._demand = demand_of(job.cluster, device, job.trainer is not None)
        self._num_slots = job.cluster.parallel_trials
        self._silent: set[str] = set()
        """Nodes that did not answer when their slot was given up."""
        self._gangs: dict[Future[GangResult], tuple[TrialSpec, Slot]] = {}
        self._stop = threading.Event()
        self._slots = make_slots(self._demand, self._num_slots)
        self._threads = ThreadPoolExecutor(self._num_slots, thread_name_prefix="gang")

    @property
    def num_slots(self) -> int:
        return self._num_slots

    def is_free(self) -> bool:
        """Whether a trial can be started now; a lost slot is made anew, if the cluster has the nodes.

        Raises:
            InfrastructureError: the last slot was lost, and none can be had in its place.
        """
        if self._free_slot() is None and len(self._slots) < self._num_slots:
            self._replace_lost()
        return self._free_slot() is not None

    def start(self, spec: TrialSpec, log_dir: Path, timeout_s: float) -> None:
        slot = self._free_slot()
        assert slot is not None, "ask is_free first"
        gang = self._threads.submit(run_gang, slot, spec, log_dir, timeout_s, self._stop)
        self._gangs[gang] = (spec, slot)

    def next_ended(self) -> tuple[TrialSpec, GangResult]:
        done, _ = wait(self._gangs, return_when=FIRST_COMPLETED)
        gang = next(gang for gang in self._gangs if gang in done)
        spec, slot = self._gangs.pop(gang)
        result = gang.result()
        if result.outcome in INFRASTRUCTURE:
            self._slots.remove(slot)
            self.num_lost += 1
            self._silent |= slot.close()
        return spec, result

    def run(self, spec: TrialSpec, log_dir: Path, timeout_s: float) -> GangResult:
        """One attempt, with nothing beside it.

        Raises:
            InfrastructureError: a slot was lost and none can be had in its place.
        """
        assert not self._gangs, "other trials are running"
        self.is_free()
        self.start(spec, log_dir, timeout_s)
        return self.next_ended()[1]

    def close(self) -> None:
        """Ends whatever runs, and gives the nodes back."""
        self._stop.set()
        wait(self._gangs, timeout=STOP_TIMEOUT_S)
        for slot in self._slots:
            slot.close()
        self._slots = []
        self._threads.shutdown()

    def _free_slot(self) -> Slot | None:
        """Always the first that is free, so that trials that run alone share one slot."""
        busy = [slot for _, slot in self._gangs.values()]
        return next((slot for slot in self._slots if slot not in busy), None)

    def _replace_lost(self) -> None:
        taken = set().union(*(slot.node_ids for slot in self._slots))
        try:
            try:
                slot = make_slot(self._demand, taken | self._silent, SPARE_NODE_WAIT_S)
            except AutotuneError:
                # An agent can die on a node that is well, and a node can come back.
                slot = make_slot(self._demand, taken, SPARE_NODE_WAIT_S if self._slots else READY_TIMEOUT_S)
        except AutotuneError as error:
            if not self._slots:
                raise InfrastructureError(f"a node was lost: {error.message}", error.hint) from error
            self._num_slots = len(self._slots)  # the study goes on with what is left
            return
        self._slots.append(slot)


@contextmanager
def open_runner(job: Job, ray_log: Path) -> Iterator[SlotRunner]:
    """Ray and the slots for the length of a study; everything it started is ended on the way out.

    Raises:
        UserError: the cluster has less than the job asks for.
        InfrastructureError: Ray or an agent does not start.
    """
    check_interpreter(job.cluster)
    with ray_session(job.cluster.address, job.cluster.ranks_per_node, ray_log):
        device = device_of(job)
        if device == "cpu" and job.cluster.address == "local":
            refuse_a_crowd(job.cluster.ranks_per_node)
        runner = SlotRunner(job, device)
        try:
            yield runner
        finally:
            runner.close()


def refuse_a_crowd(ranks: int) -> None:
    """Ray would believe any number of CPUs. Two ranks on one CPU are let through: that shows how all works."""
    cpus = os.cpu_count() or 1
    if ranks > max(2, cpus):
        raise UserError(
            f"cluster.ranks_per_node = {ranks}: this machine has {cpus} CPUs, and ranks that share one slow each other",
            f"lower cluster.ranks_per_node to {max(2, cpus)} or less; `autotune doctor` says what this machine has",
        )


def device_of(job: Job) -> str:
    if job.cluster.device != "auto":
        return job.cluster.device
    import ray

    # Asked of Ray and not of torch: the driver's machine need not have the cluster's devices.
    return "cuda" if ray.cluster_resources().get("GPU") else "cpu"
