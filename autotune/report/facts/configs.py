"""The configs that were chosen or compared with, and the best one in each trainer's own format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from autotune.best import to_exportable
from autotune.errors import UserError
from autotune.export import EXPORTERS, export
from autotune.loaded import LoadedRun
from autotune.report.text import differences, is_kept
from autotune.trainer.exported import TARGET as COMMAND
from autotune.trainer.exported import export_command

GOOD_MFU, EXCELLENT_MFU = 0.30, 0.50
"""Rules of thumb for large-scale training on GPUs; `RATING_CAVEAT` says what they are worth."""
RATING_CAVEAT = (
    "Rules of thumb for large-scale runs on GPUs: an MFU over 30 % is good, over 50 % excellent. They depend on the "
    "model, the sequence length, the network and the convention, and say nothing of a CPU or of a simulated cluster."
)


@dataclass(frozen=True)
class Config:
    role: Literal["baseline", "best", "fallback"]
    settings: dict[str, Any]
    """Knobs; null: the engine has none such."""
    differs: str
    """From the baseline, in short."""
    trial: int
    measured_in: str
    tokens_per_s_per_rank: float | None
    mfu: float | None
    mfu_causal: float | None
    """With half of the attention, as causal masks need."""
    hfu: float | None
    """With recomputation."""
    share_of_achievable: float | None
    """Model TFLOP/s over the rate that a rank reaches in the model's own matmuls; null: not calibrated."""
    allocated_gib: float | None
    """Peak of live tensors."""
    reserved_gib: float | None
    mfu_rating: Literal["below 30 %", "good", "excellent"] | None
    """By `RATING_CAVEAT`; null: no MFU, or not of a GPU that was measured."""


@dataclass(frozen=True)
class Export:
    """The best config, as one trainer takes it."""

    to: str
    files: dict[str, str]
    """File name -> text."""
    lost: dict[str, str]
    """Knob that the files do not carry -> the line to write in the training script."""
    notes: list[str]
    problem: str
    """Why there is none; empty if there is."""


def configs(run: LoadedRun) -> list[Config]:
    best = run.best
    if best is None:
        return []
    found = [_config(run, "baseline", best["baseline"])]
    if not is_kept(best):
        found.append(_config(run, "best", best["evidence"] | {"settings": best["settings"]}))
    if best["fallback"] and best["fallback"]["settings"] != best["baseline"]["settings"]:
        found.append(_config(run, "fallback", best["fallback"]))
    return found


def _config(run: LoadedRun, role: Literal["baseline", "best", "fallback"], figures: dict[str, Any]) -> Config:
    assert run.best is not None
    mfu = figures["mfu"]
    is_rated = mfu is not None and run.device == "cuda" and not run.study.simulated
    return Config(
        role=role,
        settings=figures["settings"],
        differs=differences(figures["settings"], run.best["baseline"]["settings"]),
        trial=figures.get("trial", -1),
        measured_in=figures.get("measured_in", ""),
        tokens_per_s_per_rank=figures["tokens_per_s_per_rank"],
        mfu=mfu,
        mfu_causal=figures.get("mfu_causal"),
        hfu=figures["hfu"],
        share_of_achievable=figures.get("share_of_achievable"),
        allocated_gib=figures["allocated_gib"],
        reserved_gib=figures["reserved_gib"],
        mfu_rating=_rating(mfu) if is_rated else None,
    )


def _rating(mfu: float) -> Literal["below 30 %", "good", "excellent"]:
    if mfu > EXCELLENT_MFU:
        return "excellent"
    return "good" if mfu > GOOD_MFU else "below 30 %"


def exports(run: LoadedRun) -> list[Export]:
    """By every exporter, the job's own trainer first."""
    if run.best is None:
        return []
    best = to_exportable(run.best)
    found = []
    own = [] if run.job.trainer is None else [COMMAND]
    for name in [*own, *sorted(EXPORTERS, key=lambda name: name != run.job.export_for)]:
        try:
            made = export_command(run.folder, best) if name == COMMAND else export(name, best)
        except UserError as error:
            found.append(Export(name, {}, {}, [], str(error)))
        else:
            found.append(Export(name, made.files, made.lost, list(made.notes), ""))
    return found
