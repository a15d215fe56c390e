"""The screen of `autotune export`: which settings the files carry, and what each of the others needs."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.errors import printable
from autotune.export import Best, Exported


def print_exported(console: Console, best: Best, exported: Exported, left: Sequence[str] = ()) -> None:
    """A line a knob that the engine has, those that are lost last; then the notes.

    Args:
        left: knobs that the user's own trainer decides, of which nothing was measured.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("knob", no_wrap=True)
    table.add_column("measured", no_wrap=True)
    table.add_column("exported", no_wrap=True)
    table.add_column("needs", overflow="fold")
    values = {
        name: value for name, value in best.knobs.to_dict().items() if value not in (None, {}) and name not in left
    }
    for name in exported.carried:
        if name in values:
            table.add_row(name, _shown(values[name]), Text("carried", style="green"), "")
    for name, need in exported.lost.items():
        if name not in left:
            table.add_row(name, _shown(values.get(name)), Text("lost", style="yellow"), Text(printable(need)))
    console.print(table)
    if left:
        console.print(Text(f"left to your own trainer, as it was in the trials: {', '.join(left)}"), soft_wrap=True)
    for note in exported.notes:
        console.print(Text(f"note: {printable(note)}"), soft_wrap=True)


def _shown(value: object) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else printable(str(value))
