"""How the config reaches the command: placeholders in its words, and variables of its environment."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from autotune.errors import InfrastructureError, UserError, nearest
from autotune.export import EXPORTERS, export
from autotune.export.base import Best, Exported
from autotune.probing import PROBE_VARIABLE, knobs_only
from autotune.signals import as_at_the_start
from trials.record import KNOB_NAMES, Knobs

CONFIG_VARIABLE, HELD_VARIABLE = "AUTOTUNE_CONFIG", "AUTOTUNE_HELD"
"""Path of the exported file; `best`, `fallback` or `baseline`."""
OWN_PLACEHOLDERS = ("config", "held", "world_size")
OF_VERIFY = "probe"
"""Is left to `autotune verify`, which may be the command."""
_PLACEHOLDER = re.compile(r"(?<!\$)\{([a-z][a-z0-9_]*)\}")
"""A shell's own `${name}` is left alone."""


@dataclass(frozen=True)
class Handover:
    """What a command is given."""

    config: Path | None
    """The exported file; None: no exporter knows the engine."""
    held: str
    knobs: Knobs
    world_size: int

    def values(self) -> dict[str, str]:
        """By placeholder. True and false as YAML and JSON spell them; `none` for a knob that the engine has not."""
        knobs = {name: _spelt(value) for name, value in self.knobs.to_dict().items()}
        return knobs | {"config": str(self.config), "held": self.held, "world_size": str(self.world_size)}

    def command(self, words: Sequence[str]) -> list[str]:
        values = self.values()
        return [_PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), word) for word in words]

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        found = {HELD_VARIABLE: self.held, PROBE_VARIABLE: knobs_only(self.knobs.to_dict())}
        found |= {CONFIG_VARIABLE: str(self.config)} if self.config else {}
        return {name: value for name, value in inherited.items() if name != CONFIG_VARIABLE} | found


def _spelt(value: object) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def find_command(words: Sequence[str]) -> None:
    """Sees that there is a command.

    Raises:
        UserError: none is given, or it is not found.
    """
    if not words:
        raise UserError("no COMMAND is given", "write it after --, e.g. -- torchrun --nproc-per-node 8 train.py")
    if not _PLACEHOLDER.search(words[0]) and shutil.which(words[0]) is None:
        raise UserError(
            f"COMMAND {words[0]}: command not found", "is it on PATH, and executable? give its whole path otherwise"
        )


def check_command(words: Sequence[str]) -> None:
    """Before anything is measured.

    Raises:
        UserError: no command, one that is not there, or a placeholder that is not known.
    """
    find_command(words)
    known = (*OWN_PLACEHOLDERS, *KNOB_NAMES)
    for name in _PLACEHOLDER.findall(" ".join(words)):
        if name not in (*known, OF_VERIFY):
            raise UserError(f"COMMAND has {{{name}}}: no such placeholder", nearest(name, known))


def uses_config(words: Sequence[str]) -> bool:
    return "config" in _PLACEHOLDER.findall(" ".join(words))


def check_exports(target: str, contenders: Mapping[str, Best], words: Sequence[str]) -> None:
    """That each config which may hold can be handed over.

    Raises:
        UserError: no such exporter; the command takes a file, and one of the configs makes none.
    """
    if target not in EXPORTERS:
        raise UserError(f"export to {target!r}: no such trainer", nearest(target, EXPORTERS))
    for role, best in contenders.items():
        if best.knobs.engine in EXPORTERS[target].engines:
            export(target, best)
        elif uses_config(words):
            raise UserError(
                f"COMMAND takes {{config}}, and the {role} is of {best.knobs.engine}, which {target} has not",
                "take the knobs one by one instead, e.g. {engine} and {micro_batch_size}: `autotune confirm --help`",
            )


def write_export(exported: Exported, folder: Path) -> tuple[Path, str]:
    """Writes the files; where the run's folder cannot be written, aside, as the real run must not wait for that.

    Returns:
        The first file, and what went wrong.
    """
    try:
        return _write_files(exported, folder), ""
    except OSError as error:
        aside = Path(tempfile.mkdtemp(prefix="autotune-confirm-"))
        return _write_files(exported, aside), f"{folder}: {error.strerror}: the config lies in {aside}, on this machine"


def _write_files(exported: Exported, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in exported.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder / next(iter(exported.files))


def start(words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Becomes the command: its process, terminal, signals and exit code are this one's.

    Raises:
        InfrastructureError: the system does not start it.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    as_at_the_start()
    try:
        os.execvpe(words[0], list(words), dict(environment))
    except OSError as error:
        raise InfrastructureError(
            f"COMMAND {words[0]}: {error.strerror}", "the config is exported all the same"
        ) from error
