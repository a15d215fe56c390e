"""What `autotune doctor` says of a trainer of one's own."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from autotune.doctor.findings import Examination, Finding, check


@check
def command(exam: Examination) -> Finding | None:
    """Whether the trainer's program is there; on another machine only its nodes could tell."""
    trainer, cluster = exam.job.trainer, exam.job.cluster
    if trainer is None:
        return None
    shown = " ".join(trainer.command)
    program = trainer.command[0]
    if cluster.address != "local" or cluster.command_prefix or program in ("python", "python3"):
        return Finding("ok", "command", shown)
    path = os.pathsep.join([str(Path(cluster.python or sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if shutil.which(program, path=path) is None:
        how = "give its path, or `python -m` and its module; cluster.python names the environment it is in"
        return Finding("problem", "command", f"{program}: no such program here", how, of_the_job=True)
    return Finding("ok", "command", shown)
