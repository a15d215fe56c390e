"""Steps put together from the parts of short ones, against whole steps: do they take what they are said to?

`python -m tests.benchmarks.composed`. Both run on one live model, taking turns, so that a busy machine is busy for
both. Prints the ratio of each config with its interval over the rounds.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from autotune.verdict import Verdict, compare
from tests.benchmarks.overhead import make_spec
from trials.record import Knobs, TrialSpec

RANK = Path(__file__).with_name("composed_rank.py")
TARGET = 0.05
"""Largest difference of the ratio from 1."""
SEQ_LEN = 64


def specs() -> dict[str, TrialSpec]:
    """FSDP2 with and without sync and reshard; and what keeps all weights over micro-steps, or never gathers any."""
    first = make_spec(1, 4, "none", 0)
    assert first.knobs is not None
    base = first.knobs.to_dict()
    found: dict[str, dict[str, Any]] = {
        f"fsdp2, sync each {sync}, reshard {reshard}, {accumulation}": base
        | {"sync_each_micro_batch": sync, "reshard_after_forward": reshard, "grad_accum_steps": accumulation}
        for sync, reshard, accumulation in itertools.product((True, False), (True, False), (4, 8, 16))
    }
    held_back = base | {"sync_each_micro_batch": False, "reshard_after_forward": False, "grad_accum_steps": 16}
    found["fsdp1, sync each False, reshard False, 16"] = held_back | {"engine": "fsdp1"}
    found["ddp, sync each False, 16"] = held_back | {"engine": "ddp", "bucket_cap_mb": 25.0}
    found["fsdp2, sync each True, reshard True, 1 worker, 16"] = base | {
        "grad_accum_steps": 16, "num_workers": 1, "prefetch_factor": 2
    }  # fmt: skip
    return {name: _spec(first, Knobs(**values)) for name, values in found.items()}


def _spec(first: TrialSpec, knobs: Knobs) -> TrialSpec:
    return replace(first, seq_len=SEQ_LEN, knobs=knobs, global_batch_size=first.world_size * knobs.grad_accum_steps)


def judged(verdict: Verdict) -> str:
    """By the whole interval: on a busy machine a ratio alone says little."""
    if verdict.low >= 1 - TARGET and verdict.high <= 1 + TARGET:
        return "met"
    return "MISSED" if verdict.low > 1 + TARGET or verdict.high < 1 - TARGET else "too noisy to tell"


@click.command()
@click.option("--rounds", default=9, show_default=True, help="Pairs of each config.")
@click.option("--only", default="", help="Configs whose name has this in it.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the seconds here.")
def main(rounds: int, only: str, json_file: Path | None) -> None:
    console = Console(width=120)
    configs = {name: spec for name, spec in specs().items() if only in name}
    with tempfile.TemporaryDirectory() as name:
        order, result = Path(name) / "order.json", Path(name) / "result.json"
        order.write_text(json.dumps({"specs": [spec.to_json() for spec in configs.values()], "rounds": rounds}))
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        subprocess.run([*launch, str(RANK), str(order), str(result)], check=True, timeout=3000)
        found = dict(zip(configs, map(json.loads, result.read_text().splitlines()), strict=True))
    table = Table(title=f"A composed step's time over the whole one's, {rounds} interleaved pairs")
    for column in ("config, micro-steps", "composed s", "whole s", "ratio", "95 % interval", f"within {TARGET:.0%}"):
        table.add_column(column, justify="left" if column.startswith("config") else "right")
    verdicts = []
    for config, pairs in found.items():
        composed_s, whole_s = ([pair[index] for pair in pairs] for index in (0, 1))
        verdict = compare(composed_s, whole_s)
        verdicts.append(verdict)
        means = (f"{sum(seconds) / rounds:.3g}" for seconds in (composed_s, whole_s))
        interval = f"{verdict.low:.3f} to {verdict.high:.3f}"
        table.add_row(config, *means, f"{verdict.ratio:.3f}", interval, judged(verdict))
    console.print(table)
    overall = compare([verdict.ratio for verdict in verdicts], [1.0] * len(verdicts))
    said = judged(overall)
    console.print(
        f"all configs: {overall.ratio:.3f} ({overall.low:.3f} to {overall.high:.3f}), within {TARGET:.0%}: {said}"
    )
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
