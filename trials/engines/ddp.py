"""DDP: torch's `DistributedDataParallel`, the whole model on every rank; bf16 by autocast over fp32 weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trials.engines.base import MIB, Plan
from trials.initial import Materialiser, fill_buffers
from trials.record import ENGINE_KNOBS


class Ddp:
    def __init__(self, plan: Plan) -> None:
        self.blocks = plan.blocks
        if plan.precision == "bf16":
            # Around the forward alone: over a backward, autocast would keep its bf16 copies of all weights.
            autocast = torch.autocast(plan.device.type, torch.bfloat16)
            plan.model.forward = autocast(plan.model.forward)
        fill_buffers(plan.model, plan.workload, plan.device)
        Materialiser(plan.model, plan.workload, plan.device, plan.seed)(plan.model)
        self.module: nn.Module = DistributedDataParallel(
            plan.model,
            device_ids=[plan.device.index] if plan.device.type == "cuda" else None,
            process_group=plan.mesh.get_group(),
            bucket_cap_mb=plan.knobs.bucket_cap_mb,
            gradient_as_bucket_view=True,  # else each gradient is held twice
        )

    @contextmanager
    def micro_step(self, *, last: bool, sync: bool) -> Iterator[None]:
        held_back = not (last or sync) and isinstance(self.module, DistributedDataParallel)
        with self.module.no_sync() if held_back else nullcontext():  # type: ignore[operator]
            yield

    def reduces_gradients(self) -> bool:
        return not isinstance(self.module, DistributedDataParallel) or self.module.require_backward_grad_sync

    def read(self) -> dict[str, Any]:
        return read(self.module, self.blocks)


def read(module: nn.Module, _blocks: Sequence[nn.Module]) -> dict[str, Any]:
    """The knobs that wrapping decides, from the live module; `engine` is `none` if it is another's."""
    if not isinstance(module, DistributedDataParallel):
        return {"engine": "none"}
    return {
        "engine": "ddp",
        "bucket_cap_mb": round(module.bucket_bytes_cap / MIB, 2),  # DDP holds whole bytes
        "blocks_per_unit": None,
        **dict.fromkeys(ENGINE_KNOBS),
    }
