"""FSDP2: torch's `fully_shard`, one unit for each group of consecutive blocks, the rest in the root's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Shard

from trials.engines.base import MIB, Plan, one_of
from trials.initial import full_value
from trials.record import FSDP1_KNOBS, Knobs, unit_cap_mb
from trials.workload import Workload


class Fsdp2:
    """The root keeps torch's default (its weights stay gathered between forward and backward), as trainers have it."""

    def __init__(self, plan: Plan) -> None:
        self.module, self.blocks = plan.model, plan.blocks
        options: dict[str, Any] = {"mesh": plan.sharding_mesh, "mp_policy": MixedPrecisionPolicy()}
        if plan.precision == "bf16":
            options["mp_policy"] = MixedPrecisionPolicy(plan.param_dtype, plan.gradient_dtype)
        if plan.knobs.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy()
        units = plan.units
        num_freed = len(units) - (plan.knobs.keep_last_units or 0)
        for index, unit in enumerate(units):
            fully_shard(unit, reshard_after_forward=_reshard(plan.knobs, index < num_freed), **options)
        fully_shard(plan.model, **options)
        _prefetch(plan.model, [unit[0] for unit in units], plan.knobs)
        initialise(plan.model, plan.workload, plan.device, plan.seed, bool(plan.knobs.cpu_offload))

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


def _reshard(knobs: Knobs, freed: bool) -> bool | int:
    if knobs.reshard_after_forward and freed:
        return knobs.reshard_group_size or True
    return False


def _prefetch(root: nn.Module, units: Sequence[nn.Module], knobs: Knobs) -> None:
    """Tells each unit which ones' all-gathers to queue ahead of it; the root begins the forward."""
    ahead, behind = knobs.forward_prefetch_units or 0, knobs.backward_prefetch_units or 0
    sharded: list[FSDPModule] = [module for module in (root, *units) if isinstance(module, FSDPModule)]
    for index, unit in enumerate(sharded):
        if ahead:
            unit.set_modules_to_forward_prefetch(sharded[index + 1 : index + 1 + ahead])
        if behind and index:
            # Nearest first; the root, whose weights stay, begins the backward with the last unit by itself.
            unit.set_modules_to_backward_prefetch(sharded[max(1, index - behind) : index][::-1])


def read(module: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, Any]:
    """The knobs that sharding decides, from the live module and its blocks; `engine` is `none` if it is another's."""
    groups = [param_groups(block) for block in blocks]
    if not isinstance(module, FSDPModule) or not all(groups):
        return {"engine": "none"}
    firsts, units, sizes_mib = _read_units([group[0] for group in groups], blocks)
    states = [unit._get_fsdp_state() for unit in (module, *firsts) if isinstance(unit, FSDPModule)]
    return {
        "engine": "fsdp2",
        **_read_reshard([param_groups(first)[0] for first in firsts]),
        "blocks_per_unit": max(units),
        "bucket_cap_mb": unit_cap_mb(sizes_mib, [1] * len(sizes_mib)),
        "forward_prefetch_units": max(len(state._states_to_forward_prefetch) for state in states),
        "backward_prefetch_units": max(len(state._states_to_backward_prefetch) for state in states),
        "replicate_degree": one_of({_replicate_degree(group[0]) for group in groups}),
        "reduce_dtype": one_of({"bf16" if g[0].mp_policy.reduce_dtype is torch.bfloat16 else "fp32" for g in groups}),
        "cpu_offload": one_of({isinstance(g[0].offload_policy, CPUOffloadPolicy) for g in groups}),
        **dict.fromkeys(FSDP1_KNOBS),
    }


def _read_reshard(groups: Sequence[FSDPParamGroup]) -> dict[str, Any]:
    """What becomes of each unit's weights after its forward: freed, or from some unit on to the last kept."""
    freed = [group._reshard_after_forward for group in groups]
    kept_last = len(freed) - (freed.index(False) if False in freed else len(freed))
    over = {_group_size(group) for group in groups if group._reshard_after_forward}
    if not any(freed):
        return {"reshard_after_forward": False, "keep_last_units": 0, "reshard_group_size": 0}
    in_order = freed == [True] * (len(freed) - kept_last) + [False] * kept_last
    return {
        "reshard_after_forward": True if in_order else "mixed",
        "keep_last_units": kept_last if in_order else "mixed",
        "reshard_group_size": one_of(over),
    }


def _group_size(group: FSDPParamGroup) -> int:
    """Ranks that a unit's weights are spread over between forward and backward; 0 for all that it is sharded over."""
    after, before = group.post_forward_mesh_info, group.mesh_info
    assert isinstance(after, FSDPMeshInfo)
    assert isinstance(before, FSDPMeshInfo)
    return 0 if after.shard_mesh_size == before.shard_mesh_size else after.shard_mesh_size


def _replicate_degree(group: FSDPParamGroup) -> int:
    mesh_info = group.mesh_info
    return mesh_info.replicate_mesh_size if isinstance(mesh_info, HSDPMeshInfo) else 1


def initialise(model: nn.Module, workload: Workload, device: torch.device, seed: int, offloaded: bool = False) -> None:
    """Moves `model` from `meta` to `device` and gives every parameter, sharded or not, its first value.

    Args:
        offloaded: parameters live on the host; only buffers move to the device.
    """
    model.to_empty(device="cpu" if offloaded else device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = full_value(workload, seed, name, parameter.shape, device)
            if isinstance(parameter, DTensor):
                parameter.to_local().copy_(_local_shard(full, parameter))
            else:
                parameter.copy_(full)
        workload.init_buffers(model)
    if offloaded:
        for module in model.modules():
            for leaf, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[leaf] = buffer.to(device)


def _local_shard(full: Tensor, parameter: DTensor) -> Tensor:
    """This rank's part of `full`, cut where that was drawn."""
    for dim_of_mesh, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            parts = torch.chunk(full, parameter.device_mesh.size(dim_of_mesh), dim=placement.dim)
            index = parameter.device_mesh.get_local_rank(dim_of_mesh)
            # torch.chunk may make fewer parts than ranks: the last ranks then hold nothing.
            full = parts[index] if index < len(parts) else full.narrow(placement.dim, 0, 0)
    return full


def param_groups(module: nn.Module) -> list[FSDPParamGroup]:
    """FSDP2's own record of the unit that `module` belongs to; empty if it is not sharded."""
    if not isinstance(module, FSDPModule):
        return []
    state = vars(module._get_fsdp_state())
    groups = state.get("_fsdp_param_groups")  # torch 2.12 and before: one
    return list(groups) if groups is not None else [one for one in (state["_fsdp_param_group"],) if one is not None]


def _read_units(
    groups: Sequence[FSDPParamGroup], blocks: Sequence[nn.Module]
) -> tuple[list[nn.Module], list[int], list[float]]:
    """Of each unit: its first block, its number of blocks, and its unsharded MiB in the dtype that is all-gathered."""
    firsts: list[nn.Module] = []
    units: list[int] = []
    sizes_mib: list[float] = []
    for index, group in enumerate(groups):
        if index and group is groups[index - 1]:
            units[-1] += 1
            continue
        firsts.append(blocks[index])
        units.append(1)
        dtypes = [p.param_dtype or p.orig_dtype for p in group.fsdp_params]
        sizes_mib.append(
            sum(p._orig_size.numel() * dtype.itemsize for p, dtype in zip(group.fsdp_params, dtypes, strict=True)) / MIB
        )
    return firsts, units, sizes_mib
