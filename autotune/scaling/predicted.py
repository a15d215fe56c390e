"""What was measured on a few ranks, carried on to the real run's by the step-time model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from autotune.best import read_best
from autotune.errors import UserError
from autotune.interleaved import Figure
from autotune.job import Job
from autotune.loaded import read_study_file, study_of
from autotune.preflight.closed_form import closed_form
from autotune.preflight.shape import ModelShape, of_surveyed
from autotune.rows import Limits, attempt_from_row
from autotune.scaling.points import Point, Scaling, scaling
from autotune.scaling.subject import CURVES, contenders_of, target
from autotune.stages import SCALE
from autotune.survey import FILE_NAME as STUDY_FILE
from trials.outcome import Outcome
from trials.record import Knobs


def scaling_of(folder: Path, job: Job, rows: Sequence[dict[str, Any]]) -> Scaling | None:
    """The scaling in a run's history, with what it predicts for the real run's number of ranks.

    Args:
        folder: of the run, which has a study.yaml.
        job: of the run.
        rows: of its history.

    Returns:
        None where none was measured.
    """
    # A job that was scaled without a run has no best.yaml.
    contenders = contenders_of(read_best(folder), rows) if (folder / "best.yaml").exists() else None
    limits = study_of(job, read_study_file(folder)).limits
    not_fitting = {row["trial"] for row in rows if row["stage"] == SCALE and _left_too_little(row, limits)}
    found = scaling(rows, job.global_batch_size, job.batch.target_world_size, contenders, not_fitting)
    if found is None:
        return None
    content = yaml.safe_load((folder / STUDY_FILE).read_text(encoding="utf-8"))
    shape = of_surveyed(job.model, content["model"], job.training.precision) if job.model is not None else None
    on_a_gpu = content["model"].get("device_memory_gib") is not None
    return extrapolated(
        found, job, shape, "cuda" if on_a_gpu else "cpu", content["device_name"], content["peak"]["tflops_per_s"]
    )


def _left_too_little(row: dict[str, Any], limits: Limits) -> bool:
    """It ran, with less memory free than the job asks for."""
    return row["outcome"] == Outcome.OK and not attempt_from_row(row, limits).is_feasible


def extrapolated(
    found: Scaling,
    job: Job,
    shape: ModelShape | None,
    device: str,
    device_name: str,
    peak_tflops_per_s: float | None,
) -> Scaling:
    """Adds points for the real run's number of ranks, where that is beyond what was measured.

    Of each curve: the measured step time x predicted step time there / predicted step time here. The most ranks give
    the value, all numbers of ranks that were measured its range: it is as wide as the model is wrong between them, and
    says nothing of what lies beyond.
    """
    target_ranks = found.target_world_size
    if target_ranks <= found.ranked_world_size:
        return found
    if shape is None:
        return dataclasses.replace(found, prediction_problem="the step time of a model of its kind is not predicted")

    def predicted_s(point: Point) -> float | None:
        predictor = closed_form(job, shape, device, device_name, point.world_size, peak_tflops_per_s)
        made = predictor.predict(Knobs.from_dict(point.settings))
        return None if made is None else made.step_s

    curves: dict[tuple[str, str], list[Point]] = {}
    for point in found.points:
        if point.role in CURVES and point.step_time_s is not None:
            curves.setdefault((point.role, point.mode), []).append(point)
    added, problem = [], ""
    for (role, mode), points in curves.items():
        try:
            there = target(job, {role: Knobs.from_dict(points[-1].settings)}, target_ranks, mode)
        except UserError as error:
            problem = error.message
            continue
        if role in there.problems:
            problem = there.problems[role]
            continue
        knobs = there.contenders[role]
        ahead = Point(role, mode, target_ranks, knobs.to_dict(), there.job.global_batch_size, True, 0, "")
        ahead_s = predicted_s(ahead)
        steps_s = [
            point.step_time_s.value * ahead_s / here_s
            for point in points
            if point.step_time_s is not None and ahead_s and (here_s := predicted_s(point))
        ]
        if steps_s:
            added.append(_filled(ahead, points, steps_s))
    return dataclasses.replace(found, points=(*found.points, *added), prediction_problem="" if added else problem)


def _filled(ahead: Point, points: Sequence[Point], steps_s: Sequence[float]) -> Point:
    """`points` and what each leads to, by number of ranks."""
    first, last = points[0].tokens_per_s_per_rank, points[-1]
    assert first is not None and last.tokens_per_s_per_rank is not None and last.step_time_s is not None
    tokens = last.tokens_per_s_per_rank.value * last.step_time_s.value * _sequences(ahead) / _sequences(last)
    rate = Figure(tokens / steps_s[-1], tokens / max(steps_s), tokens / min(steps_s))
    return dataclasses.replace(
        ahead,
        step_time_s=Figure(steps_s[-1], min(steps_s), max(steps_s)),
        tokens_per_s_per_rank=rate,
        efficiency=rate.times(1 / first.value),
        mfu=None if last.mfu is None else rate.times(last.mfu.value / last.tokens_per_s_per_rank.value),
    )


def _sequences(point: Point) -> int:
    """Of a rank in one optimizer step."""
    return int(point.settings["micro_batch_size"] * point.settings["grad_accum_steps"])
