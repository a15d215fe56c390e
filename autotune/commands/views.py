"""`autotune journal` and `autotune tensorboard`: a run for other tools' screens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.commands.reading import reading
from autotune.errors import UserError, printable

if TYPE_CHECKING:
    from autotune.history import Told

_RUN = click.argument("run_folder", metavar="RUN", type=click.Path(path_type=Path))


@click.command()
@_RUN
@click.option("--output", "-o", type=click.Path(path_type=Path), help="File to write (default: RUN/optuna.journal).")
def journal(run_folder: Path, output: Path | None) -> None:
    """Write the search of RUN, also of one that goes on, as an Optuna journal, which optuna-dashboard opens."""
    from autotune.views.optuna_journal import FILE_NAME, write_journal

    path = output or run_folder / FILE_NAME
    _write(lambda told: write_journal(run_folder, path, told), path, f"optuna-dashboard {path}")


@click.command()
@_RUN
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Folder (default: RUN/tensorboard).")
def tensorboard(run_folder: Path, output: Path | None) -> None:
    """Write the trials of RUN, also of one that goes on, as TensorBoard scalars: a point a trial."""
    from autotune.views.tensorboard import write_scalars

    folder = output or run_folder / "tensorboard"
    _write(lambda told: write_scalars(run_folder, folder, told), folder, f"tensorboard --logdir {folder}")


def _write(work: Callable[[Told], list[str]], path: Path, then: str) -> None:
    try:
        with reading() as told:
            skipped = work(told)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}", "give a place you can write to by --output") from error
    for line in skipped:
        click.echo(f"skipped {printable(line)}", err=True)
    click.echo(printable(f"wrote {path}\nnext: {then}"))
