"""The page's text: filters of its template, and the tables that need more than one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from markupsafe import Markup, escape

from autotune.errors import printable
from autotune.interleaved import Figure
from autotune.report.cost import amount, hours
from autotune.report.facts import Summary
from autotune.report.facts.configs import Config
from autotune.report.facts.environment import Environment
from autotune.report.facts.trials import shown
from autotune.report.text import SHORT_NAMES, count, drift_words, duration, gib, mfu_label, percent, rate


def signed_percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:+.1f} %"


def signed(number: float | None, form: str = ",.0f") -> str:
    return "-" if number is None else f"{number:+{form}}"


def interval(figure: Figure, form: Callable[[float | None], str]) -> str:
    return "-" if figure.low is None or figure.high is None else f"{form(figure.low)} to {form(figure.high)}"


def setting(value: Any) -> str:
    return "-" if value is None else printable(shown(value))


def words(name: str) -> str:
    """`frac_exposed_comm` as people say it."""
    return name.replace("_", " ")


def seconds(number: float | None) -> str:
    if number is None:
        return "-"
    return f"{1000 * number:.3g} ms" if number < 1 else f"{number:.3g} s"


def minute(iso: str | None) -> str:
    """`2026-11-30 08:59 UTC`, or with whatever offset it has; what is no time as it is."""
    try:
        return "" if iso is None else f"{datetime.fromisoformat(iso):%Y-%m-%d %H:%M %Z}"
    except ValueError:
        return str(iso)


def spanned(numbers: list[int], most: int = 12) -> str:
    """`3, 5, 8 and 40 more`."""
    listed = ", ".join(map(str, numbers[:most]))
    return listed if len(numbers) <= most else f"{listed} and {len(numbers) - most:,} more"


def unbroken(form: Callable[..., str]) -> Callable[..., str]:
    """A number stays beside its unit."""
    return lambda *arguments: form(*arguments).replace(" ", "\N{NO-BREAK SPACE}")


def points(fraction: float | None) -> str:
    """A difference of two percentages."""
    return "-" if fraction is None else f"{100 * fraction:+.1f} points"


def code_marked(text: str) -> Markup:
    """What stands between backticks is code; all of it is escaped."""
    parts = str(escape(printable(text))).split("`")
    return Markup("".join(f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(parts)))


def global_batch(told: Environment) -> str:
    """In sequences, and in tokens where their length is known."""
    tokens = f" = {told.global_batch_tokens:,} tokens" if told.global_batch_tokens else ""
    return f"{told.global_batch_size:,} sequences{tokens} per optimizer step"


FILTERS: dict[str, Callable[..., str]] = {
    "global_batch": global_batch,
    "code_marked": code_marked,
    "points": unbroken(points),
    "amount": amount,
    "count": count,
    "drift": unbroken(drift_words),
    "duration": duration,
    "gib": unbroken(gib),
    "hours": hours,
    "interval": interval,
    "percent": unbroken(percent),
    "printable": printable,
    "rate": rate,
    "seconds": unbroken(seconds),
    "setting": setting,
    "signed": signed,
    "signed_percent": unbroken(signed_percent),
    "spanned": spanned,
    "words": words,
}


def mfu_name(summary: Summary) -> str:
    return mfu_label(summary.environment.peak_source)


def hours_unit(summary: Summary) -> str:
    """What an hour of a rank is, as the cost has it: only GPUs have a driver and NCCL."""
    told = summary.environment
    return "GPU-hours" if told.driver_versions or told.nccl_versions else "rank-hours"


def sentence(summary: Summary) -> str:
    """The verdict; of a win what the large figure beside it does not say."""
    told = summary.headline
    if told.kind == "win" and told.gain is not None:
        low, high = (signed_percent(ratio - 1) for ratio in (told.gain.low, told.gain.high))
        rounds = count(told.gain.num_paired_rounds, "paired round")
        said = f"The best config beats the baseline: 95 % interval {low} to {high}, from {rounds}."
    else:
        said = told.sentence[:1].upper() + told.sentence[1:]
    return printable(said).replace(" %", "\N{NO-BREAK SPACE}%")


def ranks_to_scale(world_size: int) -> str:
    """Halves of a trial's ranks, as far as three times: `8,16,32,64`."""
    halves = [world_size >> times for times in range(4) if not world_size % (1 << times)]
    return ",".join(map(str, reversed(halves)))


def knob_rows(summary: Summary) -> list[tuple[str, list[str], bool]]:
    """Knob, its setting in each config, whether they differ; those that differ first, in the usual order."""
    settings = [config.settings for config in summary.configs]
    names = list(dict.fromkeys([*SHORT_NAMES, *(name for one in settings for name in one)]))
    rows = []
    for name in names:
        values = [one.get(name) for one in settings]
        if any(value is not None for value in values):
            texts = [setting(value) for value in values]
            rows.append((name, texts, len(set(texts)) > 1))
    return sorted(rows, key=lambda row: not row[2])


def figure_rows(summary: Summary) -> list[tuple[str, list[str]]]:
    """Label with its unit, and the figure of each config."""

    def row(label: str, of: Callable[[Config], str]) -> tuple[str, list[str]]:
        return label, [of(config) for config in summary.configs]

    known = [
        row("tokens/s per rank", lambda one: rate(one.tokens_per_s_per_rank)),
        row(mfu_name(summary), lambda one: unbroken(percent)(one.mfu)),
        row("MFU, causal attention counted half", lambda one: unbroken(percent)(one.mfu_causal)),
        row("HFU, with recomputation", lambda one: unbroken(percent)(one.hfu)),
        row("share of the achievable rate", lambda one: unbroken(percent)(one.share_of_achievable)),
        row("peak live tensors per rank", lambda one: unbroken(gib)(one.allocated_gib)),
        row("peak reserved per rank", lambda one: unbroken(gib)(one.reserved_gib)),
        row("memory limit per rank", lambda _: unbroken(gib)(summary.environment.memory_limit_gib)),
        row("measured in", lambda one: printable(one.measured_in)),
    ]
    return [(label, cells) for label, cells in known if any(cell not in ("-", "") for cell in cells)]


def environment_rows(summary: Summary) -> list[tuple[str, str]]:
    told = summary.environment
    limit = "none known"
    if told.memory_limit_gib is not None:
        limit = f"{gib(told.memory_limit_gib)} per rank, of which {told.memory_headroom:.0%} must stay free"
    rows = [
        ("device", ", ".join(told.device_names)),
        ("ranks", f"{told.world_size:,} in a trial, {told.target_world_size:,} in the real run"),
        ("hosts", f"{len(told.hosts):,}: {', '.join(told.hosts[:6])}{', ...' if len(told.hosts) > 6 else ''}"),
        ("torch", ", ".join(told.torch_versions)),
        ("driver", ", ".join(told.driver_versions)),
        ("NCCL", ", ".join(told.nccl_versions)),
        ("attention kernel", ", ".join(told.attention_backends)),
        ("model", _model(told)),
        ("data", told.data),
        ("precision", told.precision),
        ("global batch", global_batch(told)),
        ("sequence length", f"{told.seq_len:,} tokens" if told.seq_len else "not known: your trainer's own"),
        ("memory limit", limit),
        ("sampler", told.sampler),
        ("search ended", told.search_ended or ""),
        ("started", minute(told.started_at)),
        ("last attempt ended", minute(told.ended_at)),
        ("study", told.study_id),
        ("report written by", f"fsdp-autotune {told.autotune_version}"),
    ]
    return [(name, printable(value)) for name, value in rows if value]


def _model(told: Environment) -> str:
    if not told.num_params:
        return f"{told.workload}; its trials count its parameters"
    return f"{told.workload}; {_params(told.num_params)}, {told.num_blocks} blocks"


def _params(number: int) -> str:
    return f"{number / 1e9:.3g} billion parameters" if number >= 1e9 else f"{number / 1e6:.3g} million parameters"


def conventions(summary: Summary) -> list[str]:
    told = summary.environment
    peak = "not known"
    if told.peak_tflops_per_s is not None:
        peak = f"{told.peak_tflops_per_s:.4g} TFLOP/s per rank, dense {told.peak_dtype}"
    flops = f"{told.flops_per_token / 1e6:,.1f} MFLOP per token" if told.flops_per_token else "FLOPs not known"
    of_attention = "; full attention, no causal discount" if "full-attn" in told.flops_convention else ""
    knows_hfu = any(config.hfu is not None for config in summary.configs)
    said = [
        f"Peak: {peak} ({told.peak_source}).",
        f"MFU counts the model's own FLOPs, never recomputation: {flops} [{told.flops_convention}]{of_attention}."
        + (" HFU adds what activation checkpointing computes again." if knows_hfu else ""),
        "Throughput is all tokens over all wall time of whole optimizer steps, data and optimizer included, of the "
        "slowest rank. Memory is of the worst rank.",
        "The gain comes from fresh, interleaved, paired runs after the search; its interval is Student's t on log "
        "ratios over rounds.",
    ]
    if told.achievable_tflops_per_s is not None:
        said.insert(
            1, f"Achievable in the model's own matmuls: {told.achievable_tflops_per_s:.4g} TFLOP/s per rank, measured."
        )
    return [printable(line) for line in said]
