"""The trials of a run as TensorBoard scalars: a point a trial, at its number."""

from __future__ import annotations

from pathlib import Path

from tensorboardX import SummaryWriter

from autotune.history import Told, to_nobody
from autotune.loaded import load
from autotune.stages import BASELINE, SIDE_BY_SIDE
from trials.breakdown import FRACTIONS

SUFFIX = ".autotune"
"""Of our files, which the next writing replaces."""
COLUMNS = {
    "throughput": ("tokens_per_s_per_rank", "model_tflops_per_s_per_rank", "step_time_s", "mfu", "mfu_causal", "hfu"),
    "memory": ("allocated_gib", "reserved_gib", "predicted_gib"),
    "breakdown": tuple(f"frac_{name}" for name in FRACTIONS),
}
"""Of the history, by the heading they stand under; what is null has no point."""


def write_scalars(run: Path, folder: Path, told: Told = to_nobody) -> list[str]:
    """Writes one event file into `folder`, in place of an earlier one of ours.

    `search/best_tokens_per_s_per_rank` is the fastest config so far that fits; `trial/seconds` the attempt's own time;
    `trial/is_ok` is 0 of one that failed.

    Args:
        told: how far the reading of the history is.

    Returns:
        A line on each file and row of the history that says nothing.

    Raises:
        UserError: no run there, or one that has measured nothing.
    """
    loaded = load(run, told)
    for earlier in folder.glob(f"events.out.tfevents.*{SUFFIX}"):
        earlier.unlink()
    best = 0.0
    with SummaryWriter(str(folder), filename_suffix=SUFFIX) as writer:
        for attempt in loaded.attempts:
            row = attempt.row
            points = {f"{head}/{name}": row[name] for head, names in COLUMNS.items() for name in names}
            if row["started_at"] is not None and row["ended_at"] is not None:
                points["trial/seconds"] = (row["ended_at"] - row["started_at"]).total_seconds()
            points["trial/is_ok"] = float(attempt.outcome.value == "ok")
            if attempt.stage in (BASELINE, SIDE_BY_SIDE) and attempt.is_feasible:
                best = max(best, attempt.tokens_per_s_per_rank or 0.0)
                points["search/best_tokens_per_s_per_rank"] = best
            at = row["ended_at"].timestamp() if row["ended_at"] else None
            for name, value in points.items():
                if value is not None:
                    writer.add_scalar(name, value, attempt.trial, walltime=at)
    return loaded.unreadable
