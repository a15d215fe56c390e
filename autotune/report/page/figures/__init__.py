"""The page's figures, as plotly.js takes them. Colours of text and grid are the page's, dark or light: the script sets
them.
"""

from __future__ import annotations

from collections.abc import Callable

from autotune.report.facts import Summary
from autotune.report.page.figures.found import best_so_far, speed_and_memory
from autotune.report.page.figures.knobs import importance, predicted_memory, predicted_step_time, slices
from autotune.report.page.figures.scaling import efficiency
from autotune.report.page.figures.steps import alone, drift, rank_times, step_parts, waterfall
from autotune.report.page.figures.style import Content

FIGURES: dict[str, Callable[[Summary], Content | None]] = {
    "waterfall": waterfall,
    "alone": alone,
    "speed-and-memory": speed_and_memory,
    "best-over-trials": lambda summary: best_so_far(summary, over_hours=False),
    "best-over-hours": lambda summary: best_so_far(summary, over_hours=True),
    "step-parts": step_parts,
    "importance": importance,
    "predicted-memory": predicted_memory,
    "predicted-step-time": predicted_step_time,
    "rank-times": rank_times,
    "drift": drift,
    "scaling": efficiency,
}


def make_figures(summary: Summary) -> dict[str, Content]:
    """Id of its place on the page -> data and layout; a figure that has nothing to show is left out."""
    made = {name: make(summary) for name, make in FIGURES.items()}
    made |= {f"slice-{number}": figure for number, figure in enumerate(slices(summary))}
    return {name: figure for name, figure in made.items() if figure is not None}
