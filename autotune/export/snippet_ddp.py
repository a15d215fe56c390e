"""Tuned DDP settings in plain PyTorch: `apply` to a model, `make_loader`, `train_step`."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autotune.export.snippet_common import PRECISION, checkpoint_blocks

BUCKET_CAP_MB: float = 25.0


def apply(model: nn.Module, blocks: Sequence[nn.Module], device: torch.device) -> DistributedDataParallel:
    """Checkpoints `model` and wraps it in DDP; train what is returned. Call it before the optimizer is made.

    Args:
        model: the whole model, with fp32 parameters.
        blocks: its transformer blocks, in order of execution.
        device: of this rank: `torch.device("cuda", local_rank)`, or `torch.device("cpu")`.
    """
    checkpoint_blocks(model, blocks)
    if PRECISION == "bf16":
        # Around the forward alone: over a backward, autocast would keep its bf16 copies of all weights.
        model.forward = torch.autocast(device.type, torch.bfloat16)(model.forward)
    return DistributedDataParallel(
        model.to(device),
        device_ids=[device] if device.type == "cuda" else None,
        bucket_cap_mb=BUCKET_CAP_MB,
        gradient_as_bucket_view=True,  # else each gradient is held twice
    )
