"""Hands the best settings over in a trainer's own format: one module a trainer, one line here."""

from __future__ import annotations

from autotune.errors import UserError, nearest
from autotune.export import accelerate, axolotl, deepspeed, lightning, plain, torchtitan, transformers
from autotune.export.base import Best, Exported, Exporter

__all__ = ["EXPORTERS", "Best", "Exported", "Exporter", "export", "exporter"]

EXPORTERS: dict[str, Exporter] = {
    "plain": plain.EXPORTER,
    "accelerate": accelerate.EXPORTER,
    "transformers": transformers.EXPORTER,
    "lightning": lightning.EXPORTER,
    "torchtitan": torchtitan.EXPORTER,
    "deepspeed": deepspeed.EXPORTER,
    "axolotl": axolotl.EXPORTER,
}


def exporter(to: str) -> Exporter:
    """The exporter for the trainer called `to`.

    Raises:
        UserError: there is none.
    """
    if to not in EXPORTERS:
        raise UserError(f"export to {to!r}: no such trainer", nearest(to, EXPORTERS))
    return EXPORTERS[to]


def export(to: str, best: Best) -> Exported:
    """`best` as files for the trainer called `to`.

    Raises:
        UserError: no such trainer, or one that has not the engine of the settings.
    """
    target, engine = exporter(to), best.knobs.engine
    if engine not in target.engines:
        others = [name for name, other in EXPORTERS.items() if engine in other.engines]
        raise UserError(
            f"export to {to}: the settings are for {engine}, which {to} has not; it has {' and '.join(target.engines)}",
            f"export them to {' or '.join(others)}; or tune for {to}, by export_for: {to} in the job",
        )
    return target.make(best)
