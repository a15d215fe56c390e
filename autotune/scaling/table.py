"""A scaling as tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.errors import printable
from autotune.interleaved import Figure
from autotune.report.tables import bare_table
from autotune.report.text import count, mfu_label, percent
from autotune.scaling.points import Point, Scaling


def print_scaling(console: Console, found: Scaling, peak_source: str) -> None:
    """The points that were measured; apart from them those that are predicted; and who is first on the most ranks."""
    simulated = ", SIMULATED" if found.simulated else ""
    measured = [point for point in found.points if not point.is_predicted]
    predicted = [point for point in found.points if point.is_predicted]
    console.print(_table(f"Scaling{simulated}", measured))
    lines = [line for point in measured for line in point.notes()]
    lines.append(
        f"tokens/s: per rank. {mfu_label(peak_source)}. comm: exposed communication, of a profiled step. efficiency: "
        "tokens/s per rank over that on the fewest ranks; in brackets its 95 % interval. Strong scaling keeps the "
        "global batch, weak scaling each rank's share of it."
    )
    for line in dict.fromkeys(lines):
        console.print(Text(printable(line)), soft_wrap=True)
    if predicted:
        title = f"Predicted for the real run's {count(found.target_world_size, 'rank')}, NOT measured{simulated}"
        console.print(_table(title, predicted))
        console.print(Text("In brackets: what each number of ranks that was measured leads to."), soft_wrap=True)
    if found.prediction_problem:
        console.print(Text(f"Nothing is predicted: {printable(found.prediction_problem)}"), soft_wrap=True)
    if found.ranking:
        console.print(
            Text(f"Ranked on {count(found.ranked_world_size, 'rank')} ({found.ranked_mode} scaling):"), soft_wrap=True
        )
    for ranked in found.ranking:
        ratio = (
            ""
            if ranked.place == 1
            else f": {percent(ranked.ratio_to_first.value)} {_interval(ranked.ratio_to_first)} of the first"
        )
        console.print(Text(printable(f"  {ranked.place}. {ranked.role}{ratio}")), soft_wrap=True)


def _table(title: str, points: list[Point]) -> Table:
    table = bare_table(title)
    for name in ("config", "mode"):
        table.add_column(name, no_wrap=True)
    for name in ("ranks", "s/step", "tokens/s", "MFU", "comm", "efficiency", "runs"):
        table.add_column(name, justify="left" if name == "efficiency" else "right", no_wrap=True)
    for point in points:
        head = (printable(point.role), point.mode, f"{point.world_size:,}")
        if point.tokens_per_s_per_rank is None or point.step_time_s is None:
            table.add_row(*head, *["-"] * 5, "0", style="yellow")
            continue
        table.add_row(
            *head,
            f"{point.step_time_s.value:.3g}",
            f"{point.tokens_per_s_per_rank.value:,.0f}",
            percent(point.mfu.value if point.mfu else None),
            percent(point.exposed_comm_share),
            f"{percent(point.efficiency.value if point.efficiency else None)} {_interval(point.efficiency)}".rstrip(),
            str(point.num_runs) if not point.is_predicted else "-",
        )
    return table


def _interval(figure: Figure | None) -> str:
    if figure is None or figure.low is None or figure.high is None or figure.low == figure.high:
        return ""
    return f"({100 * figure.low:.0f} to {100 * figure.high:.0f})"
