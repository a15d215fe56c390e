"""A waterfall as a table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.errors import printable
from autotune.interleaved import Figure
from autotune.report.tables import bare_table
from autotune.report.text import count, mfu_label
from autotune.waterfall.steps import Step, Waterfall, Worth


def print_waterfall(console: Console, made: Waterfall, peak_source: str) -> None:
    """From the baseline to the winner, and what each change is worth by itself."""
    title = "Waterfall" + (", SIMULATED" if made.simulated else "") + ("" if made.is_complete else " (not complete)")
    console.print(_table(title, made, peak_source))
    notes = [f"{step.label}: {'one step; ' * (len(step.changes) > 1)}{step.note}" for step in _bars(made) if step.note]
    if len(made.alone) > 1:
        notes.append("Each change by itself, on the baseline:")
        beyond = "" if all(one.worth for one in made.alone) else " (with what does not run alone)"
        for one in made.alone:
            what = (
                _change(one.worth.tokens_per_s_per_rank) + " tokens/s" if one.worth else f"did not run: {one.problem}"
            )
            notes.append(f"  {one.label}: {what}")
        together = _change(made.interactions.tokens_per_s_per_rank)
        notes.append(f"  interactions, the total less their sum{beyond}: {together} tokens/s")
    low, high = (f"{100 * end:+.1f} %" if end is not None else "-" for end in (made.gain.low, made.gain.high))
    notes.append(
        f"Best against baseline: {100 * made.gain.value:+.1f} % (95 % interval {low} to {high}), "
        f"{count(made.num_rounds, 'interleaved round')}"
    )
    for note in notes:
        console.print(Text(printable(note)), soft_wrap=True)


def _bars(made: Waterfall) -> list[Step]:
    return [*made.steps, *([made.not_measurable] if made.not_measurable else [])]


def _table(title: str, made: Waterfall, peak_source: str) -> Table:
    table = bare_table(title)
    table.add_column("per rank")
    for name in ("tokens/s", "95 % interval", "TFLOP/s", mfu_label(peak_source)):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("baseline", *_levels(made.baseline))
    for step in made.steps:
        table.add_row(Text(printable(step.label)), *_changes(step.worth))
    if made.not_measurable is not None:
        label = f"not measurable: {made.not_measurable.label}"
        table.add_row(Text(printable(label), style="dim"), *_changes(made.not_measurable.worth))
    table.add_row("best", *_levels(made.winner), style="bold")
    return table


def _levels(worth: Worth) -> list[str]:
    tflops, mfu = worth.tflops_per_s_per_rank, worth.mfu
    return [
        f"{worth.tokens_per_s_per_rank.value:,.0f}",
        "",
        f"{tflops.value:.4g}" if tflops else "-",
        f"{100 * mfu.value:.1f} %" if mfu else "-",
    ]


def _changes(worth: Worth) -> list[str]:
    tflops, mfu, tokens = worth.tflops_per_s_per_rank, worth.mfu, worth.tokens_per_s_per_rank
    return [
        f"{tokens.value:+,.0f}",
        _interval(tokens),
        f"{tflops.value:+.3g}" if tflops else "-",
        f"{100 * mfu.value:+.1f} pts" if mfu else "-",
    ]


def _interval(figure: Figure) -> str:
    return "-" if figure.low is None or figure.high is None else f"{figure.low:+,.0f} to {figure.high:+,.0f}"


def _change(figure: Figure) -> str:
    return f"{figure.value:+,.0f} ({_interval(figure)})"
