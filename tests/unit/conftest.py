from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from click.testing import CliRunner

from autotune.canonical import Facts
from autotune.cli import cli
from autotune.job import Job
from autotune.job_file import validate
from autotune.space import SearchSpace
from trials.record import Knobs

QUICK: dict[str, Any] = {
    "model": {"preset": "tiny", "seq_len": 256},
    "data": {"source": "python-stdlib"},
    "batch": {"global_batch_size": 16, "target_world_size": 2},
    "cluster": {"ranks_per_node": 2, "device": "cpu", "memory_limit_gib": 0.25},
    "space": {
        "micro_batch_size": "auto",
        "sync_each_micro_batch": [True, False],
        "reshard_after_forward": [True, False],
        "bucket_cap_mb": "auto",
        "activation_checkpointing": ["none", "selective_op", "every_2", "full"],
        "num_workers": [0, 1],
        "prefetch_factor": [2, 4],
    },
}


def make_job(**sections: Any) -> Job:
    """The quickstart's shape, with sections replaced."""
    return validate(Job, QUICK | sections, "test.yaml")


def make_space(num_blocks: int = 4, cpus_allowed: int = 2, block_mib: float = 2.8145, **sections: Any) -> SearchSpace:
    return SearchSpace(make_job(**sections), Facts("cpu", num_blocks, (block_mib,) * num_blocks, cpus_allowed))


@pytest.fixture(autouse=True)
def _optuna_as_it_was() -> Iterator[None]:
    verbosity = optuna.logging.get_verbosity()
    yield
    optuna.logging.set_verbosity(verbosity)


@pytest.fixture
def space() -> SearchSpace:
    return make_space()


@pytest.fixture
def baseline(space: SearchSpace) -> Knobs:
    return space.baseline


@pytest.fixture(scope="session")
def simulated_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on a modelled cluster, with a winner; not to be changed."""
    out = tmp_path_factory.mktemp("simulated") / "run"
    options = ["--set", "measure.rounds=3", "--set", "cluster.nodes_per_trial=8", "--trials", "6"]
    cluster = "nodes=8 gpus=8 device='NVIDIA H100 80GB HBM3'"
    arguments = ["run", "llama3-8b", "--simulate", cluster, "--output", str(out), *options]
    CliRunner().invoke(cli, arguments, standalone_mode=False, catch_exceptions=False)
    return out
