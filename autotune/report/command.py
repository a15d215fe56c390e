"""`autotune report`: one page that tells a run, and the same facts for machines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.commands.cost import quantity
from autotune.errors import UserError

if TYPE_CHECKING:
    from autotune.cost import Assumptions
    from autotune.loaded import LoadedRun

PAGE, SUMMARY = "report.html", "summary.json"


def _quantity(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    return None if value is None else quantity(ctx, param, value)


@click.command(short_help="Write one HTML page on a run, and summary.json beside it.")
@click.argument("run_folder", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help=f"The page; {SUMMARY} goes beside it (default: RUN/export/report/{PAGE}).",
)
@click.option("--tokens", callback=_quantity, metavar="N", help="Also reckon the cost of training on N, e.g. 1T.")
@click.option("--gpus", "num_gpus", type=int, help="Of the real run (default: the job's batch.target_world_size).")
@click.option("--price", "price_per_hour", type=float, help="Of one GPU and hour.")
@click.option("--goodput", type=float, help="Share of the real run's time that trains (default: 1).")
@click.option("--currency", help="Of --price (default: USD).")
def report(run_folder: Path, output: Path | None, tokens: float | None, **asked: Any) -> None:
    """Write one self-contained HTML page on RUN, and the same facts as summary.json beside it.

    The page opens from disk, asks no network for anything, and may be sent on. RUN may still be going.
    """
    from rich.console import Console

    from autotune.loaded import load
    from autotune.report.facts import summarise
    from autotune.report.page import make_page
    from autotune.report.text import count

    page = run_folder / "export" / "report" / PAGE if output is None else output
    if output is not None and output.is_dir():
        page = output / PAGE
    with Console(stderr=True).status("reading the history") as status:
        run = load(run_folder, lambda done, of: status.update(f"reading the history: {done:,} of {of:,} files"))
        assumptions = _assumptions(run, tokens, asked)
        status.update(f"drawing {count(len(run.attempts), 'attempt')}")
        summary = summarise(run, assumptions)
        made = {page: make_page(summary, str(run_folder)), page.with_name(SUMMARY): summary.to_json()}
        status.update(f"writing {page}")
        _write(made)
    for path in made:
        click.echo(f"wrote {path}")
    for note in summary.headline.notes:
        click.echo(note, err=True)


def _assumptions(run: LoadedRun, tokens: float | None, asked: dict[str, Any]) -> Assumptions | None:
    """Raises:
    UserError: an option of the cost without --tokens.
    """
    from autotune.cost import Assumptions

    given = {name: value for name, value in asked.items() if value is not None}
    if tokens is None:
        if given:
            option = {"num_gpus": "gpus", "price_per_hour": "price"}.get(next(iter(given)), next(iter(given)))
            raise UserError(f"--{option} without --tokens: it has no effect", "add --tokens N, e.g. --tokens 1T")
        return None
    ranks = {"num_gpus": run.job.batch.target_world_size}
    return Assumptions(tokens=tokens, **(ranks | given))


def _write(made: dict[Path, str]) -> None:
    from trials.files import write_whole

    for path, text in made.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}", "give a file you can write by --output") from error
