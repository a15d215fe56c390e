"""The command, and the table that it ends with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.job import Job
    from autotune.run import RunResult
    from autotune.waterfall.steps import Waterfall


@click.command(short_help="Take the gain of a run that has ended apart, change by change.")
@click.argument("run_folder", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--repeats", type=click.IntRange(min=2), default=3, show_default=True, help="Interleaved runs of each config."
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of the run's job under cluster or measure, or data.source; e.g. cluster.address=auto.",
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable, on standard output.")
def waterfall(run_folder: Path, repeats: int, overrides: tuple[str, ...], as_json: bool) -> None:
    """Measure what each change from RUN's baseline to its winner is worth.

    Each change is measured on the baseline by itself, then on top of the others in order of gain, in interleaved
    repeats with baseline and winner. The rows are added to RUN/history with the stage `waterfall`. What is there
    already is not measured again: an interrupted waterfall goes on, and a larger --repeats adds to it.
    """
    from rich.console import Console

    from autotune.afterwards import at_work, read_ended
    from autotune.report.text import json_safe
    from autotune.waterfall.measuring import measure_waterfall, refuse_without_winner

    run = read_ended(run_folder, overrides)
    refuse_without_winner(run_folder, run.baseline, run.winner)
    with at_work(run.folder, run.job, run.study.simulated, to_stderr=as_json) as (runner, screen):
        made = measure_waterfall(run.job, run.folder, run.baseline, run.winner, runner, screen, repeats)
    if as_json:
        click.echo(json.dumps(json_safe(made.to_dict())))
        return
    show_waterfall(Console(highlight=False), made, run.content)


def explained(job: Job, out: Path, result: RunResult, runner: Any, screen: Any) -> Waterfall | None:
    """The waterfall of a run that has just ended, on its own runner; None, which is said, if it kept its baseline."""
    from autotune.waterfall.measuring import REPEATS, measure_waterfall

    baseline, winner = result.baseline.knobs, result.best.knobs
    if winner == baseline:
        screen.message("  no waterfall: the baseline is kept, so there is no gain to take apart")
        return None
    return measure_waterfall(job, out, baseline, winner, runner, screen, REPEATS)


def show_waterfall(console: Console, made: Waterfall | None, content: dict[str, Any]) -> None:
    """Prints a waterfall, if there is one.

    Args:
        content: of best.yaml.
    """
    from autotune.waterfall.table import print_waterfall

    if made is not None:
        print_waterfall(console, made, content["conventions"]["peak_source"])
