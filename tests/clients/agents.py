"""Runs a job's own command as a trial does: by a node's agent, its ranks' reports put together as the driver does it.
Only Ray is not there: the agent is called, and not asked through an actor."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.canonical import Facts
from autotune.cluster.agent import NodeAgent, NodeFacts
from autotune.cluster.gang import GRACE_S, GangResult, _conclude, _node_env, _rendezvous
from autotune.cluster.slots import NodeHandle, Slot
from autotune.job import Job
from autotune.job_file import validate
from autotune.measuring import make_spec
from autotune.space import SearchSpace
from autotune.trainer.judged import judged
from trials.record import Knobs, TrialSpec

HERE = Path(__file__).parent / "scripts"
COMMAND = ["python", "{probe}", "plain.py", "--mbs", "{micro_batch_size}", "--accum", "{grad_accum_steps}"]
TORCHRUN = [
    *("python", "-m", "torch.distributed.run", "--nnodes", "{nnodes}", "--node-rank", "{node_rank}"),
    *("--nproc-per-node", "{nproc}", "--master-addr", "{master_addr}", "--master-port", "{master_port}"),
]
SECTIONS: dict[str, Any] = {
    "batch": {"global_batch_size": 8, "target_world_size": 2},
    "cluster": {"ranks_per_node": 2, "device": "cpu"},
    "training": {"precision": "fp32"},
    "space": {},
    "baseline": {"micro_batch_size": 2},
    "measure": {"warmup_steps": 2, "min_steps": 3, "max_steps": 6, "trial_timeout_s": 120},
}


class Here:
    """What a runner says of itself."""

    device, world_size = "cpu", 2


def client_job(trainer: dict[str, Any] | None = None, **sections: Any) -> Job:
    """Of scripts/plain.py, with parts of `trainer` and other sections replaced."""
    section = {"command": COMMAND, "folder": str(HERE)} | (trainer or {})
    return validate(Job, SECTIONS | {"trainer": section} | sections, "test.yaml")


def baseline_of(job: Job) -> Knobs:
    return SearchSpace(job, Facts("cpu", 1, (1.0,), 2)).baseline


def order_of(job: Job, knobs: Knobs | None = None, stage: str = "explore") -> TrialSpec:
    return make_spec(job, Here(), knobs or baseline_of(job), stage, 0)  # type: ignore[arg-type]


def run_trial(
    spec: TrialSpec, folder: Path, agent: NodeAgent, hangs: Callable[[], bool] = lambda: False, timeout_s: float = 280.0
) -> GangResult:
    """One trial on this machine, from its first process to the proof that none is left.

    Args:
        hangs: whether to take its time for over now.
    """
    facts = NodeFacts("here", socket.gethostname(), "127.0.0.1", "lo")
    slot = Slot((NodeHandle(agent, facts),), spec.world_size, None)
    env = _rendezvous(slot, agent.free_port()) | _node_env(slot, 0)
    started_at, started = time.time(), time.monotonic()
    agent.start(spec.to_json(), slot.ranks(0), env, str(folder))
    detected: float | None = None
    while True:
        status = agent.poll(0.5)
        elapsed_s = time.monotonic() - started
        failures = [ended_s for code, ended_s in status.exits.values() if code]
        detected = min(failures, default=None)
        timed_out = elapsed_s > timeout_s or hangs()
        if not status.running or timed_out or (detected is not None and elapsed_s > detected + GRACE_S):
            break
    result = _conclude(slot, [agent.finish()], folder, started_at, timed_out, timeout_s, detected)
    return judged(spec, result, folder) if spec.trainer is not None else result
