"""`autotune cost`: reads a finished run, and prints what training with its configs costs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click

from autotune.commands.reading import reading
from autotune.errors import UserError

_QUANTITY = re.compile(r"(\d[\d_,]*(?:\.\d+)?(?:e\d+)?)\s*([kmbgt]?)", re.IGNORECASE)
_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def quantity(_ctx: click.Context, _param: click.Parameter, value: str) -> float:
    """`1T`, `300B`, `1.5e12` or `15_000_000` -> a number."""
    found = _QUANTITY.fullmatch(value.strip())
    if found is None:
        raise click.BadParameter(f"{value!r}: expected a number of tokens such as 1T, 300B, 2.5e11 or 500M")
    return float(found[1].replace("_", "").replace(",", "")) * _SCALES[found[2].lower()]


@click.command()
@click.argument("run_folder", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--tokens", required=True, callback=quantity, metavar="N", help="To train on in all, e.g. 1T or 300B.")
@click.option("--gpus", "num_gpus", type=int, help="Of the real run (default: the job's batch.target_world_size).")
@click.option("--price", type=float, help="Of one GPU and hour (default: none, hours alone).")
@click.option("--goodput", type=float, default=1.0, show_default=True, help="Share of the real run's time that trains.")
@click.option("--currency", default="USD", show_default=True, help="Of --price, for the screen.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable, on standard output.")
def cost(
    run_folder: Path,
    tokens: float,
    num_gpus: int | None,
    price: float | None,
    goodput: float,
    currency: str,
    as_json: bool,
) -> None:
    """What training costs with the baseline and the best config of RUN, what that saves, and what tuning took.

    The saving is reckoned from the lower bound of the measured gain.
    """
    from rich.console import Console

    from autotune.best import read_best
    from autotune.cost import Assumptions, training_cost
    from autotune.loaded import load
    from autotune.report.cost import print_cost
    from autotune.report.text import json_safe

    best = read_best(run_folder)
    with reading() as told:
        rows = [attempt.row for attempt in load(run_folder, told).attempts]
    ranks = best["training"]["target_world_size"]
    asked = Assumptions(tokens, ranks if num_gpus is None else num_gpus, price, goodput, currency)
    try:
        found = training_cost(best, rows, asked)
    except ValueError as error:
        raise UserError(str(error), "`autotune cost --help` says what each option takes") from error
    if as_json:
        click.echo(json.dumps(json_safe(found.to_dict() | {"notes": found.notes()})))
    else:
        print_cost(Console(highlight=False), found)
