"""What a job's `data` section may say, for both sides: formats, their file suffixes, and the keys that each one has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SUFFIXES: dict[str, tuple[str, ...]] = {
    "text": (".txt", ".md", ".rst", ".py"),
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet",),
    "bin": (".bin",),
    "npy": (".npy",),
}
"""File suffixes by format; `format: auto` goes by them."""

OPTIONS: dict[str, tuple[str, ...]] = {
    "text": ("tokenizer", "max_mib"),
    "jsonl": ("text_field", "tokenizer", "max_mib"),
    "parquet": ("text_field", "tokenizer", "max_mib"),
    "bin": ("token_dtype",),
    "npy": (),
    "synthetic": (),
}
"""Keys of the `data` section, beside `source` and `format`, that mean something in each format."""

DEFAULTS: dict[str, Any] = {"tokenizer": "byte", "max_mib": 64, "text_field": "text", "token_dtype": "uint16"}

LOADER_NOT_MEASURED = "the data loader was not measured (data: synthetic)"
"""What every output says where it is so."""


def inapplicable(format_: str, given: Mapping[str, Any]) -> str | None:
    """A complaint about the first key that is given and means nothing in this format; None if there is none.

    Args:
        given: the `data` section; None where a key was left out.
    """
    for name in DEFAULTS:
        if given.get(name) is not None and name not in OPTIONS[format_]:
            owners = [owner for owner, names in OPTIONS.items() if name in names]
            return (
                f"{name} = {given[name]!r}: has no meaning with {format_} data, only with {', '.join(owners)}: "
                "remove it"
            )
    return None
