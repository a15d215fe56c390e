"""FSDP2: torch's `fully_shard`, one unit for each group of consecutive blocks, the rest in the root's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Shard

from trials.engines.base import MIB, Plan, one_of
from trials.initial import full_value
from trials.record import group_blocks, unit_cap_mb
from trials.workload import Workload


class Fsdp2:
    """The root keeps torch's default (its weights stay gathered between forward and backward), as trainers have it."""

    def __init__(self, plan: Plan) -> None:
        self.module, self.blocks = plan.model, plan.blocks
        policy = MixedPrecisionPolicy()
        if plan.precision == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=plan.param_dtype, reduce_dtype=plan.gradient_dtype)
        first = 0
        for size in group_blocks(plan.block_mib, plan.knobs.bucket_cap_mb):
            unit = list(plan.blocks[first : first + size])
            fully_shard(unit, mesh=plan.mesh, reshard_after_forward=plan.knobs.reshard_after_forward, mp_policy=policy)
            first += size
        fully_shard(plan.model, mesh=plan.mesh, mp_policy=policy)
        initialise(plan.model, plan.workload, plan.device, plan.seed)

    @contextmanager
    def micro_step(self, *, last: bool, sync: bool) -> Iterator[None]:
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(last or sync)
            self.module.set_is_last_backward(last)
        yield

    def reduces_gradients(self) -> bool:
        return any(group.reduce_grads for group in param_groups(self.blocks[0]))

    def read(self) -> dict[str, Any]:
        return read(self.module, self.blocks)


def read(module: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, Any]:
    """The knobs that sharding decides, from the live module and its blocks; `engine` is `none` if it is another's."""
    groups = [param_groups(block) for block in blocks]
    if not isinstance(module, FSDPModule) or not all(groups):
        return {"engine": "none"}
    units, sizes_mib = _read_units([group[0] for group in groups])
    return {
        "engine": "fsdp2",
        "reshard_after_forward": one_of({group[0]._reshard_after_forward for group in groups}),
        "blocks_per_unit": max(units),
        "bucket_cap_mb": unit_cap_mb(sizes_mib, [1] * len(sizes_mib)),
        "limit_all_gathers": None,
        "backward_prefetch": None,
        "forward_prefetch": None,
    }


def initialise(model: nn.Module, workload: Workload, device: torch.device, seed: int) -> None:
    """Moves `model` from `meta` to `device` and gives every parameter, sharded or not, its first value."""
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = full_value(workload, seed, name, parameter.shape)
            if isinstance(parameter, DTensor):
                parameter.to_local().copy_(_local_shard(full, parameter))
            else:
                parameter.copy_(full)
        workload.init_buffers(model)


def _local_shard(full: Tensor, parameter: DTensor) -> Tensor:
    """This rank's part of `full`, cut on the host: the whole of a large table need not fit on the device."""
    for dim_of_mesh, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            parts = torch.chunk(full, parameter.device_mesh.size(dim_of_mesh), dim=placement.dim)
            index = parameter.device_mesh.get_local_rank(dim_of_mesh)
            # torch.chunk may make fewer parts than ranks: the last ranks then hold nothing.
            full = parts[index] if index < len(parts) else full.narrow(placement.dim, 0, 0)
    return full


def param_groups(module: nn.Module) -> list[FSDPParamGroup]:
    """FSDP2's own record of the unit that `module` belongs to; empty if it is not sharded."""
    return list(module._get_fsdp_state()._fsdp_param_groups) if isinstance(module, FSDPModule) else []


def _read_units(groups: Sequence[FSDPParamGroup]) -> tuple[list[int], list[float]]:
    """Blocks in each unit, and the unit's unsharded MiB in the dtype that is all-gathered."""
    units: list[int] = []
    sizes_mib: list[float] = []
    for index, group in enumerate(groups):
        if index and group is groups[index - 1]:
            units[-1] += 1
            continue
        units.append(1)
        dtypes = [p.param_dtype or p.orig_dtype for p in group.fsdp_params]
        sizes_mib.append(
            sum(p._orig_size.numel() * dtype.itemsize for p, dtype in zip(group.fsdp_params, dtypes, strict=True)) / MIB
        )
    return units, sizes_mib
