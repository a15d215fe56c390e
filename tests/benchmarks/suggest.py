"""CPU seconds the `residual` sampler takes for a suggestion among 100,000 configs, after 20 and 200 trials.

`python -m tests.benchmarks.suggest [--json FILE]`

The target is 0.1 s. The pool is filled once a study, before the first suggestion; that time is printed too. Trials are
told made-up figures: what they are changes nothing in what is computed. CPU time, so that what else runs counts little.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import tempfile
import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from autotune.canonical import Facts
from autotune.job import Job
from autotune.job_file import validate
from autotune.preflight.prediction import Prediction
from autotune.search.study import Search, Told
from autotune.space import SearchSpace
from trials.outcome import Outcome
from trials.record import Knobs

TARGET_S = 0.1
NUM_TRIALS = (20, 200)
NUM_TIMED = 10
"""Suggestions of which the middle one counts."""
LIMIT_GIB = 80.0
SPACE = {
    "micro_batch_size": "auto",
    "sync_each_micro_batch": [True, False],
    "reshard_after_forward": [True, False],
    "bucket_cap_mb": "auto",
    "activation_checkpointing": ["none", "selective_op", "every_2", "full"],
    "num_workers": [0, 1, 2, 4, 8, 12, 16],
    "prefetch_factor": [2, 4],
    "forward_prefetch_units": [0, 2],
    "backward_prefetch_units": [0, 2],
    "compile": [False, True],
    "fused_optimizer": [False, True],
}


class Made:
    """Some prediction for each config, at next to no cost."""

    def predict(self, knobs: Knobs) -> Prediction:
        kept = {"none": 12.0, "selective_op": 6.0, "every_2": 7.0, "full": 2.0}[knobs.activation_checkpointing]
        size = 15 + kept * knobs.micro_batch_size + 10 * (not knobs.reshard_after_forward)
        seconds = 3 + 1 / knobs.micro_batch_size - 0.03 * kept
        return Prediction({}, size, 1.05 * size, {}, seconds)


def make_space() -> SearchSpace:
    job = validate(
        Job,
        {
            "model": {"preset": "llama3-8b", "seq_len": 4096},
            "data": {"source": "tokens.bin"},
            "batch": {"global_batch_size": 256, "target_world_size": 8},
            "cluster": {"ranks_per_node": 8, "device": "cuda"},
            "space": SPACE,
        },
        "benchmark",
    )
    return SearchSpace(job, Facts("cuda", 32, (416.0,) * 32, 96, 8))


def tell(search: Search, knobs: Knobs, dice: random.Random) -> None:
    found = Made().predict(knobs)
    fill = found.allocated_gib * math.exp(dice.gauss(0, 0.05)) / (0.95 * LIMIT_GIB)
    rate = 1000 / found.step_s * math.exp(dice.gauss(0, 0.05))
    search.tell(
        knobs,
        Told(Outcome.OK, rate, fill - 1, dice.choice([0.0, 0.02]))
        if fill < 1 / 0.95
        else Told(Outcome.OOM_DEVICE, None, 1 / 0.95 - 1),
    )


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(json_file: Path | None) -> None:
    """Times suggestions."""
    space, dice = make_space(), random.Random(0)
    log = Path(tempfile.gettempdir()) / "suggest-benchmark.log"
    began = time.process_time()
    search = Search(space, "residual", 0, log, predictor=Made(), limit_gib=LIMIT_GIB, headroom=0.05)
    filling_s = time.process_time() - began
    tell(search, space.baseline, dice)
    configs = list(space.configs())
    figures: dict[str, float] = {"num_configs": len(configs), "pool_s": filling_s}
    table = Table(title=f"Suggestions of `residual` among {len(configs):,} configs; the pool took {filling_s:.1f} s")
    for column in ("trials told", "median CPU s", "slowest", f"under {TARGET_S} s"):
        table.add_column(column, justify="right")
    for count in NUM_TRIALS:
        for knobs in dice.sample(configs, count - len(search.known)):
            tell(search, knobs, dice)
        seconds = []
        for _ in range(NUM_TIMED):
            began = time.process_time()
            knobs_ = search.ask()
            seconds.append(time.process_time() - began)
            assert knobs_ is not None
            tell(search, knobs_, dice)
        median = statistics.median(seconds)
        figures[f"median_s_at_{count}"] = median
        table.add_row(str(count), f"{median:.3f}", f"{max(seconds):.3f}", "yes" if median < TARGET_S else "no")
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
