"""The best config of a trainer's run as that trainer takes it: its own command, with the settings in place."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from autotune.errors import UserError
from autotune.export.base import Best, Exported, comment, header
from autotune.job import Job
from autotune.job_file import load_job
from autotune.trainer.order import as_text, rendered
from autotune.trainer.section import KNOBS, Trainer
from trials.record import KNOB_NAMES

TARGET, FILE_NAME = "command", "train.sh"
_HERE = '$(dirname -- "$0")'
_LAUNCH = {
    "nnodes": "${NNODES:-%d}",
    "node_rank": "${NODE_RANK:-0}",
    "nproc": "${NPROC:-%d}",
    "master_addr": "${MASTER_ADDR:-127.0.0.1}",
    "master_port": "${MASTER_PORT:-29500}",
    "scratch": ".",
}
_TORCHRUN = (
    'python -m torch.distributed.run --nnodes "{nnodes}" --node-rank "{node_rank}" --nproc-per-node "{nproc}" '
    '--master-addr "{master_addr}" --master-port "{master_port}"'
)
_VARIABLE = re.compile(r"\{(\w+)\}")


def export_command(run: Path, best: Best) -> Exported:
    """`train.sh`, and the files that the command is given.

    Raises:
        UserError: the run was not of a trainer of one's own.
    """
    job = load_job(str(run / "job.yaml"))
    if job.trainer is None:
        raise UserError(f"export to {TARGET}: {run} did not tune a command", "only a job with `trainer` has one")
    files = _files(job, best)
    lost = {
        name: f'its value is {_asked(best)[name]}: make it the default in your script, `probe.knob("{name}", ...)`'
        for name in job.trainer.via
    }
    said = [f"Not in this file: {name}: {need}" for name, need in lost.items()]
    started = [
        "Start it once a node, with NNODES, NODE_RANK, NPROC, MASTER_ADDR and MASTER_PORT set (default: one node)."
    ]
    head = comment([*header(best, f"The tuned command of {run.name}", {}), "", *started, *said])
    lines = [f"export {name}={_quoted(text, job, best)}" for name, text in job.trainer.env.items()]
    script = "\n".join(["#!/bin/sh", head.rstrip(), *lines, f'exec {_command(job, job.trainer, best)} "$@"', ""])
    in_knobs = {name: need for name, need in lost.items() if name in KNOBS}
    carried = tuple(name for name in KNOB_NAMES if name not in in_knobs)
    return Exported({FILE_NAME: script} | files, carried, in_knobs, tuple(said))


def _asked(best: Best) -> dict[str, str]:
    knobs = best.knobs
    asked = {name: as_text(name, getattr(knobs, name)) for name in KNOBS}
    return asked | dict(knobs.custom or ()) | {"global_batch_size": str(best.global_batch_size)}


def _files(job: Job, best: Best) -> dict[str, str]:
    assert job.trainer is not None
    found: dict[str, str] = {}
    for exporter in job.trainer.render.values():
        found |= rendered(job, exporter, best.knobs, best.world_size)
    return found


def _command(job: Job, trainer: Trainer, best: Best) -> str:
    """The trials' command without the probe; one that was started once a rank is started by torchrun."""
    words = [word for word in trainer.command if word != "{probe}"]
    if trainer.launcher == "self":
        return " ".join(_quoted(word, job, best) for word in words)
    is_python = words[0] in ("python", "python3")
    rest = " ".join(_quoted(word, job, best) for word in words[is_python:])
    launch = _TORCHRUN.format(**_launch(job, best)) + ("" if is_python else " --no-python")
    return f"{launch} {rest}"


def _launch(job: Job, best: Best) -> dict[str, str]:
    ranks = job.cluster.ranks_per_node
    return _LAUNCH | {
        "nnodes": _LAUNCH["nnodes"] % max(1, best.world_size // ranks),
        "nproc": _LAUNCH["nproc"] % ranks,
        "job_dir": job.trainer.folder or "." if job.trainer else ".",
    }


def _quoted(text: str, job: Job, best: Best) -> str:
    """One word of a shell, with the settings in place; only what is filled in at its start is left to the shell."""
    assert job.trainer is not None
    values = _asked(best)
    shell = _launch(job, best)
    for placeholder, exporter in job.trainer.render.items():
        shell[placeholder] = f"{_HERE}/{next(iter(rendered(job, exporter, best.knobs, best.world_size)))}"
    names = _VARIABLE.findall(text)
    if not any(name in shell for name in names):
        return shlex.quote(text.format(**values))
    safe = text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("`", "\\`")
    return f'"{safe.format(**values | shell)}"'
