"""Starts the job's ranks where its trials would run, has them look around and measure, and gathers what they say.

Where ranks cannot be started, the reason is a finding, and this machine is looked at without them.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from autotune.cluster.gang import GangResult
from autotune.cluster.interpreter import MODULE_COMMAND
from autotune.cluster.nodes import alive_nodes
from autotune.cluster.runner import SlotRunner, open_runner
from autotune.doctor.findings import Examination, Finding, NodeFacts, RankFacts
from autotune.errors import AutotuneError, InfrastructureError, UserError
from autotune.job import Job
from autotune.job_file import load_job
from autotune.measuring import make_spec
from autotune.survey import Survey, survey_content, survey_from_content
from trials import machine
from trials.facts import STAGE
from trials.outcome import OUT_OF_MEMORY, Outcome

DEFAULT_JOB = "quickstart"
RANKS_TIMEOUT_S = 300.0
"""They need seconds on a CPU; a large model's FLOPs take longer to count."""
PROCESS_GROUP_TIMEOUT_S = 60.0
NODE_TIMEOUT_S = 120.0

# What a rank was doing when it failed -> what that is a sign of, and what to do.
_SIGNS = {
    "node": ("devices", "see `nvidia-smi`: is each GPU there, in no exclusive mode, and free?"),
    "process_group": (
        "process group",
        "ranks do not reach each other: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that connects "
        "the nodes, open its firewall, and look at NCCL_DEBUG=INFO",
    ),
    "bandwidth": ("collectives", "look at NCCL_DEBUG=INFO in the ranks' output, and at `nvidia-smi topo -m`"),
    "survey": ("model and data", "run the workload's build_model() and loss() by themselves"),
}


def examine(name: str | None, overrides: tuple[str, ...], folder: Path) -> Examination:
    """Looks at where a job is to run; takes less than a minute on a CPU.

    Args:
        name: of the job; None for the shipped quickstart's shapes on what this machine has.
        folder: for the ranks' output.

    Raises:
        UserError: the job file, or an override, is wrong.
        InfrastructureError: this machine cannot even be looked at.
    """
    here = this_machine() if name is None and machine.has_gpu() else None
    job_name = name or DEFAULT_JOB
    job = load_job(job_name, (*_all_of(here), *overrides) if name is None else overrides)
    known = Examination(job, job_name, name is None, _device_here(job, here), nodes=())
    if _crowded(known):
        unmeasured = Finding("note", "not measured", "there are fewer CPUs than ranks, so none was started")
        return replace(known, nodes=(here or this_machine(),), troubles=(unmeasured,))
    try:
        with open_runner(job, folder / "ray.log") as runner:
            known = replace(known, device=runner.device, cluster=tuple(alive_nodes()))
            return _by_ranks(known, runner, folder)
    except AutotuneError as error:
        trouble = Finding("problem", "cluster", error.message, error.hint or "see `ray status`")
        here = here or this_machine()
        return replace(known, device=_device_here(job, here), nodes=(here,), troubles=(trouble,))


def this_machine() -> NodeFacts:
    """This machine, by a process of its own.

    Raises:
        InfrastructureError: torch does not start here.
    """
    command = [*MODULE_COMMAND, "trials.doctor"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NODE_TIMEOUT_S, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        told = str(error.stderr or "").strip().splitlines()
        raise InfrastructureError(
            f"torch does not start here: {told[-1] if told else error}", f"see `{' '.join(command)}`"
        ) from error
    found: NodeFacts = _typed(NodeFacts, json.loads(done.stdout.splitlines()[-1]))
    return found


def _all_of(here: NodeFacts | None) -> list[str]:
    """Overrides of the quickstart for all of this machine's GPUs, or for its CPUs."""
    gpus = here.torch.gpus if here is not None else []
    if not gpus:
        return [f"cluster.ranks_per_node={min(2, machine.cpus_allowed())}"]
    return [
        "cluster.device=cuda",
        f"cluster.ranks_per_node={len(gpus)}",
        "cluster.memory_limit_gib=null",
        f"batch.target_world_size={len(gpus)}",
        f"batch.global_batch_size={8 * len(gpus)}",
        f"training.precision={'bf16' if all(gpu.has_bf16 for gpu in gpus) else 'fp32'}",
    ]


def _device_here(job: Job, here: NodeFacts | None) -> str:
    if job.cluster.device != "auto":
        return job.cluster.device
    return "cuda" if (here.torch.gpus if here else machine.has_gpu()) else "cpu"


def _crowded(known: Examination) -> bool:
    """Of more CPU ranks than CPUs no figure would mean anything, and a hundred of them would take the machine down."""
    cluster = known.job.cluster
    return known.device == "cpu" and cluster.address == "local" and cluster.ranks_per_node > machine.cpus_allowed()


def _by_ranks(known: Examination, runner: SlotRunner, folder: Path) -> Examination:
    """One gang on each slot, all at once: that is all nodes that the job's trials would run on."""
    job = known.job
    spec = replace(
        make_spec(job, runner, None, STAGE, -1),
        matmul_micro_batch_size=job.baseline.micro_batch_size,
        process_group_timeout_s=min(job.measure.trial_timeout_s, PROCESS_GROUP_TIMEOUT_S),
    )
    for slot in range(runner.num_slots):
        logs = folder / f"slot-{slot}"
        logs.mkdir()
        runner.start(spec, logs, RANKS_TIMEOUT_S)
    results = [runner.next_ended()[1] for _ in range(runner.num_slots)]
    troubles = [_trouble(result, folder) for result in results if result.outcome is not Outcome.OK]
    survey: Survey | None = None
    if not troubles:
        try:
            survey = survey_from_content(job, runner, survey_content(job, runner, results[0]))
        except UserError as error:
            troubles.append(Finding("problem", "job", error.message, error.hint, of_the_job=True))
    return replace(
        known,
        nodes=tuple(node for result in results for node in _nodes(result, job.cluster.ranks_per_node)),
        ranks=tuple(rank for result in results for rank in _ranks(result)),
        survey=survey,
        troubles=tuple(dict.fromkeys(troubles)),
    )


def _trouble(result: GangResult, folder: Path) -> Finding:
    report = result.reports.get(result.failed_rank or 0)
    phase = report.phase if report is not None else "start"
    name, advice = _SIGNS.get(phase, ("ranks", "see their output"))
    if result.outcome in OUT_OF_MEMORY:
        advice = "end whatever else uses the memory (`nvidia-smi`, `free -g`)"
    advice = f"{advice}; the ranks' output is in {folder}"
    if result.outcome is Outcome.INVALID:
        return Finding("problem", "job", result.reason.splitlines()[0], advice, of_the_job=True)
    what = f"{result.outcome}: {result.reason}" if result.reason else str(result.outcome)
    crashed_in_survey = result.outcome is Outcome.CRASHED and phase == "survey"
    return Finding("problem", name, what.splitlines()[0], advice, of_the_job=crashed_in_survey)


def _nodes(result: GangResult, ranks_per_node: int) -> list[NodeFacts]:
    firsts = [report for rank, report in sorted(result.reports.items()) if rank % ranks_per_node == 0]
    found = [report.survey for report in firsts if report.survey and "machine" in report.survey]
    return [_typed(NodeFacts, {name: survey[name] for name in ("machine", "torch")}) for survey in found]


def _ranks(result: GangResult) -> list[RankFacts]:
    found = []
    for rank, report in sorted(result.reports.items()):
        told = report.survey or {}
        values = {"rank": rank, "host": report.host, "matmul": told.get("matmul_rate")}
        values |= {"bandwidth": told.get("bandwidth"), "gpu_used_gib": told.get("gpu_used_gib")}
        found.append(_typed(RankFacts, values))
    return found


def _typed(kind: type[Any], values: object) -> Any:
    return TypeAdapter(kind).validate_python(values)
