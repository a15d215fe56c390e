"""The user's own command as a trial: a script that knows no tuner, two gloo ranks, and all that may go wrong in it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.cluster.agent import NodeAgent
from autotune.cluster.interpreter import interpreter_of
from autotune.measuring import make_spec
from tests.clients.agents import COMMAND, TORCHRUN, Here, client_job, order_of, run_trial
from trials.outcome import Outcome

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
model = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 64))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
def step(rows=2, micro_steps=2):
    for _ in range(micro_steps):
        tokens = torch.randint(64, (rows, 8))
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def agent() -> Iterator[NodeAgent]:
    agent = NodeAgent("cpu", "exec")
    yield agent
    agent.close()


def runs(pid: int) -> bool:
    """Whether it does; what has ended and was not yet waited for does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def script(folder: Path, text: str) -> dict[str, Any]:
    """The `trainer` section for a script of its own."""
    (folder / "train.py").write_text(SCRIPT + text)
    return {"command": ["python", "{probe}", "train.py"], "folder": str(folder)}


def test_a_script_that_knows_no_tuner_is_measured_and_read_back(agent: NodeAgent, tmp_path: Path) -> None:
    job = client_job()
    result = run_trial(order_of(job), tmp_path, agent)
    assert result.outcome is Outcome.OK, result.reason
    first, second = (result.reports[rank] for rank in (0, 1))
    assert first.applied is not None
    assert first.applied["micro_batch_size"] == 2
    assert first.applied["grad_accum_steps"] == 2
    assert first.applied["engine"] == "fsdp2"
    assert first.tokens_per_step == 2 * 2 * 32 == second.tokens_per_step
    assert first.num_steps == len(first.own_step_times_s) == sum(first.block_steps) == 6
    assert (
        sum(map(lambda t, n: t * n, first.block_times_s, first.block_steps))
        >= max(sum(first.own_step_times_s), sum(second.own_step_times_s)) - 1e-9
    )
    assert first.num_trainable_params
    assert first.reserved_bytes > 0
    assert {path.name for path in tmp_path.glob("rank-*")} == {
        f"rank-{r}.{s}" for r in (0, 1) for s in ("log", "jsonl")
    }


def test_a_command_that_starts_its_own_ranks_gives_the_same(agent: NodeAgent, tmp_path: Path) -> None:
    job = client_job({"command": [*TORCHRUN, *COMMAND[1:]], "launcher": "self"})
    result = run_trial(order_of(job), tmp_path, agent)
    assert result.outcome is Outcome.OK, result.reason
    assert sorted(result.reports) == [0, 1]
    assert result.reports[1].tokens_per_step == 128


@pytest.mark.parametrize("launcher", ["rank", "self"])
def test_the_ranks_of_a_command_that_hangs_are_ended(agent: NodeAgent, tmp_path: Path, launcher: str) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    own = script(tmp_path, "step()\nopen(f\"{os.environ['PIDS']}/{os.getpid()}\", 'w')\ntime.sleep(600)\n")
    own["env"] = {"PIDS": str(pids)}
    if launcher == "self":
        own |= {"command": [*TORCHRUN, *own["command"][1:]], "launcher": "self"}
    result = run_trial(order_of(client_job(own)), tmp_path, agent, hangs=lambda: len(list(pids.iterdir())) == 2)
    assert result.outcome is Outcome.TIMEOUT, result.reason
    started = [int(path.name) for path in pids.iterdir()]
    assert len(started) == 2
    assert result.leftover_pids == []
    assert not any(runs(pid) for pid in started)


def test_a_daemon_that_the_command_leaves_behind_is_ended(agent: NodeAgent, tmp_path: Path) -> None:
    daemon = "import subprocess, sys\nif os.environ['RANK'] == '0':\n"
    daemon += "    child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    daemon += f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
    result = run_trial(order_of(client_job(script(tmp_path, daemon + "while True: step()\n"))), tmp_path, agent)
    assert result.outcome is Outcome.OK, result.reason
    assert not runs(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("text", "outcome", "words"),
    [
        ("", Outcome.INVALID, "no optimizer step"),
        ("for _ in range(4): step()\n", Outcome.TOO_SHORT, "ended after 4 optimizer steps"),
        ("while True: step(rows=3)\n", Outcome.MISAPPLIED, "micro_batch_size: asked 2, applied 3"),
        ("while True: step(micro_steps=1)\n", Outcome.MISAPPLIED, "grad_accum_steps: asked 2, applied 1"),
        ("raise ValueError('unknown key: fsdp_reshard')\n", Outcome.CRASHED, "unknown key: fsdp_reshard"),
        ("sys.exit(3)\n", Outcome.CRASHED, "code 3"),
        ("os._exit(3)\n", Outcome.CRASHED, "exited with code 3"),
        ("os._exit(0)\n", Outcome.INVALID, "no probe was attached|no optimizer step|before"),
        ("step()\nos.kill(os.getpid(), 9)\n", Outcome.CRASHED, "SIGKILL"),
        ("step()\ntorch.empty(2**50)\n", Outcome.OOM_DEVICE, "out of memory"),
        ("from trials import probe\nprobe.watch(model)\nstep()\n", Outcome.INVALID, "attached already"),
    ],
)
def test_what_a_script_may_do_wrong(agent: NodeAgent, tmp_path: Path, text: str, outcome: Outcome, words: str) -> None:
    result = run_trial(order_of(client_job(script(tmp_path, text))), tmp_path, agent)
    assert result.outcome is outcome, result.reason
    assert any(word in result.reason for word in words.split("|")), result.reason


def test_a_command_that_is_not_there_is_named(agent: NodeAgent, tmp_path: Path) -> None:
    job = client_job({"command": ["trainnn", *COMMAND[1:]]})
    result = run_trial(order_of(job), tmp_path, agent)
    assert result.outcome is Outcome.INVALID
    assert "trainnn: No such file or directory" in result.reason


def test_a_file_that_the_trainer_rejects_is_its_last_words(agent: NodeAgent, tmp_path: Path) -> None:
    text = "import argparse\nargparse.ArgumentParser().parse_args()\n"
    own = script(tmp_path, "")
    (tmp_path / "train.py").write_text(text)
    own["command"] = [*own["command"], "--config", "{trainer_args}"]
    own["render"] = {"trainer_args": "transformers"}
    result = run_trial(order_of(client_job(own, export_for="transformers")), tmp_path, agent)
    assert result.outcome is Outcome.CRASHED
    assert "exited with code 2 before its first optimizer step" in result.reason
    assert "unrecognized arguments: --config" in result.reason


def test_another_model_than_declared_is_misapplied(agent: NodeAgent, tmp_path: Path) -> None:
    spec = order_of(client_job())
    assert spec.trainer is not None
    spec.trainer["expect"]["num_parameters"] = 12345
    result = run_trial(spec, tmp_path, agent)
    assert result.outcome is Outcome.MISAPPLIED
    assert "num_parameters: asked 12345" in result.reason


def test_ranks_start_clean(agent: NodeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_PROCID", "SLURM_NTASKS", "PMI_RANK", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("WANDB_MODE", "online")
    shown = "import json\nprint('ENV', json.dumps(dict(os.environ)))\nprint('CWD', os.getcwd())\n"
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "mine").write_text("precious")
    shown += (
        "import pathlib\npathlib.Path('checkpoints').mkdir()\npathlib.Path('checkpoints/mine').write_text('trial')\n"
    )
    own = script(tmp_path, shown + "while True: step()\n")
    own["command"] = [*own["command"], "{job_dir}/x", "checkpoints"]
    own["env"] = {"OWN": "{micro_batch_size}-{nproc}", "BRACES": "{{}}"}
    result = run_trial(order_of(client_job(own)), tmp_path, agent)
    assert result.outcome is Outcome.OK, result.reason
    log = (tmp_path / "rank-1.log").read_text()
    environment = json.loads(log.partition("ENV ")[2].partition("\n")[0])
    left = [name for name in environment if name.startswith(("SLURM_", "PMI_", "OMPI_"))]
    assert left == []
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["LOCAL_RANK"]) == ("1", "2", "1")
    assert environment["TORCHELASTIC_RUN_ID"]
    assert environment["WANDB_MODE"] == "disabled"
    assert (environment["OWN"], environment["BRACES"]) == ("2-2", "{}")
    assert (tmp_path / "checkpoints" / "mine").read_text() == "precious"
    assert not Path(log.partition("CWD ")[2].partition("\n")[0]).exists()


def test_a_memory_limit_is_real(agent: NodeAgent, tmp_path: Path) -> None:
    text = "kept = []\nwhile True:\n    step()\n    kept.append(torch.zeros(2**24))\n"
    own = script(tmp_path, text)
    cluster = {"ranks_per_node": 2, "device": "cpu", "memory_limit_gib": 0.25}
    result = run_trial(order_of(client_job(own, cluster=cluster)), tmp_path, agent)
    assert result.outcome is Outcome.OOM_DEVICE, result.reason


def test_knobs_reach_a_script_that_asks_for_them(agent: NodeAgent, tmp_path: Path) -> None:
    text = "from trials.probe import knob\nrows = int(knob('micro_batch_size', 1))\n"
    text += "print('FLAVOUR', knob('flavour', '?'))\n"
    own = script(tmp_path, text + "while True: step(rows)\n")
    own |= {"via": {"micro_batch_size": "env", "flavour": "env"}, "custom": {"flavour": ["plain", "spicy"]}}
    result = run_trial(order_of(client_job(own)), tmp_path, agent)
    assert result.outcome is Outcome.OK, result.reason
    assert "FLAVOUR plain" in (tmp_path / "rank-0.log").read_text()


def test_an_interpreter_without_our_package_runs_the_ranks(tmp_path: Path) -> None:
    """It reaches them as a zip: here by an environment that has torch and nothing of ours."""
    (tmp_path / "foreign" / "bin").mkdir(parents=True)
    torch_home = next(path for path in sys.path if (Path(path) / "torch").is_dir())
    python = tmp_path / "foreign" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH=$PYTHONPATH:{torch_home} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    job = client_job(cluster={"ranks_per_node": 2, "device": "cpu", "python": str(python)})
    agent = NodeAgent("cpu", "exec", interpreter=interpreter_of(job.cluster))
    try:
        survey = run_trial(make_spec(job, Here(), None, "survey", -1), tmp_path, agent)  # type: ignore[arg-type]
        assert survey.outcome is Outcome.OK, (tmp_path / "rank-0.log").read_text()
        result = run_trial(order_of(job), tmp_path, agent)
    finally:
        agent.close()
    assert result.outcome is Outcome.OK, result.reason
