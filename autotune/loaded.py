"""A run read back from its folder, for whoever looks at it later: reports, comparisons, costs. It writes nothing.

Neither torch nor Ray is imported; Optuna is, by `rows` (half a second).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from autotune.best import read_best
from autotune.errors import UserError
from autotune.folder import has_driver, latest_moved
from autotune.hardware import Peak
from autotune.history import History, Told, to_nobody
from autotune.job import Job
from autotune.job_file import UNPARSABLE, load_job
from autotune.rows import Attempt, Limits, ModelFacts, Study, attempt_from_row
from autotune.survey import FILE_NAME as STUDY_FILE

MOST_LISTED = 5
"""Of what could not be read, in an error."""
A_RUN = "give the folder of a run: its job's `output`"


class SurveyedModel(BaseModel):
    """Of study.yaml: the model's sizes, and the memory of the device it runs on."""

    model_config = ConfigDict(strict=True)

    num_params: int
    num_matmul_params: int
    flops_per_token: float | None
    flops_per_token_causal: float | None
    flops_convention: str
    attention_recompute_flops_per_token: float = 0.0
    is_random: bool = False
    num_blocks: int
    device_memory_gib: float | None = None
    """Null on a CPU."""
    data: str = ""
    """What is trained on, for people."""


class SurveyedPeak(BaseModel):
    """Of study.yaml: `hardware.Peak`."""

    model_config = ConfigDict(strict=True)

    tflops_per_s: float | None
    """Of one rank; null: not known."""
    dtype: str
    source: str


class StudyFile(BaseModel):
    """study.yaml: what the survey found before the first trial. Anybody may have written it, so it is read strictly."""

    model_config = ConfigDict(strict=True)

    study_id: str
    started_at: str | None = None
    """ISO 8601, UTC."""
    simulated: str = ""
    """The modelled cluster; empty for a real one."""
    device_name: str
    world_size: int
    peak: SurveyedPeak
    achievable_tflops_per_s: float | None = None
    cpu_share: float = 1.0
    model: SurveyedModel
    space_hash: str = ""
    candidates: dict[str, list[Any]] = {}
    """Knob -> the values that were searched."""
    search_ended: str | None = None
    """Why; null while it goes on, or was stopped from outside."""


@dataclass(frozen=True)
class LoadedRun:
    """All that a run has left."""

    folder: Path
    job: Job
    survey: StudyFile
    study: Study
    rows: list[dict[str, Any]] = field(repr=False)
    """Of the history, in the order of trials and attempts; of this study or not, judged or not."""
    attempts: list[Attempt] = field(repr=False)
    """The rows that are attempts of this study, judged, in the same order."""
    unreadable: list[str]
    """A line on each file and row that says nothing of this study: torn, foreign, hostile."""
    best: dict[str, Any] | None
    """The content of best.yaml; None: no config has been measured and fitted."""
    is_going: bool
    """Its driver is at work."""

    @property
    def is_complete(self) -> bool:
        """Whether the run came to its end, and chose."""
        return self.best is not None and bool(self.best["complete"])

    @property
    def device(self) -> str:
        """`cpu` or `cuda`."""
        return self.study.limits.device


def load(folder: Path, told: Told = to_nobody) -> LoadedRun:
    """The run in `folder`.

    Args:
        told: how far the reading is.

    Raises:
        UserError: no run there that has measured anything; a job.yaml, study.yaml or best.yaml that is not one.
    """
    rows, unreadable = History(folder / "history").rows(told=told)
    if not rows or not (folder / "job.yaml").is_file():
        raise _nothing_measured(folder, unreadable)
    job = load_job(str(folder / "job.yaml"))
    survey = read_study_file(folder)
    study = study_of(job, survey)
    attempts, refused = _judged(rows, study)
    if not attempts:
        raise _nothing_measured(folder, [*unreadable, *refused])
    return LoadedRun(
        folder=folder,
        job=job,
        survey=survey,
        study=study,
        rows=rows,
        attempts=attempts,
        unreadable=[*unreadable, *refused],
        best=read_best(folder) if (folder / "best.yaml").exists() else None,
        is_going=has_driver(folder.absolute()),
    )


def read_study_file(folder: Path) -> StudyFile:
    """The study.yaml of the run in `folder`.

    Raises:
        UserError: it is not there, or not one.
    """
    path = folder / STUDY_FILE
    try:
        return StudyFile.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}", A_RUN) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "its content"
        raise UserError(
            f"{path}: not a study.yaml of fsdp-autotune: {where}: {first['msg']}", "is it the folder of a run?"
        ) from error
    except UNPARSABLE as error:
        raise UserError(
            f"{path}: not a study.yaml of fsdp-autotune: not YAML: {error}", "is it the folder of a run?"
        ) from error


def study_of(job: Job, survey: StudyFile) -> Study:
    """What all attempts of a run share, read back."""
    model = {name: getattr(survey.model, name) for name in ModelFacts.__dataclass_fields__}
    # The survey asks the GPU for its memory, and asks none on a CPU.
    found = "cpu" if survey.model.device_memory_gib is None else "cuda"
    device = found if job.cluster.device == "auto" else job.cluster.device
    return Study(
        study_id=survey.study_id,
        job=job,
        model=ModelFacts(**model),
        peak=Peak(**survey.peak.model_dump()),
        limits=Limits(device, job.cluster.limit_gib(survey.model.device_memory_gib), job.cluster.memory_headroom),
        space_hash=survey.space_hash,
        world_size=survey.world_size,
        achievable_tflops_per_s=survey.achievable_tflops_per_s,
        simulated=survey.simulated,
    )


def _judged(rows: list[dict[str, Any]], study: Study) -> tuple[list[Attempt], list[str]]:
    """The attempts of the study, and a line on each row that is none."""
    attempts, refused = [], []
    for row in rows:
        if row["study_id"] != study.study_id:
            refused.append(f"trial {row['trial']}: of another study, {row['study_id']}")
            continue
        try:
            attempts.append(attempt_from_row(row, study.limits))
        except (ValueError, TypeError, KeyError) as error:
            refused.append(f"trial {row['trial']}: not an attempt of fsdp-autotune: {error}")
    return attempts, refused


def _nothing_measured(folder: Path, unreadable: list[str]) -> UserError:
    moved = latest_moved(folder)
    found = "".join(f"\n  {line}" for line in unreadable[:MOST_LISTED])
    if len(unreadable) > MOST_LISTED:
        found += f"\n  and {len(unreadable) - MOST_LISTED} more"
    return UserError(
        f"{folder}: no run there that has measured anything{found}",
        f"an earlier run was moved to {moved}" if moved else A_RUN,
    )
