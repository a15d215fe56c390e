"""Everything about one config that was measured by hand."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.diagnose import diagnose
from autotune.report.text import SHORT_NAMES, bottleneck_lines, gib, mfu_label, percent, rate, value
from autotune.rows import Attempt, Study
from trials.breakdown import FRACTIONS


def print_sheet(console: Console, study: Study, attempts: list[Attempt]) -> None:
    """Settings asked and applied, figures of the last run with their interval, the spread over all, where time goes."""
    row = attempts[-1].row
    console.print(_settings(row))
    console.print(_figures(study, row))
    if len(attempts) > 1:
        console.print(Text(_spread([attempt.tokens_per_s_per_rank or 0.0 for attempt in attempts])), soft_wrap=True)
    figures = {
        "breakdown": {part: row.get(f"frac_{part}") for part in FRACTIONS} if row.get("frac_compute") else None,
        "bottlenecks": [finding.to_dict() for finding in diagnose(row, study.limits)],
    }
    for line in bottleneck_lines("this config", figures):
        console.print(Text(line), soft_wrap=True)


def _settings(row: dict[str, Any]) -> Table:
    table = Table("setting", "asked", "applied")
    asked, applied = row["knobs"], row["applied"] or {}
    for name in SHORT_NAMES:
        if asked.get(name) is not None:
            table.add_row(name, Text(value(asked[name])), Text(value(applied.get(name))))
    return table


def _figures(study: Study, row: dict[str, Any]) -> Table:
    tokens_per_s, seq_len = row["tokens_per_s_per_rank"], study.job.seq_len
    bounds = row["tokens_per_s_per_rank_low"], row["tokens_per_s_per_rank_high"]

    def with_interval(per_token: float, digits: str) -> str:
        """A rate in proportion to tokens/s."""
        low_high = [format(bound * per_token, digits) for bound in bounds if bound]
        interval = f" (95 % interval of its blocks {' to '.join(low_high)})" if len(low_high) == 2 else ""
        return format(tokens_per_s * per_token, digits) + interval

    tflops, peak = row["model_tflops_per_s_per_rank"], row["peak_tflops_per_s"]
    known_peak = f"{peak:.4g} TFLOP/s per rank in {row['peak_dtype']}, {row['peak_source']}" if peak else "not known"
    flops = row["flops_per_token"]
    figures = {
        "tokens/s per rank": with_interval(1, ",.0f"),
        "samples/s per rank": "-" if seq_len is None else with_interval(1 / seq_len, ".4g"),
        "optimizer step": f"{row['step_time_s']:.4g} s, {row['num_steps']} timed, drift {percent(row['drift'])}",
        "timing": f"{value(row['timing'])} steps{'' if row['loader_sustained'] else ', LOADER NOT SUSTAINED'}",
        "waiting for data": f"{row['data_wait_s']:.3g} s of the timed steps, worst rank",
        "model TFLOP/s per rank": "-" if tflops is None else with_interval(tflops / tokens_per_s, ".4g"),
        mfu_label(row["peak_source"]): f"{percent(row['mfu'])} (half the attention: {percent(row['mfu_causal'])})",
        "HFU": percent(row["hfu"]),
        "peak": known_peak,
    }
    if row["achievable_tflops_per_s"] is not None:
        reached = f"{row['achievable_tflops_per_s']:.4g} TFLOP/s in the model's matmuls"
        figures["share of achievable"] = f"{percent(row['share_of_achievable'])} of {reached}"
    figures |= {
        "FLOPs per token": "not known" if flops is None else f"{flops / 1e6:.4g} M [{row['flops_convention']}]",
        "peak live tensors per rank": gib(row["allocated_gib"]),
        "peak reserved per rank": f"{gib(row['reserved_gib'])} of {gib(row['limit_gib'])}",
        "attention kernel": value(row.get("attention_backend")),
        "on": f"{row['world_size']} ranks, {row['device_name']}, torch {row['torch_version']}",
    }
    table = Table(show_header=False)
    for name, text in figures.items():
        table.add_row(name, Text(text))
    return table


def _spread(rates: list[float]) -> str:
    mean = statistics.fmean(rates)
    return (
        f"{len(rates)} runs: median {rate(statistics.median(rates))} tokens/s per rank, {rate(min(rates))} to "
        f"{rate(max(rates))}, standard deviation {percent(statistics.stdev(rates) / mean)} between runs"
    )
