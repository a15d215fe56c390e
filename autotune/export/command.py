"""What `autotune export` does: reads a run's winner, makes the files, writes them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.best import left_to_the_trainer, read_best, to_exportable
from autotune.errors import UserError
from autotune.export import Best, Exported, export, exporter
from autotune.folder import resume_command
from autotune.report.text import count, is_kept, rate
from autotune.trainer.exported import TARGET as COMMAND
from autotune.trainer.exported import export_command
from trials.record import Knobs

INCOMPLETE = "--incomplete"


@dataclass(frozen=True)
class Written:
    """An export and where it lies."""

    best: Best
    exported: Exported
    paths: list[Path]
    left: list[str]
    """Knobs that the user's own trainer decides."""
    warnings: tuple[str, ...]
    """What to know before relying on it."""


def export_run(run: Path, target: str, output: Path | None, incomplete: bool, confirmed: bool = False) -> Written:
    """Writes the winner of `run` for the trainer called `target`.

    Args:
        output: the file to write, further ones beside it; or a folder that exists. None: RUN/export/TARGET/.
        incomplete: take the best so far of a run that has not ended.
        confirmed: take what `autotune confirm` found to hold on the real run's ranks, instead of the winner.

    Raises:
        UserError: no such trainer; a run that has not ended, has no winner or was not confirmed; settings that the
            trainer cannot take; a file that cannot be written.
    """
    trainer = None if target == COMMAND else exporter(target)  # before the run is read: a wrong name is seen at once
    content = _winner(run, incomplete)
    best = _that_held(run, content) if confirmed else to_exportable(content)
    exported = export_command(run, best) if trainer is None else export(target, best)
    warnings = (*_of_the_run(content), *(trainer.warnings if trainer is not None else ()))
    return Written(best, exported, _write(exported, run, target, output), left_to_the_trainer(content), warnings)


def _winner(run: Path, incomplete: bool) -> dict[str, Any]:
    if (run / "history").is_dir() and not (run / "best.yaml").exists():
        raise UserError(
            f"{run}: this run has no winner: none of its configs was measured and fitted",
            f"`autotune show {run}` says how each ended; `autotune run {run}/job.yaml --resume` goes on with it",
        )
    content = read_best(run)
    if not content["complete"] and not incomplete:
        again = resume_command(run, content["fingerprint"].get("simulated_cluster") or "")
        raise UserError(
            f"{run}: this run has not ended: its best config so far was compared with nothing",
            f"`{again}` goes on with it; or give {INCOMPLETE} to export it all the same",
        )
    return content


def _that_held(run: Path, content: dict[str, Any]) -> Best:
    found = content["confirmed"]
    if found is None:
        raise UserError(
            f"{run}: nothing was confirmed", f"`autotune confirm {run} -- COMMAND` does, on the real run's ranks"
        )
    own = rate(found["tokens_per_s_per_rank"])
    evidence = [
        f"The {found['held']}, {own} tokens/s per rank on {count(found['world_size'], 'rank')}, {found['at'][:10]}.",
        f"Confirmation: {found['why']}",
        f"Tuned on {count(content['fingerprint']['world_size'], 'rank')}: {content['verdict']}",
    ]
    knobs = Knobs.from_dict(found["settings"])
    return replace(to_exportable(content), knobs=knobs, world_size=found["world_size"], evidence=evidence)


def _of_the_run(content: dict[str, Any]) -> list[str]:
    said = []
    if not content["complete"]:
        said.append("the run has not ended: this is the best config so far, compared with nothing")
    elif is_kept(content):
        said.append("nothing beat the baseline: these are its settings")
    return said


def _write(exported: Exported, run: Path, target: str, output: Path | None) -> list[Path]:
    folder = output if output is not None else run / "export" / target
    names = list(exported.files)
    if output is not None and not output.is_dir():
        folder, names[0] = output.parent, output.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in zip(names, exported.files.values(), strict=True):
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}", "give a file you can write by --output") from error
    return [folder / name for name in names]
