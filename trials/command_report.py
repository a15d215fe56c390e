"""What a rank of a user's own trainer reports, made from the probe's log of it.

The command's exit code alone never decides: a launcher's 0 says nothing of its ranks, and its 1 not why.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trials.machine import cpu_name
from trials.outcome import Outcome, describe_exit
from trials.record import RankReport

if TYPE_CHECKING:
    from trials.command import Command

OUT_OF_MEMORY = {"device": Outcome.OOM_DEVICE, "host": Outcome.OOM_HOST}
DONE, SCRIPT_ENDED = "done", "script_ended"
PROBE_ERROR = "ProbeError"
"""The probe's own: it is used wrongly, or cannot see what it needs to."""


@dataclass(frozen=True)
class Ended:
    """What is known of a command that has ended, beside the probe's log."""

    exit_code: int
    command: Command
    device: str
    growth_bytes: int | None
    """Of the rank's data segment."""


def read_events(path: Path) -> list[dict[str, Any]]:
    """The probe's log of one rank; a last line that is torn is left out."""
    try:
        lines = path.read_text(errors="replace").split("\n")
    except FileNotFoundError:
        return []
    events = []
    for line in lines[:-1]:
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return events


def report_of(rank: int, log: Path, ended: Ended) -> RankReport | None:
    """None: it was killed before it could say anything; who killed it is for others to find out."""
    events = read_events(log)
    by_name = {event["event"]: event for event in events}
    report = RankReport(rank)
    if "start" in by_name:
        start = by_name["start"]
        report.host, report.torch_version = start["host"], start["torch"]
    applied = by_name.get("applied")
    if applied is not None:
        _take_applied(report, applied)
    steps = [event for event in events if event["event"] == "step"]
    timed = [event for event in steps if event["timed"]]
    if "window" in by_name and timed:
        _take_times(report, by_name["window"], timed)
    if ended.device == "cpu":
        report.device_name = cpu_name()
    _take_memory(report, by_name.get("memory"), ended)
    outcome = _outcome(by_name, len(steps), len(timed), ended)
    if outcome is None:
        return None
    report.outcome, report.reason, report.error_type = outcome[0].value, outcome[1], outcome[2]
    error = by_name.get("error")
    report.phase = error["phase"] if error is not None else "done" if outcome[0] is Outcome.OK else "start"
    report.error = error["traceback"] if error is not None else ""
    return report


def _outcome(
    by_name: dict[str, dict[str, Any]], num_steps: int, num_timed: int, ended: Ended
) -> tuple[Outcome, str, str] | None:
    """Outcome, reason and the error's type; None of a rank that was killed."""
    error, end, code = by_name.get("error"), by_name.get("end"), ended.exit_code
    if error is not None:
        kind, message = error["type"], error["message"]
        if kind == PROBE_ERROR:
            return Outcome.INVALID, message, kind
        outcome = OUT_OF_MEMORY.get(error["out_of_memory"] or "", Outcome.CRASHED)
        return outcome, f"{kind} in {error['phase']}: {message}", kind
    if end is not None and (end["reason"] == DONE or num_timed >= ended.command.min_steps):
        return Outcome.OK, "", ""
    if end is not None and num_steps:
        needed = f"{ended.command.warmup_steps} to warm up, {ended.command.timed_steps} to time"
        why = "its script ended" if end["reason"] == SCRIPT_ENDED else "its time was over (measure.trial_timeout_s)"
        return (
            Outcome.TOO_SHORT,
            f"{why} after {num_steps} optimizer steps, {num_timed} of them timed; asked for were {needed} "
            "(measure.warmup_steps, measure.max_steps)",
            "",
        )
    if end is not None or code == 0:
        return Outcome.INVALID, _no_step(by_name, ended.command.attach), ""
    if code < 0:
        return None
    where = "before its first optimizer step" if "start" in by_name else "before the probe was attached"
    return Outcome.CRASHED, f"the command {describe_exit(code)} {where}; its output says why", "CommandError"


def _no_step(by_name: dict[str, dict[str, Any]], attach: str) -> str:
    if "start" not in by_name:
        how = "is {probe} before the script?" if attach == "auto" else f"does the script attach it ({attach})?"
        return f"the command ended, and no probe was attached in it: {how}"
    return (
        "the command ended without an optimizer step that the probe saw: for an optimizer of its own, or one inside "
        "backward, call probe.watch(model) and probe.step() in the script, and say attach: explicit"
    )


def _take_applied(report: RankReport, applied: dict[str, Any]) -> None:
    report.applied = applied["knobs"]
    report.observed = {name: value for name, value in applied.items() if name not in ("event", "knobs")}
    report.num_trainable_params = applied.get("num_trainable")
    device = applied.get("device") or {}
    report.device_name = device.get("name") or ""


def _take_times(report: RankReport, window: dict[str, Any], timed: list[dict[str, Any]]) -> None:
    ends = [window["t"], *(step["t"] for step in timed)]
    report.own_step_times_s = [after - before for before, after in pairwise(ends)]
    report.num_steps = len(timed)
    tokens = [step["tokens"] for step in timed if step["tokens"] is not None]
    report.tokens_per_step = statistics.fmean(tokens) if len(tokens) == len(timed) else None
    report.data_wait_s = sum(step["wait_s"] or 0.0 for step in timed)
    report.loader_sustained = window["loader_sustained"]
    report.phase_s = {"timed": ends[-1] - ends[0]}


def _take_memory(report: RankReport, memory: dict[str, Any] | None, ended: Ended) -> None:
    if memory is not None and ended.device == "cuda":
        report.allocated_bytes = memory["device_allocated"]
        report.reserved_bytes = memory["device_reserved"] or 0
        report.alloc_retries = memory["alloc_retries"] or 0
    elif ended.device == "cpu":
        report.reserved_bytes = ended.growth_bytes or (memory or {}).get("host_data") or 0
