"""Hands the best settings over in a trainer's own format: one module a trainer."""

from __future__ import annotations

from autotune.errors import UserError, nearest
from autotune.export import accelerate, plain, transformers
from autotune.export.base import Best, Exported, Exporter

ENGINES = ("fsdp2", "fsdp1")
"""That the exporters know."""

__all__ = ["EXPORTERS", "Best", "Exported", "Exporter", "export"]

EXPORTERS: dict[str, Exporter] = {
    "plain": plain.export,
    "accelerate": accelerate.export,
    "transformers": transformers.export,
}


def export(to: str, best: Best) -> Exported:
    """`best` as files for the trainer called `to`.

    Raises:
        UserError: no such trainer, or settings of an engine that the exporters do not know.
    """
    if to not in EXPORTERS:
        raise UserError(f"export to {to!r}: no such trainer", nearest(to, EXPORTERS))
    if best.knobs.engine not in ENGINES:
        raise UserError(
            f"export to {to}: the settings are for the engine {best.knobs.engine!r}",
            f"settings measured with {' and '.join(ENGINES)} can be exported; best.yaml has all of them as they are",
        )
    return EXPORTERS[to](best)
