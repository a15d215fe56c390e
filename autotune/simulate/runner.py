"""The simulated cluster as a runner: slots, attempts and their ends on a clock of its own."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass
from pathlib import Path

from autotune.cluster.gang import GangResult
from autotune.errors import InfrastructureError, UserError
from autotune.history import History
from autotune.job import Job
from autotune.simulate.cluster import SimulatedCluster
from autotune.simulate.reports import SURVEY_S, Measured, measure, survey_reports
from autotune.simulate.world import World
from trials.outcome import INFRASTRUCTURE, Outcome
from trials.record import RankReport, TrialSpec

EPOCH_S = 946_684_800.0
"""2000-01-01: a date at which nobody measured anything with this program."""
BETWEEN_TRIALS_S = 2.0


class SimulatedClock:
    """Goes on only when an attempt ends."""

    def __init__(self, now_s: float = EPOCH_S) -> None:
        self._now_s = now_s

    def monotonic(self) -> float:
        return self._now_s

    def time(self) -> float:
        """Seconds since the epoch."""
        return self._now_s

    def advance_to(self, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)


@dataclass(frozen=True)
class Slot:
    nodes: tuple[int, ...]
    slowness: float
    """Of the slowest of its nodes; 1 is the best there is."""

    def hosts(self, ranks_per_node: int) -> list[str]:
        return [f"simulated-node-{node}" for node in self.nodes for _ in range(ranks_per_node)]


class SimulatedRunner:
    """Answers as the slots of a real cluster do, out of a model. See `autotune.simulate`.

    Args:
        world: of the job and the cluster.
        now_s: where its clock stands, seconds since the epoch.
    """

    device = "cuda"

    def __init__(self, world: World, now_s: float = EPOCH_S) -> None:
        self.world, self.clock = world, SimulatedClock(now_s)
        self.simulated = str(world.cluster)
        self.world_size = world.world_size
        self.num_lost = 0
        self._num_slots = world.job.cluster.parallel_trials
        self._well = list(range(world.cluster.nodes))
        self._slots: list[Slot] = []
        self._flights: list[tuple[float, int, TrialSpec, Slot, GangResult]] = []
        self._started = itertools.count()
        while len(self._slots) < self._num_slots:
            self._slots.append(self._make_slot())

    @property
    def num_slots(self) -> int:
        return self._num_slots

    def is_free(self) -> bool:
        """Whether a trial can be started now; a lost slot is made anew while nodes are left.

        Raises:
            InfrastructureError: the last slot was lost, and there are no nodes for another.
        """
        if self._free_slot() is None and len(self._slots) < self._num_slots:
            if len(self._spare()) >= self.world.job.cluster.nodes_per_trial:
                self._slots.append(self._make_slot())
            elif not self._slots:
                raise InfrastructureError(
                    f"a node was lost: {len(self._well)} simulated nodes are left, a trial needs "
                    f"{self.world.job.cluster.nodes_per_trial}",
                    "give more nodes, or a smaller node_loss, by --simulate",
                )
            else:
                self._num_slots = len(self._slots)
        return self._free_slot() is not None

    def start(self, spec: TrialSpec, log_dir: Path, timeout_s: float) -> None:
        slot = self._free_slot()
        assert slot is not None, "ask is_free first"
        result = self._attempt(spec, slot, timeout_s)
        (log_dir / "simulated.log").write_text(f"simulated: {result.outcome}: {result.reason}\n", encoding="utf-8")
        heapq.heappush(self._flights, (result.ended_at, next(self._started), spec, slot, result))

    def next_ended(self) -> tuple[TrialSpec, GangResult]:
        ended_at, _, spec, slot, result = heapq.heappop(self._flights)
        self.clock.advance_to(ended_at + BETWEEN_TRIALS_S)
        if result.outcome in INFRASTRUCTURE:
            self._slots.remove(slot)
            self.num_lost += 1
            self._well.remove(slot.nodes[-1])
        return spec, result

    def run(self, spec: TrialSpec, log_dir: Path, timeout_s: float) -> GangResult:
        """One attempt, with nothing beside it.

        Raises:
            InfrastructureError: no slot is left.
        """
        assert not self._flights, "other trials are running"
        self.is_free()
        self.start(spec, log_dir, timeout_s)
        return self.next_ended()[1]

    def _attempt(self, spec: TrialSpec, slot: Slot, timeout_s: float) -> GangResult:
        now_s = self.clock.time()
        # By what is measured and how often, so that a resumed run finds what the whole one would have found.
        drawn = random.Random(f"{self.world.cluster.seed}:{spec.digest()}:{spec.stage}:{spec.round}:{spec.attempt}")
        lost = drawn.random() < self.world.cluster.node_loss and spec.knobs is not None
        if spec.knobs is None:
            found = Measured(Outcome.OK, "", None, survey_reports(self.world, spec.matmul_micro_batch_size), SURVEY_S)
        else:
            found = measure(self.world, spec, slot.slowness, now_s, drawn)
        if lost:
            reason = f"simulated-node-{slot.nodes[-1]} was lost (simulated)"
            found = Measured(Outcome.NODE_LOST, reason, None, {}, found.seconds * drawn.random())
        elif found.seconds > timeout_s:
            found = Measured(Outcome.TIMEOUT, f"no end after {timeout_s:.0f} s (simulated)", 0, {}, timeout_s)
        hosts = slot.hosts(self.world.job.cluster.ranks_per_node)
        return GangResult(
            found.outcome,
            found.reason,
            found.failed_rank,
            _placed(found.reports, hosts, now_s),
            hosts,
            now_s,
            now_s + found.seconds,
            detected_s=None if found.outcome is Outcome.OK else found.seconds,
        )

    def _spare(self) -> list[int]:
        taken = {node for slot in self._slots for node in slot.nodes}
        return [node for node in self._well if node not in taken]

    def _make_slot(self) -> Slot:
        nodes = tuple(self._spare()[: self.world.job.cluster.nodes_per_trial])
        cluster = self.world.cluster
        drawn = (random.Random(f"{cluster.seed}:node {node}").gauss(0.0, cluster.slow_nodes) for node in nodes)
        return Slot(nodes, 1 + max(abs(slower) for slower in drawn))

    def _free_slot(self) -> Slot | None:
        """Always the first that is free, so that trials that run alone share one slot."""
        busy = [flight[3] for flight in self._flights]
        return next((slot for slot in self._slots if slot not in busy), None)


def _placed(reports: dict[int, RankReport], hosts: list[str], started_at: float) -> dict[int, RankReport]:
    for rank, report in reports.items():
        report.host, report.started_at = hosts[rank], started_at
    return reports


def make_world(job: Job, cluster: SimulatedCluster) -> World:
    """The job on the cluster.

    Raises:
        UserError: the cluster has less than the job asks for, or the job asks for what is not modelled.
    """
    asked = job.cluster
    if job.trainer is not None:
        raise UserError("trainer: a modelled cluster cannot run your command", "leave --simulate out")
    if asked.device == "cpu":
        raise UserError(
            "cluster.device = cpu: the simulated cluster is one of GPUs",
            "add --set cluster.device=cuda; and cluster.memory_limit_gib=null, if it was a CPU's limit",
        )
    if asked.labels:
        raise UserError("cluster.labels: simulated nodes carry none", "add --set cluster.labels={}")
    if asked.ranks_per_node > cluster.gpus:
        raise UserError(
            f"cluster.ranks_per_node = {asked.ranks_per_node}: a simulated node has {cluster.gpus} GPUs",
            "give --simulate more gpus, or the job fewer ranks_per_node",
        )
    needed = asked.nodes_per_trial * asked.parallel_trials
    if needed > cluster.nodes:
        raise UserError(
            f"the job needs {needed} nodes ({asked.parallel_trials} trials at once on {asked.nodes_per_trial} each): "
            f"--simulate has {cluster.nodes}",
            "give --simulate more nodes, or the job a smaller cluster.parallel_trials or nodes_per_trial",
        )
    return World(job, cluster)


def last_end_s(history: Path) -> float:
    """Where the clock of a run that is resumed stands: after all that its history has."""
    rows, _ = History(history).rows()
    ended = [row["ended_at"].timestamp() for row in rows if row["ended_at"] is not None]
    return max(ended, default=EPOCH_S)
