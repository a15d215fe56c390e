"""What a run's folder promises of its config: throughput and its interval, and what the step was made of."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from autotune.best import read_best
from autotune.errors import UserError
from autotune.history import History
from autotune.job_file import UNPARSABLE
from autotune.rows import CONFIRM
from autotune.survey import FILE_NAME as STUDY_FILE
from autotune.verdict import Spread, spread
from trials.outcome import Outcome


@dataclass(frozen=True)
class Promise:
    """Of the config that was confirmed, or of the best of the tuning run."""

    rates: Spread
    """Tokens/s per rank."""
    where: str
    """What it comes from, for people."""
    world_size: int
    settings: dict[str, Any]
    num_parameters: int | None
    data_wait_share: float | None
    """Of a step."""
    reserved_gib: float | None
    """On a GPU, worst rank; None on a CPU, where what was measured is no part of a whole process."""

    def asked(self, world_size: int) -> dict[str, Any]:
        """For `trials.probe_log.differences`: what the real run should have applied."""
        asked = {name: value for name, value in self.settings.items() if value is not None}
        if asked.get("attention_backend") == "auto":
            del asked["attention_backend"]
        if world_size != self.world_size:
            asked.pop("grad_accum_steps", None)
        return asked | ({"num_parameters": self.num_parameters} if self.num_parameters else {})


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
    stage = CONFIRM if confirmed and confirmed["tokens_per_s_per_rank"] else "round"
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
