"""`autotune journal` and `autotune tensorboard`: a run for other tools' screens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from autotune.errors import UserError, printable

_RUN = click.argument("run_folder", metavar="RUN", type=click.Path(path_type=Path))


@click.command()
@_RUN
@click.option("--output", "-o", type=click.Path(path_type=Path), help="File to write (default: RUN/optuna.journal).")
def journal(run_folder: Path, output: Path | None) -> None:
    """Write the search of RUN, also of one that goes on, as an Optuna journal, which optuna-dashboard opens."""
    from autotune.views.optuna_journal import FILE_NAME, write_journal

    path = output or run_folder / FILE_NAME
    _write(lambda: write_journal(run_folder, path), path, f"optuna-dashboard {path}")


@click.command()
@_RUN
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Folder (default: RUN/tensorboard).")
def tensorboard(run_folder: Path, output: Path | None) -> None:
    """Write the trials of RUN, also of one that goes on, as TensorBoard scalars: a point a trial."""
    from autotune.views.tensorboard import write_scalars

    folder = output or run_folder / "tensorboard"
    _write(lambda: write_scalars(run_folder, folder), folder, f"tensorboard --logdir {folder}")


def _write(work: Callable[[], list[str]], path: Path, then: str) -> None:
    try:
        skipped = work()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}", "give a place you can write to by --output") from error
    for line in skipped:
        click.echo(f"skipped {printable(line)}", err=True)
    click.echo(printable(f"wrote {path}\nnext: {then}"))
