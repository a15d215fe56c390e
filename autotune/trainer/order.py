"""What a trial asks of the user's command: knobs in place, files rendered, and what its ranks must show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autotune.errors import UserError
from autotune.export import export
from autotune.export.base import Best
from autotune.trainer.handed import ALWAYS_COMPARED
from autotune.trainer.section import KNOBS
from trials.record import Knobs

if TYPE_CHECKING:
    from autotune.job import Job

TIMED_SHARE = 0.8
"""Of a trial's time: its timed steps are over by then."""


def make_order(job: Job, knobs: Knobs, world_size: int) -> dict[str, Any]:
    """The fields of `trials.command.Command`.

    Raises:
        UserError: an exporter cannot carry a knob that differs from what its trainer would do by itself.
    """
    trainer, measure = job.trainer, job.measure
    assert trainer is not None
    own = dict(knobs.custom or ())
    asked = {name: getattr(knobs, name) for name in KNOBS} | own
    sequences = knobs.micro_batch_size * knobs.grad_accum_steps * world_size // knobs.model_parallel_ranks
    return {
        "command": list(trainer.command),
        "env": dict(trainer.env),
        "launcher": trainer.launcher,
        "attach": trainer.attach,
        "tokens": trainer.tokens,
        "values": {name: as_text(name, value) for name, value in asked.items()} | {"global_batch_size": str(sequences)},
        "files": {placeholder: rendered(job, exporter, knobs, world_size) for placeholder, exporter in _files(job)},
        "knobs": {name: asked[name] for name in trainer.via},
        "handed": sorted(job.handed),
        "expect": expected(job, knobs, world_size),
        # In the first the probe reads back, and the second shows at what pace to go on.
        "warmup_steps": max(2, measure.warmup_steps),
        "timed_steps": measure.max_steps,
        "min_steps": measure.min_steps,
        "max_s": TIMED_SHARE * measure.trial_timeout_s,
        "folder": trainer.folder or ".",
        "python": job.cluster.python,
        "prefix": list(job.cluster.command_prefix),
    }


def _files(job: Job) -> list[tuple[str, str]]:
    assert job.trainer is not None
    return list(job.trainer.render.items())


def as_text(name: str, value: Any) -> str:
    """As it stands in the command: true and false, and for what does not apply 0 or none."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "0" if name == "prefetch_factor" else "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def rendered(job: Job, exporter: str, knobs: Knobs, world_size: int) -> dict[str, str]:
    """An exporter's files for one config.

    Raises:
        UserError: a knob that is searched, and that the file cannot carry.
    """
    exported = export(exporter, Best(knobs, job.training.precision, world_size, job.seq_len, ["A trial's settings."]))
    assert job.trainer is not None
    by_name = job.trainer.handed_by_name()
    wrong = [name for name in exported.lost if name in job.handed and name not in by_name]
    if wrong:
        raise UserError(
            f"trainer.render: {exporter} cannot carry {wrong[0]} = {getattr(knobs, wrong[0])}: "
            f"{exported.lost[wrong[0]]}",
            f"search fewer values of it (export_for: {exporter} leaves out what cannot be carried), or hand it over by "
            "a placeholder",
        )
    return exported.files


def expected(job: Job, knobs: Knobs, world_size: int) -> dict[str, Any]:
    """What each rank must show to have applied, by the probe's names: what is handed over, and what decides a step."""
    found = {name: getattr(knobs, name) for name in KNOBS if name in (*ALWAYS_COMPARED, *job.handed)}
    for name in _without_effect(knobs):
        found.pop(name, None)
    found |= {"world_size": world_size, "replicate_degree": knobs.replicate_degree}
    return {name: value for name, value in found.items() if value is not None}


def _without_effect(knobs: Knobs) -> list[str]:
    """Knobs that show nothing of themselves in this config."""
    found = ["attention_backend"]
    if knobs.grad_accum_steps == 1:
        found.append("sync_each_micro_batch")
    if knobs.engine != "ddp":
        found.append("bucket_cap_mb")  # blocks_per_unit shows it
    if not knobs.num_workers:
        found.append("prefetch_factor")
    return found
