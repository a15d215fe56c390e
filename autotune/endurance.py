"""What the winner's endurance run showed: from the ranks' reports to a column of the history, best.yaml and a line."""

from __future__ import annotations

from typing import Any

from autotune.report.text import gib, value
from autotune.rows import Attempt
from trials.outcome import Outcome

PACKED = "sequences are packed to this length: training on this data has none that is longer"
OF_A_TRAINER = "more steps of your command, on the sequences it came to; what it saves and evaluates was not run"
PASSED, FAILED, NOT_RUN = "passed", "failed", "not_run"


def status_of(attempt: Attempt) -> str:
    """Storage that fails says nothing about the config."""
    if attempt.outcome is Outcome.STORAGE_FAILED:
        return NOT_RUN
    return PASSED if attempt.outcome is Outcome.OK else FAILED


def endurance_content(
    attempt: Attempt | None, why_not: str, failed: list[Attempt], seq_len: int | None
) -> dict[str, Any]:
    """What best.yaml says of it.

    Args:
        attempt: the endurance run of the config that best.yaml names, if it had one.
        why_not: it had none.
        failed: those of configs that were faster, and are not used for it.
    """
    found: dict[str, Any] = {"status": NOT_RUN, "reason": why_not}
    if attempt is not None:
        found = {"status": status_of(attempt), "reason": attempt.reason, "trial": attempt.trial}
        row = attempt.row
        if attempt.outcome is Outcome.OK:
            found |= {
                "longest_sequence_tokens": None if attempt.knobs.custom is not None else seq_len,
                "covers": OF_A_TRAINER if attempt.knobs.custom is not None else PACKED,
                "num_steps": row["num_steps"],
                "tokens_per_s_per_rank": row["tokens_per_s_per_rank"],
                **(row["endurance"] or {}),
            }
    return found | {
        "failed": [
            {"trial": one.trial, "outcome": one.outcome.value, "reason": one.reason, "settings": one.knobs.to_dict()}
            for one in failed
        ]
    }


def endurance_lines(endurance: dict[str, Any]) -> list[str]:
    """For the screen, from best.yaml."""
    lines = [
        f"Endurance: trial {value(one['trial'])}, which was faster, failed its own: {value(one['outcome'])}: "
        f"{_first_line(one['reason'])}"
        for one in endurance.get("failed") or []
    ]
    if endurance["status"] != PASSED:
        return [
            *lines,
            f"Endurance: {value(endurance['status']).replace('_', ' ')}: {_first_line(endurance['reason'])}",
        ]
    took = [
        f"{value(phase['phase'])} {phase['seconds']:.1f} s ({gib(phase['reserved_gib'])} reserved, "
        f"{gib(phase['host_gib'])} host)"
        for phase in endurance.get("phases") or []
    ]
    longest = endurance.get("longest_sequence_tokens")
    on = f"on sequences of {value(longest)} tokens, the longest there are; {', '.join(took)}"
    if longest is None:
        on = f"of your command: {value(endurance.get('covers'))}"
    lines.append(f"Endurance: passed, {value(endurance.get('num_steps'))} steps {on}")
    hours = endurance.get("hours_to_host_limit")
    if hours is not None:
        lines.append(
            f"  host memory grows by {endurance['host_growth_mib_per_step']:.2g} MiB a step and host: at this rate "
            f"it is full after {hours:.3g} hours. All configs may do so: look for what the model or the loader keeps"
        )
    return lines


def _first_line(text: Any) -> str:
    return (value(text).splitlines() or [""])[0]
