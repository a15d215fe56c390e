"""What an exporter is given and what it hands back."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trials.record import KNOB_NAMES, Knobs

PRODUCT = "fsdp-autotune"


@dataclass(frozen=True)
class Best:
    """The settings to hand over, and what they were measured on."""

    knobs: Knobs
    precision: str
    """`bf16` (bf16 compute and gathers, fp32 master weights) or `fp32`."""
    world_size: int
    """Ranks of the real run."""
    seq_len: int | None
    """Tokens per sequence; None: known to the user's own trainer only."""
    evidence: list[str]
    """Lines for the header: what was measured, where and when."""

    @property
    def reduce_dtype(self) -> str:
        """`fp32` or `bf16`: of the gradient reduction."""
        return self.knobs.reduce_dtype or "fp32"

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step over all ranks."""
        steps = self.knobs.micro_batch_size * self.knobs.grad_accum_steps
        return steps * self.world_size // self.knobs.model_parallel_ranks


@dataclass(frozen=True)
class Exported:
    """Files in a trainer's own format. Every knob is either carried by them or named as lost."""

    files: dict[str, str]
    """File name -> text."""
    carried: tuple[str, ...]
    """Knobs that hold in the trainer with these files as they are."""
    lost: dict[str, str]
    """Knob -> one sentence with the line to write in the training script; also a comment in a file."""
    notes: tuple[str, ...] = ()
    """Differences from what was measured that are no knob; also comments in a file."""

    def __post_init__(self) -> None:
        assert sorted([*self.carried, *self.lost]) == sorted(KNOB_NAMES), "carried and lost must part the knobs"


Fixed = Mapping[str, tuple[Any, ...]]
"""Knob -> the values that a trainer can be handed."""


@dataclass(frozen=True)
class Exporter:
    """One trainer: how it is handed settings, and what it decides itself."""

    make: Callable[[Best], Exported]
    checked: Mapping[str, str]
    """Distribution -> series of versions, as `2.6`, whose meaning of the keys was checked."""
    engines: Mapping[str, Fixed]
    """The engines that the trainer has, each with the knobs whose behaviour it fixes; `export_for` pins them before
    the search. A knob that a line in the training script sets is not fixed."""
    bf16_reduces_in: Literal["fp32", "bf16"] | None = None
    """The dtype of the gradient reduction under bf16, where the trainer decides it; None: as it is told."""

    def fixed(self, engine: str) -> Fixed:
        """What `export_for` pins; nothing for an engine that the trainer has not."""
        return self.engines.get(engine, {})

    @property
    def warnings(self) -> tuple[str, ...]:
        """One for each package of the trainer that is installed here in a version that was not checked."""
        return unchecked(self.checked)


def unchecked(checked: Mapping[str, str]) -> tuple[str, ...]:
    """What to say of the packages in `checked` that are installed here in another version."""
    found = []
    for package, series in checked.items():
        installed = _installed(package)
        if installed is not None and not f"{installed}.".startswith(f"{series}."):
            found.append(
                f"WARNING: {package} {installed} is installed here, and what its keys mean was checked with {series} "
                "only: see that the settings arrive before you rely on them."
            )
    return tuple(found)


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def carried_without(lost: Iterable[str]) -> tuple[str, ...]:
    """All knobs but those in `lost`, in their usual order."""
    gone = set(lost)
    return tuple(name for name in KNOB_NAMES if name not in gone)


def header(best: Best, title: str, checked: Mapping[str, str]) -> list[str]:
    """The first lines of every exported file, without comment signs."""
    versions = " and ".join(f"{package} {series}" for package, series in checked.items())
    of_tokens = f" of {best.seq_len} tokens" if best.seq_len else ""
    return [
        f"{title}, written by {PRODUCT}.",
        f"For {best.world_size} ranks, {best.precision}, and {best.global_batch_size} sequences{of_tokens} "
        "per optimizer step over all ranks.",
        *best.evidence,
        *([f"What each key does was checked with {versions}."] if checked else []),
        *unchecked(checked),
    ]


TO_WRITE = ("Not in this file; write it in the training script (`layers`: the model's list of blocks):",)
OTHER = "Other than measured, though no knob:"


def remarks(lost: Mapping[str, str], notes: Iterable[str] = (), to_write: Sequence[str] = TO_WRITE) -> list[list[str]]:
    """What an exported file says beside its keys: the knobs that are lost, then the notes; no part for none."""
    parts = (
        [*to_write, *(f"- {name}: {need}" for name, need in lost.items())] if lost else [],
        [OTHER, *(f"- {note}" for note in notes)] if notes else [],
    )
    return [part for part in parts if part]


def remarks_text(*args: Any, **kwargs: Any) -> str:
    """`remarks` as comments, an empty line between the parts."""
    return "\n".join(comment(part) for part in remarks(*args, **kwargs))


def comment(lines: Iterable[str]) -> str:
    """`lines` as `#` comments, ending in a newline; text with line breaks stays inside the comment."""
    return "".join(f"# {part}".rstrip() + "\n" for line in lines for part in line.splitlines() or [""])
