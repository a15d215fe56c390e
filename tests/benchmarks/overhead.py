"""Seconds a trial spends outside its steps: forked ranks and fresh interpreters beside a torchrun loop, in one run.

`make benchmark`. The three ways take turns on the same configs, so that a busy machine is busy for all of them.
Prints tables and, with `--json FILE`, writes the numbers.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from autotune.cluster.gang import GangResult
from autotune.cluster.runner import SlotRunner
from autotune.cluster.slots import ray_session
from autotune.folder import prepare_folder
from autotune.job import Job
from autotune.job_file import load_job
from autotune.report.screen import LineScreen
from autotune.run import Run
from autotune.search.study import Search
from trials.outcome import Outcome
from trials.record import Knobs, Measure, TrialSpec

PLAIN_TRAIN = Path(__file__).with_name("plain_train.py")
STEPS = ("warmup", "timed")
SPLIT = {
    "process group": ("process_group",),
    "data": ("data", "drain"),
    "build and wrap": ("build",),
    "memory probe and FLOP count": ("memory", "flops"),
}
CONFIGS = ((1, 8, "full", 0), (4, 2, "selective_op", 1), (8, 1, "every_2", 0))


def make_spec(micro: int, accumulation: int, checkpointing: str, workers: int) -> TrialSpec:
    return TrialSpec(
        trial=0,
        stage="explore",
        workload="decoder",
        model={"preset": "tiny"},
        seq_len=256,
        data={"source": "python-stdlib", "tokenizer": "byte"},
        global_batch_size=16,
        precision="fp32",
        optimizer={"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1},
        world_size=2,
        device="cpu",
        seed=0,
        measure=Measure(warmup_steps=1, min_steps=2, max_steps=2),
        knobs=Knobs(
            micro_batch_size=micro,
            grad_accum_steps=accumulation,
            sync_each_micro_batch=True,
            reshard_after_forward=True,
            bucket_cap_mb=2.82,
            blocks_per_unit=1,
            activation_checkpointing=checkpointing,
            num_workers=workers,
            prefetch_factor=2 if workers else None,
        ),
    )


def by_torchrun(spec: TrialSpec, folder: Path) -> dict[str, float]:
    (folder / "spec.json").write_text(spec.to_json())
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    started = time.perf_counter()
    subprocess.run(
        [*launch, str(PLAIN_TRAIN), str(folder / "spec.json"), str(folder / "result.json")],
        check=True,
        capture_output=True,
        timeout=300,
    )
    wall_s = time.perf_counter() - started
    return {"outside": wall_s - json.loads((folder / "result.json").read_text())["steps_s"]}


def by_slot(runner: SlotRunner) -> Callable[[TrialSpec, Path], dict[str, float]]:
    def measure(spec: TrialSpec, folder: Path) -> dict[str, float]:
        started = time.perf_counter()
        result = runner.run(spec, folder, 300)
        wall_s = time.perf_counter() - started
        assert result.outcome is Outcome.OK, result.reason
        phases = [report.phase_s for report in result.reports.values()]

        def slowest(*names: str) -> float:
            return max(sum(phase.get(name, 0.0) for name in names) for phase in phases)

        inside = slowest(*STEPS)
        start_s = max(report.started_at for report in result.reports.values()) - result.started_at
        split = {"process start": start_s} | {label: slowest(*names) for label, names in SPLIT.items()}
        rest = wall_s - inside - sum(split.values())
        return {"outside": wall_s - inside, **split, "tear-down": max(rest, 0.0)}

    return measure


class TimedRunner:
    """A real runner that adds up the time spent in it, so that what is left is the driver's own."""

    def __init__(self, inner: SlotRunner) -> None:
        self.inner, self.world_size, self.device = inner, inner.world_size, inner.device
        self.num_slots, self.num_lost = inner.num_slots, inner.num_lost
        self.clock, self.simulated = inner.clock, inner.simulated
        self.spent_s, self.num_trials = 0.0, 0

    def is_free(self) -> bool:
        return self.inner.is_free()

    def start(self, spec: TrialSpec, log_dir: Path, timeout_s: float) -> None:
        self._started = time.perf_counter()
        self.inner.start(spec, log_dir, timeout_s)

    def next_ended(self) -> tuple[TrialSpec, GangResult]:
        try:
            return self.inner.next_ended()
        finally:
            self.spent_s += time.perf_counter() - self._started
            self.num_trials += 1

    def run(self, spec: TrialSpec, log_dir: Path, timeout_s: float) -> GangResult:
        started = time.perf_counter()
        try:
            return self.inner.run(spec, log_dir, timeout_s)
        finally:
            self.spent_s += time.perf_counter() - started
            self.num_trials += 1


def drivers_own_ms(runner: SlotRunner, folder: Path) -> float:
    """Milliseconds a trial of a whole run that are neither in the trial nor in the sampler."""
    config = {"vocab_size": 256, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 64}
    job: Job = load_job("quickstart", ("model.preset=null", f"model.config={json.dumps(config)}", "budget.trials=8"))
    timed = TimedRunner(runner)
    prepare_folder(folder, job)
    asked_s = 0.0
    ask = Search.ask

    def timed_ask(search: Search) -> Knobs | None:
        nonlocal asked_s
        started = time.perf_counter()
        try:
            return ask(search)
        finally:
            asked_s += time.perf_counter() - started

    Search.ask = timed_ask  # type: ignore[method-assign,assignment]
    try:
        started = time.perf_counter()
        Run(job, folder, timed, LineScreen(Console(quiet=True))).go()
        elapsed_s = time.perf_counter() - started
    finally:
        Search.ask = ask  # type: ignore[method-assign]
    return 1000 * (elapsed_s - timed.spent_s - asked_s) / timed.num_trials


@click.command()
@click.option("--repeats", default=3, show_default=True, help="Rounds over all configs.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the numbers here.")
def main(repeats: int, json_file: Path | None) -> None:
    console = Console()
    with tempfile.TemporaryDirectory() as name, ray_session("local", 4, Path(name) / "ray.log"):
        folder = Path(name)
        base = load_job("quickstart")
        runners = {
            launcher: SlotRunner(
                base.model_copy(update={"cluster": base.cluster.model_copy(update={"launcher": launcher})}), "cpu"
            )
            for launcher in ("fork", "exec")
        }
        ways = {
            "torchrun loop": by_torchrun,
            "ours, fork (CPU default)": by_slot(runners["fork"]),
            "ours, exec (GPU default)": by_slot(runners["exec"]),
        }
        found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for number in range(repeats):
            for config in CONFIGS:
                for way, measure in ways.items():
                    # The count of FLOPs is made once for each checkpointing mode of a study, and then known.
                    known = 1.0 if number else None
                    found[way].append(measure(replace(make_spec(*config), hardware_flops_per_token=known), folder))
        own_ms = drivers_own_ms(runners["fork"], folder / "run")
        for runner in runners.values():
            runner.close()
    report(console, found, own_ms, json_file)


def report(console: Console, found: dict[str, list[dict[str, float]]], own_ms: float, json_file: Path | None) -> None:
    medians: dict[str, dict[str, float]] = {
        way: {part: statistics.median(run[part] for run in runs) for part in runs[0]} for way, runs in found.items()
    }
    yardstick = medians["torchrun loop"]["outside"]
    table = Table(title="Seconds a trial spends outside warm-up and timed steps (medians, interleaved)")
    table.add_column("")
    for way in medians:
        table.add_column(way, justify="right")
    parts = list(medians["ours, fork (CPU default)"])
    for part in parts:
        table.add_row(part, *(f"{m[part]:.2f}" if part in m else "" for m in medians.values()))
    table.add_row("over the torchrun loop", *(f"{m['outside'] / yardstick:.2f}" for m in medians.values()))
    console.print(table)
    targets: dict[str, tuple[float, float]] = {
        "fork / torchrun": (medians["ours, fork (CPU default)"]["outside"] / yardstick, 0.5),
        "exec / torchrun": (medians["ours, exec (GPU default)"]["outside"] / yardstick, 1.0),
        "driver's own work, ms a trial": (own_ms, 50.0),
    }
    for label, (value, target) in targets.items():
        console.print(f"{label}: {value:.2f} (target at most {target}): {'met' if value <= target else 'MISSED'}")
    if json_file is not None:
        numbers: dict[str, Any] = {"medians_s": medians, "runs_s": found, "drivers_own_ms": own_ms}
        json_file.write_text(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
