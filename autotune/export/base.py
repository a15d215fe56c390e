"""What an exporter is given and what it hands back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

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
    seq_len: int
    """Tokens per sequence."""
    evidence: list[str]
    """Lines for the header: what was measured, where and when."""

    @property
    def reduce_dtype(self) -> str:
        """`fp32` or `bf16`: of the gradient reduction."""
        return self.knobs.reduce_dtype or "fp32"

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step over all ranks."""
        return self.knobs.micro_batch_size * self.knobs.grad_accum_steps * self.world_size


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


Exporter = Callable[[Best], Exported]


def carried_without(lost: Iterable[str]) -> tuple[str, ...]:
    """All knobs but those in `lost`, in their usual order."""
    gone = set(lost)
    return tuple(name for name in KNOB_NAMES if name not in gone)


def header(best: Best, title: str) -> list[str]:
    """The first lines of every exported file, without comment signs."""
    return [
        f"{title}, written by {PRODUCT}.",
        f"For {best.world_size} ranks, {best.precision}, and {best.global_batch_size} sequences of "
        f"{best.seq_len} tokens per optimizer step over all ranks.",
        *best.evidence,
    ]


def comment(lines: Iterable[str]) -> str:
    """`lines` as `#` comments, ending in a newline; text with line breaks stays inside the comment."""
    return "".join(f"# {part}".rstrip() + "\n" for line in lines for part in line.splitlines() or [""])
