"""One gang: start the ranks of a trial, watch them, find the root cause, leave nothing behind."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from autotune.cluster.agent import NodeRecord, NodeStatus
from autotune.cluster.slots import Slot
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


def run_gang(slot: Slot, spec: TrialSpec, log_dir: Path, timeout_s: float) -> GangResult:
    """Runs one trial on a slot and waits until none of its processes is left.

    Args:
        log_dir: where `rank-N.log` go; must exist.
        timeout_s: the gang is ended after this long, whatever its ranks do.
    """
    for _ in range(MAX_PORTS):
        result = _run_once(slot, spec, log_dir, timeout_s)
        if result.outcome is not Outcome.CRASHED or not _PORT_TAKEN.search(result.reason):
            break
    return result


def _run_once(slot: Slot, spec: TrialSpec, log_dir: Path, timeout_s: float) -> GangResult:
    import ray

    started_at, started = time.time(), time.monotonic()
    hosts = [node.host for node in slot.nodes for _ in range(slot.ranks_per_node)]
    try:
        port = ray.get(slot.nodes[0].agent.free_port.remote(), timeout=AGENT_ANSWERS_S)
        env = _rendezvous(slot, port)
        spec_json = spec.to_json()
        ray.get(
            [
                node.agent.start.remote(spec_json, _ranks(slot, index), {**env, "GROUP_RANK": str(index)}, str(log_dir))
                for index, node in enumerate(slot.nodes)
            ],
            timeout=AGENT_ANSWERS_S,
        )
        timed_out, detected_s = _watch(slot, started, timeout_s)
        records: list[NodeRecord] = ray.get(
            [node.agent.finish.remote() for node in slot.nodes], timeout=AGENT_ANSWERS_S
        )
    except ray.exceptions.RayError as error:
        return GangResult(Outcome.NODE_LOST, f"a node's agent died: {error}", None, {}, hosts, started_at, time.time())
    return _conclude(slot, records, log_dir, hosts, started_at, timed_out, timeout_s, detected_s)


def _ranks(slot: Slot, node: int) -> list[int]:
    return list(range(node * slot.ranks_per_node, (node + 1) * slot.ranks_per_node))


def _rendezvous(slot: Slot, port: int) -> dict[str, str]:
    alone = len(slot.nodes) == 1
    env = {
        "MASTER_ADDR": "127.0.0.1" if alone else slot.nodes[0].address,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(slot.world_size),
        "LOCAL_WORLD_SIZE": str(slot.ranks_per_node),
    }
    # One node needs no network: gloo by host name fails on laptops whose name does not resolve.
    return env | ({"GLOO_SOCKET_IFNAME": "lo"} if alone else {})


def _watch(slot: Slot, started: float, timeout_s: float) -> tuple[bool, float | None]:
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
        if not any(status.running for status in statuses):
            return False, detected
        if detected is not None and elapsed_s > detected + GRACE_S:
            return False, detected
        if elapsed_s > timeout_s:
            return True, elapsed_s


def _conclude(
    slot: Slot,
    records: list[NodeRecord],
    log_dir: Path,
    hosts: list[str],
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
    return GangResult(outcome, reason, failed_rank, reports, hosts, started_at, time.time(), leftover, detected_s)


def _rank_end(
    rank: int, exit_code: int | None, ended_s: float, report: RankReport | None, record: NodeRecord
) -> RankEnd:
    end = RankEnd(rank, exit_code, ended_s=ended_s, state=record.states.get(rank, ""), oom_kills=record.oom_kills)
    if report is None:
        return end
    return replace(end, outcome=Outcome(report.outcome), reason=report.reason, error_type=report.error_type)
