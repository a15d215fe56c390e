"""How well memory and step time are predicted before anything is run: against published runs, and real trials here.

`python -m tests.benchmarks.prediction [--no-trials] [--json FILE]`. Nothing that is reported was fitted to: memory has
no fitted constant; those of step time are fitted anew without each source, and without each model, in turn.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.optimize import least_squares

from autotune.preflight.memory import peak
from autotune.preflight.step_time import Constants, step_terms
from tests.benchmarks.published import Run, load

GIB = 2**30
START = Constants(
    matmul=0.75,
    peak_power=0.3,
    half_hidden=500.0,
    half_tokens=300.0,
    attention=0.45,
    attention_power=0.5,
    memory=0.7,
    network=0.6,
    block_overhead_s=2e-4,
    block_jitter_s=2e-5,
    doubling=0.007,
)
"""Guesses, made before any fit: what the runs do not tell stays near them."""
APART = 0.03
"""Runs closer than this to each other are a tie: published repeats of one config differ by 1.6 %."""


# --- memory of published runs -------------------------------------------------------------------------------------


def memory_errors(runs: Iterable[Run]) -> list[tuple[Run, float, float]]:
    """Of each run with a published peak: predicted GiB, and relative error."""
    found = []
    for run in runs:
        if run.memory_gib is not None:
            peaks = peak(run.shape, run.setting, run.knobs, run.acts)
            predicted = (peaks.reserved if run.is_reserved else peaks.allocated) / GIB
            found.append((run, predicted, predicted / run.memory_gib - 1))
    return found


def rejected(runs: Iterable[Run]) -> tuple[list[Run], int]:
    """Of the configs that ran, those that are predicted to need more than the device has; and how many were asked."""
    asked = [run for run in runs if run.ran_in_gib is not None]
    wrong = [
        run
        for run in asked
        if run.ran_in_gib and peak(run.shape, run.setting, run.knobs, run.acts).allocated / GIB > run.ran_in_gib
    ]
    return wrong, len(asked)


# --- step time of published runs ----------------------------------------------------------------------------------


def predicted_s(run: Run, constants: Constants) -> float:
    return sum(
        step_terms(run.shape, run.setting, run.knobs, run.rates, constants, has_loader=False, acts=run.acts).values()
    )


def fit(runs: Sequence[Run]) -> Constants:
    """Constants by least squares on log step times, outliers damped; kept near the start where the runs do not tell."""
    start = np.log(np.array(astuple(START)))
    measured = np.log([run.step_s or math.nan for run in runs])

    def residuals(log_constants: Any) -> Any:
        constants = Constants(*np.exp(log_constants))
        predicted = np.log([predicted_s(run, constants) for run in runs])
        return np.concatenate([(predicted - measured) / 0.03, (log_constants - start) / 0.7])

    shares = np.array(
        [0.0 if field.name not in ("half_hidden", "half_tokens") else 12.0 for field in fields(Constants)]
    )
    bounds = (start - 2.5, np.minimum(start + 2.5, shares))
    found = least_squares(residuals, np.clip(start, bounds[0] + 1e-6, bounds[1] - 1e-6), bounds=bounds, loss="soft_l1")
    return Constants(*(float(value) for value in np.exp(found.x)))


@dataclass(frozen=True)
class Held:
    """A run that was predicted by constants that were fitted without it."""

    run: Run
    step_s: float

    @property
    def error(self) -> float:
        """Of MFU; it is what tokens per second are off by."""
        assert self.run.step_s is not None
        return self.run.step_s / self.step_s - 1


def leave_out(runs: Sequence[Run], key: Callable[[Run], str]) -> list[Held]:
    held = []
    for name in dict.fromkeys(key(run) for run in runs):
        constants = fit([run for run in runs if key(run) != name])
        held += [Held(run, predicted_s(run, constants)) for run in runs if key(run) == name]
    return held


def ordered(held: Iterable[Held]) -> tuple[int, int]:
    """Pairs of one source, model and device that are more than APART apart: right ones, and all."""
    right = total = 0
    for a, b in itertools.combinations(held, 2):
        if (a.run.source, a.run.group) != (b.run.source, b.run.group):
            continue
        rates = [_mfu(one.run, one.run.step_s or math.nan) for one in (a, b)]
        if abs(math.log(rates[0] / rates[1])) > APART:
            guesses = [_mfu(one.run, one.step_s) for one in (a, b)]
            total += 1
            right += (rates[0] > rates[1]) == (guesses[0] > guesses[1])
    return right, total


def _mfu(run: Run, step_s: float) -> float:
    return run.tokens * run.shape.flops_per_token() / step_s / (run.rates.tflops_per_s * 1e12)


# --- real trials --------------------------------------------------------------------------------------------------


def tracked() -> list[dict[str, Any]]:
    """Closed form beside MemTracker's peak of 20 real trials, each on two gloo ranks."""
    from tests.benchmarks.tracked import CONFIGS, compare
    from tests.ranks.harness import RankServer

    with tempfile.TemporaryDirectory() as folder:
        server = RankServer(Path(folder))
        try:
            return [compare(server, config) for config in CONFIGS]
        finally:
            server.close()


# --- tables -------------------------------------------------------------------------------------------------------


@click.command()
@click.option("--trials/--no-trials", default=True, help="Run the real trials (a minute or two).")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the numbers there too.")
@click.option("--fit", "fit_all", is_flag=True, help="Only fit all rows, and print the constants to ship.")
def main(trials: bool, json_path: Path | None, fit_all: bool) -> None:
    runs, left_out = load()
    timed = [run for run in runs if run.step_s is not None]
    console = Console(highlight=False, width=140)
    if fit_all:
        console.print(asdict(fit(timed)))
        return
    numbers: dict[str, Any] = {"rows": len(runs), "left_out": left_out}
    console.print(f"{len(runs)} usable rows; left out: " + "; ".join(f"{n}, {why}" for why, n in left_out.items()))
    numbers |= _print_memory(console, runs)
    numbers |= _print_time(console, timed)
    if trials:
        numbers |= _print_tracked(console)
    if json_path is not None:
        json_path.write_text(json.dumps(numbers, indent=1))


def _print_memory(console: Console, runs: Sequence[Run]) -> dict[str, Any]:
    table = Table(
        "source", "model", "GPUs", "compiled", "published GiB", "predicted GiB", "error", title="Memory, published"
    )
    errors = memory_errors(runs)
    for run, predicted, error in errors:
        compiled = "yes" if run.knobs.compile else "no"
        world = str(run.setting.world_size)
        table.add_row(run.source, run.model, world, compiled, f"{run.memory_gib}", f"{predicted:.1f}", f"{error:+.1%}")
    console.print(table)
    wrong, asked = rejected(runs)
    median = statistics.median(abs(error) for _, _, error in errors)
    console.print(
        f"median error {median:.1%} of {len(errors)} rows (target 7 %); {len(wrong)} of {asked} configs that ran"
    )
    console.print(f"  are predicted not to fit (target 0){''.join(f'; {run.source} {run.model}' for run in wrong)}")
    return {"memory_median_error": median, "memory_rows": len(errors), "rejected": len(wrong), "asked": asked}


def _print_time(console: Console, runs: Sequence[Run]) -> dict[str, Any]:
    numbers: dict[str, Any] = {"timed_rows": len(runs)}
    for name in ("source", "model"):
        key = operator.attrgetter(name)
        held = leave_out(runs, key)
        table = Table(name, "rows", "MFU error, median", "p90", "pairs in order", title=f"MFU, each {name} held out")
        groups = {group: [one for one in held if key(one.run) == group] for group in dict.fromkeys(map(key, runs))}
        for group, members in {**groups, "all": held}.items():
            errors = sorted(abs(one.error) for one in members)
            right, total = ordered(members)
            share = f"{right}/{total} = {right / total:.0%}" if total else "-"
            p90 = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
            table.add_row(group, str(len(members)), f"{statistics.median(errors):.1%}", f"{p90:.1%}", share)
        right, total = ordered(held)
        numbers[f"without_{name}"] = {
            "median_error": statistics.median(abs(one.error) for one in held),
            "right": right,
            "pairs": total,
        }
        console.print(table)
    console.print("target of pairs in order: 93 %")
    return numbers


def _print_tracked(console: Console) -> dict[str, Any]:
    found = tracked()
    table = Table("config", "MemTracker MiB", "predicted MiB", "error", "fullest moment", title="Memory, real trials")
    for one in found:
        figures = (f"{one['tracked_mib']:.1f}", f"{one['predicted_mib']:.1f}", f"{one['error']:+.1%}")
        table.add_row(one["config"], *figures, one["moment"])
    console.print(table)
    errors = [abs(one["error"]) for one in found]
    console.print(f"median error {statistics.median(errors):.2%}, largest {max(errors):.1%} (target: median 5 %)")
    return {"tracked_median_error": statistics.median(errors), "tracked_max_error": max(errors), "tracked": found}


if __name__ == "__main__":
    main()
