"""The interface the run measures through, and its real form: a slot of a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from autotune.cluster.gang import GangResult, run_gang
from autotune.cluster.slots import Slot, make_slot, ray_session
from autotune.errors import InfrastructureError, UserError
from autotune.job import Job
from trials.outcome import INFRASTRUCTURE
from trials.record import TrialSpec


class Runner(Protocol):
    world_size: int
    device: str

    def run(self, spec: TrialSpec, log_dir: Path, timeout_s: float) -> GangResult:
        """One attempt, from start to clean-up."""
        ...


class SlotRunner:
    """Runs trials one after the other on one slot; a slot that lost its agent or is not clean is replaced."""

    def __init__(self, job: Job, device: str) -> None:
        self.device = device
        self._ranks_per_node = job.cluster.ranks_per_node
        launcher = job.cluster.launcher
        self._launcher = ("fork" if device == "cpu" else "exec") if launcher == "auto" else launcher
        self._slot: Slot | None = self._make_slot()
        self.world_size = self._slot.world_size

    def _make_slot(self) -> Slot:
        return make_slot(self.device, self._launcher, 1, self._ranks_per_node)

    def run(self, spec: TrialSpec, log_dir: Path, timeout_s: float) -> GangResult:
        """One attempt.

        Raises:
            InfrastructureError: a slot was lost and none can be had in its place.
        """
        if self._slot is None:
            try:
                self._slot = self._make_slot()
            except UserError as error:
                raise InfrastructureError(f"a node was lost: {error.message}", error.hint) from error
        result = run_gang(self._slot, spec, log_dir, timeout_s)
        if result.outcome in INFRASTRUCTURE:
            self.close()  # and made anew at the next trial, once this one is recorded
        return result

    def close(self) -> None:
        if self._slot is not None:
            self._slot.close()
            self._slot = None


@contextmanager
def open_runner(job: Job, ray_log: Path) -> Iterator[SlotRunner]:
    """Ray and a slot for the length of a study; everything it started is ended on the way out.

    Raises:
        UserError: the cluster has less than the job asks for.
        InfrastructureError: Ray or an agent does not start.
    """
    with ray_session(job.cluster.address, job.cluster.ranks_per_node, ray_log):
        runner = SlotRunner(job, _device(job))
        try:
            yield runner
        finally:
            runner.close()


def _device(job: Job) -> str:
    if job.cluster.device != "auto":
        return job.cluster.device
    import ray

    # Asked of Ray and not of torch: the driver's machine need not have the cluster's devices.
    return "cuda" if ray.cluster_resources().get("GPU") else "cpu"
