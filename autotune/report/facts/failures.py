"""What did not end well, by cause."""

from __future__ import annotations

import re
from dataclasses import dataclass

from autotune.loaded import LoadedRun
from autotune.report.facts.trials import MOST_OF_A_REASON
from trials.outcome import INFRASTRUCTURE, OUT_OF_MEMORY, Outcome

_NUMBERS = re.compile(r"\d+(?:[.,]\d+)*")
MEANS = {
    Outcome.OOM_DEVICE: "more memory than the device, or its limit, has",
    Outcome.OOM_HOST: "more memory than the host has",
    Outcome.PREDICTED_OOM: "proposed by the search, surely too large by the predictions, and not tried",
    Outcome.TIMEOUT: "no end within measure.trial_timeout_s",
    Outcome.CRASHED: "an error, or a rank that ended without a report",
    Outcome.NODE_LOST: "the node or its agent was lost; tried again",
    Outcome.INVALID: "the model or its data cannot be used so",
    Outcome.MISAPPLIED: "the settings read back are not those asked for",
    Outcome.TOO_SHORT: "too few timed steps for a figure",
    Outcome.WRONG_NUMERICS: "its losses are not the baseline's",
    Outcome.UNCLEAN_DEVICE: "the device was in use before the trial; tried again",
    Outcome.INTERRUPTED: "stopped from outside; tried again when the run is resumed",
    Outcome.STORAGE_FAILED: "a disk was full or could not be written",
}


@dataclass(frozen=True)
class Failure:
    """Attempts that ended in the same way, for reasons that differ in numbers alone."""

    outcome: str
    means: str
    num_attempts: int
    trials: list[int]
    reason: str
    """Of the first of them."""
    is_of_the_config: bool
    """False: the machine is to blame, and the config was tried again."""
    log_path: str
    """Of the first, relative to the run's folder; empty if there is none."""


def failures(run: LoadedRun) -> list[Failure]:
    """The most frequent first."""
    causes: dict[tuple[Outcome, str], list[int]] = {}
    for index, attempt in enumerate(run.attempts):
        if attempt.outcome is not Outcome.OK:
            numberless = _NUMBERS.sub("#", attempt.reason)
            # Each allocator's message has its own sizes and places; out of memory is one cause.
            key = "" if attempt.outcome in OUT_OF_MEMORY else numberless
            causes.setdefault((attempt.outcome, key), []).append(index)
    found = []
    for (outcome, _), indices in causes.items():
        first = run.attempts[indices[0]]
        found.append(
            Failure(
                outcome=str(outcome),
                means=MEANS[outcome],
                num_attempts=len(indices),
                trials=[run.attempts[index].trial for index in indices],
                reason=(first.reason.splitlines() or [""])[0][:MOST_OF_A_REASON],
                is_of_the_config=outcome not in INFRASTRUCTURE,
                log_path=first.row.get("log_path") or "",
            )
        )
    return sorted(found, key=lambda failure: -failure.num_attempts)
