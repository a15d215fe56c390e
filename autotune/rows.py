"""What the ranks of one attempt report -> its figures, its row in the history, and what the search is told."""

from __future__ import annotations

import math
import statistics
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeGuard

from autotune.cluster.gang import GangResult
from autotune.hardware import Peak
from autotune.job import Job
from autotune.search.study import Told
from autotune.stages import STAGES
from autotune.trainer.counted import model_of
from autotune.trainer.handed import untouched
from trials.breakdown import Breakdown, pacing_rank
from trials.conventions import keeps_no_scores, tflops_per_s, utilisation
from trials.outcome import OUT_OF_MEMORY, Outcome
from trials.record import COMPOSED, SYNTHETIC, WHOLE, Knobs, RankReport, TrialSpec, digest
from trials.timing import mean_step_s, t95

GIB = 2**30
EXECUTED = ("hardware_flops_per_token", "attention_recompute_flops_per_token")
"""What runs per token, and what of it is attention's backward computing its scores again."""
MAX_TRIAL, MAX_ATTEMPT = 10**7, 10**3
"""More than any study has: numbers beyond were not written by us."""


@dataclass(frozen=True)
class ModelFacts:
    """Of the model, by the survey; its names are those of `trials.survey.survey_model`."""

    num_params: int
    num_matmul_params: int
    flops_per_token: float | None
    flops_per_token_causal: float | None
    flops_convention: str
    attention_recompute_flops_per_token: float = 0.0
    """Where a fused kernel runs it."""
    is_random: bool = False
    """Dropout: two runs of one config give two losses."""


@dataclass(frozen=True)
class Limits:
    """What a config must fit in, per rank."""

    device: str
    limit_gib: float | None
    headroom: float

    def over_limit(self, used_gib: float) -> float:
        """Used / usable memory minus 1, positive if it does not fit; -1 without a limit.

        CUDA judges live bytes (reserved memory is partly a cache). On CPU the limit sees the data segment.
        """
        if self.limit_gib is None:
            return -1.0
        return used_gib / (self.limit_gib * (1 - self.headroom)) - 1

    def judged_gib(self, row: dict[str, Any]) -> float | None:
        """Memory of a row of the history on the scale that the limit judges, worst rank."""
        used: float | None = row.get("reserved_gib") if self.device == "cpu" else row.get("allocated_gib")
        return used

    def reserved_share(self, row: dict[str, Any]) -> float | None:
        """Of the limit, what CUDA's allocator took, cached blocks among it; on a CPU that is what is judged."""
        reserved = row.get("reserved_gib")
        return None if self.device == "cpu" or self.limit_gib is None or reserved is None else reserved / self.limit_gib

    @property
    def least_oom_over_limit(self) -> float:
        """What is known of a config that ran out of memory: it wanted more than all of the limit."""
        return 1 / (1 - self.headroom) - 1 or 1e-6


@dataclass(frozen=True)
class Study:
    """What all attempts of a study share."""

    study_id: str
    job: Job
    model: ModelFacts
    peak: Peak
    limits: Limits
    space_hash: str
    world_size: int
    achievable_tflops_per_s: float | None = None
    """Rate of one rank in the model's matmuls, if the job asked for it (`cluster.calibrate_peak`)."""
    simulated: str = ""
    """The modelled cluster that stood in for a real one; empty if everything was measured."""

    def told(self, knobs: Knobs) -> dict[str, Any]:
        """A config, for files: null where the user's own trainer decides."""
        return knobs.to_dict() if self.job.trainer is None else untouched(knobs.to_dict(), self.job.handed)


@dataclass(frozen=True)
class Attempt:
    """One attempt, measured and judged; made from its row, whether that was written now or in an earlier life."""

    trial: int
    stage: str
    knobs: Knobs
    outcome: Outcome
    reason: str
    told: Told
    memory_gib: float | None
    """On the scale that the limit judges."""
    row: dict[str, Any]

    @property
    def tokens_per_s_per_rank(self) -> float | None:
        return self.told.tokens_per_s_per_rank

    @property
    def is_composed(self) -> bool:
        """Its step's time was put together from parts."""
        return self.row.get("timing") == COMPOSED

    @property
    def is_feasible(self) -> bool:
        return self.outcome is Outcome.OK and self.told.memory_over_limit <= 0


def attempt_from_row(row: dict[str, Any], limits: Limits) -> Attempt:
    """Judges a row of the history, which anybody may have written, against the limits.

    Raises:
        ValueError, TypeError: values that no attempt has.
    """
    outcome = Outcome(row["outcome"])
    if row["stage"] not in STAGES or not (0 <= row["trial"] <= MAX_TRIAL and 0 <= row["attempt"] <= MAX_ATTEMPT):
        raise ValueError(f"stage {row['stage']!r}, trial {row['trial']}, attempt {row['attempt']}")
    if not all(isinstance(host, str) for host in row["hosts"]):
        raise ValueError(f"hosts {row['hosts']}")
    if row.get("timing") not in (None, WHOLE, COMPOSED):
        raise ValueError(f"timing {row['timing']!r}")
    for name in ("allocated_gib", "reserved_gib", *EXECUTED, "mfu", "mfu_causal", "hfu", "step_time_s"):
        if row.get(name) is not None and not _is_figure(row[name]):
            raise ValueError(f"{name} {row[name]}")
    if not all(isinstance(loss, float) and math.isfinite(loss) for loss in row.get("losses") or []):
        raise ValueError(f"losses {row['losses']}")
    used = limits.judged_gib(row)
    over = 0.0
    retried = outcome is Outcome.OK and bool(row["alloc_retries"])
    if outcome is Outcome.OK:
        rate = row["tokens_per_s_per_rank"]
        if used is None or not _is_figure(rate) or rate == 0:
            raise ValueError(f"outcome ok with {used} GiB and {rate} tokens/s")
        over = limits.over_limit(used)
        if retried and over <= 0:
            over = limits.least_oom_over_limit  # an allocator that had to retry was at the edge
    elif outcome in OUT_OF_MEMORY:
        over = limits.least_oom_over_limit
    return Attempt(
        trial=row["trial"],
        stage=row["stage"],
        knobs=Knobs.from_dict(row["knobs"]),
        outcome=outcome,
        reason=row["reason"] or "",
        told=Told(
            outcome,
            row["tokens_per_s_per_rank"] if outcome is Outcome.OK else None,
            over,
            data_wait_share=_data_wait_share(row),
            reserved_share=limits.reserved_share(row),
            allocator_was_full=retried,
        ),
        memory_gib=used,
        row=row,
    )


def _is_figure(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value) and value >= 0


def _data_wait_share(row: dict[str, Any]) -> float | None:
    """Of a step: what the profile shows the device to have waited, else what the host did."""
    if row.get("frac_data_wait") is not None:
        return float(row["frac_data_wait"])
    waited_s, step_s, num_steps = (row.get(name) for name in ("data_wait_s", "step_time_s", "num_steps"))
    return float(waited_s / (step_s * num_steps)) if _is_figure(waited_s) and step_s and num_steps else None


def predicted_oom_row(
    knobs: Knobs, trial: int, predicted: dict[str, float], at_s: float, study: Study
) -> dict[str, Any]:
    """The row of a config that the search proposed and that surely does not fit: no attempt was made."""
    at = datetime.fromtimestamp(at_s, UTC)
    return predicted | {
        "study_id": study.study_id,
        "trial": trial,
        "attempt": 0,
        "stage": "explore",
        "started_at": at,
        "ended_at": at,
        "knobs": study.told(knobs),
        "outcome": Outcome.PREDICTED_OOM.value,
        "reason": "predicted not to fit, corrected by the trials so far; not tried",
        "limit_gib": study.limits.limit_gib,
        "world_size": study.world_size,
        "hosts": [],
        "simulated": bool(study.simulated),
    }


def history_row(spec: TrialSpec, result: GangResult, study: Study, log_path: str) -> dict[str, Any]:
    """An attempt's row, from all its ranks' reports: slowest rank for time, worst rank for memory."""
    knobs = spec.knobs
    assert knobs is not None
    model, peak = model_of(result.reports, study.model) if spec.trainer is not None else study.model, study.peak
    row = _identity(spec, result, study, log_path) | {
        "simulated": bool(study.simulated),
        "limit_gib": study.limits.limit_gib,
        "peak_tflops_per_s": peak.tflops_per_s,
        "peak_dtype": peak.dtype,
        "peak_source": peak.source,
        "achievable_tflops_per_s": study.achievable_tflops_per_s,
        "flops_per_token": model.flops_per_token,
        "flops_convention": model.flops_convention,
    }
    row |= _environment(list(result.reports.values()))
    if result.outcome is Outcome.OK:
        row |= _speed(knobs, result.reports, model, peak) | _memory(result.reports) | gang_breakdown(result.reports)
        if row["model_tflops_per_s_per_rank"] is not None and study.achievable_tflops_per_s is not None:
            row["share_of_achievable"] = row["model_tflops_per_s_per_rank"] / study.achievable_tflops_per_s
        row["endurance"] = gang_endurance(result.reports, row["step_time_s"])
    return row


def _identity(spec: TrialSpec, result: GangResult, study: Study, log_path: str) -> dict[str, Any]:
    assert spec.knobs is not None
    applied = next((report.applied for report in result.reports.values() if report.applied), None)
    return {
        "study_id": study.study_id,
        "trial": spec.trial,
        "attempt": spec.attempt,
        "stage": spec.stage,
        "round": spec.round,
        "spec_digest": spec.digest(),
        "started_at": datetime.fromtimestamp(result.started_at, UTC),
        "ended_at": datetime.fromtimestamp(result.ended_at, UTC),
        "knobs": study.told(spec.knobs),
        "applied": _storable(applied),
        "outcome": result.outcome.value,
        "reason": result.reason,
        "failed_rank": result.failed_rank,
        "log_path": log_path,
        "detected_s": result.detected_s,
        "world_size": spec.world_size,
        "hosts": result.hosts,
        "workload_digest": workload_digest(spec),
        "loader_measured": spec.data["source"] != SYNTHETIC,
    }


def _storable(applied: dict[str, Any] | None) -> dict[str, Any] | None:
    """Only what has the knob's type: a misapplied knob may read back as `mixed`, which its reason says."""
    if applied is None:
        return None
    texts = ("engine", "activation_checkpointing", "backward_prefetch", "attention_backend", "reduce_dtype")
    return {k: v for k, v in applied.items() if v is None or k in texts or isinstance(v, bool | int | float)}


def workload_digest(spec: TrialSpec) -> str:
    """Names model, data, batch and precision: what must be equal for two throughputs to be comparable."""
    trained: list[Any] = [
        spec.workload,
        spec.model,
        spec.seq_len,
        spec.data,
        spec.global_batch_size,
        spec.precision,
        spec.optimizer,
    ]
    if spec.trainer is not None:
        trained.append(
            {name: spec.trainer[name] for name in ("command", "env", "launcher", "tokens", "python", "prefix")}
        )
    return digest(trained)


def _environment(reports: list[RankReport]) -> dict[str, Any]:
    if not reports:
        return {}
    first = reports[0]
    phases = {phase for report in reports for phase in report.phase_s}
    return {
        "device_name": first.device_name,
        "torch_version": first.torch_version,
        "attention_backend": first.attention_backend or None,
        "driver_version": first.driver_version,
        "nccl_version": first.nccl_version,
        "phase_s": {phase: max(report.phase_s.get(phase, 0.0) for report in reports) for phase in sorted(phases)},
    }


def _speed(knobs: Knobs, reports: dict[int, RankReport], model: ModelFacts, peak: Peak) -> dict[str, Any]:
    first = reports[0]
    # Ranks that work on the same sequences count them once.
    of_trainer = first.tokens_per_step and first.tokens_per_step / knobs.model_parallel_ranks
    tokens_per_step = of_trainer or first.micro_batch_tokens * knobs.grad_accum_steps
    step_s = mean_step_s(first.block_times_s, first.block_steps)
    half_s = _half_width_s(first.block_times_s)
    rate = tokens_per_step / step_s
    fused = keeps_no_scores(first.attention_backend or knobs.attention_backend)
    again = model.attention_recompute_flops_per_token if fused else 0.0
    counted = first.hardware_flops_per_token
    hardware = None if counted is None else counted + again
    return {
        "tokens_per_s_per_rank": rate,
        "tokens_per_s_per_rank_low": tokens_per_step / (step_s + half_s) if half_s is not None else None,
        "tokens_per_s_per_rank_high": tokens_per_step / (step_s - half_s) if half_s and half_s < step_s else None,
        "step_time_s": step_s,
        "block_times_s": first.block_times_s,
        "rank_step_times_s": [reports[rank].own_step_times_s for rank in sorted(reports)],
        "num_steps": first.num_steps,
        "drift": first.drift,
        "timing": first.timing,
        "step_parts_s": _pacing(reports).step_parts_s,
        "loader_sustained": all(report.loader_sustained for report in reports.values()),
        "data_wait_s": max(report.data_wait_s for report in reports.values()),
        "losses": first.losses,
        "hardware_flops_per_token": hardware,
        "attention_recompute_flops_per_token": again,
        "model_tflops_per_s_per_rank": model.flops_per_token and tflops_per_s(rate, model.flops_per_token),
        "mfu": _utilisation(rate, model.flops_per_token, peak),
        "mfu_causal": _utilisation(rate, model.flops_per_token_causal, peak),
        "hfu": _utilisation(rate, hardware, peak),
    }


def _pacing(reports: dict[int, RankReport]) -> RankReport:
    """Of the rank whose steps took longest."""
    return max(reports.values(), key=lambda report: sum(report.own_step_times_s))


def composed_beside(row: dict[str, Any], composed_step_s: float | None) -> dict[str, Any]:
    """Fields of a row of whole steps: what the search had put together for the same config, and how far it was off."""
    whole_s = row.get("step_time_s")
    if composed_step_s is None or not whole_s or row["timing"] != WHOLE:
        return {}
    return {"composed_step_time_s": composed_step_s, "composed_difference": composed_step_s / whole_s - 1}


def _half_width_s(block_times_s: list[float]) -> float | None:
    """Of the 95 % interval of the mean step time over the blocks of one run; None below three blocks."""
    if len(block_times_s) < 3:
        return None
    return t95(len(block_times_s) - 1) * statistics.stdev(block_times_s) / math.sqrt(len(block_times_s))


def _utilisation(tokens_per_s: float, flops_per_token: float | None, peak: Peak) -> float | None:
    """A fraction; None without a peak, or where it exceeds 1: then the peak is wrong, and tokens/s still competes."""
    if flops_per_token is None or peak.tflops_per_s is None:
        return None
    fraction = utilisation(tokens_per_s, flops_per_token, peak.tflops_per_s)
    return fraction if fraction <= 1 else None


def _memory(reports: dict[int, RankReport]) -> dict[str, Any]:
    tracked = [report.allocated_bytes for report in reports.values() if report.allocated_bytes is not None]
    return {
        "allocated_gib": max(tracked) / GIB if len(tracked) == len(reports) else None,
        "reserved_gib": max(report.reserved_bytes for report in reports.values()) / GIB,
        "alloc_retries": max(report.alloc_retries for report in reports.values()),
    }


def gang_breakdown(reports: dict[int, RankReport]) -> dict[str, Any]:
    """The gang's fractions are those of the rank that the others wait for: a mean would count waits as network."""
    told = [reports[rank].breakdown for rank in sorted(reports)]
    ranks = [Breakdown(**values) for values in told if values is not None]
    if not ranks or len(ranks) < len(told):
        return {}
    pacing = ranks[pacing_rank(ranks)]
    return {f"frac_{name}": value for name, value in pacing.fractions().items()} | {
        "non_matmul_share": pacing.non_matmul_share,
        "rank_breakdowns": [rank.to_dict() for rank in ranks],
    }


def gang_endurance(reports: dict[int, RankReport], step_s: float) -> dict[str, Any] | None:
    """Of each phase the worst rank; of the host's memory the host that is full first. None of any other trial."""
    found = {rank: report.endurance for rank, report in reports.items() if report.endurance is not None}
    if not found or len(found) < len(reports):
        return None
    growths: dict[str, float] = {}
    available: dict[str, int] = {}
    for rank, endurance in found.items():
        host = reports[rank].host
        growth = endurance["host_growth_bytes_per_step"]  # of all ranks known, or of none: they run the same steps
        if growth is not None:
            growths[host] = growths.get(host, 0.0) + growth
        available[host] = min(available.get(host, sys.maxsize), endurance["host_available_bytes"])
    steps_left = {host: available[host] / growth for host, growth in growths.items() if growth > 0}
    return {
        "phases": [
            {
                "phase": phases[0]["phase"],
                "seconds": max(phase["seconds"] for phase in phases),
                "allocated_gib": _worst_gib([phase["allocated_bytes"] for phase in phases]),
                "reserved_gib": _worst_gib([phase["reserved_bytes"] for phase in phases]),
                "host_gib": _worst_gib([phase["host_bytes"] for phase in phases]),
            }
            for phases in zip(*(endurance["phases"] for endurance in found.values()), strict=True)
        ],
        "host_growth_mib_per_step": max(growths.values()) / 2**20 if growths else None,
        "hours_to_host_limit": min(steps_left.values()) * step_s / 3600 if steps_left else None,
    }


def _worst_gib(amounts: list[int | None]) -> float | None:
    known = [amount for amount in amounts if amount is not None]
    return max(known) / GIB if len(known) == len(amounts) else None
