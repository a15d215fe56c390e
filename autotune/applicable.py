"""Whether a knob can have a value on the machine at hand, with the ranks of a trial, in a job."""

from __future__ import annotations

import itertools
from typing import Any

from autotune.canonical import Facts
from autotune.job import Job
from trials.record import ENGINE_KNOBS


def inapplicable(name: str, values: tuple[Any, ...], job: Job, facts: Facts) -> str:
    """Why a knob of EXTRA_KNOBS cannot have these values on this machine; empty if it can."""
    degrees = job.space.replicate_degree or (job.baseline.replicate_degree or 1,)
    return (
        _not_on_the_device(name, values, facts.device)
        or _not_with_the_ranks(name, values, facts.world_size, degrees)
        or _not_in_the_job(name, values, job, facts.device)
    )


def _not_on_the_device(name: str, values: tuple[Any, ...], device: str) -> str:
    knob = ENGINE_KNOBS.get(name)
    if knob is not None and device not in knob.devices and values != (knob.default,):
        return f"there is none on {device}"
    absent = set(values) - {"auto", "flash", "math"} if name == "attention_backend" and device == "cpu" else set()
    return f"a CPU has no {' or '.join(sorted(absent))}; it has flash and math" if absent else ""


def _not_with_the_ranks(name: str, values: tuple[Any, ...], world_size: int, degrees: tuple[int, ...]) -> str:
    for value, degree in itertools.product(values, degrees):
        if name == "replicate_degree" and (world_size % value or value >= world_size > 1):
            return f"{value} copies of a model that is still sharded do not come out of {world_size} ranks"
        ranks = world_size // degree
        if name == "reshard_group_size" and value and not (1 < value < ranks and ranks % value == 0):
            return f"{value} is no divisor between 1 and the {ranks} ranks that weights are sharded over"
    return ""


def _not_in_the_job(name: str, values: tuple[Any, ...], job: Job, device: str) -> str:
    if name == "compile" and True in values and device == "cpu" and job.cluster.memory_limit_gib is not None:
        return "on a CPU the compiler's own memory would count against cluster.memory_limit_gib"
    if name == "reduce_dtype" and "bf16" in values and job.training.precision == "fp32":
        return "bf16 needs training.precision = bf16"
    return ""
