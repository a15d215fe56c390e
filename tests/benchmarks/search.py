"""Search strategies on simulated clusters: how soon they come near the true optimum, and what they burn on the way.

`python -m tests.benchmarks.search [--strategies gp,residual] [--seeds 20] [--parallel 1,4] [--json FILE]`

The baseline has been measured and told before the first trial, and does not count. A run's regret after k trials is
how far below the optimum that config truly is which its noisy trials rank first among those that fit.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import random
import statistics
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import click
import optuna
from rich.console import Console
from rich.progress import track
from rich.table import Table

from autotune.search.study import Search, Told
from tests.benchmarks.scenarios import CALIBRATION_SEEDS, HELD_OUT, REPORTING_SEEDS, SCENARIOS, Landscape, physics
from trials.outcome import OUT_OF_MEMORY, Outcome
from trials.record import Knobs

TRIALS = 40
NEAR = 0.02
"""Regret below which a config counts as the optimum."""
SHARES_AT = (5, 10, 20, 40)
REGRET_AT = (10, 20)
PROCESSES = 2


class Strategy(Protocol):
    """What is compared; `autotune.search.study.Search` is one."""

    def ask(self) -> Knobs | None: ...

    def tell(self, knobs: Knobs, told: Told) -> None: ...


Make = Callable[[Landscape, int, int], Strategy]
"""By a landscape, a seed, and the number of trials at once."""


def by_search(sampler: str, *, predicts: bool = True) -> Make:
    """The product's own search with one of its samplers; with or without the closed forms."""

    def make(landscape: Landscape, seed: int, parallel: int) -> Strategy:
        return Search(
            landscape.space,
            sampler,
            seed,
            Path(tempfile.gettempdir()) / "search-benchmark.log",
            predictor=landscape.predictor if predicts else None,
            limit_gib=landscape.limit_gib,
            headroom=landscape.limits.headroom,
            num_parallel=parallel,
            pool=landscape.config_pools[predicts].for_another_study(),
        )

    return make


class Bare:
    """Optuna as people use it: a config that does not fit has throughput 0, and nothing is filtered."""

    def __init__(self, landscape: Landscape, sampler: optuna.samplers.BaseSampler) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space = landscape.space
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._asked: dict[Knobs, deque[optuna.Trial]] = {}

    def ask(self) -> Knobs | None:
        trial = self._study.ask()
        knobs = self._space.suggest(trial)
        self._asked.setdefault(knobs, deque()).append(trial)
        return knobs

    def tell(self, knobs: Knobs, told: Told) -> None:
        fits = told.outcome is Outcome.OK and told.memory_over_limit <= 0
        value = told.tokens_per_s_per_rank if fits and told.tokens_per_s_per_rank else 0.0
        if self._asked.get(knobs):
            self._study.tell(self._asked[knobs].popleft(), value)
        elif self._space.contains(knobs):
            params, distributions = self._space.params(knobs), self._space.distributions(knobs)
            self._study.add_trial(optuna.trial.create_trial(value=value, params=params, distributions=distributions))


class LargestBatchFirst:
    """As DeepSpeed's autotuner goes: the largest micro-batch that fits the defaults, then everything else there.

    The other settings come in the order of how many of them differ from the defaults, at random among as many.
    """

    def __init__(self, landscape: Landscape, seed: int) -> None:
        base = landscape.space.baseline
        changing = ("micro_batch_size", "grad_accum_steps", "sync_each_micro_batch")
        fixed = {name: value for name, value in base.to_dict().items() if name not in changing}
        self._left = list(landscape.configs)
        random.Random(seed).shuffle(self._left)
        self._left.sort(key=lambda knobs: sum(getattr(knobs, name) != value for name, value in fixed.items()))
        alike = [knobs for knobs in self._left if all(getattr(knobs, name) == value for name, value in fixed.items())]
        plain = [knobs for knobs in alike if knobs.sync_each_micro_batch]
        self._ladder = sorted(plain, key=lambda knobs: knobs.micro_batch_size, reverse=True)
        self._steps = set(self._ladder)
        self._micro = base.micro_batch_size

    def ask(self) -> Knobs | None:
        if self._ladder and self._ladder[0].micro_batch_size > self._micro:
            return self._ladder.pop(0)
        for number, knobs in enumerate(self._left):
            if knobs.micro_batch_size == self._micro and knobs not in self._steps:
                return self._left.pop(number)
        return self._left.pop() if self._left else None

    def tell(self, knobs: Knobs, told: Told) -> None:
        if knobs in self._steps and told.outcome is Outcome.OK and told.memory_over_limit <= 0:
            self._micro = max(self._micro, knobs.micro_batch_size)


STRATEGIES: dict[str, Make] = {
    "tpe-bare": lambda landscape, seed, _: Bare(landscape, optuna.samplers.TPESampler(seed=seed)),
    "random-bare": lambda landscape, seed, _: Bare(landscape, optuna.samplers.RandomSampler(seed=seed)),
    "deepspeed-like": lambda landscape, seed, _: LargestBatchFirst(landscape, seed),
    "tpe": by_search("tpe"),
    "random": by_search("random"),
    "gp": by_search("gp"),
    "residual": by_search("residual"),
    "residual-unpredicted": by_search("residual", predicts=False),
}
"""By name; `-bare` is Optuna alone, without the product's own filter of repeats and of what surely does not fit."""


@dataclass(frozen=True)
class Outcomes:
    """One strategy on one landscape."""

    scenario: str
    seed: int
    trials_to_near: float
    """Trials until a config truly within NEAR of the optimum has run; infinite if none has."""
    regret_at: dict[int, float]
    """Fraction, after so many trials."""
    out_of_memory_in_20: int
    out_of_memory_in_40: int
    repeated_out_of_memory: int
    """Trials of a config that had run out of memory before."""


COMPARED = ("residual", "gp", "tpe-bare", "random-bare", "deepspeed-like")


def run(make: Make, landscape: Landscape, parallel: int) -> Outcomes:
    """TRIALS trials, `parallel` of them under way at any time."""
    strategy = make(landscape, landscape.seed, parallel)
    baseline = landscape.space.baseline
    tried: list[tuple[Knobs, Told]] = []
    first = landscape.measure(baseline, -1)
    strategy.tell(baseline, first)
    under_way: deque[Knobs] = deque()
    asked = 0
    while asked < TRIALS or under_way:
        while asked < TRIALS and len(under_way) < parallel:
            knobs = strategy.ask()
            if knobs is None:
                asked = TRIALS
                break
            under_way.append(knobs)
            asked += 1
        if not under_way:
            break
        knobs = under_way.popleft()
        told = landscape.measure(knobs, len(tried))
        strategy.tell(knobs, told)
        tried.append((knobs, told))
    return _judge(landscape, (baseline, first), tried)


def _judge(landscape: Landscape, baseline: tuple[Knobs, Told], tried: list[tuple[Knobs, Told]]) -> Outcomes:
    near = (
        number
        for number, (knobs, _) in enumerate(tried, start=1)
        if landscape.truth(knobs)[2] and landscape.regret(knobs) <= NEAR
    )
    failed = [knobs for knobs, told in tried if told.outcome in OUT_OF_MEMORY]
    return Outcomes(
        scenario=landscape.name,
        seed=landscape.seed,
        trials_to_near=next(near, math.inf),
        regret_at={count: _regret(landscape, [baseline, *tried[:count]]) for count in REGRET_AT},
        out_of_memory_in_20=_failed(tried[:20]),
        out_of_memory_in_40=_failed(tried),
        repeated_out_of_memory=len(failed) - len(set(failed)),
    )


def _failed(tried: Sequence[tuple[Knobs, Told]]) -> int:
    return sum(told.outcome in OUT_OF_MEMORY for _, told in tried)


def _regret(landscape: Landscape, tried: Sequence[tuple[Knobs, Told]]) -> float:
    fitting = [
        (told.tokens_per_s_per_rank or 0.0, knobs)
        for knobs, told in tried
        if told.outcome is Outcome.OK and told.memory_over_limit <= 0
    ]
    if not fitting:
        return 1.0
    return landscape.regret(max(fitting, key=lambda pair: pair[0])[1])


Found = dict[tuple[str, int], list[Outcomes]]
"""By strategy and trials at once."""


@click.command()
@click.option("--strategies", default=",".join(COMPARED), show_default=True, help=f"Of {', '.join(STRATEGIES)}.")
@click.option("--scenarios", default=",".join(SCENARIOS), show_default=True, help="Names, with commas between.")
@click.option("--seeds", default=20, show_default=True, help="Landscapes of each scenario.")
@click.option("--calibrating", is_flag=True, help="On the seeds to tune on, instead of those to report on.")
@click.option("--parallel", default="1,4", show_default=True, help="Trials at once, with commas between.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write every run here.")
def main(strategies: str, scenarios: str, seeds: int, calibrating: bool, parallel: str, json_file: Path | None) -> None:
    """Compares strategies."""
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    console = Console(width=max(Console().width, 140))
    at_once, seeds_of = (
        [int(text) for text in parallel.split(",")],
        CALIBRATION_SEEDS if calibrating else REPORTING_SEEDS,
    )
    found: Found = {(name, count): [] for name in strategies.split(",") for count in at_once}
    for scenario in track(scenarios.split(","), "scenarios", console=Console(stderr=True)):
        physics(scenario)  # what all seeds share, before processes are forked
        with multiprocessing.get_context("fork").Pool(PROCESSES) as pool:
            jobs = [(scenario, seed, tuple(found)) for seed in seeds_of[:seeds]]
            for outcomes in pool.imap(_all_of, jobs):
                for key, outcome in outcomes.items():
                    found[key].append(outcome)
        physics.cache_clear()
    report(console, found, json_file)


def _all_of(job: tuple[str, int, tuple[tuple[str, int], ...]]) -> dict[tuple[str, int], Outcomes]:
    """Every strategy on one landscape."""
    scenario, seed, wanted = job
    landscape = Landscape(scenario, seed)
    return {(name, at_once): run(STRATEGIES[name], landscape, at_once) for name, at_once in wanted}


def report(console: Console, found: Found, json_file: Path | None) -> None:
    table = Table(title=f"Search: {NEAR:.0%} of the true optimum; OOMs and regrets are means")
    for column in ("strategy", "at once", "runs", "median trials", *(f"within {k}" for k in SHARES_AT)):
        table.add_column(column, justify="left" if column == "strategy" else "right", no_wrap=column == "strategy")
    for column in (*(f"regret at {k}" for k in REGRET_AT), "OOMs in 20", "in 40", "repeated"):
        table.add_column(column, justify="right")
    for (strategy, at_once), outcomes in found.items():
        table.add_row(strategy, str(at_once), str(len(outcomes)), *_cells(outcomes))
        held_out = [outcome for outcome in outcomes if outcome.scenario in HELD_OUT]
        if held_out and len(held_out) < len(outcomes):
            table.add_row("  held out", "", str(len(held_out)), *_cells(held_out))
    console.print(table)
    console.print(_verdict(found))
    if json_file is not None:
        rows: list[dict[str, Any]] = [
            {"strategy": strategy, "parallel": at_once} | asdict(outcome)
            for (strategy, at_once), outcomes in found.items()
            for outcome in outcomes
        ]
        for row in rows:
            row["trials_to_near"] = row["trials_to_near"] if math.isfinite(row["trials_to_near"]) else None
        json_file.write_text(json.dumps(rows, indent=1))


def _verdict(found: Found) -> str:
    """The rule that the default sampler goes by, and the targets."""
    lines = []
    ours, stock = found.get(("residual", 1)), found.get(("gp", 1))
    if ours:
        lines.append(
            f"residual: median {_median(ours):g} (target 7), within 20 {_within(ours, 20):.0%} (88 %), within 40 "
            f"{_within(ours, 40):.0%} (95 %), OOMs in 20 {_mean(o.out_of_memory_in_20 for o in ours):.2f} (0.4), "
            f"exact OOM repeats {sum(o.repeated_out_of_memory for o in ours)} (0)"
        )
    if ours and stock:
        points = 100 * (_within(ours, 20) - _within(stock, 20))
        stays = points >= 5 or _median(stock) - _median(ours) >= 2
        lines.append(
            f"residual against gp: {points:+.0f} points within 20, median {_median(ours):g} against "
            f"{_median(stock):g}: {'stays' if stays else 'does not stay'} (5 points or 2 trials)"
        )
    return "\n".join(lines)


def _median(outcomes: Sequence[Outcomes]) -> float:
    return statistics.median(outcome.trials_to_near for outcome in outcomes)


def _within(outcomes: Sequence[Outcomes], count: int) -> float:
    return _mean(outcome.trials_to_near <= count for outcome in outcomes)


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _cells(outcomes: list[Outcomes]) -> list[str]:
    median = _median(outcomes)
    return [
        f"{median:g}" if math.isfinite(median) else f">{TRIALS}",
        *(f"{_within(outcomes, count):.0%}" for count in SHARES_AT),
        *(f"{_mean(outcome.regret_at[count] for outcome in outcomes):.1%}" for count in REGRET_AT),
        f"{_mean(outcome.out_of_memory_in_20 for outcome in outcomes):.2f}",
        f"{_mean(outcome.out_of_memory_in_40 for outcome in outcomes):.2f}",
        f"{_mean(outcome.repeated_out_of_memory for outcome in outcomes):.2f}",
    ]


if __name__ == "__main__":
    main()
