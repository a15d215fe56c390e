"""What the driver must know before it can search: the model's size, the device, and on a CPU its real peak."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trials.flops import matmul_params, model_flops
from trials.machine import cpu_name
from trials.workload import Workload
from trials.wrap import block_mib, block_names

NOT_DECLARED: dict[str, Any] = {
    "num_params": 0,
    "num_matmul_params": 0,
    "num_blocks": 1,
    "block_mib": [1.0],
    "flops_per_token": None,
    "flops_per_token_causal": None,
    "flops_convention": "counted in the trials",
}
"""Of a user's own trainer whose model the job does not describe: stands in for what nobody knows."""
PROBE_SIZES = (512, 1024, 2048)
PROBE_S = 2.0


def survey_model(workload: Workload, seq_len: int, precision: str) -> dict[str, Any]:
    """Sizes and FLOPs of the model, read from a copy on `meta`."""
    with torch.device("meta"):
        model = workload.build_model()
    blocks = workload.blocks(model)
    block_names(model, blocks)  # refuses a workload without blocks
    flops = model_flops(workload, model, seq_len)
    return {
        "num_params": sum(parameter.numel() for parameter in model.parameters()),
        "num_matmul_params": matmul_params(model),
        "num_blocks": len(blocks),
        "block_mib": block_mib(blocks, precision),
        "flops_per_token": flops.per_token,
        "flops_per_token_causal": flops.per_token_causal,
        "flops_convention": flops.convention,
        "attention_recompute_flops_per_token": flops.attention_recompute,
        "is_random": has_dropout(model),
    }


def has_dropout(model: nn.Module) -> bool:
    """Whether some module draws random numbers in training: a Dropout, or a rate that it hands to a function."""
    for module in model.modules():
        rates = [value for name, value in vars(module).items() if "drop" in name or "jitter" in name or name == "p"]
        if any(isinstance(rate, float) and rate > 0 for rate in rates):
            return True
    return False


def device_facts(device: str) -> dict[str, str]:
    """Names and versions that say what was measured on."""
    if device == "cuda":
        return {
            "device_name": torch.cuda.get_device_name(),
            "driver_version": _nvidia_driver_version(),
            "nccl_version": ".".join(str(part) for part in torch.cuda.nccl.version()),  # type: ignore[no-untyped-call]
        }
    return {"device_name": cpu_name(), "driver_version": "", "nccl_version": ""}


def cuda_facts() -> dict[str, float]:
    """What a process may use of its GPU: in a MIG slice, fewer multiprocessors than the card's row in the table."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "sm_count": properties.multi_processor_count,
        "device_memory_gib": properties.total_memory / 2**30,
    }


def _nvidia_driver_version() -> str:
    version = Path("/sys/module/nvidia/version")
    return version.read_text().strip() if version.exists() else ""


def cpu_peak(precision: str) -> dict[str, float]:
    """Matmul rate of this rank's threads, per second of CPU time: what one rank could reach, alone or not; and
    the share of its time that it had a CPU for each, which is less than 1 where others want them too.

    By CPU time, since on a shared machine wall time measures the neighbours; the 90th percentile over short samples.
    One call of each size is thrown away: it builds the kernel. Call it once a study: a peak probed anew for each
    trial has been seen to turn the ranking around.
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    rates: list[float] = []
    wall_before, cpu_before = time.perf_counter(), time.process_time()
    for size in PROBE_SIZES:
        a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
        repeats = max(1, round(2e9 / (2 * size**3)))
        torch.mm(a, b)
        end = time.perf_counter() + PROBE_S / len(PROBE_SIZES)
        while time.perf_counter() < end:
            started = time.process_time()
            for _ in range(repeats):
                torch.mm(a, b)
            rates.append(2 * size**3 * repeats / (time.process_time() - started))
    num_threads = torch.get_num_threads()
    share = (time.process_time() - cpu_before) / (time.perf_counter() - wall_before) / num_threads
    return {
        # process_time adds up threads, so this is the rate of one; a rank has all of its own.
        "cpu_peak_tflops_per_s": statistics.quantiles(rates, n=10)[-1] * num_threads / 1e12,
        "cpu_share": min(1.0, share),
    }
