"""The Python file that applies settings by torch's own calls: joined from snippet_*.py, with the tuned constants."""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from autotune.export.base import Best, comment, header
from trials.record import FSDP1_KNOBS

NAME = "autotune_best.py"
CHECKED = {"torch": "2.13"}

MEANING: dict[str, str] = {
    "micro_batch_size": "sequences per rank and micro-step",
    "grad_accum_steps": "micro-steps per optimizer step",
    "sync_each_micro_batch": "whether gradients are reduced after every micro-step, not just the last",
    "reshard_after_forward": "whether a unit's weights are freed after forward, gathered anew for backward",
    "bucket_cap_mb": "MiB of unsharded weights, in the gathered dtype, that one FSDP unit may hold",
    "blocks_per_unit": "blocks that bucket_cap_mb puts in one FSDP unit",
    "activation_checkpointing": "none, full, every_K (each K-th block), selective_op (keeps matmuls, SDPA)",
    "num_workers": "DataLoader worker processes per rank",
    "prefetch_factor": "batches that each worker keeps ready; none without workers",
    "engine": "fsdp2: torch.distributed.fsdp.fully_shard; fsdp1: FullyShardedDataParallel; ddp",
    "limit_all_gathers": "whether the CPU thread waits before it queues a third all-gather",
    "backward_prefetch": "when backward gathers the next unit: pre or post this one's gradients, or none",
    "forward_prefetch": "whether the next unit's all-gather is queued before this one's forward",
}

PARTS = {
    "fsdp2": ("common", "units", "fsdp2"),
    "fsdp1": ("common", "units", "fsdp1", "no_sync"),
    "ddp": ("common", "ddp", "no_sync"),
}
"""Of the Python file, by engine: the modules snippet_*.py."""
CONSTANT = r"^([A-Z_]+): .* = .*\n"


def meaning_of(best: Best) -> list[tuple[str, str]]:
    """The knobs that the files carry, of those that the engine has, each with its meaning."""
    engine = best.knobs.engine
    absent = {"fsdp2": FSDP1_KNOBS, "fsdp1": (), "ddp": (*FSDP1_KNOBS, "reshard_after_forward", "blocks_per_unit")}
    meaning = MEANING | ({"bucket_cap_mb": "MiB of gradients in one all-reduce"} if engine == "ddp" else {})
    return [(name, text) for name, text in meaning.items() if name not in absent[engine]]


def text(best: Best, title: str, use: Sequence[str], checked: Mapping[str, str] = CHECKED) -> str:
    """The Python file.

    Args:
        use: lines for its head that say how to call it.
        checked: packages and their versions, as for `header`.
    """
    knobs = best.knobs.to_dict()
    constants = [("precision", best.precision, "bf16 or fp32")]
    if best.knobs.engine != "ddp":
        constants.append(("reduce_dtype", best.reduce_dtype, "of the gradient reduction"))
    constants += [(name, knobs[name], meaning) for name, meaning in meaning_of(best)]
    head = comment([*header(best, title, checked), "", *use])
    return head + "\n" + _code(tuple((name.upper(), value, meaning) for name, value, meaning in constants))


def _code(constants: tuple[tuple[str, Any, str], ...]) -> str:
    """One module of several: the engine's docstring, the imports of all, the constants, then the code.

    The parts are ordinary, checked code; only the values of their constants change.
    """
    values = {name: value for name, value, _ in constants}
    docstring, imports, code, declared = _joined(values["ENGINE"])
    missing = declared - set(values)
    assert not missing, f"the snippet needs {missing}"
    given = "".join(comment([meaning]) + f"{name} = {_literal(value)}\n" for name, value, meaning in constants)
    return f"{docstring}{imports}\n{given}\n{code}"


@functools.cache
def _joined(engine: str) -> tuple[str, str, str, frozenset[str]]:
    """Docstring, imports, code, and the names of the constants."""
    folder = resources.files("autotune.export")
    texts = [folder.joinpath(f"snippet_{part}.py").read_text(encoding="utf-8") for part in PARTS[engine]]
    (docstring,) = (text.splitlines(keepends=True)[0] for text in texts if text.startswith('"""Tuned '))
    bodies = [re.sub(r"  # type: ignore.*", "", _after_imports(text)) for text in texts]
    declared = frozenset(name for body in bodies for name in re.findall(CONSTANT, body, flags=re.MULTILINE))
    codes = [re.sub(CONSTANT, "", body, flags=re.MULTILINE).strip("\n") for body in bodies]
    return docstring, _imports(*texts), "\n\n\n".join(codes) + "\n", declared


def _imports(*texts: str) -> str:
    """The imports of all `texts` but those of our own modules, in the order that formatters want."""
    nodes = [node for text in texts for node in ast.parse(text).body]
    plain = {f"import {alias.name}\n" for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names: dict[str, set[str]] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("autotune."):
            names.setdefault(node.module, set()).update(alias.name for alias in node.names)
    lines = [*sorted(plain), *(f"from {module} import {_in_order(names[module])}\n" for module in sorted(names))]
    stdlib = [line for line in lines if " torch" not in line]
    return "\n" + "".join(stdlib) + "\n" + "".join(line for line in lines if line not in stdlib)


def _in_order(names: set[str]) -> str:
    return ", ".join(sorted(names, key=lambda name: (name.islower(), name)))  # classes first


def _after_imports(text: str) -> str:
    last = max(node.end_lineno or 0 for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom))
    return "".join(text.splitlines(keepends=True)[last:])


def _literal(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)  # double quotes, as the snippet has
