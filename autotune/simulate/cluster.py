"""What `--simulate` says: the modelled cluster, parsed and checked."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from autotune.errors import UserError, nearest
from autotune.hardware import device_table, peak_for

EXAMPLE = "nodes=64 gpus=8 device='NVIDIA H100 80GB HBM3'"
CPUS_PER_GPU = 12
NETWORK_GB_PER_S = 50.0
"""Of each GPU, one direction: one 400 Gbit/s card a GPU."""

Positive = Annotated[int, Field(gt=0, le=100_000)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


@dataclass(frozen=True)
class Memory:
    """Of a device in the table of peaks: what that table has not."""

    total_gib: float
    """As torch reports it: less than the name says."""
    gb_per_s: float
    link_gb_per_s: float
    """To the other GPUs of its node, one direction."""
    achievable: float
    """Share of the dense bf16 peak that the largest matmuls reach."""


MEMORY: dict[str, Memory] = {
    # Bandwidths by the vendors' datasheets; achievable shares by mamf-finder's published means (hardware not in its
    # table: 0.78).
    "A100 SXM4 40GB": Memory(39.4, 1555, 300, 0.87),
    "A100 SXM4 80GB": Memory(79.2, 2039, 300, 0.87),
    "A100 PCIe 80GB": Memory(79.2, 1935, 31.5, 0.81),
    "H100 SXM5": Memory(79.1, 3350, 450, 0.80),
    "H100 PCIe": Memory(79.1, 2000, 63, 0.78),
    "H100 NVL": Memory(93.1, 3900, 300, 0.78),
    "H200 SXM": Memory(139.8, 4800, 450, 0.80),
    "B200": Memory(178.4, 8000, 900, 0.78),
    "MI300X": Memory(191.7, 5300, 448, 0.51),
    "L40S": Memory(44.4, 864, 31.5, 0.78),
    "A10G": Memory(22.0, 600, 31.5, 0.78),
    "L4": Memory(22.0, 300, 31.5, 0.78),
}
"""By the name of the device table's row."""


class SimulatedCluster(BaseModel):
    """Keys of `--simulate`; a key that is left out has its default."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    nodes: Positive
    """Nodes that the cluster has."""
    gpus: Positive
    """GPUs of each node."""
    device: str
    """The GPU, as torch names it."""
    cpus: Positive | None = None
    """CPUs of each node; default: 12 a GPU."""
    memory_gib: Rate | None = None
    """Of each GPU; default, here and in the next two: the device's."""
    memory_gb_per_s: Rate | None = None
    link_gb_per_s: Rate | None = None
    """Between the GPUs of a node, one direction."""
    network_gb_per_s: Rate = NETWORK_GB_PER_S
    """Between nodes, one direction, for each GPU."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of everything that is drawn."""
    effects: Annotated[float, Field(ge=0, le=5)] = 1.0
    """Size of the hidden effects; 0 leaves the mechanisms alone."""
    noise: Share = 0.015
    """Standard deviation between two runs of one config."""
    drift: Share = 0.01
    """How far the cluster's speed wanders over hours."""
    slow_nodes: Share = 0.01
    """How much slower the typical node is than the best."""
    node_loss: Share = 0.0
    """Chance that an attempt loses a node."""

    @model_validator(mode="after")
    def _known_device(self) -> Self:
        if self.row is None and None in (self.memory_gib, self.memory_gb_per_s, self.link_gb_per_s):
            raise ValueError(
                f"device = {self.device!r}: no bandwidth and memory known; known are {', '.join(MEMORY)}, by the names "
                "that torch gives them; for another give memory_gib, memory_gb_per_s and link_gb_per_s"
            )
        if not any(peak_for(self.device, precision).tflops_per_s for precision in ("bf16", "fp32")):
            raise ValueError(f"device = {self.device!r}: {peak_for(self.device, 'bf16').source}")
        return self

    @property
    def row(self) -> str | None:
        """The device's name in MEMORY."""
        found = [device.name for device in device_table() if device.match.search(self.device)]
        return next((name for name in found if name in MEMORY), None)

    @property
    def cpus_per_node(self) -> int:
        return self.cpus or CPUS_PER_GPU * self.gpus

    def __str__(self) -> str:
        """In the form of `--simulate`, with all that differs from the defaults."""
        given = self.model_dump(exclude_defaults=True)
        return " ".join(f"{key}={shlex.quote(str(value))}" for key, value in given.items())


def parse_cluster(text: str) -> SimulatedCluster:
    """The cluster that `--simulate` describes.

    Raises:
        UserError: not KEY=VALUE, a key that is unknown, missing or given twice, or a value that cannot be.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise _error(text, str(error).lower()) from error
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise _error(text, f"{word!r} is no KEY=VALUE")
        if key in values:
            raise _error(text, f"{key} is given twice")
        values[key] = value
    try:
        return SimulatedCluster.model_validate(values)
    except ValidationError as error:
        raise _error(text, "; ".join(_said(problem) for problem in error.errors())) from error


def _said(problem: object) -> str:
    assert isinstance(problem, dict)
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{key}: unknown key; {nearest(key, SimulatedCluster.model_fields)}"
    if problem["type"] == "missing":
        return f"{key} is missing"
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    description = SimulatedCluster.model_fields[key].description
    return f"{key} = {problem['input']!r}: {problem['msg'].replace('Input should', 'should')}" + (
        f" ({description})" if description else ""
    )


def _error(text: str, what: str) -> UserError:
    return UserError(f"--simulate {text!r}: {what}", f'write KEY=VALUE with spaces between: --simulate "{EXAMPLE}"')
