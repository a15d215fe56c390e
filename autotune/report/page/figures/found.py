"""What the search found: speed against memory, and the best so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune.report.facts import Summary
from autotune.report.facts.progress import Progress
from autotune.report.facts.trials import RAN_OUT, Trial, comparable
from autotune.report.page.figures.style import (
    BASELINE,
    BEST,
    FAILED,
    HEIGHT,
    LOSS,
    OTHER,
    Content,
    Speed,
    axis,
    figure,
    figures_text,
    line_at,
    memory_unit,
    numbers,
    safe,
    speed,
    trace,
)
from autotune.report.page.words import hours_unit
from autotune.report.text import gib
from autotune.stages import BASELINE as BASELINE_STAGE
from autotune.stages import SIDE_BY_SIDE
from trials.outcome import Outcome

MANY = 400
"""Points from which they are drawn small."""
MARKED = ("diamond", "star")
NOT_TRIED = str(Outcome.PREDICTED_OOM)


def speed_and_memory(summary: Summary) -> Content | None:
    """Each trial that ran at what it measured; what ran out of memory where it was predicted."""
    told = comparable(summary.trials)
    unit = speed(summary)
    ran = [one for one in told if one.memory_gib is not None and _height(unit, one) is not None]
    placed = [one for one in told if one.outcome in RAN_OUT | {NOT_TRIED} and _predicted(unit, one) is not None]
    if not ran:
        return None
    limit = summary.environment.memory_limit_gib
    most = max([one.memory_gib or 0.0 for one in ran] + ([limit] if limit else []))
    name, per_gib = memory_unit(most)
    size = 6 if len(told) > MANY else 9
    best = next((one.settings for one in summary.configs if one.role == "best"), None)
    own = {name: value for name, value in (best or {}).items() if value is not None}
    by_kind = {
        "fits": (
            [one for one in ran if one.fits and one.stage != BASELINE_STAGE and one.settings != own],
            OTHER,
            "circle",
        ),
        "ran, over the limit": ([one for one in ran if not one.fits], LOSS, "circle-open"),
        "baseline": ([one for one in ran if one.fits and one.stage == BASELINE_STAGE], BASELINE, "diamond"),
        "best, each of its runs": ([one for one in ran if one.fits and one.settings == own], BEST, "star"),
    }
    traces: list[Any] = [_front(summary, unit, per_gib)]
    for kind, (ones, colour, symbol) in by_kind.items():
        if ones:
            traces.append(
                _points(
                    kind,
                    [per_gib * (one.memory_gib or 0.0) for one in ones],
                    [_height(unit, one) for one in ones],
                    ones,
                    {
                        "color": colour,
                        "symbol": symbol,
                        "size": size + 3 * (symbol in MARKED),
                        "opacity": 0.85,
                    },
                )
            )
    for kind, ones in {
        "ran out of memory, where predicted": [one for one in placed if one.outcome in RAN_OUT],
        "predicted not to fit, not tried": [one for one in placed if one.outcome == NOT_TRIED],
    }.items():
        if ones:
            symbol = "x" if ones[0].outcome in RAN_OUT else "x-thin-open"
            memory = [per_gib * (one.predicted_memory_gib or 0.0) for one in ones]
            marker = {"color": FAILED, "symbol": symbol, "size": size}
            traces.append(_points(kind, memory, [_predicted(unit, one) for one in ones], ones, marker))
    return figure(
        traces,
        height=HEIGHT + 60,
        xaxis=axis(f"peak memory per rank, {name}", rangemode="tozero"),
        yaxis=unit.axis(),
        hovermode="closest",
        **(_limit(summary, limit, per_gib) if limit is not None else {}),
    )


def _limit(summary: Summary, limit_gib: float, per_gib: float) -> Content:
    """Two lines: the limit, and what is left of it less the headroom."""
    at, usable = per_gib * limit_gib, per_gib * limit_gib * (1 - summary.environment.memory_headroom)
    shapes = [line_at(at, color=LOSS, width=2)]
    if usable < at:
        shapes.append(line_at(usable, color=LOSS, width=1, dash="dot"))
    note = {
        "x": at,
        "y": 0,
        "yref": "paper",
        "text": f"limit {gib(limit_gib)}",
        "textangle": -90,
        "xanchor": "left",
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"color": LOSS},
    }
    return {"shapes": shapes, "annotations": [note]}


def _height(unit: Speed, one: Trial) -> float | None:
    return unit.of(one.tokens_per_s_per_rank, one.mfu)


def _predicted(unit: Speed, one: Trial) -> float | None:
    found = unit.of(one.predicted_tokens_per_s_per_rank, one.predicted_mfu)
    return found if one.predicted_memory_gib is not None else None


def _points(
    name: str, x: Sequence[float], y: Sequence[float | None], ones: Sequence[Trial], marker: dict[str, Any]
) -> Content:
    return trace(
        "scatter",
        x=numbers(x),
        y=numbers(y),
        mode="markers",
        name=name,
        marker=marker,
        customdata=[[one.trial, one.measure_options, "\n".join(one.export_lines)] for one in ones],
        text=[_hover(one) for one in ones],
        hovertemplate="%{text}<extra></extra>",
    )


def _hover(one: Trial) -> str:
    if one.memory_gib is not None:
        figures = f"{figures_text(one.tokens_per_s_per_rank, one.mfu)}<br>{gib(one.memory_gib)} a rank"
    else:
        predicted = figures_text(one.predicted_tokens_per_s_per_rank, one.predicted_mfu)
        figures = f"predicted: {predicted}<br>predicted: {gib(one.predicted_memory_gib)} a rank"
    settings = "<br>".join(safe(line) for line in one.export_lines) or "as baseline"
    return f"<b>trial {one.trial}</b>, {one.stage}, {one.outcome}<br>{figures}<br>{settings}"


def _front(summary: Summary, unit: Speed, per_gib: float) -> Content:
    by_number = {one.trial: one for one in comparable(summary.trials)}
    front = [by_number[number] for number in summary.pareto_trials]
    return trace(
        "scatter",
        x=[per_gib * (one.memory_gib or 0.0) for one in front],
        y=[_height(unit, one) for one in front],
        mode="lines",
        name="Pareto front",
        line={"color": BEST, "width": 2, "shape": "hv"},
        hoverinfo="skip",
    )


def best_so_far(summary: Summary, *, over_hours: bool) -> Content | None:
    """The best of baseline and exploration as it was known, with all attempts and the stages."""
    unit, told = speed(summary), summary.progress
    if not any(one.best_tokens_per_s_per_rank for one in told):
        return None
    x = [one.rank_hours if over_hours else float(number) for number, one in enumerate(told, 1)]
    ran = [index for index, one in enumerate(told) if _speed_of(unit, one) is not None]
    hours = hours_unit(summary)
    traces = [
        trace(
            "scatter",
            x=numbers(x),
            y=numbers([unit.of(one.best_tokens_per_s_per_rank, one.best_mfu) for one in told]),
            mode="lines",
            name="best so far",
            line={"color": BEST, "width": 2.5, "shape": "hv"},
            hoverinfo="skip",
        ),
        trace(
            "scatter",
            x=numbers([x[index] for index in ran]),
            y=numbers([_speed_of(unit, told[index]) for index in ran]),
            mode="markers",
            name="an attempt",
            marker={"color": OTHER, "size": 4 if len(ran) > MANY else 7, "opacity": 0.8},
            text=[_attempt_hover(told[index], hours) for index in ran],
            hovertemplate="%{text}<extra></extra>",
        ),
    ]
    title = f"{hours} of all attempts" if over_hours else "attempts, as they ended"
    shapes: list[Content] = []
    for start, end, stage in _stages(told, x):
        if stage not in (BASELINE_STAGE, SIDE_BY_SIDE):
            shapes.append(
                line_at(start)
                | {
                    "type": "rect",
                    "x1": end,
                    "fillcolor": BASELINE,
                    "opacity": 0.10,
                    "line": {"width": 0},
                    "layer": "below",
                }
            )
        shapes.append(line_at(start, color=BASELINE, width=1, dash="dot"))
    return figure(
        traces,
        height=300,
        xaxis=axis(title, rangemode="tozero"),
        yaxis=unit.axis(),
        hovermode="closest",
        shapes=shapes,
    )


def stage_words(told: Sequence[Progress]) -> list[str]:
    """The stages in the order in which they came, with their attempts: `explore 2 to 13`."""
    spans = _stages(told, [float(number) for number in range(1, len(told) + 1)])
    return [f"{stage} {start + 1:.0f}" + (f" to {end:.0f}" if end > start + 1 else "") for start, end, stage in spans]


def _stages(told: Sequence[Progress], x: Sequence[float]) -> list[tuple[float, float, str]]:
    """Where each stage begins and ends; finalists and others that alternate are one."""
    spans: list[tuple[float, float, str]] = []
    previous = 0.0
    for one, at in zip(told, x, strict=True):
        if spans and spans[-1][2] == one.stage:
            spans[-1] = (spans[-1][0], at, one.stage)
        else:
            spans.append((previous, at, one.stage))
        previous = at
    return spans


def _speed_of(unit: Speed, one: Progress) -> float | None:
    return unit.of(one.tokens_per_s_per_rank, one.mfu)


def _attempt_hover(one: Progress, hours: str) -> str:
    told = figures_text(one.tokens_per_s_per_rank, one.mfu)
    return f"<b>trial {one.trial}</b>, {one.stage}<br>{told}<br>after {one.rank_hours:.3g} {hours}"
