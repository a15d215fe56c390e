"""Which earlier runs a run was told of: kept in its study.yaml, so that a resumed run is told of the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autotune.errors import UserError
from autotune.job_file import UNPARSABLE
from autotune.rows import Study
from autotune.survey import FILE_NAME
from autotune.warm_start import OPTION, OTHER_MODEL_OPTION, WarmStart
from trials.files import write_whole

KEY = "warm_start"


class _Run(BaseModel):
    model_config = ConfigDict(strict=True)

    run: Annotated[str, Field(pattern=r"^[^\x00]+$")]
    """Its folder, absolute."""
    study_id: str


class _Kept(BaseModel):
    model_config = ConfigDict(strict=True)

    other_model: bool
    """They were taken although they may have measured another model."""
    runs: list[_Run]


def open_warm_starts(
    out: Path, study: Study, asked: Sequence[Path], other_model: bool, say: Callable[[str], None]
) -> list[WarmStart]:
    """The warm starts asked for, which study.yaml then keeps; of a resumed run those that it keeps.

    One that is gone since, or another run by now, is left out: what was measured here stays true without it, and a run
    of hours is not to end with the folder of another. `say` is told.

    Args:
        out: the run's folder, with its study.yaml.

    Raises:
        UserError: one has no history, or is of another model; the resumed run began with others than those asked for.
    """
    content = yaml.safe_load((out / FILE_NAME).read_text(encoding="utf-8"))
    if KEY in content:
        return _reopen(_checked(content[KEY], out / FILE_NAME), study, out, asked, other_model, say)
    opened = [WarmStart(run, study, other_model=other_model) for run in asked]
    runs = [_Run(run=str(one.run.absolute()), study_id=one.study_id) for one in opened]
    content[KEY] = _Kept(other_model=other_model, runs=runs).model_dump()
    write_whole(out / FILE_NAME, yaml.safe_dump(content, sort_keys=False))
    return opened


def has_kept(out: Path) -> bool:
    """Whether the run in `out` keeps its warm starts by now."""
    try:
        return KEY in yaml.safe_load((out / FILE_NAME).read_text(encoding="utf-8"))
    except (*UNPARSABLE, TypeError, OSError):
        return False


def _checked(kept: Any, path: Path) -> _Kept:
    try:
        return _Kept.model_validate(kept)
    except ValidationError as error:
        raise UserError(f"{path}: {KEY}: {error}", "start anew without --resume") from error


def _reopen(
    kept: _Kept, study: Study, out: Path, asked: Sequence[Path], other_model: bool, say: Callable[[str], None]
) -> list[WarmStart]:
    then, now = (sorted({path.resolve() for path in paths}) for paths in ([Path(one.run) for one in kept.runs], asked))
    if asked and (then != now or kept.other_model != other_model):
        began = " and ".join(f"with {OPTION} {path}" for path in then) or f"without {OPTION}"
        raise UserError(
            f"{out}: this run began {began}{f' {OTHER_MODEL_OPTION}' if kept.other_model else ''}, which cannot change "
            "once it has trials",
            f"resume it without {OPTION}, which it keeps, or start anew without --resume",
        )
    opened = []
    for one in kept.runs:
        try:
            found = WarmStart(Path(one.run), study, other_model=kept.other_model)
        except UserError as error:
            say(f"  going on without a warm start that this run began with: {error.message}")
            continue
        if found.study_id == one.study_id:
            opened.append(found)
        else:
            say(f"  going on without a warm start that this run began with: {OPTION} {one.run}: it is another run now")
    return opened
