"""The screen while a run goes on: a live table on a terminal, one line a trial elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from autotune.errors import printable
from autotune.report.text import count, differences, duration, gib, mfu_label, percent, rate
from autotune.rows import Attempt
from autotune.stages import SCALE, SEARCHED
from trials.outcome import Outcome
from trials.record import Knobs, TrialSpec

SHOWN_ROWS = 24


class Screen(Protocol):
    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def message(self, text: str) -> None: ...

    def baseline_known(self, knobs: Knobs) -> None: ...

    def trial_started(self, spec: TrialSpec, remaining_s: float | None) -> None: ...

    def trial_ended(self, attempt: Attempt, best: Attempt | None) -> None: ...


def make_screen(console: Console) -> LiveScreen | LineScreen:
    return LiveScreen(console) if console.is_terminal else LineScreen(console)


class _Base:
    def __init__(self, console: Console) -> None:
        self.console = console
        self.baseline: dict[str, Any] = {}

    def message(self, text: str) -> None:
        self.console.print(escape(printable(text)), highlight=False, soft_wrap=True)

    def baseline_known(self, knobs: Knobs) -> None:
        self.baseline = knobs.to_dict()

    def settings(self, knobs: Knobs, stage: str) -> str:
        if stage == "baseline" and knobs.custom is not None:
            own = "".join(f", {name} {own}" for name, own in knobs.custom)
            return f"micro {knobs.micro_batch_size}, accum {knobs.grad_accum_steps}{own}"
        if stage == "baseline":
            return (
                f"micro {knobs.micro_batch_size}, accum {knobs.grad_accum_steps}, ckpt {knobs.activation_checkpointing}"
            )
        return differences(knobs.to_dict(), self.baseline)


class LineScreen(_Base):
    """One plain line a trial: for logs and pipes."""

    _remaining_s: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def trial_started(self, spec: TrialSpec, remaining_s: float | None) -> None:
        self._remaining_s = remaining_s

    def trial_ended(self, attempt: Attempt, best: Attempt | None) -> None:
        cells = _cells(attempt, best, _point(attempt) + self.settings(attempt.knobs, attempt.stage))
        notes = [attempt.reason.splitlines()[0][:80]] if attempt.reason else []
        if self._remaining_s is not None:
            notes.append(f"{duration(self._remaining_s)} left")
        end = f"  [{'; '.join(notes)}]" if notes else ""
        best_so_far = f"best {cells['best']:>7}  " if attempt.stage in SEARCHED else ""
        self.message(
            f"{cells['trial']:>4}  {cells['stage']:<9}  {cells['outcome']:<13} {cells['rate']:>8} tokens/s  "
            f"{cells['mfu_label']} {cells['mfu']:>6}  {cells['memory']:>8} memory  "
            f"{best_so_far}{cells['settings']}{end}"
        )


class LiveScreen(_Base):
    """A table that grows, with the present trials and the time left under it."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._rows: list[dict[str, str]] = []
        self._now: dict[int, tuple[TrialSpec, float, float | None]] = {}
        """By trial: its order, when it was started, and the time left then."""
        self._label = "MFU"
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._now = {}
        self._live.stop()

    def trial_started(self, spec: TrialSpec, remaining_s: float | None) -> None:
        self._now = self._now | {spec.trial: (spec, time.monotonic(), remaining_s)}

    def trial_ended(self, attempt: Attempt, best: Attempt | None) -> None:
        self._now = {trial: now for trial, now in self._now.items() if trial != attempt.trial}
        cells = _cells(attempt, best, _point(attempt) + self.settings(attempt.knobs, attempt.stage))
        self._label = cells["mfu_label"]
        self._rows.append(cells)

    def _render(self) -> Group:
        table = Table(box=None, padding=(0, 1), header_style="bold")
        for name, justify in (
            ("trial", "right"),
            ("stage", "left"),
            ("outcome", "left"),
            ("tokens/s per rank", "right"),
            (self._label, "right"),
            ("memory", "right"),
            ("best", "right"),
            ("differs from baseline", "left"),
        ):
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
        for cells in self._rows[-SHOWN_ROWS:]:
            ok = cells["outcome"] == Outcome.OK.value
            style = "green" if cells["is_best"] else "" if ok else "yellow"
            keys = ("trial", "stage", "outcome", "rate", "mfu", "memory", "best", "settings")
            table.add_row(*(Text(cells[key]) for key in keys), style=style)
        return Group(table, *(self._status(*now) for now in self._now.values()))

    def _status(self, spec: TrialSpec, since: float, remaining_s: float | None) -> Text:
        elapsed_s = time.monotonic() - since
        what = "the survey of model and machine"
        if spec.knobs is not None:
            ranks = f" on {count(spec.world_size, 'rank')}" if spec.stage == SCALE else ""
            what = f"trial {spec.trial} ({spec.stage}{ranks}): {self.settings(spec.knobs, spec.stage)}"
        left = "" if remaining_s is None else f"; about {duration(max(0.0, remaining_s - elapsed_s))} left"
        return Text(f"running {what}, {elapsed_s:.0f} s{left}", style="dim")


def _point(attempt: Attempt) -> str:
    """Of a scaling: whose and where."""
    if attempt.stage != SCALE:
        return ""
    ranks, knobs = attempt.row["world_size"], attempt.knobs
    batch = knobs.micro_batch_size * knobs.grad_accum_steps * ranks // knobs.model_parallel_ranks
    return f"{attempt.row.get('role')} on {count(ranks, 'rank')}, batch {batch}: "


def _cells(attempt: Attempt, best: Attempt | None, settings: str) -> dict[str, str]:
    outcome = attempt.outcome.value
    if attempt.outcome is Outcome.OK and not attempt.is_feasible:
        outcome = "over headroom"
    return {
        "trial": str(attempt.trial),
        "stage": attempt.stage,
        "outcome": outcome,
        "rate": rate(attempt.tokens_per_s_per_rank),
        "mfu": percent(attempt.row.get("mfu")),
        "mfu_label": mfu_label(attempt.row.get("peak_source")),
        "memory": gib(attempt.memory_gib),
        # After the search it is the rounds that decide, and a single trial's record says little.
        "best": rate(best.tokens_per_s_per_rank if best and attempt.stage in SEARCHED else None),
        "settings": settings,
        "is_best": "yes" if best is not None and best.trial == attempt.trial else "",
    }
