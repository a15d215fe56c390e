"""Efficiency over the number of ranks, with what is predicted drawn apart."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.report.facts import Summary
from autotune.report.page.figures.style import BASELINE, BEST, FAILED, PARTS, Content, axis, figure, safe, trace
from autotune.scaling.points import Point

COLOURS = {"best": BEST, "baseline": BASELINE, "fallback": PARTS["optimizer"]}


def efficiency(summary: Summary) -> Content | None:
    made = summary.scaling
    if made is None:
        return None
    curves: dict[tuple[str, str], list[Point]] = {}
    for point in made.points:
        if point.efficiency is not None:
            curves.setdefault((point.role, point.mode), []).append(point)
    traces = [line for (role, mode), points in curves.items() for line in _curve(role, mode, points)]
    if not traces:
        return None
    ranks = sorted({point.world_size for points in curves.values() for point in points})
    return figure(
        traces,
        height=340,
        xaxis=axis("ranks", type="log", tickmode="array", tickvals=ranks, ticktext=[f"{number:,}" for number in ranks]),
        yaxis=axis("efficiency per rank", ticksuffix=" %", rangemode="tozero"),
        hovermode="closest",
    )


def _curve(role: str, mode: str, points: Sequence[Point]) -> list[Content]:
    measured = [point for point in points if not point.is_predicted]
    predicted = [*measured[-1:], *(point for point in points if point.is_predicted)]
    dash, colour = ("solid" if mode == "weak" else "dot"), COLOURS.get(role, FAILED)
    traces = [_line(f"{safe(role)}, {mode}", measured, colour, dash, "circle")]
    if len(predicted) > 1:
        traces.append(_line(f"{safe(role)}, {mode}, predicted", predicted, colour, "dash", "circle-open"))
    return traces


def _line(name: str, points: Sequence[Point], colour: str, dash: str, symbol: str) -> Content:
    found = [(point, point.efficiency) for point in points if point.efficiency is not None]
    return trace(
        "scatter",
        x=[point.world_size for point, _ in found],
        y=[100 * share.value for _, share in found],
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [100 * (share.high - share.value) if share.high is not None else 0 for _, share in found],
            "arrayminus": [100 * (share.value - share.low) if share.low is not None else 0 for _, share in found],
            "thickness": 1.2,
        },
        mode="lines+markers",
        name=name,
        line={"color": colour, "width": 2, "dash": dash},
        marker={"symbol": symbol, "size": 8},
        hovertemplate="%{x:,} ranks: %{y:.1f} %<extra>" + name + "</extra>",
    )
