"""Predictions that trials correct: the regression's algebra, bounds of out-of-memories, zones."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import truncnorm

from autotune.preflight.prediction import COLLECTIVE_RATES, Prediction
from autotune.search.correct import MEMORY, Corrected, Fit, Zone, step_time
from autotune.search.observed import Observed, most_telling
from autotune.search.pool import AS_ASSUMED, Pool
from autotune.search.residual.acquisition import expected_improvement
from autotune.search.residual.kernel import OF_STEP_TIME, Kernels
from autotune.search.residual.posterior import Posterior, site_above
from tests.unit.conftest import make_space
from tests.unit.test_residual import HEADROOM, LIMIT_GIB, MANY_KNOBS, Made, needs_gib
from trials.record import Knobs

SPACE = make_space(space=MANY_KNOBS, training={"engines": ["fsdp2", "fsdp1"]})
POOL = Pool(SPACE, Made(), LIMIT_GIB, HEADROOM)
KERNELS = Kernels(SPACE)
TABLES = KERNELS.step_time
PLACES = st.lists(st.integers(0, len(POOL) - 1), min_size=1, max_size=6, unique=True)


def some(*indices: int) -> np.ndarray:
    return np.array(indices, dtype=np.intp)


@settings(deadline=None)
@given(PLACES, PLACES)
def test_effects_by_table_are_the_sums_of_likeness(at: list[int], asked: list[int]) -> None:
    weights = np.linspace(-1, 2, len(at))
    a, b = POOL.levels[:, at], POOL.levels[:, asked]
    single, pairs = TABLES.sums(b, a)
    assert TABLES.weighted(a, b, weights) == pytest.approx(single @ weights)
    assert TABLES.weighted_pairs(a, b, weights) == pytest.approx(pairs @ weights, abs=1e-9)


@settings(deadline=None)
@given(PLACES)
def test_likeness_is_a_covariance_and_highest_with_itself(at: list[int]) -> None:
    single, pairs = TABLES.sums(POOL.levels[:, at], POOL.levels[:, at])
    assert np.linalg.eigvalsh(single + pairs).min() > -1e-9
    assert np.diag(single) == pytest.approx(TABLES.weight)
    assert np.diag(pairs) == pytest.approx(TABLES.pair_weight)
    assert single.max() <= TABLES.weight + 1e-9


def test_a_knob_without_effect_is_like_itself_and_unlike_all_values() -> None:
    table = TABLES.tables[TABLES.names.index("backward_prefetch")]
    assert table[-1].tolist() == [0.0, 0.0, OF_STEP_TIME["backward_prefetch"]]
    ordered = TABLES.tables[TABLES.names.index("micro_batch_size")]
    assert ordered[0, 1] > ordered[0, 2] > ordered[0, 3] > 0, "nearer levels are more alike"


def test_a_regression_without_noise_goes_through_its_points_and_is_sure_there() -> None:
    at = some(3, 40, 77)
    values = np.array([0.1, -0.2, 0.3])
    single, _ = TABLES.sums(POOL.levels[:, at], POOL.levels[:, at])
    posterior = Posterior(single, np.full(3, 1e-9), values)
    assert single @ posterior.weights == pytest.approx(values, abs=1e-6)
    assert posterior.sd(single, TABLES.weight) == pytest.approx(0, abs=1e-3)
    assert Posterior(np.empty((0, 0)), np.empty(0), np.empty(0)).sd(np.empty((0, 2)), 4.0).tolist() == [2.0, 2.0]


@given(st.floats(-3, 3), st.floats(-3, 3), st.floats(0.05, 2))
def test_a_bound_gives_the_moments_of_the_truncated_normal(bound: float, mean: float, sd: float) -> None:
    site = site_above(bound, mean, sd**2)
    truncated = truncnorm((bound - mean) / sd, np.inf, loc=mean, scale=sd)
    if site is None:
        assert truncated.mean() == pytest.approx(mean, abs=1e-2 * sd)
        return
    value, variance = site
    precision = 1 / sd**2 + 1 / variance
    assert 1 / precision == pytest.approx(truncated.var(), rel=1e-3, abs=1e-5 * sd**2)
    assert (mean / sd**2 + value / variance) / precision == pytest.approx(truncated.mean(), rel=1e-3, abs=1e-3 * sd)


def test_one_trial_corrects_all_predictions_and_most_of_all_its_neighbours() -> None:
    before = Fit(POOL, KERNELS, Observed())
    base = int(POOL.add([SPACE.baseline])[0])
    after = Fit(POOL, KERNELS, Observed(measured=[base], log_fill=[POOL.log_fill[base] + 0.2]))
    moved = after.log_fill() - before.log_fill()
    assert 0.1 < moved[base] <= 0.2
    assert (moved > 0).all()
    assert moved.argmax() == base


def test_an_out_of_memory_says_that_its_like_do_not_fit_either() -> None:
    margin = [i for i, fill in enumerate(POOL.log_fill) if -0.1 < fill < -0.05]
    failed = margin[0]
    like = int(POOL.neighbours(failed)[0])
    before = Fit(POOL, KERNELS, Observed()).probability(some(failed, like))
    observed = Observed(too_large=[failed], log_fill_above=[0.05], out_of_memory=[failed])
    after = Fit(POOL, KERNELS, observed).probability(some(failed, like))
    assert before[0] > 0.5
    assert after[0] < 0.1
    assert after[1] < before[1]


def test_zones_by_the_margin_that_is_stated() -> None:
    fit = Fit(POOL, KERNELS, Observed())
    for index in range(0, len(POOL), 13):
        share = needs_gib(POOL.configs[index]) / LIMIT_GIB / (1 - HEADROOM)
        zone = fit.zone(index)
        if share < 0.85:
            assert zone is Zone.SAFE
        elif share > 1.25:
            assert zone is (Zone.RISKY if POOL.always_allowed[index] else Zone.SURE_OOM)


def test_without_a_limit_everything_fits() -> None:
    fit = Fit(Pool(SPACE, Made()), KERNELS, Observed(ran=[0], log_step=[1.0], fits=[True], data_wait=[None]))
    assert fit.may_fit().all()
    assert fit.probability(some(0, 5)).tolist() == [1.0, 1.0]


def test_times_are_corrected_whatever_their_unit() -> None:
    """Throughput and predicted seconds differ by a constant that the trials give away."""
    ran = [0, 50, 100]
    observed = Observed(ran=ran, log_step=[float(POOL.log_step[i]) - 9.0 for i in ran], fits=[True] * 3)
    believed = step_time(POOL, KERNELS, observed)
    assert believed.mean() == pytest.approx(POOL.log_step - 9.0, abs=0.01)


class Networked(Made):
    """Its collectives take half of a step where gradients are reduced at each micro-step, at the assumed rate."""

    def predict(self, knobs: Knobs) -> Prediction:
        plain = super().predict(knobs)
        at_rates = tuple(plain.step_s * (1 + knobs.sync_each_micro_batch / rate) for rate in COLLECTIVE_RATES)
        return replace(plain, step_s=at_rates[AS_ASSUMED], step_s_at_rates=at_rates)


@pytest.mark.parametrize("true_rate", COLLECTIVE_RATES)
def test_the_rate_of_collectives_is_the_one_that_the_trials_speak_for(true_rate: float) -> None:
    pool = Pool(SPACE, Networked(), LIMIT_GIB, HEADROOM)
    truth = pool.log_step_at_rates[COLLECTIVE_RATES.index(true_rate)]
    assert np.ptp(truth - pool.log_step) > 0.1 or true_rate == 1.0, "the rate turns the order around"
    ran = list(range(0, len(pool), len(pool) // 8))
    believed = step_time(pool, KERNELS, Observed(ran=ran, log_step=[float(truth[i]) for i in ran]))
    assert believed.mean() == pytest.approx(truth, abs=0.02)


def test_without_predictions_at_other_rates_there_is_one_answer() -> None:
    assert (POOL.log_step_at_rates == POOL.log_step).all()


def test_configs_under_way_are_believed_to_come_out_as_expected() -> None:
    ran = some(0, 50)
    alone = Corrected(POOL, KERNELS.memory, MEMORY, lambda: POOL.log_fill, (ran, np.array([-0.5, -0.2])))
    beside = Corrected(
        POOL, KERNELS.memory, MEMORY, lambda: POOL.log_fill, (ran, np.array([-0.5, -0.2])), running=some(100)
    )
    assert beside.mean() == pytest.approx(alone.mean(), abs=1e-6)
    assert beside.sd(some(100))[0] < alone.sd(some(100))[0]


def test_of_many_points_the_lowest_and_the_latest_are_kept() -> None:
    indices, values = most_telling(list(range(10)), [5.0, 1.0, 9.0, 8.0, 0.0, 7.0, 7.0, 7.0, 6.0, 9.0], 4)
    assert indices.tolist() == [1, 4, 8, 9]
    assert values.tolist() == [1.0, 0.0, 6.0, 9.0]


def test_expected_improvement_grows_with_mean_and_spread() -> None:
    mean, sd = np.array([0.0, 0.1, 0.0]), np.array([0.1, 0.1, 0.3])
    plain, better, wider = expected_improvement(mean, sd, 0.05)
    assert 0 < plain < better
    assert plain < wider
    assert expected_improvement(np.array([0.0]), np.array([1.0]), 0.0)[0] == pytest.approx(1 / math.sqrt(2 * math.pi))


def test_a_host_out_of_memory_says_nothing_of_the_device(tmp_path: Path) -> None:
    from autotune.search.study import Search, Told
    from trials.outcome import Outcome

    search = Search(SPACE, "residual", 0, tmp_path / "log", predictor=Made(), limit_gib=LIMIT_GIB, headroom=HEADROOM)
    search.tell(SPACE.baseline, Told(Outcome.OOM_HOST, None, 0.05))
    observed = search._observed()
    assert observed.too_large == []
    assert observed.settled == {int(search._pool.add([SPACE.baseline])[0])}
