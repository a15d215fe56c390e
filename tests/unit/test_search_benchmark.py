"""The search benchmark: its enumerated truth is the simulated cluster's, and its figures mean what they say."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from autotune.search.study import Told
from tests.benchmarks import scenarios, search
from tests.benchmarks.scenarios import CALIBRATION_SEEDS, REPORTING_SEEDS, SCENARIOS, Landscape
from tests.benchmarks.search import STRATEGIES, TRIALS, run
from trials.outcome import Outcome
from trials.record import Knobs


@pytest.fixture(scope="module")
def landscape() -> Landscape:
    """A scenario with a few hundred configs."""
    small = replace(SCENARIOS["13b-8xH100-8k"], name="small", space=({"num_workers": [0, 2], "prefetch_factor": [2]},))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(scenarios.SCENARIOS, "small", small)
        return Landscape("small", 1)


def test_the_enumerated_truth_is_the_simulated_clusters(landscape: Landscape) -> None:
    assert 200 < len(landscape.configs) < 2000
    for number in range(0, len(landscape.configs), 7):
        knobs = landscape.configs[number]
        truth = landscape.world.truth(knobs)
        rate, memory_gib, fits = landscape.truth(knobs)
        assert rate == pytest.approx(truth.tokens_per_s_per_rank)
        assert memory_gib == pytest.approx(truth.allocated_gib)
        assert landscape.out_of_memory[number] == truth.out_of_memory
        usable_gib = (landscape.limits.limit_gib or 0.0) * (1 - landscape.limits.headroom)
        assert fits == (not truth.out_of_memory and not truth.retries and truth.allocated_gib <= usable_gib)


def test_the_optimum_fits_and_nothing_that_fits_beats_it(landscape: Landscape) -> None:
    truths = [landscape.truth(knobs) for knobs in landscape.configs]
    assert landscape.optimum == max(rate for rate, _, fits in truths if fits)
    assert 0 < np.mean([fits for _, _, fits in truths]) < 1, "memory must decide something"


def test_trials_are_noisy_about_the_truth_and_repeat_by_seed(landscape: Landscape) -> None:
    knobs = landscape.space.baseline
    rates = [landscape.measure(knobs, seed).tokens_per_s_per_rank or 0.0 for seed in range(200)]
    logs = np.log(np.array(rates) / landscape.truth(knobs)[0])
    assert abs(logs.mean()) < 0.005
    assert 0.012 < logs.std() < 0.018
    assert landscape.measure(knobs, 3) == landscape.measure(knobs, 3)


class Knowing:
    """Asks for the best config first, then for one that runs out of memory, again and again."""

    def __init__(self, landscape: Landscape, _seed: int, _parallel: int) -> None:
        best = int(np.argmax(np.where(landscape.fits, landscape.rates, 0.0)))
        worst = int(np.argmax(landscape.needed_gib))
        self._next = [landscape.configs[worst], landscape.configs[best]]

    def ask(self) -> Knobs:
        return self._next.pop() if len(self._next) > 1 else self._next[0]

    def tell(self, knobs: Knobs, told: Told) -> None:
        assert told.outcome in (Outcome.OK, Outcome.OOM_DEVICE)


def test_the_figures_mean_what_they_say(landscape: Landscape) -> None:
    outcomes = run(Knowing, landscape, 1)
    assert outcomes.trials_to_near == 1
    assert outcomes.regret_at == {10: 0.0, 20: 0.0}
    assert (outcomes.out_of_memory_in_20, outcomes.out_of_memory_in_40) == (19, TRIALS - 1)
    assert outcomes.repeated_out_of_memory == TRIALS - 2


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("parallel", [1, 4])
def test_every_strategy_runs_its_trials_and_its_figures_repeat(
    landscape: Landscape, name: str, parallel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "gp":  # it takes a second for each
        monkeypatch.setattr(search, "TRIALS", 12)
    outcomes = run(STRATEGIES[name], landscape, parallel)
    assert outcomes == run(STRATEGIES[name], landscape, parallel)
    assert outcomes.regret_at[20] <= 1
    assert outcomes.trials_to_near > 0
    if not name.endswith("-bare"):
        assert outcomes.repeated_out_of_memory == 0
    assert math.isfinite(landscape.regret(landscape.space.baseline))


def test_nothing_is_reported_on_seeds_that_were_calibrated_on() -> None:
    assert not set(CALIBRATION_SEEDS) & set(REPORTING_SEEDS)
