"""What every engine is given, and what the trial asks of the model it makes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trials.record import Knobs, group_blocks
from trials.workload import Workload

MIB = 2**20


@dataclass(frozen=True)
class Plan:
    """A model on `meta`, its blocks checkpointed already, and all that decides how it is sharded."""

    model: nn.Module
    blocks: Sequence[nn.Module]
    """In order of execution; checkpoint wrappers where `activation_checkpointing` put them."""
    block_mib: Sequence[float]
    """Unsharded MiB of each block in the dtype that is all-gathered."""
    knobs: Knobs
    precision: str
    """`fp32`, or `bf16` over fp32 master weights."""
    mesh: DeviceMesh
    """Of one dimension, over all ranks."""
    device: torch.device
    workload: Workload
    seed: int

    @property
    def param_dtype(self) -> torch.dtype:
        """Of compute and of all-gathers."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Of the gradient reduction."""
        return torch.bfloat16 if self.knobs.reduce_dtype == "bf16" else torch.float32

    @property
    def sharding_mesh(self) -> DeviceMesh:
        """The ranks by (copy, shard) where the model is replicated (HSDP), else the mesh as it is."""
        degree = self.knobs.replicate_degree or 1
        if degree == 1:
            return self.mesh
        ranks = self.mesh.mesh.view(degree, -1)
        return DeviceMesh(self.mesh.device_type, ranks, mesh_dim_names=("replicate", "shard"))

    @property
    def units(self) -> list[list[nn.Module]]:
        """The blocks of each FSDP unit, by `bucket_cap_mb`."""
        remaining = iter(self.blocks)
        sizes = group_blocks(self.block_mib, self.knobs.bucket_cap_mb)
        return [list(itertools.islice(remaining, size)) for size in sizes]


class ShardedModel(Protocol):
    """A model that an engine has sharded and initialised."""

    module: nn.Module
    """What the loss is computed with and the optimizer is made over."""
    blocks: Sequence[nn.Module]

    def micro_step(self, *, last: bool, sync: bool) -> AbstractContextManager[None]:
        """Around the forward and backward of one micro-step.

        Args:
            last: of its optimizer step.
            sync: reduce gradients after this micro-step; the last always does.
        """
        ...

    def reduces_gradients(self) -> bool:
        """Whether a backward now would reduce the first block's gradients: the live state, not what was asked."""
        ...

    def read(self) -> dict[str, Any]:
        """The knobs that sharding decides, from the live objects; `engine` is `none` if it is not sharded."""
        ...


def one_of(values: set[Any]) -> Any:
    """The value that all agree on, else `mixed`."""
    return next(iter(values)) if len(values) == 1 else "mixed"
