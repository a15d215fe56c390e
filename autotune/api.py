"""Tuning from Python: `from autotune import load_job, tune, load_run`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.best import read_best
from autotune.folder import check_resumable, prepare_folder, sole_driver
from autotune.history import SCHEMA
from autotune.job import Job
from autotune.job_file import load_job as _load_job
from autotune.loaded import LoadedRun, load
from autotune.report.screen import make_screen
from autotune.runners import runner_of
from trials.record import Knobs

if TYPE_CHECKING:
    import pandas
    import pyarrow


@dataclass(frozen=True)
class Gain:
    """Throughput of the chosen config over the baseline's, by fresh paired rounds."""

    ratio: float
    low: float
    high: float
    """95 % interval of the ratio."""


@dataclass(frozen=True)
class Config:
    """Settings, and what was measured of them; per rank, memory of the worst rank, MFU as a fraction."""

    settings: Knobs
    tokens_per_s_per_rank: float | None
    mfu: float | None
    """None: no peak or no FLOPs are known."""
    reserved_gib: float | None


@dataclass(frozen=True)
class Run:
    """A run, as its folder has it."""

    folder: Path
    complete: bool
    """False: it has not ended, and `best` is the best so far."""
    simulated: bool
    verdict: str
    """In a sentence."""
    best: Config
    """The config to use: the baseline, where nothing beats it."""
    baseline: Config
    gain: Gain | None
    """None: nothing was compared with the baseline."""
    content: dict[str, Any] = field(repr=False)
    """All of best.yaml."""
    loaded: LoadedRun = field(repr=False)
    """Job, survey and attempts."""

    @property
    def is_win(self) -> bool:
        """Whether the whole interval of the gain lies above none, and the run has ended."""
        return self.complete and self.gain is not None and self.gain.low > 1

    def history(self) -> pyarrow.Table:
        """One row an attempt; columns and units are those of `autotune.history.SCHEMA`."""
        import pyarrow

        return pyarrow.Table.from_pylist(self.loaded.rows, schema=SCHEMA)

    def to_pandas(self) -> pandas.DataFrame:
        """The history as a data frame.

        Raises:
            ImportError: pandas is not installed.
        """
        frame: pandas.DataFrame = self.history().to_pandas()
        return frame


def load_job(name: str | Path, overrides: Sequence[str] = ()) -> Job:
    """The job at a path, or shipped under a name, with `section.key=value` overrides.

    Raises:
        UserError: no such job; every bad key and value.
    """
    return _load_job(str(name), tuple(overrides))


def load_run(folder: str | Path) -> Run:
    """A run that has measured something, be it that it goes on.

    Raises:
        UserError: there is none, or none in which a config ran to its end.
    """
    path = Path(folder).absolute()
    found = load(path)
    best = found.best or read_best(path)  # which says that there is none
    gain = best["gain"]
    return Run(
        folder=path,
        complete=best["complete"],
        simulated=bool(best["fingerprint"].get("simulated")),
        verdict=best["verdict"],
        best=_config(best["settings"], best["evidence"]),
        baseline=_config(best["baseline"]["settings"], best["baseline"]),
        gain=Gain(gain["ratio"], gain["low"], gain["high"]) if gain else None,
        content=best,
        loaded=found,
    )


def tune(job: Job, *, resume: bool = False, warm_start: Sequence[str | Path] = (), simulate: str | None = None) -> Run:
    """Tunes a job into the folder `job.output`, as `autotune run` does, with the same screen.

    Args:
        resume: go on with the run in that folder; without it, an earlier run there is moved aside.
        warm_start: folders of earlier runs of this model, which the search is told of.
        simulate: the modelled cluster to ask instead of measuring.

    Raises:
        UserError: the job, its workload or its data are wrong; another driver runs into the folder.
        NothingFitsError: not even the baseline fits in memory, or surely nothing beside it.
        InfrastructureError: Ray, a node, the survey or the baseline failed.
    """
    from rich.console import Console

    from autotune.run import Run as Stages

    out = Path(job.output).absolute()
    open_runner, label = runner_of(job, out, simulate)
    earlier = [Path(path).absolute() for path in warm_start]
    with sole_driver(out):
        if resume:
            check_resumable(out, job, label)
        else:
            prepare_folder(out, job)
        with open_runner() as runner, make_screen(Console(highlight=False)) as screen:
            Stages(job, out, runner, screen, resume, earlier).go()
    return load_run(out)


def _config(settings: dict[str, Any], figures: dict[str, Any]) -> Config:
    knobs = Knobs.from_dict(settings)
    return Config(knobs, figures["tokens_per_s_per_rank"], figures["mfu"], figures["reserved_gib"])
