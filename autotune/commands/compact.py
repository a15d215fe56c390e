"""`autotune compact`: one file of a long history."""

from __future__ import annotations

from pathlib import Path

import click

from autotune.commands.reading import reading
from autotune.errors import UserError, printable


@click.command()
@click.argument("run_folder", metavar="RUN", type=click.Path(path_type=Path))
def compact(run_folder: Path) -> None:
    """Make one Parquet file of RUN's history, which has one an attempt; every command reads it as before, faster.

    What cannot be read is left as it is. RUN may be resumed afterwards; it may not be going now.
    """
    from rich.filesize import decimal

    from autotune.folder import sole_driver
    from autotune.history import History

    history = History(run_folder / "history")
    if not history.folder.is_dir() or not history.file_names():
        raise UserError(
            f"{run_folder}: no run there that has measured anything", "give the folder of a run: its job's `output`"
        )
    with sole_driver(run_folder.absolute()), reading() as told:
        try:
            made = history.compact(told)
        except OSError as error:
            raise UserError(
                f"{error.filename or history.folder}: {error.strerror or error}", "nothing measured is lost; try again"
            ) from error
    if made is None:
        click.echo(printable(f"{run_folder}: its history is one file already; nothing to do"))
        return
    for line in made.left:
        click.echo(printable(f"left as it is: {line}"), err=True)
    size = decimal(made.path.stat().st_size)
    click.echo(
        printable(f"{made.num_files:,} files, {decimal(made.num_bytes)} -> {made.path}: {made.num_rows:,} rows, {size}")
    )
