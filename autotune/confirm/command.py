"""The command: checks all that can be checked, has the configs measured, hands one over and becomes the real run."""

from __future__ import annotations

import re
from pathlib import Path

import click

from autotune.errors import UserError

_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?")


def seconds_of(_ctx: click.Context, _param: click.Parameter, value: str) -> float:
    """`10m`, `90s`, `1h30m`, or seconds."""
    found = _DURATION.fullmatch(value)
    hours, minutes, rest = (int(part or 0) for part in found.groups()) if found else (0, 0, 0)
    seconds = 3600 * hours + 60 * minutes + rest
    if seconds == 0:
        raise click.BadParameter(f"{value!r}: expected a time such as 10m, 90s or 1h30m")
    return float(seconds)


@click.command(short_help="Measure a run's configs on all ranks, then start COMMAND with the one that holds.")
@click.argument("run_folder", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--within",
    callback=seconds_of,
    metavar="TIME",
    default="10m",
    show_default=True,
    help="For the measuring, e.g. 90s or 1h30m; what is known by then decides.",
)
@click.option("--ranks", type=click.IntRange(min=1), help="Ranks to measure on (default: batch.target_world_size).")
@click.option("--to", "target", metavar="NAME", help="Exporter of {config} (default: the job's export_for, or plain).")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of the run's job under cluster or measure, or data.source; e.g. cluster.address=auto.",
)
@click.option("--strict", is_flag=True, help="Do not start COMMAND if the measuring fails or ends without a verdict.")
@click.option("--simulate", metavar="CLUSTER", help="Rehearse a simulated run: ask the modelled cluster.")
def confirm(
    run_folder: Path,
    command: tuple[str, ...],
    within: float,
    ranks: int | None,
    target: str | None,
    overrides: tuple[str, ...],
    strict: bool,
    simulate: str | None,
) -> None:
    """Measure best, fallback and baseline of the finished RUN on all of the real run's ranks, then become COMMAND.

    The first of best and fallback that runs there and beats the baseline, by paired rounds, is handed over; else it is
    the baseline. COMMAND is started in any case, with its own exit code: if measuring fails, with the baseline, unless
    --strict. The global batch stays as it was; the accumulation follows the number of ranks.

    \b
    COMMAND receives the config in any of these ways:
      {config}            in its words: the path of the exported file
      {micro_batch_size}  in its words: a knob's value, by its name in best.yaml; also {held}, {world_size}
      $AUTOTUNE_CONFIG    in its environment: the same path; $AUTOTUNE_HELD: best, fallback or baseline
      probe.knob(...)     in its script, if that asks the probe: `micro = probe.knob("micro_batch_size", 1)`

    \b
    As the first step of a Slurm job, in its batch script, on nodes that Ray was started on and that share RUN:
      autotune confirm runs/mine --set cluster.address=auto --to accelerate -- \\
          srun accelerate launch --config_file {config} train.py
    On one machine:
      autotune confirm runs/mine -- torchrun --nproc-per-node {world_size} train.py --mbs {micro_batch_size}

    The rows are added to RUN/history with the stage `confirm`, and the result to best.yaml as `confirmed`.
    Exit codes: COMMAND's own; before it is started: 2 the input is wrong, 4 with --strict, 130 interrupted.
    """
    from autotune.confirm.confirming import Request, confirm_and_start

    if not run_folder.is_dir():
        raise UserError(f"{run_folder}: no such folder", "give the folder of a run: its job's `output`")
    request = Request(run_folder.absolute(), command, within, ranks, target, overrides, strict, simulate)
    confirm_and_start(request)
