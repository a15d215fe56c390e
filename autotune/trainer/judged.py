"""What only all ranks of a user's own trainer can tell together: whether they did what was asked, and how fast."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trials.outcome import OUT_OF_MEMORY, Outcome
from trials.probe_log import Difference, RankLog, Throughput, differences, read_ranks, shared_gpus, throughput
from trials.record import RankReport, TrialSpec
from trials.timing import drift

if TYPE_CHECKING:
    from autotune.cluster.gang import GangResult

NUM_BLOCKS = 8
"""That timed steps are put together in: single ones are too alike to their neighbours to say how sure the mean is."""
JUDGED = frozenset({Outcome.OK, Outcome.TOO_SHORT, *OUT_OF_MEMORY})
"""Outcomes behind which the settings may be others than asked for."""


def judged(spec: TrialSpec, result: GangResult, folder: Path) -> GangResult:
    """The gang's result once its ranks have been looked at side by side; their logs are kept in `folder`."""
    for rank, report in result.reports.items():
        if report.probe_log is not None:
            (folder / f"rank-{rank}.jsonl").write_text(report.probe_log)
    logs = read_ranks(folder, spec.world_size)
    problem = _problem(spec, result, logs)
    if problem is not None:
        return replace(result, outcome=problem[0], reason=problem[1], failed_rank=problem[2])
    if result.outcome is Outcome.OK:
        _join(result.reports, throughput(logs))
    return result


def _problem(spec: TrialSpec, result: GangResult, logs: list[RankLog]) -> tuple[Outcome, str, int | None] | None:
    """Outcome, reason and rank, where the ranks show more than each of them has said."""
    assert spec.trainer is not None
    shared = shared_gpus(logs)
    if shared:
        return Outcome.INVALID, f"{shared[0]}: does the script choose its device by LOCAL_RANK?", None
    if result.outcome not in JUDGED:
        return None
    own = spec.knobs.model_parallel_ranks if spec.knobs is not None else 1
    found, _ = differences(logs, spec.trainer["expect"], own)
    if found:
        return Outcome.MISAPPLIED, "; ".join(_told(spec, one) for one in found), found[0].rank
    if result.outcome is Outcome.OK and any(step["tokens"] is None for log in logs for step in log.timed):
        return (
            Outcome.INVALID,
            "the tokens of a step are not known: no integer batch (samples, sequence) was seen in the model's forward; "
            "say trainer.tokens: N (tokens of a sequence), or call probe.step(tokens=...)",
            None,
        )
    return None


def _told(spec: TrialSpec, difference: Difference) -> str:
    """With what to do about it, where the probe's own words do not say it."""
    assert spec.trainer is not None
    if difference.hint or difference.name not in spec.trainer["values"]:
        return str(difference)
    handed = difference.name in spec.trainer["handed"]
    hint = "it was handed over, and the script did not use it" if handed else "nothing hands it over"
    key = "training.engines" if difference.name == "engine" else f"baseline.{difference.name}"
    return f"{difference} ({hint}; if the script decides it, say {key}: {difference.applied})"


def _join(reports: dict[int, RankReport], found: Throughput) -> None:
    """Gives each report the gang's times: of each step the slowest rank's, of tokens the mean over ranks."""
    num_steps = len(found.step_times_s)
    block = max(1, num_steps // NUM_BLOCKS)
    parts = [found.step_times_s[start : start + block] for start in range(0, num_steps, block)]
    for rank, report in reports.items():
        report.own_step_times_s = found.rank_step_times_s[rank]
        report.block_times_s = [sum(part) / len(part) for part in parts]
        report.block_steps = [len(part) for part in parts]
        report.num_steps = num_steps
        report.tokens_per_step = found.tokens_per_step / len(reports)
        report.drift = drift(report.block_times_s)
        report.loader_sustained = found.loader_sustained
        report.data_wait_s = found.data_wait_s or 0.0
        report.warnings = found.notes
        report.phase_s = {"timed": sum(report.own_step_times_s)}
