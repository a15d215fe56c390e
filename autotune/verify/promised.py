"""Reads a promise from a run's folder. Apart from the promise itself, whose holder need not load torch for weeks."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import yaml

from autotune.best import read_best
from autotune.errors import UserError
from autotune.history import History
from autotune.job_file import UNPARSABLE
from autotune.stages import CONFIRM, ROUND
from autotune.survey import FILE_NAME as STUDY_FILE
from autotune.verdict import Spread, spread
from autotune.verify.promise import Promise
from trials.outcome import Outcome


def read_promise(run: Path) -> Promise:
    """The promise of the run in `run`.

    Raises:
        UserError: no run there, or one that was simulated.
    """
    best = read_best(run)
    if best["fingerprint"].get("simulated"):
        raise UserError(
            f"{run}: its run was simulated: nothing was measured that could be promised", "tune on a real cluster first"
        )
    confirmed = best["confirmed"]
    settings = (confirmed or best)["settings"]
    rows, _ = History(run / "history").rows()
    ran = [row for row in rows if row["knobs"] == settings and row["outcome"] == Outcome.OK.value]
    stage = CONFIRM if confirmed and confirmed["tokens_per_s_per_rank"] else ROUND
    measured = [row for row in ran if row["stage"] == stage] or ran[-1:]
    if stage == CONFIRM:
        assert confirmed is not None
        rates = Spread(
            confirmed["tokens_per_s_per_rank"],
            confirmed["tokens_per_s_per_rank_low"],
            confirmed["tokens_per_s_per_rank_high"],
            len(measured),
        )
        where, world_size = f"confirmed on {confirmed['at'][:10]}", confirmed["world_size"]
    else:
        known = [row["tokens_per_s_per_rank"] for row in measured]
        rates = spread(known or [_figure(run, best, settings)])
        where, world_size = f"tuned on {best['fingerprint']['written_at'][:10]}", best["fingerprint"]["world_size"]
    return Promise(
        rates=rates,
        where=where,
        world_size=world_size,
        settings=settings,
        num_parameters=_num_parameters(run),
        data_wait_share=_median([_wait_share(row) for row in measured]),
        reserved_gib=_median([row["reserved_gib"] for row in measured if row["driver_version"]]),
    )


def _figure(run: Path, best: dict[str, Any], settings: dict[str, Any]) -> float:
    """Of best.yaml, where the history is gone."""
    for one in (best["evidence"] | {"settings": best["settings"]}, best["baseline"]):
        if one["settings"] == settings and one["tokens_per_s_per_rank"]:
            return float(one["tokens_per_s_per_rank"])
    raise UserError(f"{run}: no throughput of the config is known", "measure it: autotune confirm")


def _num_parameters(run: Path) -> int | None:
    try:
        found = yaml.safe_load((run / STUDY_FILE).read_text(encoding="utf-8"))["model"]["num_params"]
    except (*UNPARSABLE, KeyError, TypeError, OSError):
        return None
    return found if isinstance(found, int) else None


def _wait_share(row: dict[str, Any]) -> float | None:
    waited_s, step_s, num_steps = (row[name] for name in ("data_wait_s", "step_time_s", "num_steps"))
    return waited_s / (step_s * num_steps) if waited_s is not None and step_s and num_steps else None


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
