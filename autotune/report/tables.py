"""Tables printed once: the result of a run, and a run or a trial looked at later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.endurance import endurance_lines
from autotune.errors import printable
from autotune.report.text import (
    SHORT_NAMES,
    bottleneck_lines,
    count,
    differences,
    gib,
    is_kept,
    loader_advice,
    mfu_label,
    noise_advice,
    percent,
    rate,
    timing,
    timing_lines,
    value,
)
from autotune.stages import baseline_settings
from trials.record import COMPOSED

ALWAYS_SHOWN = frozenset(list(SHORT_NAMES)[: list(SHORT_NAMES).index("engine") + 1])


def bare_table(title: str) -> Table:
    """Without lines, so that many columns fit a narrow screen."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 1),
        collapse_padding=True,
        pad_edge=False,
    )


def print_best(console: Console, best: dict[str, Any]) -> None:
    """The content of best.yaml: baseline beside best, and the settings to copy."""
    baseline, evidence = best["baseline"], best["evidence"]
    simulated = best["fingerprint"].get("simulated")
    state = (", SIMULATED" if simulated else "") + ("" if best["complete"] else " (the run has not ended)")
    table = Table(title=f"Result{state}", title_justify="left", title_style="bold")
    for name in ("", "baseline", "best"):
        table.add_column(name, justify="left" if not name else "right")
    for label, left, right in _figures(baseline, evidence, best["conventions"]):
        table.add_row(label, left, right)
    gain = best["gain"]
    if gain:
        low, high = (f"{100 * (gain[key] - 1):+.1f} %" for key in ("low", "high"))
        whose = "gain of the config compared" if is_kept(best) else "gain"
        table.add_row(f"{whose}, 95 % interval", "", f"{100 * (gain['ratio'] - 1):+.1f} % ({low} to {high})")
    table.add_section()
    usual = baseline["settings"].get("custom") or {}
    own = [(name, value(ours), value(usual.get(name))) for name, ours in (best["settings"].get("custom") or {}).items()]
    for name, ours, theirs in own:
        table.add_row(name, Text(theirs), Text(ours, style="bold" if ours != theirs else ""))
    for name in SHORT_NAMES:
        settings = best["settings"].get(name), baseline["settings"].get(name)
        if settings == (None, None) or (name not in ALWAYS_SHOWN and settings[0] == settings[1]):
            continue  # a knob of another engine, or one that few touch
        ours, theirs = (value(setting) for setting in settings)
        table.add_row(name, Text(theirs), Text(ours, style="bold" if ours != theirs else ""))
    console.print(table)
    for line in _below(best):
        console.print(line, soft_wrap=True)


def _below(best: dict[str, Any]) -> Iterator[Text]:
    """What bounds the configs, the verdict, and what to know of it."""
    baseline, evidence = best["baseline"], best["evidence"]
    shown = {"baseline": baseline} | ({"best": evidence} if evidence["trial"] != baseline["trial"] else {})
    for name, figures in shown.items():
        for line in [*timing_lines(name, figures), *bottleneck_lines(name, figures)]:
            yield Text(line)
    yield Text(f"Verdict: {value(best['verdict'])}", style="bold")
    if best["gain"] and is_kept(best):
        compared = differences(best["gain"]["settings"], baseline["settings"])
        yield Text(f"Compared with the baseline, the fastest in the search: {compared}")
    for line in endurance_lines(best["endurance"]) if best.get("endurance") else []:
        yield Text(line)
    if best.get("confirmed"):
        yield Text(confirmed_line(best["confirmed"]))
    for advice in (noise_advice(best), loader_advice(best)):
        if advice:
            yield Text(advice)


def confirmed_line(confirmed: dict[str, Any]) -> str:
    """What `autotune confirm` found last, from best.yaml."""
    own = confirmed["tokens_per_s_per_rank"]
    figure = f", {rate(own)} tokens/s per rank" if own else ""
    ranks = count(confirmed["world_size"], "rank")
    return f"Confirmed on {ranks}, {confirmed['at'][:10]}: {confirmed['held']} held{figure}: {value(confirmed['why'])}"


def _figures(baseline: dict[str, Any], best: dict[str, Any], conventions: dict[str, Any]) -> list[tuple[str, str, str]]:
    label, limit = mfu_label(conventions["peak_source"]), gib(conventions["limit_gib"])
    shares = [figures.get("share_of_achievable") for figures in (baseline, best)]
    achievable = [("share of achievable", percent(shares[0]), percent(shares[1]))] if any(shares) else []
    found = [
        ("tokens/s per rank", rate(baseline["tokens_per_s_per_rank"]), rate(best["tokens_per_s_per_rank"])),
        (label, percent(baseline["mfu"]), percent(best["mfu"])),
        ("HFU", percent(baseline["hfu"]), percent(best["hfu"])),
        *achievable,
        ("peak live tensors per rank", gib(baseline["allocated_gib"]), gib(best["allocated_gib"])),
        ("peak reserved per rank", gib(baseline["reserved_gib"]), gib(best["reserved_gib"])),
        ("memory limit per rank", limit, limit),
    ]
    # A trainer of one's own has some that nobody knows; that no MFU is known is worth a row.
    return [row for row in found if row[0] == label or row[1:] != ("-", "-")]


NARROW = 120
"""Columns of a terminal below which the list of trials leaves out what `--trial` shows."""


def print_trials(console: Console, rows: list[dict[str, Any]]) -> None:
    """All attempts, a line each."""
    baseline = baseline_settings(rows)
    source = next((row["peak_source"] for row in rows if row["peak_source"]), None)
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "trial": lambda row: str(row["trial"]) + (f".{row['attempt']}" if row["attempt"] else ""),
        "stage": lambda row: value(row["stage"]),
        "outcome": lambda row: value(row["outcome"]),
        "tokens/s per rank": lambda row: rate(row["tokens_per_s_per_rank"]),
        mfu_label(source): lambda row: percent(row["mfu"]),
    }
    if console.width >= NARROW:
        columns |= {
            "HFU": lambda row: percent(row["hfu"]),
            "live": lambda row: gib(row["allocated_gib"]),
            "reserved": lambda row: gib(row["reserved_gib"]),
        }
    if len({row["world_size"] for row in rows}) > 1:  # confirmed, or scaled
        columns["ranks"] = lambda row: value(row["world_size"])
    if any(row.get("timing") == COMPOSED for row in rows):
        columns["timing"] = timing
    columns["differs from baseline"] = lambda row: differences(row["knobs"], baseline)
    title = "SIMULATED: nothing was measured" if any(row["simulated"] for row in rows) else None
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), header_style="bold")
    for name in columns:
        text = name in ("stage", "outcome", "timing", "differs from baseline")
        table.add_column(name, justify="left" if text else "right", no_wrap=name in ("stage", "outcome"))
    for row in rows:
        table.add_row(*(Text(cell(row)) for cell in columns.values()))
    console.print(table)


def print_trial(console: Console, row: dict[str, Any]) -> None:
    """Every field of one attempt."""
    table = Table(show_header=False, box=None, padding=(0, 1))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, content in row.items():
        if isinstance(content, dict):
            shown = ", ".join(f"{k} {_number(v)}" for k, v in content.items())
        elif isinstance(content, list) and content and isinstance(content[0], list):
            shown = f"{len(content)} ranks x {len(content[0])}"
        elif isinstance(content, list) and content and isinstance(content[0], dict):
            shown = "; ".join(", ".join(f"{k} {_number(v)}" for k, v in part.items()) for part in content)
        elif isinstance(content, list):
            shown = ", ".join(_number(v) for v in content)
        else:
            shown = _number(content)
        table.add_row(name, Text(printable(shown)))
    console.print(table)


def _number(content: Any) -> str:
    return f"{content:.6g}" if isinstance(content, float) else value(content)
