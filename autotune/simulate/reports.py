"""A truth and a die -> what the ranks of one attempt report, as real ranks would."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.job import Job
from autotune.simulate.machine import GIB, Shape
from autotune.simulate.trial import BLOCK_SD, STATE_BYTES, Trial, checkpoint_s
from autotune.simulate.world import Truth, World
from trials.breakdown import Breakdown
from trials.conventions import PALM_MATMUL, flops_per_token
from trials.outcome import Outcome
from trials.record import COMPOSED, Knobs, RankReport, TrialSpec, checkpoint_stride
from trials.timing import drift

LABEL = "simulated"
SURVEY_S = 30.0
MEMORY_SD = 0.002
"""Of what a run reserves: the same settings do not always make the same fragments."""
KERNELS_PER_BLOCK = 33
HOST_GIB = 6.0
"""That a rank and its workers take of the host, torch's libraries among it."""
RANK_SPREAD = 0.01
"""Of compute, between the best rank of a gang and the slowest."""


@dataclass(frozen=True)
class Measured:
    """An attempt, but for where and when."""

    outcome: Outcome
    reason: str
    failed_rank: int | None
    reports: dict[int, RankReport]
    seconds: float
    """From start to clean-up."""


def measure(world: World, spec: TrialSpec, slowness: float, now_s: float, drawn: random.Random) -> Measured:
    """One attempt at `now_s` on a slot; noise comes from `drawn`."""
    knobs = spec.knobs
    assert knobs is not None
    truth = world.truth(knobs, slowness)
    run_factor = math.exp(drawn.gauss(0.0, world.cluster.noise))
    trial = Trial(world, spec, truth, truth.step_s * run_factor, now_s, drawn)
    trial.begin()
    # Fragments differ from run to run: near the limit, a config fits in one and not in the next.
    memory_factor = 1 + drawn.gauss(0.0, MEMORY_SD)
    if truth.needed_gib * memory_factor > truth.capacity_gib:
        return _out_of_memory(world, truth, trial.phase_s, drawn)
    if trial.compile_s > spec.compile_timeout_s:
        took_s, limit_s = trial.compile_s, spec.compile_timeout_s
        reason = f"compiling took {took_s:.0f} s; measure.compile_timeout_s = {limit_s:.0f} ({LABEL})"
        return Measured(Outcome.TIMEOUT, reason, 0, {}, sum(trial.phase_s.values()))
    trial.finish()
    measured = trial.measured
    noise = np.random.default_rng(drawn.getrandbits(32))
    shape = (world.world_size, measured.num_steps)
    own_s = np.array(measured.own_step_times_s) * np.exp(noise.normal(0.0, BLOCK_SD, shape))
    reports = {}
    for rank in range(world.world_size):
        report = _report(world, rank)
        report.outcome, report.phase = Outcome.OK.value, "done"
        report.phase_s = dict(trial.phase_s)
        report.applied = knobs.to_dict()
        report.micro_batch_tokens = knobs.micro_batch_size * spec.seq_len
        report.num_steps = measured.num_steps
        report.block_times_s, report.block_steps = measured.block_times_s, measured.block_steps
        report.own_step_times_s = own_s[rank].tolist()
        if trial.step_parts_s is not None:
            report.timing, report.step_parts_s = COMPOSED, dict(trial.step_parts_s)
        report.loader_sustained, report.warnings = trial.loader_sustained, list(trial.warnings)
        report.data_wait_s = trial.data_wait_s
        report.drift = drift(measured.block_times_s)
        report.losses = _losses(world.shape, spec, measured.num_steps)
        report.allocated_bytes = round(truth.allocated_gib * GIB)
        report.reserved_bytes = round(min(truth.reserved_gib * memory_factor, truth.capacity_gib) * GIB)
        report.alloc_retries = truth.retries * measured.num_steps
        if not knobs.compile:  # else the kernel is not seen
            report.attention_backend = "flash" if knobs.attention_backend == "auto" else knobs.attention_backend
        if spec.checkpoint_dir is not None:
            report.endurance = _endurance(world, truth, trial)
        if trial.profiled:
            report.breakdown = _breakdown(world, knobs, truth, trial.mean_step_s, rank, drawn).to_dict()
        reports[rank] = report
    reports[0].hardware_flops_per_token = hardware_flops_per_token(world.shape, knobs.activation_checkpointing)
    return Measured(Outcome.OK, "", None, reports, sum(trial.phase_s.values()))


def _out_of_memory(world: World, truth: Truth, phases: dict[str, float], drawn: random.Random) -> Measured:
    rank = drawn.randrange(world.world_size)
    phase = "build" if truth.phase == "build" else next(name for name in ("compile", "first_step") if name in phases)
    spent: dict[str, float] = {}
    for name, seconds in phases.items():
        spent[name] = seconds * (0.5 if name == phase else 1.0)
        if name == phase:
            break
    total_gib = world.machine.memory_bytes / GIB
    where = "" if truth.phase == "build" else f" of its {truth.phase}"
    reason = (
        f"out of memory in {phase}{where}: CUDA out of memory. Tried to allocate more than the "
        f"{truth.capacity_gib:.2f} GiB it may have; GPU {rank % world.machine.gpus_per_node} has a total capacity of "
        f"{total_gib:.2f} GiB ({LABEL})"
    )
    reports = {number: _report(world, number) for number in range(world.world_size)}
    for report in reports.values():
        report.phase, report.phase_s = phase, dict(spent)
    failed = reports[rank]
    failed.outcome, failed.reason, failed.error_type = Outcome.OOM_DEVICE.value, reason, "OutOfMemoryError"
    return Measured(Outcome.OOM_DEVICE, reason, rank, reports, sum(spent.values()) + 2.0)


def _report(world: World, rank: int) -> RankReport:
    return RankReport(
        rank=rank,
        device_name=f"{world.cluster.device} ({LABEL})",
        torch_version=LABEL,
        driver_version=LABEL,
        nccl_version=LABEL,
    )


def _breakdown(world: World, knobs: Knobs, truth: Truth, step_s: float, rank: int, drawn: random.Random) -> Breakdown:
    """Of one rank's profiled step: what a faster rank does not compute, it waits for the slowest."""
    scale = step_s / truth.step_s
    seconds = {name: part * scale for name, part in truth.parts.items()}
    ahead_s = seconds["compute"] * RANK_SPREAD * (drawn.random() if rank else 0.0)
    cost = world.kernels.block(knobs.micro_batch_size, knobs.compile, knobs.attention_backend)
    return Breakdown(
        window_s=step_s,
        compute_s=seconds["compute"] - ahead_s,
        exposed_comm_s=seconds["exposed_comm"] + ahead_s,
        exposed_copy_s=seconds["exposed_copy"],
        data_wait_s=seconds["data_wait"],
        optimizer_s=seconds["optimizer"],
        idle_s=seconds["idle"],
        comm_s=max(truth.comm_s * scale, seconds["exposed_comm"]) + ahead_s,
        non_matmul_share=1 - truth.matmul_share,
        median_kernel_us=1e6 * cost.forward_s / KERNELS_PER_BLOCK,
    )


def _endurance(world: World, truth: Truth, trial: Trial) -> dict[str, Any]:
    """As `trials.endurance` reports it; nothing but the training itself comes near its peak, and nothing leaks."""
    peak_bytes, own_bytes = round(truth.allocated_gib * GIB), STATE_BYTES * world.shape.num_params // world.world_size
    seconds = {"train": trial.phase_s["timed"], "evaluate": trial.phase_s["evaluate"]} | dict.fromkeys(
        ("save", "load"), checkpoint_s(world)
    )
    allocated_bytes = {"train": peak_bytes, "evaluate": (peak_bytes + own_bytes) // 2}
    phases = [
        {
            "phase": name,
            "seconds": took_s,
            "allocated_bytes": allocated_bytes.get(name, own_bytes),
            "reserved_bytes": round(truth.reserved_gib * GIB),
            "host_bytes": round(HOST_GIB * GIB) + (own_bytes if name in ("save", "load") else 0),
        }
        for name, took_s in seconds.items()
    ]
    return {
        "phases": phases,
        "host_growth_bytes_per_step": 0.0,
        "host_available_bytes": 2**40,
    }


def _losses(shape: Shape, spec: TrialSpec, num_steps: int) -> list[float]:
    """The same for all settings, as it must be: they train alike."""
    wobble = random.Random(f"{spec.seed}:losses")
    count = spec.num_warmup_steps + 1 + 2 * spec.composed + num_steps
    return [math.log(shape.vocab) * math.exp(-step / 400) * (1 + wobble.gauss(0.0, 2e-3)) for step in range(count)]


def hardware_flops_per_token(shape: Shape, mode: str) -> float:
    """What a forward and a backward execute: the convention's count, and what blocks compute again.

    Full checkpointing runs a block's forward again but for its last matmul; selective keeps all matmuls.
    """
    needed = flops_per_token(shape.num_matmul_params, shape.num_layers, shape.q_size, shape.seq_len)
    stride = 1 if mode == "full" else checkpoint_stride(mode)
    if stride is None:
        return needed
    again = 2 * (shape.block_matmul_params - shape.hidden * shape.ffn) + 4 * shape.q_size * shape.seq_len
    return needed + math.ceil(shape.num_layers / stride) * again


def survey_reports(world: World, matmul_micro_batch_size: int | None = None) -> dict[int, RankReport]:
    """The survey of model and machine, as counts: nothing is built.

    Args:
        matmul_micro_batch_size: also the rate reached in the matmuls of so many sequences.
    """
    shape, job = world.shape, world.job
    found = survey_facts(job, shape) | {
        "cpus_allowed": world.cluster.cpus_per_node,
        "device_memory_gib": world.machine.memory_bytes / GIB,
    }
    if matmul_micro_batch_size is not None:
        found["matmul_rate"] = {"model_tflops_per_s": world.kernels.matmul_flops_per_s(matmul_micro_batch_size) / 1e12}
    reports = {rank: _report(world, rank) for rank in range(world.world_size)}
    for report in reports.values():
        report.outcome, report.phase, report.survey = Outcome.OK.value, "done", found
    return reports


def survey_facts(job: Job, shape: Shape) -> dict[str, object]:
    """What `trials.survey.survey_model` says of the built-in decoder, from its shape."""
    arguments = (shape.num_matmul_params, shape.num_layers, shape.q_size, shape.seq_len)
    return {
        "num_params": shape.num_params,
        "num_matmul_params": shape.num_matmul_params,
        "num_blocks": shape.num_layers,
        "block_mib": [shape.block_bytes / 2**20] * shape.num_layers,
        "flops_per_token": flops_per_token(*arguments, "6N+12Lds"),
        "flops_per_token_causal": flops_per_token(*arguments, "6N+6Lds"),
        "attention_recompute_flops_per_token": 2 * shape.num_layers * shape.q_size * shape.seq_len,
        "flops_convention": PALM_MATMUL.name,
        "is_random": False,
        "data": f"{job.built_in[1].source}, not read ({LABEL})",
    }
