"""The command: examine, check, and keep the ranks' output only where something is wrong."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune.doctor import checks, trainer_checks  # noqa: F401 (puts the checks on the list)
from autotune.doctor.examine import examine
from autotune.doctor.findings import Examination, Finding, exit_code, run_checks
from autotune.errors import UserError


@dataclass(frozen=True)
class Diagnosis:
    """What `autotune doctor` answers."""

    findings: list[Finding]
    examination: Examination | None
    """None: the job file itself is wrong, and nothing was looked at."""

    @property
    def exit_code(self) -> int:
        return exit_code(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """For machines: findings, and the figures that they are made of, with their units in the names."""
        exam = self.examination
        return {
            "exit_code": self.exit_code,
            "findings": [asdict(finding) for finding in self.findings],
            "device": exam.device if exam else None,
            "nodes": [asdict(node) for node in exam.nodes] if exam else [],
            "ranks": [asdict(rank) for rank in exam.ranks] if exam else [],
            "peak": asdict(exam.survey.study.peak) if exam and exam.survey else None,
        }


def diagnose(job_name: str | None, overrides: tuple[str, ...]) -> Diagnosis:
    """Examines where the job would run, and judges it.

    Raises:
        InfrastructureError: this machine cannot even be looked at.
    """
    folder = Path(tempfile.mkdtemp(prefix="autotune-doctor-"))
    kept = False
    try:
        examination = examine(job_name, overrides, folder)
        kept = any(str(folder) in trouble.advice for trouble in examination.troubles)
        return Diagnosis(run_checks(examination), examination)
    except UserError as error:
        hint = error.hint or "`autotune init` writes a job that is right, to edit"
        return Diagnosis([Finding("problem", "job", error.message, hint, of_the_job=True)], None)
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
