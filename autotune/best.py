"""best.yaml: the best config so far with its evidence; what exporters and trainers read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict

from autotune.diagnose import diagnose
from autotune.errors import UserError
from autotune.export.base import Best
from autotune.job_file import UNPARSABLE
from autotune.report.text import gib, loader_advice, mfu_label, percent, rate
from autotune.rows import Attempt, Limits, Study
from autotune.verdict import CONFIDENCE, Verdict
from trials.breakdown import FRACTIONS
from trials.files import write_whole
from trials.record import TRAINER, WHOLE, Knobs

HEADER = """\
# Written by fsdp-autotune. Throughput is per rank; memory is per rank, worst rank; MFU and HFU are fractions.
# complete: false means that the run had not ended: the config is the best seen so far, not a verdict.
"""
SIMULATED_HEADER = """\
# SIMULATED: nothing here was measured; fingerprint.simulated_cluster says what stood in for a real cluster.
"""


@dataclass(frozen=True)
class Evidence:
    """A config and what is known of its speed."""

    attempt: Attempt
    rate: float | None = None
    """Tokens/s per rank over fresh rounds; None: only the one trial's is known."""
    profiled: Attempt | None = None
    """The trial of this config that shows where its step's time goes; None: none was profiled."""
    peaks: Mapping[str, float] = field(default_factory=dict)
    """`allocated_gib` and `reserved_gib`: the most of all its runs, rounds and endurance among them; the one trial's
    where it is not given."""

    def to_dict(self, limits: Limits) -> dict[str, Any]:
        """Figures with their units; those that follow from throughput are scaled to `rate`."""
        attempt, row = self.attempt, self.attempt.row
        measured = attempt.tokens_per_s_per_rank
        scale = self.rate / measured if self.rate and measured else 1.0

        def scaled(value: float | None) -> float | None:
            return None if value is None else value * scale

        return {
            "trial": attempt.trial,
            "measured_in": "fresh paired rounds" if self.rate else f"trial {attempt.trial} alone, in the search",
            "tokens_per_s_per_rank": scaled(measured),
            "mfu": scaled(row.get("mfu")),
            "mfu_causal": scaled(row.get("mfu_causal")),
            "hfu": scaled(row.get("hfu")),
            "share_of_achievable": scaled(row.get("share_of_achievable")),
            "allocated_gib": self.peaks.get("allocated_gib", row.get("allocated_gib")),
            "reserved_gib": self.peaks.get("reserved_gib", row.get("reserved_gib")),
            "timing": WHOLE if self.rate else row.get("timing") or WHOLE,
            "composed_difference": self._composed_difference(),
            "loader_sustained": row.get("loader_sustained") is not False,
            "breakdown": self._breakdown(),
            "bottlenecks": [finding.to_dict() for finding in diagnose((self.profiled or attempt).row, limits)],
        }

    def _composed_difference(self) -> float | None:
        """Step time that the search put together from parts / that of the whole steps of the rounds - 1."""
        measured = self.attempt.tokens_per_s_per_rank
        if not self.attempt.is_composed or not self.rate or not measured:
            return None
        return self.rate / measured - 1

    def _breakdown(self) -> dict[str, Any] | None:
        """Fractions of a step, which sum to 1."""
        if self.profiled is None:
            return None
        row = self.profiled.row
        fractions = {name: row[f"frac_{name}"] for name in FRACTIONS}
        return {"trial": self.profiled.trial} | fractions | {"non_matmul_share": row["non_matmul_share"]}


def best_content(
    study: Study,
    *,
    best: Evidence,
    baseline: Evidence,
    fallback: Evidence | None,
    verdict: Verdict | None,
    candidate: Knobs | None,
    no_verdict: str,
    endurance: dict[str, Any],
    warm_start: list[dict[str, Any]],
    complete: bool,
    written_at_s: float,
) -> dict[str, Any]:
    """What best.yaml says. `settings` is the config to use: the baseline's own, where nothing beats it.

    Args:
        candidate: the config that `verdict` compares with the baseline, whether it won or not.
        no_verdict: why there is none.
        endurance: by `endurance_content`.
        warm_start: earlier runs that the search was told of.
        written_at_s: seconds since the epoch.
    """
    job, row = study.job, best.attempt.row
    return {
        "complete": complete,
        "verdict": verdict.sentence() if verdict else no_verdict,
        "settings": study.told(best.attempt.knobs),
        "training": {
            "precision": job.training.precision,
            "reduce_dtype": best.attempt.knobs.reduce_dtype or "fp32",
            "target_world_size": job.batch.target_world_size,
            "global_batch_size": job.global_batch_size,
            "seq_len": job.seq_len,
        },
        "data": {"source": job.data.source if job.data else TRAINER, "loader_measured": job.loader_measured},
        "evidence": best.to_dict(study.limits),
        "gain": (
            {
                "ratio": verdict.ratio,
                "low": verdict.low,
                "high": verdict.high,
                "confidence": CONFIDENCE,
                "num_paired_rounds": verdict.num_rounds,
                "settings": study.told(candidate),
            }
            if verdict and candidate
            else None
        ),
        "endurance": endurance,
        "baseline": _with_settings(baseline, study),
        "fallback": _with_settings(fallback, study) if fallback else None,
        "warm_start": warm_start,
        "conventions": {
            "flops_convention": row.get("flops_convention") or study.model.flops_convention,
            "flops_per_token": row.get("flops_per_token"),
            "peak_tflops_per_s": study.peak.tflops_per_s,
            "peak_dtype": study.peak.dtype,
            "peak_source": study.peak.source,
            "achievable_tflops_per_s": study.achievable_tflops_per_s,
            "limit_gib": study.limits.limit_gib,
        },
        "fingerprint": {
            "study_id": study.study_id,
            "space_hash": study.space_hash,
            "workload_digest": row["workload_digest"],
            "device_name": row.get("device_name"),
            "torch_version": row.get("torch_version"),
            "driver_version": row.get("driver_version"),
            "nccl_version": row.get("nccl_version"),
            "world_size": study.world_size,
            "hosts": sorted(set(row["hosts"])),
            "written_at": datetime.fromtimestamp(written_at_s, UTC).isoformat(timespec="seconds"),
            "simulated": bool(study.simulated),
            "simulated_cluster": study.simulated or None,
        },
    }


def _with_settings(evidence: Evidence, study: Study) -> dict[str, Any]:
    return {"settings": study.told(evidence.attempt.knobs)} | evidence.to_dict(study.limits)


def write_best(path: Path, content: dict[str, Any]) -> None:
    """Replaces best.yaml at once, so that a reader never sees half of it."""
    warning = SIMULATED_HEADER if content["fingerprint"].get("simulated") else ""
    write_whole(path, HEADER + warning + yaml.safe_dump(content, sort_keys=False))


def note_confirmed(run: Path, section: dict[str, Any]) -> None:
    """Adds what a confirmation found to `run`/best.yaml; all else stays as it is."""
    path = run / "best.yaml"
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    write_best(path, content | {"confirmed": section})


def is_settled(run: Path) -> bool:
    """Whether the run has a best.yaml that says that it came to its end."""
    try:
        return bool(read_best(run)["complete"])
    except UserError:
        return False


def read_confirmed(run: Path) -> dict[str, Any] | None:
    """What a confirmation found earlier; None if there was none, or best.yaml cannot be read."""
    try:
        found = read_best(run)["confirmed"]
    except UserError:
        return None
    return dict(found) if found else None


def read_best(run: Path) -> dict[str, Any]:
    """The content of `run`/best.yaml.

    Raises:
        UserError: no run there, or none that has measured anything.
    """
    path = run / "best.yaml"
    if not path.is_file():
        raise UserError(
            f"{run}: no best.yaml there",
            "give the folder of a run (its job's `output`) that has measured a config",
        )
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        _File.model_validate(content)
        content.setdefault("fallback", None)
        content.setdefault("confirmed", None)
        for config in (content, content["baseline"], content["fallback"], content["confirmed"]):
            if config is None:
                continue
            config["settings"] = _whole(config["settings"])
    except (*UNPARSABLE, TypeError, OSError) as error:
        raise UserError(
            f"{path}: not a best.yaml of fsdp-autotune: {type(error).__name__}: {error}",
            "was it edited by hand?",
        ) from error
    assert isinstance(content, dict)
    return content


def _whole(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with every knob; null stays what the user's own trainer decides."""
    knobs = Knobs.from_dict(settings).to_dict()
    if knobs["custom"] is None:
        return knobs
    return {name: None if settings.get(name) is None else setting for name, setting in knobs.items()}


def left_to_the_trainer(best: dict[str, Any]) -> list[str]:
    """Knobs that the user's own command was not handed: nothing was measured of them."""
    settings = best["settings"]
    if settings["custom"] is None:
        return []
    filled_in = Knobs.from_dict(settings).to_dict()
    return [name for name, value in filled_in.items() if value is not None and settings[name] is None]


class _Part(BaseModel):
    """Of best.yaml: what is read of it again, since anybody may have written it."""

    model_config = ConfigDict(strict=True)


class _Figures(_Part):
    tokens_per_s_per_rank: float | None
    mfu: float | None
    hfu: float | None
    share_of_achievable: float | None = None
    allocated_gib: float | None
    reserved_gib: float | None


class _Baseline(_Figures):
    settings: dict[str, Any]


class _Training(_Part):
    precision: Literal["fp32", "bf16"]
    reduce_dtype: Literal["fp32", "bf16"]
    target_world_size: int
    seq_len: int | None


class _Gain(_Part):
    ratio: float
    low: float
    high: float


class _Phase(_Part):
    phase: str
    seconds: float
    reserved_gib: float | None
    host_gib: float | None


class _Failed(_Part):
    trial: int
    outcome: str
    reason: str


class _Endurance(_Part):
    status: Literal["passed", "failed", "not_run"]
    reason: str
    phases: list[_Phase] = []
    host_growth_mib_per_step: float | None = None
    hours_to_host_limit: float | None = None
    failed: list[_Failed]


class _Conventions(_Part):
    flops_convention: str
    peak_source: str
    limit_gib: float | None


class _Confirmed(_Part):
    held: Literal["best", "fallback", "baseline"]
    why: str
    at: str
    world_size: int
    settings: dict[str, Any]
    tokens_per_s_per_rank: float | None
    tokens_per_s_per_rank_low: float | None
    tokens_per_s_per_rank_high: float | None


class _Fingerprint(_Part):
    world_size: int
    device_name: str | None
    torch_version: str | None
    written_at: str
    simulated: bool = False
    simulated_cluster: str | None = None


class _File(_Part):
    complete: bool
    verdict: str
    settings: dict[str, Any]
    training: _Training
    evidence: _Figures
    gain: _Gain | None
    endurance: _Endurance | None = None
    baseline: _Baseline
    fallback: _Baseline | None = None
    confirmed: _Confirmed | None = None
    conventions: _Conventions
    fingerprint: _Fingerprint


def to_exportable(best: dict[str, Any]) -> Best:
    """What exporters take, from the content of best.yaml."""
    evidence, training, fingerprint = best["evidence"], best["training"], best["fingerprint"]
    conventions = best["conventions"]
    advice, left = loader_advice(best), left_to_the_trainer(best)
    simulated = fingerprint.get("simulated", False)
    label = mfu_label(conventions["peak_source"])
    limit = f" of {gib(conventions['limit_gib'])}" if conventions["limit_gib"] else ""
    return Best(
        knobs=Knobs.from_dict(best["settings"]),
        precision=training["precision"],
        world_size=training["target_world_size"],
        seq_len=training["seq_len"],
        evidence=[
            *([f"SIMULATED, not measured: {fingerprint.get('simulated_cluster')}"] if simulated else []),
            *([] if best["complete"] else ["The run had not ended: this is the best config so far, not a verdict."]),
            f"{'Simulated' if simulated else 'Measured'}: {rate(evidence['tokens_per_s_per_rank'])} tokens/s per rank, "
            f"{label} {percent(evidence['mfu'])} [{conventions['flops_convention']}], HFU {percent(evidence['hfu'])}, "
            f"peak memory {gib(evidence['reserved_gib'])} reserved{limit} per rank,",
            f"on {fingerprint['world_size']} ranks of {fingerprint['device_name']}, torch "
            f"{fingerprint['torch_version']}, {fingerprint['written_at'][:10]}.",
            f"Verdict: {best['verdict']}",
            *([f"Left to your own trainer, and no advice here: {', '.join(left)}"] if left else []),
            *([advice] if advice else []),
        ],
    )
