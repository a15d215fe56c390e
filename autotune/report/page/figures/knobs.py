"""What each knob did, and how good the predictions were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from autotune.report.facts import Summary
from autotune.report.facts.knobs import Slice, flat, searched
from autotune.report.facts.trials import Trial, comparable, shown
from autotune.report.page.figures.style import (
    BASELINE,
    BEST,
    OTHER,
    Content,
    Speed,
    axis,
    figure,
    figures_text,
    memory_unit,
    numbers,
    safe,
    speed,
    trace,
    wrapped,
)
from autotune.report.text import percent

MANY = 400
MOST_SLICES = 24
"""A space of more knobs that vary has the others in summary.json."""
MOST_UPRIGHT = 6
"""Values whose names stand side by side below a small figure."""
SPREAD = 0.18
"""Of a category's width, over which its points are spread so as not to hide each other."""


def importance(summary: Summary) -> Content | None:
    shares = summary.importance.shares
    if not shares:
        return None
    names = list(shares)
    bars = trace(
        "bar",
        orientation="h",
        y=[wrapped(name, 26) for name in names],
        x=[100 * shares[name] for name in names],
        marker={"color": BEST},
        text=[percent(shares[name]) for name in names],
        textposition="auto",
        hovertemplate="%{x:.1f} %<extra></extra>",
    )
    return figure(
        [bars],
        height=80 + 30 * len(names),
        xaxis=axis("share of the importance", ticksuffix=" %", rangemode="tozero"),
        yaxis={"autorange": "reversed", "automargin": True},
        showlegend=False,
    )


def slices(summary: Summary) -> Iterator[Content]:
    unit = speed(summary)
    tried = [
        (flat(one.settings), height, one.trial)
        for one in searched(summary.trials)
        if one.fits and (height := unit.of(one.tokens_per_s_per_rank, one.mfu)) is not None
    ]
    for one in summary.slices[:MOST_SLICES]:
        yield _slice(one, tried, unit)


def _slice(one: Slice, tried: Sequence[tuple[dict[str, Any], float, int]], unit: Speed) -> Content:
    """A column a value: each trial, and the best."""
    place = {value.value: index for index, value in enumerate(one.values)}
    points = [
        (place[shown(settings[one.knob])], height, number) for settings, height, number in tried if one.knob in settings
    ]
    spread = (
        np.random.default_rng(0).uniform(-SPREAD, SPREAD, len(points)) if len(points) > MANY else np.zeros(len(points))
    )
    trials = trace(
        "scatter",
        x=numbers((np.asarray([x for x, _, _ in points]) + spread).astype(np.float32)),
        y=numbers([y for _, y, _ in points]),
        mode="markers",
        marker={"color": OTHER, "size": 4 if len(points) > MANY else 7, "opacity": 0.7},
        customdata=[number for _, _, number in points],
        hovertemplate="trial %{customdata}: %{y:,.4g}<extra></extra>",
    )
    best = [(place[v.value], unit.of(v.best_tokens_per_s_per_rank, v.best_mfu)) for v in one.values]
    tops = trace(
        "scatter",
        x=[x for x, y in best if y is not None],
        y=[y for _, y in best if y is not None],
        mode="markers",
        marker={"color": BEST, "size": 26, "symbol": "line-ew-open", "line": {"width": 2.5}},
        hoverinfo="skip",
    )
    return figure(
        [trials, tops],
        height=240,
        xaxis=axis(
            safe(one.knob),
            tickmode="array",
            tickvals=list(place.values()),
            ticktext=[_tick(value.value, value.num_out_of_memory) for value in one.values],
            range=[-0.6, len(place) - 0.4],
            **({"tickangle": 0} if len(place) <= MOST_UPRIGHT else {}),
        ),
        yaxis=unit.axis(),
        showlegend=False,
        hovermode="closest",
    )


def _tick(value: str, num_out_of_memory: int) -> str:
    short = value if len(value) <= 16 else f"{value[:15]}..."
    return safe(short) + (f"<br>{num_out_of_memory} OOM" if num_out_of_memory else "")


def predicted_memory(summary: Summary) -> Content | None:
    ran = [one for one in comparable(summary.trials) if one.predicted_memory_gib is not None and one.memory_gib]
    if not ran:
        return None
    unit, per_gib = memory_unit(max(one.memory_gib or 0.0 for one in ran))
    return _against(
        ran,
        f"memory, {unit}",
        lambda one: (per_gib * (one.predicted_memory_gib or 0.0), per_gib * (one.memory_gib or 0.0)),
    )


def predicted_step_time(summary: Summary) -> Content | None:
    ran = [one for one in comparable(summary.trials) if one.predicted_step_time_s is not None and one.step_time_s]
    if not ran:
        return None
    return _against(ran, "step time, s", lambda one: (one.predicted_step_time_s or 0.0, one.step_time_s or 0.0))


def _against(ran: Sequence[Trial], what: str, pair: Callable[[Trial], tuple[float, float]]) -> Content:
    pairs = np.asarray([pair(one) for one in ran], np.float32)
    most = 1.05 * float(pairs.max())
    points = trace(
        "scatter",
        x=numbers(pairs[:, 0]),
        y=numbers(pairs[:, 1]),
        mode="markers",
        marker={"color": OTHER, "size": 4 if len(ran) > MANY else 7, "opacity": 0.8},
        text=[f"<b>trial {one.trial}</b>, {figures_text(one.tokens_per_s_per_rank, one.mfu)}" for one in ran],
        hovertemplate="%{text}<br>predicted %{x:.4g}, measured %{y:.4g}<extra></extra>",
    )
    equal = trace(
        "scatter",
        x=[0, most],
        y=[0, most],
        mode="lines",
        line={"color": BASELINE, "width": 1, "dash": "dash"},
        hoverinfo="skip",
    )
    return figure(
        [equal, points],
        height=300,
        xaxis=axis(f"predicted {what}", range=[0, most]),
        yaxis=axis(f"measured {what}", range=[0, most]),
        showlegend=False,
        hovermode="closest",
    )
