"""`autotune watch`: a run on another terminal."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from autotune.errors import UserError
from autotune.signals import EXIT_INTERRUPTED

EXIT_ENDED_EARLY = 4


@click.command()
@click.argument("run_folder", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--wait", is_flag=True, help="For a run that has not begun.")
def watch(run_folder: Path, wait: bool) -> None:
    """Follow RUN from another terminal of its host, until it ends; a line a trial where there is no terminal.

    Exit codes: 0 it came to its end, 2 no run there, 4 it ended before, 130 interrupted (the run goes on).
    """
    from rich.console import Console

    from autotune.best import read_best
    from autotune.folder import resume_command
    from autotune.report.screen import make_screen
    from autotune.report.tables import print_best
    from autotune.watch import follow

    console, run = Console(highlight=False), run_folder.absolute()
    screen = make_screen(console)
    try:
        with screen:
            ended_well = follow(run, screen, wait)
    except KeyboardInterrupt:
        click.echo("autotune: no longer watching; the run goes on", err=True)
        sys.exit(EXIT_INTERRUPTED)
    try:
        print_best(console, read_best(run))
    except UserError:
        click.echo(f"{run_folder}: it ended without a result", err=True)
    if not ended_well:
        again = resume_command(run_folder, _simulated(run))
        click.echo(f"ended before its end; to go on: {again}", err=True)
        sys.exit(EXIT_ENDED_EARLY)


def _simulated(run: Path) -> str:
    """The modelled cluster of a run; empty for a real one, or one that had no survey yet."""
    from autotune.loaded import read_study_file

    try:
        return read_study_file(run).simulated
    except UserError:
        return ""
