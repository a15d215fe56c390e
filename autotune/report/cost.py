"""The screen of `autotune cost`: baseline beside best, what is saved, and what the tuning took."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.cost import Cost, TrainingCost
from autotune.errors import printable
from autotune.report.text import rate

_UNITS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))


def print_cost(console: Console, cost: Cost) -> None:
    asked = cost.assumptions
    devices = "GPU" if cost.unit == "GPU-hours" else "rank"
    price = f", {_price(asked.price_per_hour, cost)} a {devices} and hour" if asked.price_per_hour else ""
    title = f"{amount(asked.tokens)} tokens on {asked.num_gpus:,} {devices}s, goodput {asked.goodput:g}{price}"
    table = Table(title=printable(title), title_justify="left", title_style="bold")
    for name in ("", "baseline", "best"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("tokens/s per rank", *(rate(config.tokens_per_s_per_rank) for config in (cost.baseline, cost.best)))
    table.add_row(cost.unit, *(hours(config.hours) for config in (cost.baseline, cost.best)))
    table.add_row("days", *(_days(config) for config in (cost.baseline, cost.best)))
    if asked.price_per_hour:
        table.add_row("money", *(_price(config.money, cost) for config in (cost.baseline, cost.best)))
        table.add_row(
            "per 1e21 useful FLOPs",
            *(_price(config.money_per_1e21_flops, cost) for config in (cost.baseline, cost.best)),
        )
    console.print(table)
    for line in cost_lines(cost):
        console.print(Text(printable(line)), soft_wrap=True)


def cost_lines(cost: Cost) -> list[str]:
    """What is saved, what the tuning took, and what the figures rest on."""
    spent = f"Tuning took {hours(cost.tuning_hours)} {cost.unit} in trials{_in_money(cost.tuning_money, cost)}"
    if cost.saved_hours is None or cost.break_even_tokens is None:
        lines = [f"No saving shown: {cost.why_no_saving}", spent]
    else:
        share = cost.saved_hours / cost.baseline.hours
        lines = [
            f"Saved, at least (lower bound of the gain): {hours(cost.saved_hours)} {cost.unit}"
            f"{_in_money(cost.saved_money, cost)}, {100 * share:.1f} % of the baseline's",
            f"{spent}: paid back after {amount(cost.break_even_tokens)} tokens",
        ]
    return lines + [note[0].upper() + note[1:] for note in cost.notes()]


def amount(number: float) -> str:
    """`1 T`, `300 B`, `12.3 M`."""
    for name, size in _UNITS:
        if number >= size:
            return f"{number / size:.3g}{name}"
    return f"{number:.3g}"


def hours(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _days(config: TrainingCost) -> str:
    return f"{config.days:,.0f}" if config.days >= 100 else f"{config.days:.3g}"


def _price(money: float | None, cost: Cost) -> str:
    if money is None:
        return "-"
    return f"{money:,.0f} {cost.assumptions.currency}" if money >= 100 else f"{money:.3g} {cost.assumptions.currency}"


def _in_money(money: float | None, cost: Cost) -> str:
    return "" if money is None else f" ({_price(money, cost)})"
