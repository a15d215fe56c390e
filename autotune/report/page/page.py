"""Puts the page together: the template, its style and script, the figures, and plotly.js."""

from __future__ import annotations

import importlib.resources
import shlex
from typing import Any

import jinja2
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from autotune.report.cost import cost_lines
from autotune.report.facts import Summary
from autotune.report.facts.configs import RATING_CAVEAT
from autotune.report.page import words
from autotune.report.page.figures import make_figures
from autotune.report.page.figures.found import stage_words
from autotune.report.page.figures.style import PARTS
from autotune.report.text import json_safe, percent

MOST_FAILURES = 50
"""Causes that the page lists; summary.json has all of them."""


def make_page(summary: Summary, shown_folder: str) -> str:
    """HTML, complete.

    Args:
        shown_folder: the run's folder, as its commands are written on the page.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("autotune.report.page", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= words.FILTERS
    figures = make_figures(summary)
    content: dict[str, Any] = {
        "s": summary,
        "figures": figures.keys(),
        "sentence": words.sentence(summary),
        "knob_rows": words.knob_rows(summary),
        "figure_rows": words.figure_rows(summary),
        "environment_rows": words.environment_rows(summary),
        "conventions": words.conventions(summary),
        "mfu_label": words.mfu_name(summary),
        "hours_unit": words.hours_unit(summary),
        "rating_caveat": RATING_CAVEAT,
        "folder": shlex.quote(shown_folder),
        "parts": PARTS,
        "ranks_to_scale": words.ranks_to_scale(summary.environment.world_size),
        "stages": stage_words(summary.progress),
        "cost_lines": cost_lines(summary.cost) if summary.cost else [],
        "percent_of": percent,
        "failures": summary.failures[:MOST_FAILURES],
        # Ours, and safe as they are; the figures hold words of the run, and are escaped for a script element.
        "style": Markup(_text("style.css")),
        "script": Markup(_text("page.js")),
        "plotly": Markup(get_plotlyjs()),
        "figures_json": htmlsafe_json_dumps(json_safe(figures)),
        "measure_json": htmlsafe_json_dumps(f"autotune measure {shlex.quote(f'{shown_folder}/job.yaml')}"),
    }
    return environment.get_template("page.html").render(content)


def _text(name: str) -> str:
    return (importlib.resources.files("autotune.report.page") / name).read_text(encoding="utf-8")
