"""A confirmation from beginning to end, in the process that becomes the real run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import click

from autotune.best import note_confirmed, to_exportable
from autotune.confirm.decide import Decision, after_failure, unmeasured
from autotune.confirm.handover import (
    CONFIG_VARIABLE,
    Handover,
    check_command,
    check_exports,
    start,
    uses_config,
    write_export,
)
from autotune.confirm.measuring import FOUND_NAME, ORDER_NAME, Found, Order
from autotune.confirm.rounds import ALL_MEASURED
from autotune.confirm.tuned import Tuned, read_tuned
from autotune.errors import InfrastructureError, UserError, printable
from autotune.export import EXPORTERS, export
from autotune.export.base import Best
from autotune.folder import sole_driver
from autotune.report.text import count, duration, rate
from autotune.verdict import MIN_ROUNDS
from trials.files import write_whole
from trials.outcome import describe_exit
from trials.record import Knobs

GRACE_S = 60.0
"""After its time, for the measuring process to end its ranks and Ray; then it is killed."""
END_S = 30.0
"""The same, after it was told to end."""


@dataclass(frozen=True)
class Request:
    """The command line."""

    run: Path
    command: tuple[str, ...]
    within_s: float
    ranks: int | None
    target: str | None
    overrides: tuple[str, ...]
    strict: bool
    simulate: str | None


def confirm_and_start(request: Request) -> NoReturn:
    """Confirms, and becomes the command.

    Raises:
        UserError: of the run, the options or the command, before anything is measured; or the model is another one.
        InfrastructureError: with `strict`, there is no verdict; the command cannot be started.
    """
    inherited = dict(os.environ)
    tuned = read_tuned(request.run, request.ranks, request.overrides, request.simulate)
    check_command(request.command)
    target = request.target or tuned.job.export_for or "plain"
    check_exports(
        target, {role: _exportable(tuned, knobs, []) for role, knobs in tuned.contenders.items()}, request.command
    )
    with sole_driver(request.run):
        folder = _new_folder(request.run)
        limit = duration(request.within_s)
        _say(f"autotune confirm: {_shown(request.run)} on {count(tuned.world_size, 'rank')}, in {limit} or less")
        found = _measured(request, tuned, folder)
        if found.refused:
            raise UserError(*found.refused)
        decision = _decision(found, tuned)
        _refuse_without_verdict(request, found, decision)
        handover = _hand_over(request, tuned, target, found, decision)
    _tell(request, found, decision, handover)
    start(handover.command(request.command), handover.environment(inherited))


def _new_folder(run: Path) -> Path:
    """For what the measuring leaves beside the trials' own logs."""
    folder = run / "logs" / f"confirm-{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}", "RUN is written to: rows of its history, the result") from error
    return folder


def _measured(request: Request, tuned: Tuned, folder: Path) -> Found:
    """What the measuring process found out, however it ended."""
    order = Order(
        str(request.run), tuned.world_size, request.overrides, request.simulate, request.within_s, time.time()
    )
    path = folder / ORDER_NAME
    write_whole(path, json.dumps(asdict(order)))
    # A process group of its own: Ctrl-C of a terminal reaches this process alone, which passes it on, once.
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "autotune.confirm.measuring", str(path)],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        process_group=0,
    )
    why = ""
    try:
        code = process.wait(request.within_s + GRACE_S)
        why = f"the measuring process {describe_exit(code)}" if code else ""
    except subprocess.TimeoutExpired:
        why = f"the measuring process did not end {GRACE_S:.0f} s after its time"
        _kill(process)
    except BaseException:
        _interrupt(process)
        raise
    found = _read_found(folder / FOUND_NAME)
    if found.ended:
        return found  # what it did after that changes nothing
    return replace(found, ended=why or "the measuring process said nothing", failed=True)


def _read_found(path: Path) -> Found:
    if not path.exists():
        return Found()
    values = json.loads(path.read_text(encoding="utf-8"))
    return Found(**values | {"refused": tuple(values["refused"]) if values["refused"] else None})


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """Ends it in order: it records what was interrupted, and ends its ranks."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # its ranks die with it
    process.wait()


def _decision(found: Found, tuned: Tuned) -> Decision:
    if found.decision is None:
        return unmeasured(tuned.contenders, f"nothing was measured: {_first_line(found.ended)}")
    decision = Decision(**found.decision)
    if found.failed:
        measured = {role: Knobs.from_dict(one["settings"]) for role, one in decision.standings.items()}
        return after_failure(decision, measured, _first_line(found.ended))
    return decision


def _refuse_without_verdict(request: Request, found: Found, decision: Decision) -> None:
    if not request.strict:
        return
    if found.failed:
        raise InfrastructureError(f"--strict: the measuring failed: {found.ended}", "COMMAND was not started")
    if found.ended != ALL_MEASURED and decision.num_pairs < MIN_ROUNDS:
        raise InfrastructureError(
            f"--strict: {found.ended} after {decision.num_pairs} paired rounds, a verdict needs {MIN_ROUNDS}: "
            f"{decision.why}",
            "COMMAND was not started; give more time by --within",
        )


def _hand_over(request: Request, tuned: Tuned, target: str, found: Found, decision: Decision) -> Handover:
    """Exports the config and notes the result; what cannot be written is said, and stops nothing."""
    knobs, at = Knobs.from_dict(decision.settings), datetime.now(UTC).isoformat(timespec="seconds")
    config, files = None, []
    if knobs.engine in EXPORTERS[target].engines:
        evidence = _evidence(tuned, found, decision, at)
        exported = export(target, _exportable(tuned, knobs, evidence))
        config, problem = write_export(exported, request.run / "export" / f"confirmed-{target}")
        files = [str(config.with_name(name)) for name in exported.files]
        if problem:
            _say(f"  {problem}")
        for knob, need in exported.lost.items():
            _say(f"  not carried by {config.name}: {knob}: {need}")
    section = {
        "held": decision.held,
        "why": decision.why,
        "at": at,
        "world_size": tuned.world_size,
        "settings": decision.settings,
        **{name: value for name, value in decision.standings[decision.held].items() if name.startswith("tokens")},
        "num_paired_rounds": decision.num_pairs,
        "measuring_ended": found.ended,
        "measuring_failed": found.failed,
        "device_name": (found.hardware or {}).get("device_name"),
        "contenders": decision.standings,
        "exported": {"to": target, "files": files} if files else None,
        "simulated": bool(tuned.simulated),
    }
    try:
        note_confirmed(request.run, section)
    except OSError as error:
        _say(f"  {request.run / 'best.yaml'}: {error.strerror}: the result is not noted there")
    return Handover(config, decision.held, knobs, tuned.world_size)


def _exportable(tuned: Tuned, knobs: Knobs, evidence: list[str]) -> Best:
    return replace(to_exportable(tuned.content), knobs=knobs, world_size=tuned.world_size, evidence=evidence)


def _evidence(tuned: Tuned, found: Found, decision: Decision, at: str) -> list[str]:
    """Lines for the header of the exported file."""
    own = decision.standings[decision.held]["tokens_per_s_per_rank"]
    measured = f"{rate(own)} tokens/s per rank" if own else "not measured"
    device = (found.hardware or {}).get("device_name") or "devices that were not seen"
    return [
        *([f"SIMULATED, not measured: {tuned.simulated}"] if tuned.simulated else []),
        f"The {decision.held}, {measured} on {count(tuned.world_size, 'rank')} of {device}, {at[:10]}.",
        f"Confirmation: {decision.why}",
        f"Tuned on {count(tuned.tuned_world_size, 'rank')}: {tuned.content['verdict']}",
    ]


def _tell(request: Request, found: Found, decision: Decision, handover: Handover) -> None:
    _say(f"  the measuring ended: {found.ended}")
    for role, one in decision.standings.items():
        what = one["problem"] or one["gain"] or ("" if one["num_runs"] else "not measured")
        figure = f"{rate(one['tokens_per_s_per_rank'])} tokens/s per rank in {count(one['num_runs'], 'run')}"
        _say(f"  {role:<8}  {figure if one['num_runs'] else ''}{'; ' if what and one['num_runs'] else ''}{what}")
    _say(f"held: {decision.held} ({decision.why})")
    words = handover.command(request.command)
    if words == list(request.command):
        _say(f"  COMMAND names no placeholder: the config reaches it only if it reads ${CONFIG_VARIABLE}")
    elif handover.config and not uses_config(request.command):
        _say(f"  {CONFIG_VARIABLE}={_shown(handover.config)}")
    _say(f"starting: {' '.join(words)}")


def _first_line(text: str) -> str:
    return (text.splitlines() or [""])[0]


def _say(text: str) -> None:
    click.echo(printable(text), err=True)


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
