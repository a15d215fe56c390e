"""Tuned FSDP1 settings in plain PyTorch: `apply` to a model, `make_loader`, `train_step`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy

from autotune.export.snippet_common import PRECISION, checkpoint_blocks
from autotune.export.snippet_units import group_blocks

REDUCE_DTYPE: str = "fp32"
RESHARD_AFTER_FORWARD: bool = True
LIMIT_ALL_GATHERS: bool = True
BACKWARD_PREFETCH: str = "none"
FORWARD_PREFETCH: bool = False


def apply(model: nn.Module, blocks: Sequence[nn.Module], device: torch.device) -> FullyShardedDataParallel:
    """Checkpoints and shards `model`; train what is returned. Call it before the optimizer is made.

    Args:
        model: the whole model, with fp32 parameters that are the same on all ranks.
        blocks: its transformer blocks, in order of execution.
        device: of this rank: `torch.device("cuda", local_rank)`, or `torch.device("cpu")`.
    """
    sizes = group_blocks(blocks)
    units = join_blocks(model, checkpoint_blocks(model, blocks), sizes)
    prefetch = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}
    options: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy.FULL_SHARD if RESHARD_AFTER_FORWARD else ShardingStrategy.SHARD_GRAD_OP,
        "limit_all_gathers": LIMIT_ALL_GATHERS,
        "backward_prefetch": prefetch[BACKWARD_PREFETCH],
        "forward_prefetch": FORWARD_PREFETCH,
        "use_orig_params": True,
        "device_id": device,
    }
    if PRECISION == "bf16":
        # Buffers keep their dtype; what enters a unit is cast, as FSDP2 does.
        reduce_dtype = torch.bfloat16 if REDUCE_DTYPE == "bf16" else torch.float32
        options["mixed_precision"] = MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype, cast_forward_inputs=True
        )
    names = {module: name for name, module in model.named_modules()}
    for unit in units:
        model.set_submodule(names[unit], FullyShardedDataParallel(unit, **options))
    # The rest is the root's own unit, which torch keeps gathered from forward to backward.
    return FullyShardedDataParallel(model, **options)


class BlockGroup(nn.Module):
    """Consecutive blocks that run one after the other: the first argument passes through, the others go to each."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        for block in self.blocks:
            hidden = block(hidden, *args, **kwargs)
        return hidden


def join_blocks(model: nn.Module, blocks: Sequence[nn.Module], sizes: Sequence[int]) -> list[nn.Module]:
    """The modules that become FSDP units: the blocks, or where several share a unit, groups of them.

    FSDP1 makes a unit of one module, so blocks that share one are moved into a BlockGroup. This renames parameters
    (`layers.3.x` -> `layers.1.blocks.1.x`), and so the keys of checkpoints; and the list gets shorter.
    """
    if max(sizes) == 1:
        return list(blocks)
    names = {module: name for name, module in model.named_modules()}
    units: list[nn.Module] = []
    end = len(blocks)
    for size in reversed(sizes):  # from the last on, so that earlier blocks keep their place in the list
        members = list(blocks[end - size : end])
        layers = model.get_submodule(names[members[0]].rpartition(".")[0])
        first = list(layers.children()).index(members[0])
        if not isinstance(layers, nn.ModuleList) or list(layers[first : first + size]) != members:
            raise ValueError("blocks that share a unit must follow each other in one nn.ModuleList")
        unit = BlockGroup(members)
        layers[first] = unit
        del layers[first + 1 : first + size]
        units.insert(0, unit)
        end -= size
    return units
