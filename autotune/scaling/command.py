"""The command, and the tables that it ends with."""

from __future__ import annotations

import json
from pathlib import Path

import click


def _ranks(_ctx: click.Context, _param: click.Parameter, value: str) -> tuple[int, ...]:
    """`1,2,4` -> numbers of ranks."""
    parts = value.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{value!r}: expected numbers of ranks with commas between them, e.g. 1,2,4,8")
    return tuple(sorted({int(part) for part in parts}))


@click.command(short_help="Measure how a run's configs, or a job's baseline, scale with the number of ranks.")
@click.argument("subject", metavar="RUN|JOB")
@click.option("--ranks", callback=_ranks, required=True, metavar="N,N,...", help="Numbers of ranks, e.g. 1,2,4,8.")
@click.option("--mode", type=click.Choice(["strong", "weak", "both"]), default="both", show_default=True)
@click.option(
    "--repeats", type=click.IntRange(min=2), default=3, show_default=True, help="Interleaved runs of each point."
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the job.")
@click.option("--output", type=click.Path(path_type=Path), help="Folder, of a JOB (default: its `output` + -scale).")
@click.option(
    "--simulate",
    metavar="CLUSTER",
    help="Measure nothing: ask a modelled cluster, e.g. \"nodes=8 gpus=8 device='NVIDIA H100 80GB HBM3'\".",
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable, on standard output.")
def scale(
    subject: str,
    ranks: tuple[int, ...],
    mode: str,
    repeats: int,
    overrides: tuple[str, ...],
    output: Path | None,
    simulate: str | None,
    as_json: bool,
) -> None:
    """Measure best and baseline of a RUN that has ended, or the baseline of a JOB, on each number of ranks.

    Strong scaling keeps the global batch, weak scaling each rank's share of it. On the most ranks the run's fallback
    and finalists are measured too, and all are ranked. The rows are added to the history with the stage `scale`. What
    is there already is not measured again: an interrupted scaling goes on, and a larger --repeats adds to it; but more
    --ranks, or another --mode, than were measured are measured beside the others, in new rounds. A real
    run's configs are not simulated in its own folder, but in one beside it: RUN-scale.
    """
    from rich.console import Console

    from autotune.errors import NothingFitsError
    from autotune.report.text import json_safe
    from autotune.scaling.go import measure_scaling
    from autotune.scaling.table import print_scaling

    found, folder, peak_source = measure_scaling(
        subject, ranks, mode, repeats, overrides, output, simulate, to_stderr=as_json
    )
    if as_json:
        click.echo(json.dumps(json_safe(found.to_dict()) if found else None))
    elif found is not None:
        print_scaling(Console(highlight=False), found, peak_source)
        click.echo(f"History: {folder}/history")
    if found is None or not any(point.num_runs for point in found.points):
        raise NothingFitsError(
            "no config ran to its end on any of these numbers of ranks", "`autotune show` says what became of each"
        )
