"""Which columns of a history have values: a simulated one must have those of a real one."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from autotune.history import History

Kind = tuple[str, str | None, bool]


def filled(rows: list[dict[str, Any]]) -> dict[Kind, set[str]]:
    """Columns with a value in any attempt of a kind: by outcome, timing, and whether it was an endurance run."""
    found: dict[Kind, set[str]] = defaultdict(set)
    for row in rows:
        kind = (row["outcome"], row["timing"], row["stage"] == "endurance")
        found[kind] |= {name for name, value in row.items() if value not in (None, "", [])}
    return found


def missing_where_simulated(real: list[dict[str, Any]], job: Path, out: Path, *overrides: str) -> dict[Kind, set[str]]:
    """Simulates `job`, which `real` is the history of, on GPUs: columns that only the real one has a value in."""
    from tests.unit.test_simulated_run import autotune

    options = [part for override in ("cluster.device=cuda", *overrides) for part in ("--set", override)]
    cluster = "nodes=1 gpus=2 device='NVIDIA A100-SXM4-80GB'"
    autotune("run", str(job), "--simulate", cluster, "--output", str(out), *options)
    rows, skipped = History(out / "history").rows()
    assert skipped == []
    simulated = filled(rows)
    common = simulated.keys() & (measured := filled(real)).keys()
    assert ("ok", "whole", False) in common
    return {kind: lacking for kind in common if (lacking := measured[kind] - simulated[kind])}
