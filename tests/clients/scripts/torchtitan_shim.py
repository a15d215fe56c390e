"""For the tests only: torchtitan.train, which is for GPUs, on a CPU over gloo. Nothing else of it is changed."""

from __future__ import annotations

import platform
from types import SimpleNamespace

import torch
from torchtitan.tools import utils

# What torchtitan asks of torch.cuda; the others take it from there when they are loaded.
utils.device_type = "cpu"
utils.device_module = SimpleNamespace(
    **{name: getattr(torch.cpu, name) for name in ("set_device", "synchronize", "device_count")},
    current_device=lambda: 0,
    get_device_name=lambda _device: platform.machine(),
    get_device_properties=lambda _device: SimpleNamespace(total_memory=1),
    memory_stats=lambda _device: {},
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
)

from torchtitan.distributed import fsdp  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.models.common import config_utils  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402

# FlexAttention has no backward on a CPU.
config_utils.get_attention_config = lambda _backend: ScaledDotProductAttention.Config()
# gloo has no reduction that scales; the factor is 1.
undivided = fsdp.disable_fsdp_gradient_division


def sum_gradients(model: torch.nn.Module) -> None:
    undivided(model)
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


fsdp.disable_fsdp_gradient_division = sum_gradients
# It needs torch.distributed.set_timeout, which torch 2.13 has not, and a barrier by device.
dist_utils.set_pg_timeouts = lambda **_: None

if __name__ == "__main__":
    from torchtitan.train import main

    main()
