"""Figures and settings as short text, the same everywhere."""

from __future__ import annotations

from typing import Any

from trials.formats import LOADER_NOT_MEASURED

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
    "limit_all_gathers": "limit gathers",
    "backward_prefetch": "backward prefetch",
    "forward_prefetch": "forward prefetch",
}
_DERIVED = ("bucket_cap_mb",)  # said by blocks_per_unit


def loader_advice(best: dict[str, Any]) -> str | None:
    """What to say of a best.yaml whose figures leave out what the data loader costs; None if they do not."""
    if best.get("data", {}).get("loader_measured", True):
        return None
    said = LOADER_NOT_MEASURED[0].upper() + LOADER_NOT_MEASURED[1:]
    return f"{said}: num_workers and prefetch_factor are no advice, keep your own."


def printable(text: str) -> str:
    """`text` without what would steer a terminal; line breaks stay."""
    return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)


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
        if name in knobs and name not in _DERIVED and knobs[name] != baseline.get(name)
    ]
    return ", ".join(changed) or "as baseline"


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
    """A CPU's peak is probed, not a datasheet's: the name says so."""
    return "MFU (cpu probe)" if peak_source and peak_source.startswith("cpu probe") else "MFU"
