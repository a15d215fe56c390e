"""How the search went: the best so far, over attempts and over the hours they took."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.cost import spent_hours
from autotune.loaded import LoadedRun
from autotune.stages import BASELINE, SIDE_BY_SIDE
from trials.outcome import Outcome


@dataclass(frozen=True)
class Progress:
    """After one attempt, in the order in which they ended."""

    trial: int
    stage: str
    rank_hours: float
    """Hours x ranks of all attempts by now; GPU-hours on GPUs."""
    tokens_per_s_per_rank: float | None
    """Null: it did not run to its end, or not on the baseline's number of ranks."""
    mfu: float | None
    best_tokens_per_s_per_rank: float | None
    """Of the baseline and the explored configs that fit; later stages measure the same configs again."""
    best_mfu: float | None


def progress(run: LoadedRun) -> list[Progress]:
    """Configs that were predicted not to fit are no attempts."""
    made = [attempt for attempt in run.attempts if attempt.outcome is not Outcome.PREDICTED_OOM]
    made.sort(key=lambda attempt: (attempt.row["ended_at"] is None, attempt.row["ended_at"] or 0, attempt.trial))
    found: list[Progress] = []
    ranks = next((attempt.row["world_size"] for attempt in run.attempts if attempt.stage == BASELINE), None)
    hours, best, best_mfu = 0.0, None, None
    for attempt in made:
        hours += spent_hours([attempt.row])
        compares = ranks is None or attempt.row["world_size"] == ranks
        rate = attempt.tokens_per_s_per_rank if compares else None
        mfu = attempt.row["mfu"] if compares and attempt.outcome is Outcome.OK else None
        is_searched = attempt.stage in (BASELINE, SIDE_BY_SIDE) and attempt.is_feasible
        if is_searched and rate is not None and (best is None or rate > best):
            best, best_mfu = rate, mfu
        found.append(Progress(attempt.trial, attempt.stage, hours, rate, mfu, best, best_mfu))
    return found
