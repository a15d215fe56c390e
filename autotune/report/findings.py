"""The screen of `autotune doctor`: a line each finding, and what it comes to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from autotune.errors import printable

if TYPE_CHECKING:  # `findings` imports what is slow
    from autotune.doctor.findings import Finding

STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def print_findings(console: Console, findings: list[Finding], job_name: str) -> None:
    width = max(len(finding.name) for finding in findings) + 2
    for finding in findings:
        advice = f" -> {finding.advice}" if finding.advice else ""
        console.print(
            Text(f"{finding.status:<9}", style=STYLES[finding.status]),
            Text(f"{finding.name:<{width}}", style="bold"),
            Text(printable(f"{finding.value}{advice}")),
            sep="",
            soft_wrap=True,
        )
    console.print(Text(verdict(findings, job_name), style="bold"), soft_wrap=True)


def verdict(findings: list[Finding], job_name: str) -> str:
    """One sentence: whether the job can run here."""
    problems = [finding for finding in findings if finding.status == "problem"]
    num_notes = sum(finding.status == "note" for finding in findings)
    notes = f"{num_notes} note{'' if num_notes == 1 else 's'}"
    if not problems:
        return f"{job_name} can run here; {notes}"
    what = f"{len(problems)} problem{'' if len(problems) == 1 else 's'}, {notes}"
    if any(finding.of_the_job for finding in problems):
        return f"{job_name} is wrong: {what}"
    return f"{job_name} cannot run here as it is: {what}"
