"""The verdict in one sentence, and what to know before believing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from autotune.cost import EXPLAINED, spent_hours
from autotune.endurance import endurance_lines
from autotune.folder import resume_command
from autotune.loaded import LoadedRun
from autotune.report.text import SIMULATED, count, is_kept, loader_advice, noise_advice
from autotune.stages import OF_NO_RUN
from trials.outcome import OUT_OF_MEMORY, Outcome

NOTHING_FITTED = "No config has been measured and fitted, so there is no result."

NOTHING_TUNED = "Nothing was tuned here: these are trials of `autotune measure` or `autotune scale`."


@dataclass(frozen=True)
class Gain:
    """Of tokens/s, the best config over the baseline, from paired rounds."""

    ratio: float
    low: float
    high: float
    """95 % interval."""
    num_paired_rounds: int


@dataclass(frozen=True)
class Headline:
    complete: bool
    """Whether the run came to its end; what is said is a verdict only then."""
    is_going: bool
    """Its driver was at work when this was read."""
    simulated: bool
    """Nothing was measured."""
    simulated_cluster: str | None
    kind: Literal["win", "keep", "unfinished", "none"]
    """`keep`: use the baseline. `unfinished`: the best so far was compared with nothing. `none`: nothing fitted."""
    sentence: str
    gain: Gain | None
    """Of the config that was compared, whether it won or not."""
    notes: list[str]
    num_configs_tried: int
    num_out_of_memory: int
    tuning_hours: float
    """Hours x ranks of all attempts that led to the config, or confirmed it."""
    explaining_hours: float
    """Of those that a waterfall or a scaling measured afterwards."""
    endurance: list[str]
    """What became of the best config's longer run."""
    confirmed: dict[str, Any] | None
    """What `autotune confirm` found last, on the real run's ranks; null: it has not run."""


def headline(run: LoadedRun) -> Headline:
    best = run.best
    searched = [attempt for attempt in run.attempts if attempt.stage in ("baseline", "explore")]
    tried = {attempt.knobs for attempt in searched if attempt.outcome is not Outcome.PREDICTED_OOM}
    kind = _kind(best)
    return Headline(
        complete=run.is_complete,
        is_going=run.is_going,
        simulated=bool(run.study.simulated),
        simulated_cluster=run.study.simulated or None,
        kind=kind,
        sentence=best["verdict"] if best else NOTHING_TUNED if _is_no_run(run) else NOTHING_FITTED,
        gain=_gain(best),
        notes=_notes(run),
        num_configs_tried=len(tried),
        num_out_of_memory=len({attempt.knobs for attempt in searched if attempt.outcome in OUT_OF_MEMORY}),
        tuning_hours=spent_hours(attempt.row for attempt in run.attempts if attempt.stage not in EXPLAINED),
        explaining_hours=spent_hours(attempt.row for attempt in run.attempts if attempt.stage in EXPLAINED),
        endurance=endurance_lines(best["endurance"]) if best and best.get("endurance") else [],
        confirmed=best["confirmed"] if best else None,
    )


def _is_no_run(run: LoadedRun) -> bool:
    """There is nothing to go on with."""
    return run.best is None and all(attempt.stage in OF_NO_RUN for attempt in run.attempts)


def _kind(best: dict[str, Any] | None) -> Literal["win", "keep", "unfinished", "none"]:
    if best is None:
        return "none"
    if not best["complete"]:
        return "unfinished"
    return "keep" if is_kept(best) else "win"


def _gain(best: dict[str, Any] | None) -> Gain | None:
    found = best["gain"] if best else None
    if not found:
        return None
    return Gain(found["ratio"], found["low"], found["high"], found.get("num_paired_rounds", 0))


def _notes(run: LoadedRun) -> list[str]:
    said = []
    if run.study.simulated:
        said.append(f"{SIMULATED.upper()}: nothing here was measured; a model stood in for {run.study.simulated}")
    if not run.is_complete and not _is_no_run(run):
        again = f"`{resume_command(run.folder, run.study.simulated)}` goes on with it"
        state = "The run is still going" if run.is_going else f"The run has not ended; {again}"
        said.append(f"{state}: all that is said here is of what it had measured by now")
    confirmed = run.best["confirmed"] if run.best else None
    if confirmed and confirmed["held"] != "best" and _kind(run.best) == "win":
        ranks = count(confirmed["world_size"], "rank")
        said.append(f"On the real run's {ranks} the {confirmed['held']} held, and not the best: {confirmed['why']}")
    if run.unreadable:
        said.append(f"{count(len(run.unreadable), 'file or row')} of the folder could not be used; listed at the end")
    advice = [noise_advice(run.best), loader_advice(run.best)] if run.best else []
    return said + [line for line in advice if line]
