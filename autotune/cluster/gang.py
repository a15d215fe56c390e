"""One gang: start the ranks of a trial, watch them, find the root cause, leave nothing behind."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from autotune.cluster.agent import NodeRecord, NodeStatus
from autotune.cluster.slots import Slot
from autotune.trainer.judged import judged
from trials.outcome import Outcome, RankEnd, combine
from trials.record import RankReport, TrialSpec

POLL_S = 0.5
AGENT_ANSWERS_S = 60.0
"""An agent that is silent for longer is lost, whatever Ray says of it."""
MAX_PORTS = 3
"""The port of a rendezvous was free a moment before; another process may have taken it since."""
_PORT_TAKEN = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
GRACE_S = 1.5
"""After the first failure: long enough for the rank that caused it to write its report, when a peer died first."""


@dataclass
class GangResult:
    """One attempt, as all its ranks tell it."""

    outcome: Outcome
    reason: str
    failed_rank: int | None
    reports: dict[int, RankReport]
    hosts: list[str]
    """One a rank: as the rank itself reports it, else as its slot was made."""
    started_at: float
    """Seconds since the epoch."""
    ended_at: float
    leftover_pids: list[int] = field(default_factory=list)
    detected_s: float | None = None
    """Seconds from the start of the gang to the first sign of failure."""

    @property
    def warnings(self) -> list[str]:
        """What ranks could not find out beside the measurement; each once."""
        return list(dict.fromkeys(warning for report in self.reports.values() for warning in report.warnings))


def run_gang(
    slot: Slot, spec: TrialSpec, log_dir: Path, timeout_s: float, stop: threading.Event | None = None
) -> GangResult:
    """Runs one trial on a slot and waits until none of its processes is left.

    Args:
        log_dir: where `rank-N.log` go; must exist.
        timeout_s: the gang is ended after this long, whatever its ranks do.
        stop: ends the gang soon after it is set.
    """
    assert spec.world_size == slot.world_size, "the order is for another number of ranks than the slot has"
    stop = stop or threading.Event()
    for _ in range(MAX_PORTS):
        result = _run_once(slot, spec, log_dir, timeout_s, stop)
        if stop.is_set():
            return replace(result, outcome=Outcome.INTERRUPTED, reason="the run was interrupted", failed_rank=None)
        if spec.trainer is not None:
            result = judged(spec, result, log_dir)
        if result.outcome is not Outcome.CRASHED or not _PORT_TAKEN.search(result.reason):
            break
    return result


def _run_once(slot: Slot, spec: TrialSpec, log_dir: Path, timeout_s: float, stop: threading.Event) -> GangResult:
    import ray

    started_at, started = time.time(), time.monotonic()
    try:
        port = ray.get(slot.nodes[0].agent.free_port.remote(), timeout=AGENT_ANSWERS_S)
        env = _rendezvous(slot, port)
        spec_json = spec.to_json()
        ray.get(
            [
                node.agent.start.remote(spec_json, slot.ranks(index), env | _node_env(slot, index), str(log_dir))
                for index, node in enumerate(slot.nodes)
            ],
            timeout=AGENT_ANSWERS_S,
        )
        timed_out, detected_s = _watch(slot, started, timeout_s, stop)
        records: list[NodeRecord] = ray.get(
            [node.agent.finish.remote() for node in slot.nodes], timeout=AGENT_ANSWERS_S
        )
    except ray.exceptions.GetTimeoutError:
        reason = f"a node's agent did not answer within {AGENT_ANSWERS_S:.0f} s"
        return GangResult(Outcome.NODE_LOST, reason, None, {}, _hosts(slot, {}), started_at, time.time())
    except ray.exceptions.RayError as error:
        reason = f"a node's agent died: {error}"
        return GangResult(Outcome.NODE_LOST, reason, None, {}, _hosts(slot, {}), started_at, time.time())
    return _conclude(slot, records, log_dir, started_at, timed_out, timeout_s, detected_s)


def _rendezvous(slot: Slot, port: int) -> dict[str, str]:
    """As torchrun sets it, for all ranks of a gang."""
    return {
        "MASTER_ADDR": "127.0.0.1" if len(slot.nodes) == 1 else slot.nodes[0].facts.address,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(slot.world_size),
        "LOCAL_WORLD_SIZE": str(slot.ranks_per_node),
        "GROUP_WORLD_SIZE": str(len(slot.nodes)),
    }


def _node_env(slot: Slot, index: int) -> dict[str, str]:
    """For the ranks of one node. gloo by host name fails where the name does not resolve, or resolves to loopback.

    NCCL finds its interfaces itself.
    """
    # One node needs no network.
    interface = "lo" if len(slot.nodes) == 1 else slot.nodes[index].facts.interface
    return {"GROUP_RANK": str(index)} | ({"GLOO_SOCKET_IFNAME": interface} if interface else {})


def _hosts(slot: Slot, reports: dict[int, RankReport]) -> list[str]:
    asked = {rank: node.facts.host for index, node in enumerate(slot.nodes) for rank in slot.ranks(index)}
    return [reports[rank].host if rank in reports else host for rank, host in sorted(asked.items())]


def _watch(slot: Slot, started: float, timeout_s: float, stop: threading.Event) -> tuple[bool, float | None]:
    """Waits for the end of all ranks, of the grace after a failure, or of the time; says whether time ran out."""
    import ray

    detected: float | None = None
    while True:
        statuses: list[NodeStatus] = ray.get(
            [node.agent.poll.remote(POLL_S) for node in slot.nodes], timeout=AGENT_ANSWERS_S
        )
        elapsed_s = time.monotonic() - started
        exits: list[tuple[int, float]] = [exit_ for status in statuses for exit_ in status.exits.values()]
        if detected is None and any(code for code, _ in exits):
            detected = min(ended_s for code, ended_s in exits if code)
        if stop.is_set() or not any(status.running for status in statuses):
            return False, detected
        if detected is not None and elapsed_s > detected + GRACE_S:
            return False, detected
        if elapsed_s > timeout_s:
            return True, elapsed_s


def _conclude(
    slot: Slot,
    records: list[NodeRecord],
    log_dir: Path,
    started_at: float,
    timed_out: bool,
    timeout_s: float,
    detected_s: float | None,
) -> GangResult:
    reports: dict[int, RankReport] = {}
    ends: list[RankEnd] = []
    for record in records:
        for rank, text in record.logs.items():
            (log_dir / f"rank-{rank}.log").write_text(text)
        for rank, (exit_code, ended_s) in record.exits.items():
            report = RankReport.from_json(record.reports[rank]) if rank in record.reports else None
            if report is not None:
                reports[rank] = report
            ends.append(_rank_end(rank, exit_code, ended_s, report, record))
    outcome, reason, failed_rank = combine(ends, timed_out, timeout_s)
    leftover = [pid for record in records for pid in record.leftover_pids]
    if leftover:
        outcome, reason = Outcome.UNCLEAN_DEVICE, f"processes {leftover} could not be ended; first: {reason}"
    elif outcome is Outcome.OK and len(reports) != slot.world_size:
        outcome, reason = Outcome.CRASHED, f"{slot.world_size - len(reports)} rank(s) left no report"
    elif outcome is Outcome.OK and (elsewhere := _elsewhere(slot, records, reports)):
        # Says nothing about the config: the slot is not what it was taken for, and is given up.
        outcome, reason = Outcome.NODE_LOST, elsewhere
    hosts = _hosts(slot, reports)
    return GangResult(outcome, reason, failed_rank, reports, hosts, started_at, time.time(), leftover, detected_s)


def _elsewhere(slot: Slot, records: list[NodeRecord], reports: dict[int, RankReport]) -> str:
    """What differs from the nodes, and the ranks on each, that the slot was asked for; empty if nothing does."""
    for index, (node, record) in enumerate(zip(slot.nodes, records, strict=True)):
        asked = slot.ranks(index)
        if sorted(record.exits) != asked:
            return f"node {index} ({node.facts.host}) ran ranks {sorted(record.exits)}, asked were {asked}"
        for rank in asked:
            if reports[rank].host != node.facts.host:
                return f"rank {rank} ran on host {reports[rank].host}, asked was {node.facts.host}"
    return ""


def _rank_end(
    rank: int, exit_code: int | None, ended_s: float, report: RankReport | None, record: NodeRecord
) -> RankEnd:
    end = RankEnd(rank, exit_code, ended_s=ended_s, state=record.states.get(rank, ""), oom_kills=record.oom_kills)
    if report is None:
        return end
    return replace(end, outcome=Outcome(report.outcome), reason=report.reason, error_type=report.error_type)
