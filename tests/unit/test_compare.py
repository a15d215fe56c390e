"""`autotune compare`: unpaired ratios, and what else differs between two runs."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from scipy import stats

from autotune.cli import cli
from autotune.compare import compare_runs, load_side
from autotune.errors import UserError
from autotune.history import History
from autotune.report.compare import comparison_lines
from autotune.verdict import welch


def test_the_interval_is_welchs_on_logs() -> None:
    ours, theirs = [110.0, 112.0, 109.0, 115.0], [99.0, 103.0, 97.0]
    import numpy as np

    reference = stats.ttest_ind(np.log(ours), np.log(theirs), equal_var=False).confidence_interval(0.95)
    found = welch(ours, theirs)
    assert (found.low, found.high) == pytest.approx((np.exp(reference.low), np.exp(reference.high)))
    swapped = welch(theirs, ours)
    assert (1 / swapped.high, 1 / swapped.low) == pytest.approx((found.low, found.high))


def test_equal_configs_rarely_differ() -> None:
    random.seed(1)
    pairs = [([random.gauss(100, 2) for _ in range(5)], [random.gauss(100, 0.5) for _ in range(7)]) for _ in range(400)]
    outside = sum(not found.low <= 1 <= found.high for found in (welch(a, b) for a, b in pairs))
    assert outside <= 32, "5 % expected"


def test_runs_without_spread_have_an_interval_of_no_width() -> None:
    found = welch([2.0, 2.0], [1.0, 1.0])
    assert (found.ratio, found.low, found.high) == pytest.approx((2, 2, 2))


@pytest.mark.parametrize(("a", "b"), [([1.0], [1.0, 2.0]), ([1.0, 2.0], []), ([0.0, 1.0], [1.0, 1.0])])
def test_what_has_no_interval_is_refused(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError):
        welch(a, b)


def changed(run: Path, to: Path, **fingerprint: object) -> Path:
    """A copy of a run on another machine."""
    shutil.copytree(run, to)
    content = yaml.safe_load((to / "best.yaml").read_text())
    content["fingerprint"] |= fingerprint
    (to / "best.yaml").write_text(yaml.safe_dump(content))
    return to


def test_a_run_beside_itself_shows_no_difference(simulated_run: Path) -> None:
    found = compare_runs(load_side(simulated_run), load_side(simulated_run))
    assert (found.environment, found.conventions, found.job) == ({}, {}, {})
    assert found.warnings() == [f"{simulated_run} is SIMULATED: nothing of it was measured"]
    for ratio in found.ratios:
        assert ratio.ratio == pytest.approx(1)
        assert ratio.low is not None and ratio.high is not None
        assert ratio.low < 1 < ratio.high
        assert ratio.num_runs == (3, 3), "of its rounds alone"
    assert comparison_lines(found)[0].endswith("no difference shown")


def test_what_differs_is_named(simulated_run: Path, tmp_path: Path) -> None:
    other = changed(simulated_run, tmp_path / "b", torch_version="2.14.0", world_size=128)
    job = (other / "job.yaml").read_text()
    (other / "job.yaml").write_text(
        job.replace("min_steps: ", "min_steps: 1")
        .replace("seed: 0", "seed: 3")
        .replace("precision: bf16", "precision: fp32")
    )
    found = compare_runs(load_side(simulated_run), load_side(other))
    assert found.environment["torch_version"][1] == "2.14.0"
    assert found.environment["world_size"] == (64, 128)
    assert sorted(found.job) == ["measure.min_steps", "seed", "training.precision"]
    warnings = " ".join(found.warnings())
    assert "different work: training.precision" in warnings
    assert "per rank" in warnings


def test_without_rounds_there_is_a_ratio_and_no_interval(simulated_run: Path, tmp_path: Path) -> None:
    other = changed(simulated_run, tmp_path / "b")
    for path in (other / "history").iterdir():
        if path.name != "trial-0000-attempt-0.parquet":
            path.unlink()
    best, _ = compare_runs(load_side(simulated_run), load_side(other)).ratios
    assert best.ratio == pytest.approx(1, rel=0.05)
    assert (best.low, best.num_runs[1]) == (None, 0), "only the baseline's first trial is left"
    assert "no interval" in comparison_lines(compare_runs(load_side(simulated_run), load_side(other)))[0]


def test_runs_on_other_ranks_are_none_of_the_run(simulated_run: Path, tmp_path: Path) -> None:
    """Where there are no rounds, the same config's runs in a scaling or a confirmation do not stand in for them."""
    other = changed(simulated_run, tmp_path / "b")
    history = History(other / "history")
    first = history.rows()[0][0]
    for path in (other / "history").iterdir():
        path.unlink()
    history.append(first)
    for number, stage in enumerate(("scale", "confirm", "scale"), 1):
        history.append(first | {"trial": number, "stage": stage, "world_size": 8, "tokens_per_s_per_rank": 1.0})
    _, baseline = compare_runs(load_side(simulated_run), load_side(other)).ratios
    assert baseline.num_runs == (3, 1)


def test_the_screen_and_json_say_the_same(simulated_run: Path, tmp_path: Path) -> None:
    other = changed(simulated_run, tmp_path / "b", device_name="Another GPU")
    shown = CliRunner().invoke(cli, ["compare", str(simulated_run), str(other)]).output
    content = json.loads(CliRunner().invoke(cli, ["compare", str(simulated_run), str(other), "--json"]).output)
    assert "Another GPU" in shown
    assert "B's best against A's: +0.0 %" in shown
    assert content["environment"]["device_name"][1] == "Another GPU"
    assert content["ratios"][0]["ratio"] == pytest.approx(1)


def test_a_folder_without_a_run_is_named(simulated_run: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["compare", str(simulated_run), str(tmp_path)], standalone_mode=False)
    assert isinstance(done.exception, UserError)
    assert str(tmp_path) in str(done.exception)
