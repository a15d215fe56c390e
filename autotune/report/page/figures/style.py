"""What the figures share: units of the speed axis, colours that read on dark and light, and text that is only text."""

from __future__ import annotations

import base64
import html
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from autotune.errors import printable
from autotune.report.facts import Summary
from autotune.report.page.words import mfu_name
from autotune.report.text import percent, rate

BASELINE, BEST, OTHER, FAILED, LOSS = "#8b93a1", "#3b7dd8", "#7fa8dc", "#d9822b", "#c8553d"
PARTS = {
    "compute": "#3b7dd8",
    "exposed_comm": "#d9822b",
    "exposed_copy": "#c9a227",
    "data_wait": "#b0529f",
    "optimizer": "#2f9e8f",
    "idle": "#a5abb6",
}
HEIGHT = 380
Content = dict[str, Any]
"""Of a figure or a part of it, as plotly.js takes it. Plain, since plotly's own classes take seconds to check and copy
thousands of points; a test has them check each figure."""
Array = npt.NDArray[np.float32]
WRAPPED = 46
"""Characters of a line of hover text."""


def safe(text: str) -> str:
    """Plotly takes some tags in its text; a run's words have none."""
    return html.escape(printable(text), quote=False)


def wrapped(text: str, width: int = WRAPPED) -> str:
    return "<br>".join(safe(line) for line in textwrap.wrap(text, width) or [""])


@dataclass(frozen=True)
class Speed:
    """The unit of speed on the page: MFU where it is known, else tokens/s per rank."""

    is_mfu: bool
    title: str

    def of(self, tokens_per_s: float | None, mfu: float | None) -> float | None:
        if not self.is_mfu:
            return tokens_per_s
        return None if mfu is None else 100 * mfu

    def axis(self, **more: Any) -> dict[str, Any]:
        return axis(self.title, ticksuffix=" %" if self.is_mfu else "", rangemode="tozero", **more)


def speed(summary: Summary) -> Speed:
    is_mfu = any(one.mfu is not None for one in summary.trials)
    return Speed(is_mfu, mfu_name(summary) if is_mfu else "tokens/s per rank")


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title, "standoff": 10}, "automargin": True, "zeroline": False} | more


def figure(traces: Sequence[Content], height: int = HEIGHT, **layout: Any) -> Content:
    """With the margins and the legend of all of them."""
    return {
        "data": list(traces),
        "layout": {
            "height": height,
            "margin": {"l": 8, "r": 24, "t": 8, "b": 8},
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left"},
            "hoverlabel": {"align": "left"},
            "bargap": 0.35,
        }
        | layout,
    }


def trace(kind: str, **content: Any) -> Content:
    return {"type": kind} | content


def numbers(values: Sequence[float | None] | Array) -> Content:
    """As plotly takes typed arrays: a third of the size that thousands of them have as text. None is a gap."""
    packed = np.asarray(values, np.float32)
    return {"dtype": "f4", "bdata": base64.b64encode(packed.tobytes()).decode()}


def line_at(x: float, **line: Any) -> Content:
    """A shape: upright, over the whole height."""
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line}


def figures_text(tokens_per_s: float | None, mfu: float | None) -> str:
    shown = f"{rate(tokens_per_s)} tokens/s"
    return shown if mfu is None else f"MFU {percent(mfu)}, {shown}"


def memory_unit(most_gib: float) -> tuple[str, float]:
    """Name of the unit, and how many of it a GiB is."""
    return ("MiB", 1024.0) if most_gib < 1 else ("GiB", 1.0)
