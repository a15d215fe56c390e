"""`{name}` in a trainer's command and environment: which there are, and what is put in their place.

A doubled brace is one brace, as in Python's format strings: JSON goes through unharmed.
"""

from __future__ import annotations

import string
from collections.abc import Iterable

from autotune.errors import nearest

LAUNCH = {
    "probe": "the file that measures: `python {probe} train.py ...`",
    "nnodes": "nodes of a trial",
    "node_rank": "number of the node, from 0",
    "nproc": "ranks on each node",
    "master_addr": "where rank 0 listens",
    "master_port": "and its port, a fresh one each trial",
    "job_dir": "the job file's folder",
    "scratch": "the trial's own folder, in which the command runs and which is removed after it",
}
"""Known on the node that runs the command."""
BATCH = {"global_batch_size": "sequences per optimizer step over the ranks of a trial"}
"""Beside the knobs."""


def names_in(text: str) -> list[str]:
    """The placeholders of a text.

    Raises:
        ValueError: a brace that opens nothing, or something else than a name.
    """
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}; write {{{{ and }}}} for braces that are no placeholder") from None
    found = []
    for _, name, spec, conversion in parts:
        if name is None:
            continue
        if not name.isidentifier() or spec or conversion:
            raise ValueError(f"{text!r}: expected {{name}}; write {{{{ and }}}} for braces that are no placeholder")
        found.append(name)
    return found


def check_names(texts: Iterable[str], known: Iterable[str]) -> None:
    """Refuses a placeholder that nothing stands behind.

    Raises:
        ValueError: with the names that are known.
    """
    names = list(known)
    for text in texts:
        for name in names_in(text):
            if name not in names:
                raise ValueError(f"{text!r}: no such placeholder; {nearest(name, names)}")
