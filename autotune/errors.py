"""Errors meant for people: what was wrong, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AutotuneError(Exception):
    """Base of what the command line prints instead of a traceback.

    Args:
        message: what was wrong and where (file, key, value).
        hint: what to do about it.
    """

    exit_code = 4

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class UserError(AutotuneError, ValueError):
    """Bad input: a job, a space, an option, a folder."""

    exit_code = 2


class NothingFitsError(AutotuneError):
    """Nothing that was asked for fits in memory: it ran out of it, or surely would have."""

    exit_code = 3


class InfrastructureError(AutotuneError):
    """Ray, a node, or a trial that must not fail (the survey, the baseline) failed."""

    exit_code = 4


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint that names what `name` was probably meant to be, or everything that is known."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names)}"


def printable(text: str) -> str:
    """`text` without what would steer a terminal; line breaks stay."""
    return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)
