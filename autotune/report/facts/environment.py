"""What it was measured on and how, and what was not measured."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from autotune import __version__
from autotune.job import Job
from autotune.loaded import LoadedRun
from autotune.report.text import is_kept, loader_advice
from trials.record import COMPOSED


@dataclass(frozen=True)
class Environment:
    study_id: str
    autotune_version: str
    """Of the program that wrote this summary."""
    started_at: str | None
    ended_at: str | None
    """Of the last attempt; ISO 8601, UTC."""
    search_ended: str | None
    """Why; null: it has not, or was stopped."""
    device_names: list[str]
    hosts: list[str]
    world_size: int
    """Ranks of a trial."""
    target_world_size: int
    """Ranks of the real run."""
    torch_versions: list[str]
    driver_versions: list[str]
    nccl_versions: list[str]
    attention_backends: list[str]
    """Kernels that were seen."""
    workload: str
    num_params: int
    num_matmul_params: int
    num_blocks: int
    seq_len: int | None
    """None: of a user's own trainer that did not say."""
    data: str
    precision: str
    global_batch_size: int
    """Sequences per optimizer step over all ranks."""
    global_batch_tokens: int | None
    memory_limit_gib: float | None
    """Of a rank; null: none known."""
    memory_headroom: float
    """Share of the limit that must stay free."""
    peak_tflops_per_s: float | None
    """Dense, of a rank; null: not known, and no MFU."""
    peak_dtype: str
    peak_source: str
    achievable_tflops_per_s: float | None
    """Rate of a rank in the model's own matmuls; null: not calibrated (`cluster.calibrate_peak`)."""
    flops_convention: str
    flops_per_token: float | None
    candidates: dict[str, list[Any]]
    """The space that was searched."""
    sampler: str
    warm_start: list[dict[str, Any]]


def _workload(job: Job) -> str:
    if job.model is None:
        return "your own trainer"
    return job.model.workload if job.model.preset is None else f"{job.model.workload}: {job.model.preset}"


def environment(run: LoadedRun) -> Environment:
    survey, job, study = run.survey, run.job, run.study
    ends = [attempt.row["ended_at"] for attempt in run.attempts if attempt.row["ended_at"] is not None]
    return Environment(
        study_id=study.study_id,
        autotune_version=__version__,
        started_at=survey.started_at,
        ended_at=max(ends).isoformat(timespec="seconds") if ends else None,
        search_ended=survey.search_ended,
        device_names=_seen(run, "device_name") or [survey.device_name],
        hosts=sorted({host for attempt in run.attempts for host in attempt.row["hosts"]}),
        world_size=study.world_size,
        target_world_size=job.batch.target_world_size,
        torch_versions=_seen(run, "torch_version"),
        driver_versions=_seen(run, "driver_version"),
        nccl_versions=_seen(run, "nccl_version"),
        attention_backends=_seen(run, "attention_backend"),
        workload=_workload(job),
        num_params=study.model.num_params,
        num_matmul_params=study.model.num_matmul_params,
        num_blocks=survey.model.num_blocks,
        seq_len=job.seq_len,
        data=survey.model.data or (job.data.source if job.data else "your trainer's own"),
        precision=job.training.precision,
        global_batch_size=job.global_batch_size,
        global_batch_tokens=job.global_batch_size * job.seq_len if job.seq_len else None,
        memory_limit_gib=study.limits.limit_gib,
        memory_headroom=study.limits.headroom,
        peak_tflops_per_s=study.peak.tflops_per_s,
        peak_dtype=study.peak.dtype,
        peak_source=study.peak.source,
        achievable_tflops_per_s=study.achievable_tflops_per_s,
        # Of a trainer of one's own they are counted in its trials.
        flops_convention=", ".join(_seen(run, "flops_convention")) or study.model.flops_convention,
        flops_per_token=study.model.flops_per_token or next(iter(_seen(run, "flops_per_token")), None),
        candidates={name: list(values) for name, values in survey.candidates.items()},
        sampler=job.sampler,
        warm_start=(run.best or {}).get("warm_start") or [],
    )


def _seen(run: LoadedRun, column: str) -> list[Any]:
    """All there are: a run that was resumed may have gone on with other versions."""
    return sorted({attempt.row[column] for attempt in run.attempts if attempt.row.get(column)})


def _of_mfu(run: LoadedRun) -> list[str]:
    study = run.study
    if study.peak.tflops_per_s is None:
        return [f"MFU and HFU: {study.peak.source}. `cluster.peak_tflops_per_s` of the job gives a peak."]
    if run.job.trainer is not None:
        return ["HFU: what your own trainer computes again is not counted."]
    return [] if study.model.flops_per_token is not None else ["MFU and HFU: the model's FLOPs are not known."]


def not_measured(run: LoadedRun, *, has_waterfall: bool, has_scaling: bool) -> list[str]:
    """What a reader might take for measured, and was not; each with what measures it, if something does."""
    said, best, study, folder = [], run.best, run.study, shlex.quote(str(run.folder))
    if study.simulated:
        said.append(f"Everything: a modelled cluster stood in for a real one ({study.simulated}).")
    said += _of_mfu(run)
    if study.achievable_tflops_per_s is None:
        said.append("The rate that a rank reaches in the model's matmuls: `cluster.calibrate_peak: true` asks for it.")
    target = run.job.batch.target_world_size
    if target != study.world_size and (best is None or not best["confirmed"]):
        said.append(
            f"The real run's {target} ranks: trials had {study.world_size}. `autotune confirm` measures on all of them."
        )
    if not has_waterfall and best is not None and not is_kept(best):
        said.append(f"What each change was worth: `autotune waterfall {folder}` measures it.")
    if not has_scaling:
        said.append(f"Scaling with the number of ranks: `autotune scale {folder} --ranks N,N,...` measures it.")
    endurance = (best or {}).get("endurance")
    if endurance and endurance["status"] == "not_run":
        said.append(f"Endurance, evaluation and checkpoints: {endurance['reason']}.")
    if not any(attempt.row.get("frac_compute") is not None for attempt in run.attempts):
        said.append("Where a step's time goes: no trial was profiled.")
    advice = loader_advice(best) if best else None
    if advice:
        said.append(advice)
    num_composed = sum(attempt.row.get("timing") == COMPOSED for attempt in run.attempts)
    if num_composed:
        said.append(
            f"Whole steps of {num_composed} trials of the search: they were put together from the parts of short ones."
        )
    if study.model.is_random:
        said.append("Whether losses are the baseline's: the model has dropout.")
    return said
