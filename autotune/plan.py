"""`autotune plan`: what a job would search, take and cost, by the closed forms. No trial runs, and no Ray starts."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.canonical import Facts
from autotune.errors import UserError
from autotune.estimate import Estimate, Gang, Guess, estimate
from autotune.hardware import Peak, find_device, peak_for
from autotune.job import Job
from autotune.job_model import Model
from autotune.preflight.closed_form import closed_form, mfu
from autotune.preflight.fastest import RISKY, SAFE, SURE_OOM, Room, fastest, looked_at
from autotune.preflight.prediction import Prediction
from autotune.preflight.shape import ModelShape, of_model, of_surveyed
from autotune.space import SearchSpace
from trials.outcome import TrialError
from trials.record import Knobs

MOST_PREDICTED = 20_000
"""Of a larger space, so many are drawn."""
NUM_TOP = 10
CPUS_PER_GPU = 8
"""Assumed of nodes that nobody has asked."""
COUNT_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Planned:
    """A config, and what is predicted of it on each number of ranks."""

    knobs: Knobs
    at: Mapping[int, Prediction]


@dataclass(frozen=True)
class Plan:
    job: Job
    space: SearchSpace
    shape: ModelShape | None
    counted: str
    """How the model's sizes were found, for people."""
    device: str
    device_name: str
    peak: Peak
    limit_gib: float | None
    worlds: tuple[int, ...]
    """Numbers of ranks that are asked about; the first is a trial's."""
    num_configs: int
    baseline: Planned | None
    configs: tuple[Planned, ...]
    """All of the space, or a sample of it; empty where nothing can be predicted."""

    @property
    def trial_world(self) -> int:
        return self.worlds[0]

    @property
    def room(self) -> Room:
        return Room(self.limit_gib, self.device, self.job.cluster.memory_headroom)

    def zone(self, planned: Planned, world: int) -> str:
        """`sure_oom`, `risky` or `safe`; without a limit, `safe`."""
        return self.room.zone(planned.at[world])

    def zones(self, world: int) -> dict[str, int]:
        counts = dict.fromkeys((SAFE, RISKY, SURE_OOM), 0)
        for planned in self.configs:
            counts[self.zone(planned, world)] += 1
        return counts

    def top(self) -> list[Planned]:
        """The fastest that fit in a trial, then those that may; each with the fewest workers that keep up."""
        planned = {one.knobs: one for one in self.configs}
        predicted = ((knobs, one.at[self.trial_world]) for knobs, one in planned.items())
        return [planned[knobs] for knobs in fastest(predicted, self.room, NUM_TOP)]

    def surely_failing(self) -> list[tuple[int, str, int]]:
        """Micro-batch, checkpointing, and the number of configs with them, where none has a chance."""
        found = []
        ordered = sorted(self.configs, key=_group)
        for (micro, mode), group in itertools.groupby(ordered, key=_group):
            members = list(group)
            if all(self.zone(one, self.trial_world) == SURE_OOM for one in members):
                found.append((micro, mode, len(members)))
        return found

    def only_at_target(self) -> list[Planned]:
        """What surely fails in a trial, and fits the real run, or may: those that fit first, fastest first."""
        target = self.job.batch.target_world_size
        if target not in self.worlds or target == self.trial_world:
            return []
        failing = [one for one in self.configs if self.zone(one, self.trial_world) == SURE_OOM]
        found = [one for one in failing if self.zone(one, target) != SURE_OOM]
        return sorted(found, key=lambda one: (self.zone(one, target) != SAFE, one.at[target].step_s))

    def mfu(self, planned: Planned, world: int) -> float | None:
        return mfu(planned.at[world], self.shape, planned.knobs, self.peak) if self.shape else None

    def estimate(self) -> Estimate | None:
        """What the whole study takes; None where no step time is predicted."""
        if self.baseline is None or self.shape is None:
            return None
        cluster, world = self.job.cluster, self.trial_world
        baseline, *others = (Guess(one.knobs, one.at[world].step_s) for one in (self.baseline, *self.top()))
        gang = Gang(self.device, world, cluster.parallel_trials)
        return estimate(self.job, gang, baseline, others, self.shape.num_params, self.num_configs)


def _group(planned: Planned) -> tuple[int, str]:
    return planned.knobs.micro_batch_size, planned.knobs.activation_checkpointing


def make_plan(job: Job, worlds: Sequence[int] = (), device_name: str | None = None) -> Plan:
    """The plan of a job that has been read and checked.

    Args:
        worlds: numbers of ranks to predict for beside a trial's and the target's; each keeps micro-batch and
            accumulation.
        device_name: as torch gives it; overrides the job's.

    Raises:
        UserError: the model is none, the space has no such candidates, a world does not hold whole copies.
    """
    name = device_name or job.cluster.device_name or ""
    device = "cuda" if job.cluster.device == "cuda" or name else "cpu"
    if name and find_device(name) is None and peak_for(name, job.training.precision).tflops_per_s is None:
        raise UserError(
            f"device {name!r}: not in the table of devices",
            "give the name as torch.cuda.get_device_name() prints it, e.g. 'NVIDIA H100 80GB HBM3'",
        )
    shape, sizes, counted = _count(job)
    trial_world = job.cluster.world_size
    cpus = len(os.sched_getaffinity(0)) if device == "cpu" else CPUS_PER_GPU * job.cluster.ranks_per_node
    space = SearchSpace(job, Facts(device, len(sizes), sizes, cpus, trial_world))
    asked = tuple(dict.fromkeys((trial_world, job.batch.target_world_size, *worlds)))
    _check_worlds(asked, space)
    peak = _peak(job, device, name)
    predictors = {world: closed_form(job, shape, device, name, world, job.cluster.peak_tflops_per_s) for world in asked}

    def planned(knobs: Knobs) -> Planned | None:
        found = {world: predictor.predict(knobs) for world, predictor in predictors.items()}
        known = {world: prediction for world, prediction in found.items() if prediction is not None}
        return Planned(knobs, known) if len(known) == len(found) else None

    drawn = looked_at(space, random.Random(job.seed), MOST_PREDICTED)
    row = find_device(name)
    memory_gib = row.memory_gib(name) if row else None
    return Plan(
        job=job,
        space=space,
        shape=shape,
        counted=counted,
        device=device,
        device_name=name,
        peak=peak,
        limit_gib=job.cluster.limit_gib(memory_gib),
        worlds=asked,
        num_configs=space.num_configs,
        baseline=planned(space.baseline),
        configs=tuple(one for one in map(planned, drawn) if one is not None) if shape else (),
    )


def _peak(job: Job, device: str, name: str) -> Peak:
    precision, given = job.training.precision, job.cluster.peak_tflops_per_s
    if name or given is not None:
        return peak_for(name, precision, given_tflops_per_s=given)
    if device == "cpu":
        return Peak(None, precision, "the run probes it; so no MFU is predicted")
    return Peak(None, precision, "of no GPU in particular, so no MFU is predicted: name it by --device")


def _check_worlds(worlds: Sequence[int], space: SearchSpace) -> None:
    degrees = space.candidates.get("replicate_degree", (1,))
    groups = [size for size in space.candidates.get("reshard_group_size", ()) if size]
    for world, parts in itertools.product(worlds, (*degrees, *groups)):
        if world < 1 or world % parts:
            raise UserError(f"--world {world}: does not divide into the {parts} parts of the space", "give a multiple")


def _count(job: Job) -> tuple[ModelShape | None, tuple[float, ...], str]:
    """Shape, MiB of each block, and how they were found.

    Raises:
        UserError: the model is none.
    """
    model, precision = job.model, job.training.precision
    if model is None:
        return None, (1.0,), "your trainer's own, of which nothing is declared, so nothing is predicted"
    try:
        shape = of_model(model)
    except TrialError as error:
        raise UserError(str(error)) from error
    if shape is not None:
        return shape, shape.block_mib(precision), "from its config alone; nothing was built"
    found = _build_and_count(model, precision)
    whose = "transformers' code" if model.workload == "hf" else f"the code of {model.workload}"
    counted = f"{whose} ran here and built it on `meta`, to count it"
    return of_surveyed(model, found, precision), tuple(found["block_mib"]), counted


def _build_and_count(model: Model, precision: str) -> dict[str, Any]:
    order = {
        "workload": model.workload,
        "arguments": {"seq_len": model.seq_len, **model.factory_arguments()},
        "precision": precision,
        "import_paths": [model.import_path] if model.import_path else [],
    }
    command = [sys.executable, "-P", "-m", "trials.count", json.dumps(order)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COUNT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"model.workload = {model.workload}: not built on `meta` after {COUNT_TIMEOUT_S:.0f} s",
            "a model that is built there takes no memory and no time: does its code wait for something?",
        ) from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise UserError(
            f"model.workload = {model.workload}: building it on `meta` failed:\n{done.stderr.strip()[-2000:]}"
        )
    found: dict[str, Any] = json.loads(lines[-1])
    if "error" in found:
        raise UserError(found["error"])
    return found
