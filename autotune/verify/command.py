"""The command: checks what can be checked, leaves a process that follows the real run, and becomes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import click

from autotune.confirm.command import seconds_of
from autotune.errors import UserError


@click.command(short_help="Start COMMAND, and say now and then whether it is as fast as RUN promised.")
@click.argument("run_folder", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--attach",
    type=click.Choice(["auto", "script"]),
    default="auto",
    show_default=True,
    help="script: it has the probe's lines, or its callback; the command is left as it is.",
)
@click.option("--tokens", type=click.FloatRange(min=0, min_open=True), help="Of each sample, if its inputs are none.")
@click.option("--every", callback=seconds_of, metavar="TIME", default="1h", show_default=True, help="After step 1000.")
def verify(run_folder: Path, command: tuple[str, ...], attach: str, tokens: float | None, every: float) -> None:
    """Become COMMAND, a real run, with the probe attached, and say how it compares with what RUN promised.

    At steps 50, 200, 1000 and then hourly, one line: tokens/s per rank against the promise (the confirmed figure, else
    that of RUN's best.yaml) and its interval, and what is otherwise: waits for data, a rank that is behind the others,
    memory, growth of the host's memory. They go to standard error and to RUN/logs/verify-.../verify.log. At first it
    says which settings are not those that were promised.

    The exit code, signals and output are COMMAND's own: it is not a child, but takes this process's place; what follows
    it only reads files. The probe watches (it takes part in no step, and waits for nothing); if it breaks, the run goes
    on without it.

    \b
      autotune verify runs/mine -- torchrun --nproc-per-node 8 train.py
      autotune verify runs/mine -- bash -c 'torchrun --nproc-per-node 8 {probe} train.py'
      srun --ntasks-per-node 1 autotune verify runs/mine -- torchrun --nnodes 4 ... train.py   # ranks of each node

    Where {probe} is not in COMMAND, the probe goes before its first file *.py, or before -m MODULE.
    """
    from autotune.confirm.handover import find_command, start
    from autotune.probing import PROBE_VARIABLE, given_knobs
    from autotune.verify.attach import request, with_probe
    from autotune.verify.promised import read_promise

    find_command(command)
    words = list(command) if attach == "script" else with_probe(command)
    promise = read_promise(run_folder)
    probed = Path(tempfile.mkdtemp(prefix="autotune-verify-"))
    try:
        folder = run_folder / "logs" / f"verify-{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.uname().nodename}-{os.getpid()}"
        folder.mkdir(parents=True)
        order = {"pid": os.getpid(), "probed": str(probed), "log": str(folder / "verify.log"), "every_s": every}
        (folder / "order.json").write_text(json.dumps(order | {"promise": asdict(promise)}), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}", "RUN is where the lines are kept") from error
    # It leaves a process behind that is no child of the real run's, which would have to wait for it.
    subprocess.run(
        [sys.executable, "-P", "-m", "autotune.verify.detached", str((folder / "order.json").absolute())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # a terminal's Ctrl-C is the run's
        check=False,
    )
    asked = request(probed, attach, tokens, given_knobs(os.environ))
    start(words, {**os.environ, PROBE_VARIABLE: asked})
