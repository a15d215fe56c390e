"""Our trial under a real Tuner with Tune's own OptunaSearch."""

from __future__ import annotations

import math
from pathlib import Path

from ray import tune
from ray.tune.search.optuna import OptunaSearch

from autotune.cluster.runner import SlotRunner
from autotune.integrations.ray_tune import METRIC, param_space, trainable
from autotune.job_file import load_job
from tests.cluster.conftest import CONFIG, rank_processes, write_job


def test_a_tuner_with_optunas_search_measures_real_gangs(runner: SlotRunner, tmp_path: Path) -> None:
    space = {"micro_batch_size": [1, 2], "activation_checkpointing": ["none", "full"]}
    job = load_job(str(write_job(tmp_path, space=space)))
    choices = param_space(job)
    assert {name: domain.categories for name, domain in choices.items()} == space
    before = rank_processes()
    tuner = tune.Tuner(
        trainable(job),
        param_space=choices,
        tune_config=tune.TuneConfig(
            metric=METRIC, mode="max", num_samples=4, search_alg=OptunaSearch(seed=0), max_concurrent_trials=1
        ),
        run_config=tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0),
    )
    results = tuner.fit()
    assert (len(results), results.num_errors) == (4, 0)
    for result in results:
        assert result.metrics is not None
        assert (result.metrics["outcome"], result.metrics["fits"]) == ("ok", True)
        assert result.metrics[METRIC] > 0
        assert result.metrics["memory_gib"] > 0
        assert 0 < result.metrics["mfu"] < 1
        assert Path(result.path, "rank-1.log").exists()
    assert results.get_best_result().config is not None
    assert rank_processes() <= before, "a gang ends with its trial"


def test_a_config_that_fails_is_a_result_and_no_error(runner: SlotRunner, texts: Path, tmp_path: Path) -> None:
    model = {
        "workload": "faulty_model:make",
        "import_path": str(texts),
        "config": {"mode": "oom", "config": CONFIG},
        "seq_len": 32,
    }
    job = load_job(str(write_job(tmp_path, model=model, space={"micro_batch_size": [1, 2]})))
    tuner = tune.Tuner(
        trainable(job),
        param_space={"micro_batch_size": 2},
        run_config=tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0),
    )
    (result,) = tuner.fit()
    assert result.error is None
    assert result.metrics is not None
    assert (result.metrics["outcome"], result.metrics["fits"], result.metrics[METRIC]) == ("oom_device", False, 0.0)
    assert result.metrics["memory_over_limit"] > 0
    assert math.isnan(result.metrics["mfu"])
    assert result.metrics["reason"]
