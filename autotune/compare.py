"""Two runs beside each other: their settings, how fast the one's config is against the other's, and what else differs.

Their rounds were not run as pairs, so the interval of the ratio is Welch's, on logs: what drifted between the two runs
is in the ratio and not in its interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune.best import read_best
from autotune.folder import leaves
from autotune.history import Told, to_nobody
from autotune.loaded import load
from autotune.stages import OF_A_RUN
from autotune.verdict import CONFIDENCE, welch
from trials.record import COMPOSED

ENVIRONMENT = ("device_name", "torch_version", "nccl_version", "driver_version", "world_size", "hosts", "simulated")
CONVENTIONS = ("flops_convention", "flops_per_token", "peak_tflops_per_s", "peak_source", "limit_gib")
NOT_COMPARED = frozenset({"output"})
"""Keys of a job that say nothing of what it measures."""
OF_THE_WORK = ("model.", "data.", "trainer.", "batch.global_batch_", "training.precision", "training.optimizer.")
"""How keys of a job begin that decide what a token costs: if one differs, tokens/s are of different work."""
FEWEST_RUNS = 2
"""Of each config, for an interval."""


@dataclass(frozen=True)
class Side:
    """A run that is compared."""

    name: str
    best: dict[str, Any]
    """The content of best.yaml."""
    rows: list[dict[str, Any]]
    job: dict[str, Any]
    """Its keys, dotted."""

    def rates(self, settings: Mapping[str, Any]) -> list[float]:
        """Tokens/s per rank of the runs of a config: its fresh rounds; without any, its runs of whole steps.

        What was measured after the run's end is not among them: some of it ran on other ranks.
        """
        ok = [
            row for row in self.rows if row["outcome"] == "ok" and row["stage"] in OF_A_RUN and row["knobs"] == settings
        ]
        rounds = [row for row in ok if row["stage"] == "round"]
        alone = [row for row in ok if row["stage"] in ("baseline", "finalist") or row["timing"] != COMPOSED]
        return [row["tokens_per_s_per_rank"] for row in rounds or alone]


@dataclass(frozen=True)
class Ratio:
    """Tokens/s per rank of B's config over A's."""

    what: str
    """`best` or `baseline`."""
    rates: tuple[float | None, float | None]
    """Of A and B, as best.yaml has them."""
    mfu: tuple[float | None, float | None]
    ratio: float | None
    low: float | None
    high: float | None
    """95 % interval; None: a config was run less than twice."""
    num_runs: tuple[int, int]


@dataclass(frozen=True)
class Comparison:
    """What `autotune compare` answers. Pairs are (A, B)."""

    names: tuple[str, str]
    complete: tuple[bool, bool]
    simulated: tuple[bool, bool]
    verdicts: tuple[str, str]
    settings: dict[str, tuple[Any, Any]]
    """Of the best configs: all of them."""
    ratios: tuple[Ratio, ...]
    environment: dict[str, tuple[Any, Any]]
    """What differs, here and below."""
    conventions: dict[str, tuple[Any, Any]]
    job: dict[str, tuple[Any, Any]]
    confidence: float = CONFIDENCE

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def warnings(self) -> list[str]:
        """What keeps the figures from being compared, for people."""
        lines = []
        other_work = [key for key in self.job if key.startswith(OF_THE_WORK)]
        if other_work:
            lines.append(f"tokens/s are of different work: {', '.join(other_work)}")
        if {"flops_convention", "peak_tflops_per_s", "peak_source"} & self.conventions.keys():
            lines.append("MFU is counted by another convention or peak: compare tokens/s")
        if "world_size" in self.environment:
            lines.append("another number of ranks: throughput is per rank")
        lines += [
            f"{name} is SIMULATED: nothing of it was measured"
            for name, simulated in dict(zip(self.names, self.simulated, strict=True)).items()
            if simulated
        ]
        lines += [
            f"{name} has not ended: its best is the best so far"
            for name, ended in zip(self.names, self.complete, strict=True)
            if not ended
        ]
        return lines


def load_side(run: Path, told: Told = to_nobody) -> Side:
    """Reads a run.

    Args:
        told: how far it is.

    Raises:
        UserError: no run there, or none that has measured anything; its job cannot be read.
    """
    found = load(run, told)
    best = found.best or read_best(run)  # which says that there is none
    return Side(str(run), best, [one.row for one in found.attempts], leaves(found.job.model_dump(mode="json")))


def compare_runs(a: Side, b: Side) -> Comparison:
    """B against A."""
    first, second = a.best, b.best
    return Comparison(
        names=(a.name, b.name),
        complete=(first["complete"], second["complete"]),
        simulated=(bool(first["fingerprint"].get("simulated")), bool(second["fingerprint"].get("simulated"))),
        verdicts=(first["verdict"], second["verdict"]),
        settings={
            name: (first["settings"].get(name), second["settings"].get(name))
            for name in {**first["settings"], **second["settings"]}
        },
        ratios=(
            _ratio("best", a, b, (first["evidence"], second["evidence"]), (first["settings"], second["settings"])),
            _ratio(
                "baseline",
                a,
                b,
                (first["baseline"], second["baseline"]),
                (first["baseline"]["settings"], second["baseline"]["settings"]),
            ),
        ),
        environment=_different(first["fingerprint"], second["fingerprint"], ENVIRONMENT),
        conventions=_different(first["conventions"], second["conventions"], CONVENTIONS),
        job=_different(a.job, b.job, sorted((a.job.keys() | b.job.keys()) - NOT_COMPARED)),
    )


def _ratio(
    what: str,
    a: Side,
    b: Side,
    figures: tuple[Mapping[str, Any], Mapping[str, Any]],
    settings: tuple[Mapping[str, Any], Mapping[str, Any]],
) -> Ratio:
    runs = [side.rates(knobs) for side, knobs in zip((a, b), settings, strict=True)]
    known = (figures[0]["tokens_per_s_per_rank"], figures[1]["tokens_per_s_per_rank"])
    is_enough = all(len(rates) >= FEWEST_RUNS and min(rates) > 0 for rates in runs)
    interval = welch(runs[1], runs[0]) if is_enough else None
    middle = [_geometric_mean(rates) if rates else rate for rates, rate in zip(runs, known, strict=True)]
    ratio = middle[1] / middle[0] if middle[0] and middle[1] else None
    return Ratio(
        what=what,
        rates=known,
        mfu=(figures[0]["mfu"], figures[1]["mfu"]),
        ratio=interval.ratio if interval else ratio,
        low=interval.low if interval else None,
        high=interval.high if interval else None,
        num_runs=(len(runs[0]), len(runs[1])),
    )


def _geometric_mean(rates: Sequence[float]) -> float | None:
    return math.exp(statistics.fmean(math.log(rate) for rate in rates)) if min(rates) > 0 else None


def _different(a: Mapping[str, Any], b: Mapping[str, Any], names: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    return {name: (a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)}
