"""`autotune compare`: two clusters, or two versions."""

from __future__ import annotations

import json
from pathlib import Path

import click

from autotune.commands.reading import reading


@click.command()
@click.argument("run_a", type=click.Path(path_type=Path))
@click.argument("run_b", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Machine-readable, on standard output.")
def compare(run_a: Path, run_b: Path, as_json: bool) -> None:
    """Show the results of RUN_A and RUN_B side by side: two clusters, two versions, two jobs.

    Settings, MFU, the ratio of their throughputs with its interval, and what differs in environment and job.
    """
    from rich.console import Console

    from autotune.compare import compare_runs, load_side
    from autotune.report.compare import print_comparison
    from autotune.report.text import json_safe

    with reading() as told:
        found = compare_runs(load_side(run_a, told), load_side(run_b, told))
    if as_json:
        click.echo(json.dumps(json_safe(found.to_dict() | {"warnings": found.warnings()}), default=str))
    else:
        print_comparison(Console(highlight=False), found)
