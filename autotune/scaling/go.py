"""A scaling from beginning to end: of a run that has ended, in its folder, or of a job, in one of its own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from autotune.afterwards import history_rows, interruptible, read_ended
from autotune.errors import UserError
from autotune.folder import prepare_folder, sole_driver
from autotune.job import Job
from autotune.job_file import load_job
from autotune.loaded import read_study_file
from autotune.report.screen import make_screen
from autotune.scaling.measuring import Scale, modes_of, targets
from autotune.scaling.points import Scaling
from autotune.scaling.predicted import scaling_of
from autotune.scaling.sizes import Opener, real_sizes, simulated_sizes
from autotune.scaling.subject import BASELINE, BEST, contenders_of, outline
from autotune.survey import FILE_NAME as STUDY_FILE
from autotune.survey import survey_from_content, take_survey
from trials.record import Knobs


@dataclass(frozen=True)
class _Subject:
    job: Job
    folder: Path
    contenders: dict[str, Knobs]
    rates: dict[str, float]
    """Tokens/s per rank that are known, by role."""
    is_run: bool
    """`folder` holds a finished run, with a survey."""


def measure_scaling(
    subject: str,
    ranks: tuple[int, ...],
    mode: str,
    repeats: int,
    overrides: tuple[str, ...],
    output: Path | None,
    simulate: str | None,
    *,
    to_stderr: bool,
) -> tuple[Scaling | None, Path, str]:
    """Measures, and reads out of the history what came of it; its folder; and where its peak comes from.

    Raises:
        UserError: no run or job there, a run that has not ended, ranks that the cluster has not or that the batch does
            not divide over.
        InfrastructureError: Ray, a node, or ranks failed.
    """
    what = _subject(subject, overrides, output, simulate)
    if simulate is not None:
        what = replace(what, job=_over_modelled_nodes(what.job, simulate))
    modes = modes_of(mode)
    # What the batch does not divide over is refused before anything is started.
    largest = targets(what.job, what.contenders or {BASELINE: outline(what.job)}, ranks, modes)[-1].job
    screen = make_screen(Console(highlight=False, stderr=to_stderr))
    with sole_driver(what.folder), interruptible(what.folder):
        if not what.is_run:
            _prepare(what, simulate)
        with _sizes(what, largest, simulate) as opened, screen:
            content, contenders = _survey(what, largest, opened)
            wanted = targets(what.job, contenders, ranks, modes)
            rows = history_rows(what.folder)
            Scale(what.folder, content, wanted, opened, screen, repeats, what.rates, rows).go()
    found = scaling_of(what.folder, what.job, history_rows(what.folder))
    return found, what.folder, content["peak"]["source"]


def _subject(name: str, overrides: tuple[str, ...], output: Path | None, simulate: str | None) -> _Subject:
    folder = Path(name)
    if not folder.is_dir():
        job = load_job(name, overrides)
        out = output or Path(f"{job.output}-scale")
        return _Subject(job.model_copy(update={"output": str(out)}), out.absolute(), {}, {}, False)
    run = read_ended(folder, overrides)
    content, simulated = run.content, run.study.simulated
    contenders = contenders_of(content, history_rows(folder))
    rates = {BEST: content["evidence"], BASELINE: content["baseline"]}
    known = {role: figures["tokens_per_s_per_rank"] for role, figures in rates.items()}
    if bool(simulate) == bool(simulated):
        if output is not None:
            raise UserError(f"--output {output}: the rows of a run go to its own history", "leave out --output")
        if simulate and simulate != simulated:
            _refuse_another_cluster(folder, simulate, simulated)
        return _Subject(run.job, run.folder, contenders, known, True)
    if simulated:
        raise UserError(
            f"{folder}: its run was simulated ({simulated}), and is not scaled on a real cluster",
            f'go on with the simulated one: --simulate "{simulated}"',
        )
    whole = folder.resolve()  # `.` has no name
    out = output.absolute() if output else whole.with_name(f"{whole.name}-scale")
    return _Subject(run.job.model_copy(update={"output": str(out)}), out, contenders, {}, False)


def _over_modelled_nodes(job: Job, simulate: str) -> Job:
    """A job for one machine takes as many nodes of a modelled cluster as its ranks fill."""
    if job.cluster.address != "local":
        return job
    from autotune.simulate.cluster import parse_cluster

    gpus = parse_cluster(simulate).gpus
    return job.model_copy(
        update={"cluster": job.cluster.model_copy(update={"address": "auto", "ranks_per_node": gpus})}
    )


def _refuse_another_cluster(folder: Path, simulate: str, simulated: str) -> None:
    if _label(simulate) != simulated:
        raise UserError(
            f"{folder}: its run was simulated on another cluster: {simulated}", f'give --simulate "{simulated}"'
        )


def _prepare(what: _Subject, simulate: str | None) -> None:
    """Goes on with a scaling of the same job on the same cluster; else makes the folder anew."""
    if (what.folder / STUDY_FILE).is_file() and (what.folder / "job.yaml").is_file():
        same_job = (what.folder / "job.yaml").read_text(encoding="utf-8") == what.job.to_yaml()
        if same_job and read_study_file(what.folder).simulated == _label(simulate):
            return
    prepare_folder(what.folder, what.job)


def _label(simulate: str | None) -> str:
    """The modelled cluster's own spelling; empty for a real one."""
    if simulate is None:
        return ""
    from autotune.simulate.cluster import parse_cluster

    return str(parse_cluster(simulate))


def _sizes(what: _Subject, largest: Job, simulate: str | None) -> AbstractContextManager[Opener]:
    if simulate is not None:
        return simulated_sizes(largest, simulate, what.folder / "history")
    return real_sizes(largest, what.folder / "logs" / "ray.log")


def _survey(what: _Subject, largest: Job, opened: Opener) -> tuple[dict[str, Any], dict[str, Knobs]]:
    """Of study.yaml: the run's, or one that is taken now on the most ranks; and the configs, a job's own baseline."""
    path = what.folder / STUDY_FILE
    if path.exists() and what.contenders:
        return _read(path), what.contenders
    with opened(largest) as runner:
        if not path.exists():
            take_survey(largest, runner, what.folder)
        content = _read(path)
        return content, what.contenders or {BASELINE: survey_from_content(what.job, runner, content).space.baseline}


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content
