"""Figures and settings as short text, the same everywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from autotune.errors import printable
from trials.breakdown import FRACTIONS
from trials.formats import LOADER_NOT_MEASURED
from trials.record import COMPOSED

SHORT_NAMES = {
    "micro_batch_size": "micro",
    "grad_accum_steps": "accum",
    "sync_each_micro_batch": "sync each",
    "reshard_after_forward": "reshard",
    "blocks_per_unit": "blocks/unit",
    "bucket_cap_mb": "bucket MiB",
    "activation_checkpointing": "ckpt",
    "num_workers": "workers",
    "prefetch_factor": "prefetch",
    "engine": "engine",
    "keep_last_units": "keep last",
    "reshard_group_size": "reshard over",
    "forward_prefetch_units": "units ahead",
    "backward_prefetch_units": "units behind",
    "replicate_degree": "copies",
    "reduce_dtype": "reduce",
    "cpu_offload": "offload",
    "limit_all_gathers": "limit gathers",
    "backward_prefetch": "backward prefetch",
    "forward_prefetch": "forward prefetch",
    "compile": "compile",
    "attention_backend": "attention",
    "fused_optimizer": "fused adamw",
}
SIMULATED = "simulated"
"""Marks what was not measured, wherever it is kept or shown."""
LEAST_SHOWN = 0.005
"""Of a step; less is not listed."""


def loader_advice(best: dict[str, Any]) -> str | None:
    """What to say of a best.yaml whose figures leave out what the data loader costs; None if they do not."""
    if best.get("data", {}).get("loader_measured", True):
        return None
    said = LOADER_NOT_MEASURED[0].upper() + LOADER_NOT_MEASURED[1:]
    return f"{said}: num_workers and prefetch_factor are no advice, keep your own."


TOO_WIDE = 1.2
"""Upper over lower end of a gain's interval, from which the rounds themselves tell little."""


def noise_advice(best: Mapping[str, Any]) -> str | None:
    """What to do where the rounds differ so much that nothing could be told; None if they do not."""
    gain = best["gain"]
    if not gain or not gain["low"] <= 1 <= gain["high"] or gain["high"] < TOO_WIDE * gain["low"]:
        return None
    return (
        "The rounds differ too much among themselves to tell: measure again on a machine with nothing else on it, or "
        "with more measure.rounds."
    )


def is_kept(best: Mapping[str, Any]) -> bool:
    """Whether the config to use is the baseline's own."""
    return bool(best["settings"] == best["baseline"]["settings"])


def json_safe(content: Any) -> Any:
    """`content` with null where JSON has no number: NaN and the infinities."""
    if isinstance(content, dict):
        return {key: json_safe(inner) for key, inner in content.items()}
    if isinstance(content, list):
        return [json_safe(inner) for inner in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def value(thing: Any) -> str:
    if thing is None:
        return "-"
    if isinstance(thing, bool):
        return "yes" if thing else "no"
    return printable(str(thing))


def differences(knobs: dict[str, Any], baseline: dict[str, Any]) -> str:
    """Settings of `knobs` that differ from the baseline's; `as baseline` if none does."""
    changed = [
        f"{SHORT_NAMES[name]} {value(knobs[name])}"
        for name in SHORT_NAMES
        # None is a knob of another engine, which `engine` says.
        if knobs.get(name) is not None and not _is_said(name, knobs) and knobs[name] != baseline.get(name)
    ]
    usual = baseline.get("custom") or {}
    changed += [f"{name} {value(own)}" for name, own in (knobs.get("custom") or {}).items() if own != usual.get(name)]
    return ", ".join(changed) or "as baseline"


def _is_said(name: str, knobs: dict[str, Any]) -> bool:
    """By blocks_per_unit, where the engine has units."""
    return name == "bucket_cap_mb" and knobs.get("blocks_per_unit") is not None


def bottleneck_lines(name: str, figures: dict[str, Any]) -> list[str]:
    """Where a step of a config in best.yaml goes, and what bounds it; nothing if that is not known."""
    lines = []
    if figures.get("breakdown"):
        shares = [(part.replace("_", " "), figures["breakdown"].get(part)) for part in FRACTIONS]
        parts = [f"{part} {percent(share)}" for part, share in shares if share is not None and share >= LEAST_SHOWN]
        lines.append(f"A step of {name}: {', '.join(parts)}")
    elif figures.get("bottlenecks"):
        lines.append(f"What bounds {name}:")
    lines.extend(f"  {finding_line(finding)}" for finding in figures.get("bottlenecks") or [])
    return [printable(line) for line in lines]


def timing(row: dict[str, Any]) -> str:
    """How the steps of a row of the history were timed, and how far off they were when they were put together."""
    kind = value(row.get("timing"))
    difference = row.get("composed_difference")
    return kind if difference is None else f"{kind} (composed {100 * difference:+.1f} %)"


def timing_lines(name: str, figures: dict[str, Any]) -> list[str]:
    """What to know of how the throughput of a config in best.yaml was measured; nothing if it is as it should be."""
    lines = []
    difference = figures.get("composed_difference")
    if isinstance(difference, float):
        lines.append(
            f"The search put a step of {name} together from the parts of a short one: {100 * difference:+.1f} % of the "
            "time that its whole steps take in the rounds"
        )
    elif figures.get("timing") == COMPOSED:
        lines.append(f"A step of {name} was not run whole, but put together from the parts of a short one")
    if figures.get("loader_sustained") is False:
        lines.append(
            f"The loader's queue of {name} could not be emptied in its trial's time: the rate may not be sustained"
        )
    return lines


def finding_line(finding: dict[str, Any]) -> str:
    """One thing that bounds a step: its name and numbers, the most there is to gain, and what to try."""
    bound, to_try = finding.get("upper_bound"), ", ".join(finding.get("to_try") or [])
    return (
        f"{finding['name']}: {finding['evidence']}"
        + (f"; gain at most {100 * bound:+.0f} %" if bound is not None else "")
        + (f"; try {to_try}" if to_try else "")
    )


def drift_words(drift: float) -> str:
    """`12 % more`, `3 % less`."""
    return f"{abs(100 * drift):.0f} % {'more' if drift > 0 else 'less'}"


def count(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.1f} %"


def rate(tokens_per_s: float | None) -> str:
    return "-" if tokens_per_s is None else f"{tokens_per_s:,.0f}"


def gib(amount: float | None) -> str:
    if amount is None:
        return "-"
    return f"{amount * 1024:.0f} MiB" if amount < 1 else f"{amount:.2f} GiB"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def mfu_label(peak_source: str | None) -> str:
    """A CPU's peak is probed, not a datasheet's, and a simulated cluster has none: the name says so."""
    known = next((kind for kind in ("cpu probe", SIMULATED) if peak_source and peak_source.startswith(kind)), None)
    return f"MFU ({known})" if known else "MFU"
