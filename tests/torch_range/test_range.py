"""Ranks in another environment than the driver's: older Pythons and torches, in which nothing of ours is installed.

`make test-torch-range` makes the environments and names their interpreters in RANGE_PYTHONS.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import trials
from autotune.cli import cli
from autotune.cluster.agent import NodeAgent
from autotune.cluster.interpreter import interpreter_of
from autotune.job import Job
from autotune.measuring import make_spec
from tests.clients.agents import COMMAND, TORCHRUN, Here, client_job, order_of, run_trial
from tests.clients.test_command import SCRIPT
from tests.unit.conftest import make_job, make_space
from trials.outcome import Outcome

PYTHONS = [path for path in os.environ.get("RANGE_PYTHONS", "").split(os.pathsep) if path]


@pytest.fixture(params=PYTHONS, scope="module")
def python(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def agent(python: str) -> Iterator[NodeAgent]:
    agent = NodeAgent("cpu", "exec", interpreter=interpreter_of(range_job(python).cluster))
    yield agent
    agent.close()


def range_job(python: str, command: list[str] | None = None, launcher: str = "rank", **cluster: object) -> Job:
    section = {"command": command or COMMAND, "launcher": launcher}
    return client_job(section, cluster={"ranks_per_node": 2, "device": "cpu", "python": python} | cluster)


def test_there_is_something_to_test() -> None:
    assert PYTHONS, "run this by `make test-torch-range`"


def test_every_file_of_trials_is_read_by_that_python(python: str) -> None:
    paths = [str(path) for path in Path(trials.__file__).parent.rglob("*.py")]
    code = "import sys\nfor path in sys.argv[1:]: compile(open(path).read(), path, 'exec')"
    subprocess.run([python, "-c", code, *paths], check=True)


def test_ours_is_not_installed_there(python: str, tmp_path: Path) -> None:
    done = subprocess.run([python, "-c", "import autotune"], check=False, capture_output=True, text=True, cwd=tmp_path)
    assert "ModuleNotFoundError" in done.stderr


def test_the_survey_runs_there(python: str, agent: NodeAgent, tmp_path: Path) -> None:
    spec = make_spec(range_job(python), Here(), None, "survey", -1)  # type: ignore[arg-type]
    result = run_trial(spec, tmp_path, agent)
    assert result.outcome is Outcome.OK, (tmp_path / "rank-0.log").read_text()
    theirs = [python, "-c", "import torch; print(torch.__version__)"]
    version = subprocess.run(theirs, check=True, capture_output=True, text=True).stdout.strip()
    assert result.reports[0].torch_version == version


@pytest.mark.parametrize("launcher", ["rank", "self"])
def test_a_command_is_measured_and_read_back_there(
    python: str, agent: NodeAgent, tmp_path: Path, launcher: str
) -> None:
    command = COMMAND if launcher == "rank" else [*TORCHRUN, *COMMAND[1:]]
    result = run_trial(order_of(range_job(python, command, launcher)), tmp_path, agent)
    assert result.outcome is Outcome.OK, result.reason
    report = result.reports[1]
    assert report.applied is not None
    assert (report.applied["engine"], report.applied["micro_batch_size"]) == ("fsdp2", 2)
    assert report.tokens_per_step == 128
    assert report.num_steps == 6


def test_running_out_of_memory_is_told_there(python: str, agent: NodeAgent, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        SCRIPT + "kept = []\nwhile True:\n    step()\n    kept.append(torch.zeros(2**24))\n"
    )
    job = range_job(python, ["python", "{probe}", str(tmp_path / "train.py")], memory_limit_gib=0.25)
    result = run_trial(order_of(job), tmp_path, agent)
    assert result.outcome is Outcome.OOM_DEVICE, result.reason


def test_a_built_in_model_is_measured_there(python: str, agent: NodeAgent, tmp_path: Path) -> None:
    cluster = {"ranks_per_node": 2, "device": "cpu", "python": python}
    job = make_job(cluster=cluster, measure={"warmup_steps": 1, "min_steps": 2, "max_steps": 2})
    knobs = replace(make_space().baseline, bucket_cap_mb=1.41, activation_checkpointing="selective_op")
    result = run_trial(make_spec(job, Here(), knobs, "baseline", 0), tmp_path, agent)  # type: ignore[arg-type]
    assert result.outcome is Outcome.OK, result.reason
    assert result.reports[0].num_steps >= 2


def test_doctor_runs_that_python_and_prints_its_versions(python: str, tmp_path: Path) -> None:
    job = range_job(python)
    (tmp_path / "job.yaml").write_text(job.to_yaml())
    done = CliRunner().invoke(cli, ["doctor", str(tmp_path / "job.yaml")], env={"COLUMNS": "1000"})
    assert done.exit_code == 0, done.output
    assert f"{python}: " in done.output
