"""The probe's place in a command, and the request that it finds in the environment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from trials import probe_log

PLACEHOLDER = "{probe}"
PROBE = Path(probe_log.__file__).with_name("probe.py")


def with_probe(words: Sequence[str]) -> list[str]:
    """`words` with the probe before the script: where {probe} is, else before the first file *.py, else before -m.

    Raises:
        UserError: none of them is there.
    """
    if any(PLACEHOLDER in word for word in words):
        return [word.replace(PLACEHOLDER, str(PROBE)) for word in words]
    scripts = [index for index, word in enumerate(words) if index and word.endswith(".py") and Path(word).is_file()]
    modules = [index for index, word in enumerate(words[:-1]) if index and word == "-m"]
    place = scripts[:1] or modules[-1:]
    if not place:
        raise UserError(
            f"COMMAND {' '.join(words)}: no place for the probe is seen in it: no file *.py, no -m MODULE",
            "write {probe} before the script where Python is given it, e.g. -- torchrun {probe} train.py; or, if the "
            "script has the probe's own lines (probe.watch and probe.step, or a callback), --attach script",
        )
    return [*words[: place[0]], str(PROBE), *words[place[0] :]]


def request(out: Path, attach: str, tokens: float | None, knobs: Mapping[str, Any]) -> str:
    """What the probe is asked for: to watch, and never to end or to fail the script.

    It is passed by value, so that it is known on nodes that do not have the folder, where nothing is then written.

    Args:
        out: for its files, on this host.
        attach: `auto`, or `script`, which has lines of its own.
        tokens: of a sample, where the model's inputs do not tell; None: they do.
        knobs: for `probe.knob`.
    """
    return json.dumps(
        {
            "out": str(out),
            "warmup_steps": 1,
            "timed_steps": None,
            "max_s": None,
            "attach": "auto" if attach == "auto" else "explicit",
            "tokens": "auto" if tokens is None else tokens,
            "knobs": dict(knobs),
            "expect": {},
        }
    )
