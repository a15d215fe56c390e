"""What a rank of a user's own trainer reports, made from the probe's log of it.

The command's exit code alone never decides: a launcher's 0 says nothing of its ranks, and its 1 not why.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trials.machine import cpu_name
from trials.outcome import VANISHED, Outcome, describe_exit
from trials.probe_log import RankLog, RankOutcome, rank_outcome, read_rank
from trials.record import RankReport

if TYPE_CHECKING:
    from trials.command import Command


@dataclass(frozen=True)
class Ended:
    """What is known of a command that has ended, beside the probe's log."""

    exit_code: int
    command: Command
    device: str
    growth_bytes: int | None
    """Of the rank's data segment."""
    last_line: str = ""
    """Of the command's output: for people, who often find the reason in it, and never to tell an outcome by."""


def report_of(rank: int, path: Path, ended: Ended) -> RankReport | None:
    """None: it was killed before it could say anything; who killed it is for others to find out.

    Args:
        path: of the probe's log; what the gang's ranks tell together is read from its text, on the driver.
    """
    log = read_rank(path) if path.exists() else RankLog(path)
    found = _outcome(log, ended)
    if found.outcome is None:
        return None
    report = RankReport(rank, outcome=found.outcome.value, reason=found.reason, error_type=found.error_type)
    report.phase = "done" if found.outcome is Outcome.OK else "start"
    if path.exists():
        report.probe_log = path.read_text(errors="replace")
    if log.start is not None:
        report.host, report.torch_version = log.start["host"], log.start["torch"]
    if log.error is not None:
        report.phase, report.error = log.error["phase"], log.error["traceback"]
    if log.applied is not None:
        report.applied = log.applied["knobs"]
        report.num_trainable_params = log.applied["num_trainable"]
    _take_device(report, log, ended)
    return report


def _outcome(log: RankLog, ended: Ended) -> RankOutcome:
    said = rank_outcome(log)
    if said.outcome is Outcome.TOO_SHORT and len(log.timed) >= ended.command.min_steps:
        return RankOutcome(Outcome.OK)
    gave_up = log.end is not None and log.end["reason"] == "script_ended" and ended.exit_code > 0
    if (said.outcome is not None and not gave_up) or ended.exit_code < 0:
        return said
    kind = "CommandError"
    if log.start is not None and ended.exit_code:
        where = f"after {len(log.steps)} optimizer steps" if log.steps else "before its first optimizer step"
        kind = kind if gave_up else VANISHED
    elif ended.exit_code:
        where = "before the probe was attached"
    else:
        how = "is {probe} before the script?" if ended.command.attach == "auto" else "does the script attach it?"
        what = f"attach: {ended.command.attach}; {how}"
        return RankOutcome(Outcome.INVALID, f"the command ended, and no probe was attached on this rank ({what})")
    said_last = f": {ended.last_line}" if ended.last_line else ""
    return RankOutcome(Outcome.CRASHED, f"the command {describe_exit(ended.exit_code)} {where}{said_last}", kind)


def _take_device(report: RankReport, log: RankLog, ended: Ended) -> None:
    memory = log.memory or {}
    if ended.device == "cpu":
        report.device_name = cpu_name()
        report.reserved_bytes = ended.growth_bytes or memory.get("host_data") or 0
        return
    report.device_name = ((log.applied or {}).get("device") or {}).get("name") or ""
    report.allocated_bytes = memory.get("device_allocated")
    report.reserved_bytes = memory.get("device_reserved") or 0
    report.alloc_retries = memory.get("alloc_retries") or 0
