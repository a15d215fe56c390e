"""The screen of `autotune compare`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.compare import Comparison, Ratio
from autotune.errors import printable
from autotune.report.text import percent, rate, value

MOST_SHOWN = 2
"""Of a list."""


def print_comparison(console: Console, found: Comparison) -> None:
    """A beside B, and a line on each throughput."""
    table = Table(title="Best configs", title_justify="left", title_style="bold")
    for name in ("", "A", "B"):
        table.add_column(name, justify="right" if name else "left", overflow="fold", no_wrap=not name)
    table.add_row("run", *(Text(printable(name)) for name in found.names))
    best, baseline = found.ratios
    table.add_row("tokens/s per rank", *map(rate, best.rates))
    table.add_row("MFU", *map(percent, best.mfu))
    table.add_row("of the baseline", *map(rate, baseline.rates))
    for title, pairs in (
        (
            "settings",
            {name: pair for name, pair in found.settings.items() if any(one not in (None, {}) for one in pair)},
        ),
        ("environment", found.environment),
        ("conventions", found.conventions),
        ("job", found.job),
    ):
        if not pairs:
            continue
        table.add_section()
        if title != "settings":
            table.add_row(Text(f"{title}, what differs", style="italic"), "", "")
        for name, (ours, theirs) in pairs.items():
            style = "bold" if ours != theirs else ""
            table.add_row(Text(printable(name)), _cell(ours, style), _cell(theirs, style))
    console.print(table)
    for line in comparison_lines(found):
        console.print(Text(line), soft_wrap=True)


def comparison_lines(found: Comparison) -> list[str]:
    """The ratios with their intervals, and what keeps them from being compared."""
    return [printable(line) for line in [*map(_ratio_line, found.ratios), *found.warnings()]]


def _ratio_line(ratio: Ratio) -> str:
    of = f"B's {ratio.what} against A's"
    if ratio.ratio is None:
        return f"{of}: not known"
    gain = f"{of}: {100 * (ratio.ratio - 1):+.1f} % tokens/s per rank"
    runs = f"{ratio.num_runs[0]} runs of A's, {ratio.num_runs[1]} of B's"
    if ratio.low is None or ratio.high is None:
        return f"{gain} (no interval: {runs})"
    low, high = (f"{100 * (bound - 1):+.1f} %" for bound in (ratio.low, ratio.high))
    same = "; no difference shown" if ratio.low <= 1 <= ratio.high else ""
    return f"{gain} (95 % interval {low} to {high}, unpaired: {runs}){same}"


def _cell(content: Any, style: str) -> Text:
    shown = content
    if isinstance(content, list | tuple):
        shown = ", ".join(map(str, content[:MOST_SHOWN]))
        shown += f" and {len(content) - MOST_SHOWN} more" if len(content) > MOST_SHOWN else ""
    return Text(value(f"{shown:.6g}" if isinstance(shown, float) else shown), style=style)
