"""A run in a dozen plain lines, for a team's channel."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import printable
from autotune.folder import resume_command
from autotune.report.text import count, differences, finding_line, gib, is_kept, mfu_label, noise_advice, percent, rate
from autotune.stages import OF_NO_RUN
from trials.breakdown import FRACTIONS

MAX_LINES, WIDTH = 12, 240
LEAST_SHOWN = 0.02
"""Of a step; less is not worth a word here."""


def brief_lines(run: Path, best: Mapping[str, Any] | None, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Verdict, baseline and best, the settings that differ, where the time goes, what next.

    Args:
        best: the content of best.yaml; None: the run has none (yet).
        rows: of its history.

    Returns:
        At most 12 lines of at most 240 printable characters: what takes longer is cut, commands hardly ever.
    """
    if best is None and rows and all(row["stage"] in OF_NO_RUN for row in rows):
        return [_plain(f"{run}: nothing was tuned here, but {count(len(rows), 'attempt')} made by measure or scale")]
    if best is None:
        last = rows[-1] if rows else None
        lines = [f"{run}: no config has run to its end; {count(len(rows), 'attempt')}"]
        lines += [f"last: trial {last['trial']} ({last['stage']}) ended in {last['outcome']}"] if last else []
        lines += _wrapped(str(last["reason"]), 3) if last and last["reason"] else []
        return [_plain(line) for line in lines]
    baseline, evidence = best["baseline"], best["evidence"]
    kept = is_kept(best)
    lines = [
        _title(run, best),
        *_wrapped(f"verdict: {best['verdict']}", 2),
        f"baseline: {_figures(baseline, best)}",
        "best: the baseline" if kept else f"best: {_figures(evidence, best)}",
    ]
    if not kept:
        lines += _wrapped(f"best differs by: {differences(best['settings'], baseline['settings'])}", 2)
    lines += [
        f"a step of {name}: {shares}"
        for name, figures in (("baseline", baseline), ("best", {} if kept else evidence))
        if (shares := _shares(figures))
    ]
    lines += [
        f"what bounds {name}: {finding_line(finding)}"
        for name, figures in [("baseline" if kept else "best", evidence)]
        for finding in (figures.get("bottlenecks") or [])[:1]
    ]
    lines += _wrapped(f"next: {_next(run, best)}", 2)
    return [_plain(line) for line in lines[:MAX_LINES]]


def _title(run: Path, best: Mapping[str, Any]) -> str:
    fingerprint = best["fingerprint"]
    simulated = "SIMULATED, " if fingerprint.get("simulated") else ""
    return (
        f"fsdp-autotune {run}: {simulated}{count(fingerprint['world_size'], 'rank')} of {fingerprint['device_name']}, "
        f"torch {fingerprint['torch_version']}, {fingerprint['written_at'][:10]}"
    )


def _figures(figures: Mapping[str, Any], best: Mapping[str, Any]) -> str:
    conventions = best["conventions"]
    limit = f" of {gib(conventions['limit_gib'])}" if conventions["limit_gib"] else ""
    return (
        f"{rate(figures['tokens_per_s_per_rank'])} tokens/s per rank, {mfu_label(conventions['peak_source'])} "
        f"{percent(figures['mfu'])}, {gib(figures['reserved_gib'])} reserved{limit} per rank"
    )


def _shares(figures: Mapping[str, Any]) -> str:
    found = figures.get("breakdown") or {}
    shares = [(name.replace("_", " "), found.get(name)) for name in FRACTIONS]
    known = sorted(((share, name) for name, share in shares if share and share >= LEAST_SHOWN), reverse=True)
    return ", ".join(f"{name} {percent(share)}" for share, name in known)


def _next(run: Path, best: Mapping[str, Any]) -> str:
    if not best["complete"]:
        again = resume_command(run, best["fingerprint"].get("simulated_cluster") or "")
        return f"it has not ended; `autotune watch {run}` if it runs, `{again}` if not"
    if is_kept(best):
        return noise_advice(best) or f"keep your baseline; `autotune show {run}` has all that was tried"
    target = "plain" if best["settings"]["custom"] is None else "command"
    if confirmed := best.get("confirmed"):
        ranks = count(confirmed["world_size"], "rank")
        return f"on {ranks} the {confirmed['held']} held; `autotune export {run} --to {target} --confirmed` writes it"
    if best["fingerprint"].get("simulated"):
        return f"`autotune export {run} --to {target}`, to see the form of it: nothing was measured"
    return f"`autotune export {run} --to {target}`, then `autotune confirm {run} -- COMMAND` on the real ranks"


def _wrapped(text: str, at_most: int) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, max_lines=at_most, placeholder=" ...", subsequent_indent="  ", break_on_hyphens=False
    )


def _plain(line: str) -> str:
    whole = printable(" ".join(line.split("\n")))
    return whole if len(whole) <= WIDTH else whole[: WIDTH - 4] + " ..."
