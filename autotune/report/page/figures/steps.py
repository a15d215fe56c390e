"""Where time goes: changes from the baseline to the winner, parts of a step, ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from autotune.interleaved import Figure
from autotune.report.facts import Summary
from autotune.report.facts.steps import RankTimes
from autotune.report.page.figures.style import BASELINE, BEST, LOSS, PARTS, Content, axis, figure, safe, trace, wrapped
from autotune.report.page.words import seconds
from autotune.report.text import percent
from autotune.waterfall.steps import Waterfall, Worth
from trials.breakdown import FRACTIONS

ROW = 46
"""Pixels of a bar with its label."""
PALE = frozenset({"idle", "exposed_copy"})
"""Parts whose colour takes dark text."""
ROOM = 1.18
"""Of an axis, so that what stands beside the longest bar is on it."""
MANY_RANKS = 64
INTERACTIONS = "what the changes are worth together, less the sum of what they are worth alone"
NARROW = 26
"""Characters of a label beside a bar."""


Bar = tuple[str, str, Worth, str]
"""Its label, how plotly measures it, what it is worth, and a note."""


def waterfall(summary: Summary) -> Content | None:
    """Change on top of change."""
    made = summary.waterfall
    if made is None:
        return None
    grouped = made.not_measurable
    steps: list[Bar] = [(step.label, "relative", step.worth, step.note) for step in made.steps]
    if grouped:
        steps.append((f"not measurable: {grouped.label}", "relative", grouped.worth, ""))
    return _from_baseline_to_best(made, steps)


def alone(summary: Summary) -> Content | None:
    """Each change by itself, and what they do to each other; of one change there is no more to say."""
    made = summary.waterfall
    if made is None or len(made.alone) < 2:
        return None
    steps: list[Bar] = [(one.label, "relative", one.worth, "") for one in made.alone if one.worth is not None]
    return _from_baseline_to_best(made, [*steps, ("interactions", "relative", made.interactions, INTERACTIONS)])


def _from_baseline_to_best(made: Waterfall, steps: Sequence[Bar]) -> Content:
    bars: list[Bar] = [("baseline", "absolute", made.baseline, ""), *steps, ("best", "total", made.winner, "")]
    heights = list(accumulate(worth.tokens_per_s_per_rank.value for _, _, worth, _ in bars[:-1]))
    labels = [wrapped(label, NARROW) for label, _, _, _ in bars]
    values = [worth.tokens_per_s_per_rank for _, _, worth, _ in bars]
    lines = max(label.count("<br>") + 1 for label in labels)
    return figure(
        [
            trace(
                "waterfall",
                orientation="h",
                measure=[kind for _, kind, _, _ in bars],
                y=labels,
                x=[value.value for value in values],
                text=[
                    _level(value) if kind != "relative" else _change(value)
                    for (_, kind, _, _), value in zip(bars, values, strict=True)
                ],
                textposition="outside",
                textangle=0,
                cliponaxis=False,
                hovertext=[_worth(worth, note, kind) for _, kind, worth, note in bars],
                hoverinfo="text",
                increasing={"marker": {"color": BEST}},
                decreasing={"marker": {"color": LOSS}},
                totals={"marker": {"color": BASELINE}},
                connector={"line": {"color": BASELINE, "width": 1}},
            )
        ],
        height=70 + max(ROW, 17 * lines + 14) * len(bars),
        xaxis=axis(
            "tokens/s per rank",
            range=[min(0, ROOM * min(heights)), ROOM * max(heights)],
            nticks=4,
            tickangle=0,
        ),
        yaxis={"autorange": "reversed", "automargin": True},
        showlegend=False,
    )


def _level(value: Figure) -> str:
    return f"{value.value:,.0f}"


def _change(value: Figure) -> str:
    return f"{value.value:+,.0f}"


def _worth(worth: Worth, note: str, kind: str) -> str:
    sign = "+" if kind == "relative" else ""
    lines = [_range("tokens/s", worth.tokens_per_s_per_rank, f"{sign},.0f")]
    if worth.tflops_per_s_per_rank:
        lines.append(_range("TFLOP/s", worth.tflops_per_s_per_rank, f"{sign}.4g"))
    if worth.mfu:
        lines.append(_range("% MFU", worth.mfu.times(100), f"{sign}.1f"))
    return "<br>".join([*lines, *([wrapped(note)] if note else [])])


def _range(unit: str, value: Figure, form: str) -> str:
    interval = "" if value.low is None or value.high is None else f" ({value.low:{form}} to {value.high:{form}})"
    return f"{value.value:{form}} {unit}{interval}"


def step_parts(summary: Summary) -> Content | None:
    told = summary.step_parts
    if not told:
        return None
    labels = [f"{wrapped(one.label, NARROW)}<br>trial {one.trial}" for one in told]
    traces = [
        trace(
            "bar",
            orientation="h",
            y=labels,
            x=[100 * one.fractions[name] for one in told],
            name=name.replace("_", " "),
            marker={"color": PARTS[name]},
            text=[percent(one.fractions[name]) if one.fractions[name] >= 0.06 else "" for one in told],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            insidetextfont={"color": "#1c2330" if name in PALE else "#ffffff"},
            hovertemplate=f"{name.replace('_', ' ')}: %{{x:.1f}} % of the step<extra></extra>",
        )
        for name in FRACTIONS
    ]
    lines = max(label.count("<br>") + 1 for label in labels)
    return figure(
        traces,
        height=70 + max(ROW, 17 * lines + 14) * len(told),
        barmode="stack",
        uniformtext={"mode": "hide", "minsize": 10},
        xaxis=axis("share of a profiled step", ticksuffix=" %", range=[0, 100], dtick=25, tickangle=0),
        yaxis={"autorange": "reversed", "automargin": True},
        showlegend=False,  # the page has one, which wraps on a phone
    )


def rank_times(summary: Summary) -> Content | None:
    """Mean step time of each rank, with its fastest and slowest step, and the work in it."""
    told = [one for one in summary.rank_times if len(one.ranks) > 1]
    if not told:
        return None
    colours = {"baseline": BASELINE, "best": BEST}
    traces = [timed for one in told for timed in _of_ranks(one, colours[one.label])]
    num_ranks = max(len(one.ranks) for one in told)
    ticks = {"dtick": 1} if num_ranks <= 16 else {}
    return figure(
        traces,
        height=300,
        xaxis=axis("rank", range=[-0.6, num_ranks - 0.4], **ticks),
        yaxis=axis("seconds a step", rangemode="tozero"),
        hovermode="closest",
    )


def drift(summary: Summary) -> Content | None:
    """Step time over the timed blocks, as they came."""
    told = [one for one in summary.rank_times if len(one.block_times_s) > 1]
    if not told:
        return None
    colours = {"baseline": BASELINE, "best": BEST}
    traces = [
        trace(
            "scatter",
            x=list(range(1, len(one.block_times_s) + 1)),
            y=one.block_times_s,
            mode="lines+markers",
            name=f"{one.label}, trial {one.trial}",
            line={"color": colours[one.label], "width": 2},
            hovertemplate="block %{x}: %{y:.3s}s a step<extra>" + one.label + "</extra>",
        )
        for one in told
    ]
    few = {"dtick": 1} if max(len(one.block_times_s) for one in told) <= 20 else {}
    return figure(
        traces,
        height=300,
        xaxis=axis("timed block", **few),
        yaxis=axis("seconds a step, slowest rank", rangemode="tozero"),
        hovermode="closest",
    )


def _of_ranks(one: RankTimes, colour: str) -> list[Content]:
    ranks = one.ranks
    shift = 0.08 if one.label == "best" else -0.08
    x = [rank.rank + shift for rank in ranks]
    few = len(ranks) <= MANY_RANKS
    timed = trace(
        "scatter",
        x=x,
        y=[rank.mean_step_s for rank in ranks],
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [rank.max_step_s - rank.mean_step_s for rank in ranks],
            "arrayminus": [rank.mean_step_s - rank.min_step_s for rank in ranks],
            "thickness": 1.2,
            "width": 4 if few else 0,
        },
        mode="markers",
        name=f"{one.label}, timed steps",
        marker={"color": colour, "size": 8 if few else 4},
        text=[
            f"<b>{one.label}</b>, rank {rank.rank} on {safe(rank.host)}<br>mean {seconds(rank.mean_step_s)}, "
            f"{seconds(rank.min_step_s)} to {seconds(rank.max_step_s)}"
            for rank in ranks
        ],
        hovertemplate="%{text}<extra></extra>",
    )
    worked = [(at, rank) for at, rank in zip(x, ranks, strict=True) if rank.work_s is not None]
    if not worked:
        return [timed]
    work = trace(
        "scatter",
        x=[at for at, _ in worked],
        y=[rank.work_s for _, rank in worked],
        mode="markers",
        name=f"{one.label}, own work",
        marker={"color": colour, "size": 8 if few else 4, "symbol": "line-ew-open", "line": {"width": 2}},
        text=[f"<b>{one.label}</b>, rank {rank.rank}: {seconds(rank.work_s)} of work" for _, rank in worked],
        hovertemplate="%{text}<extra></extra>",
    )
    return [timed, work]
