"""What `autotune doctor` asks of a node: what torch sees there, and how fast memory and collectives are.

`python -P -m trials.doctor` prints the facts of a node as one JSON object, without a rank: where none can be started.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from trials import machine
from trials.collectives import all_gather_single
from trials.facts import GIB, MIB, Gpu, TorchFacts
from trials.machine import cpu_name
from trials.survey import device_facts

COPY_BYTES = {"cpu": 2**26, "cuda": 2**30}
COPY_S = 0.5
MAX_GATHER_MIB = {"cpu": 64.0, "cuda": 1024.0}
NUM_GATHERS = 10
USUAL_UNIT_MIB = 64.0
"""For a model that nobody describes."""


def torch_facts() -> TorchFacts:
    """Takes no memory on any GPU."""
    gpus, problem = [], ""
    if torch.version.cuda or torch.version.hip:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            gpus = [_gpu(index) for index in range(torch.cuda.device_count())]
        except RuntimeError as error:
            problem = str(error).splitlines()[0]
    build = f"cuda {torch.version.cuda}" if torch.version.cuda else f"hip {torch.version.hip or ''}"
    on_gpu = device_facts("cuda") if gpus else {"driver_version": "", "nccl_version": ""}
    capabilities: Any = getattr(torch.cpu, "get_capabilities", dict)()  # not every torch has it
    return TorchFacts(
        version=torch.__version__,
        gpu_build=build if torch.version.cuda or torch.version.hip else "",
        nccl_version=on_gpu["nccl_version"],
        driver_version=on_gpu["driver_version"],
        cpu_name=cpu_name(),
        cpu_has_bf16=any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")),
        gpus=gpus,
        problem=problem,
    )


def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    return Gpu(
        name=properties.name,
        sm_count=properties.multi_processor_count,
        memory_gib=properties.total_memory / GIB,
        capability=f"{properties.major}.{properties.minor}",
        has_bf16=bool(torch.version.hip) or properties.major >= 8,
    )


def node_facts() -> dict[str, Any]:
    return {"machine": asdict(machine.examine()), "torch": asdict(torch_facts())}


def copy_gb_per_s(device: str) -> float:
    """Median of half a second of copies; wall time, since memory is shared with whoever else uses it."""
    source = torch.ones(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy: Callable[[], Any] = lambda: target.copy_(source)  # noqa: E731
    return 2 * source.nbytes / statistics.median(_times_s(copy, device, COPY_S)) / 1e9


def all_gather(unit_mib: float, device: str, slowest: Callable[[float], float]) -> tuple[float | None, float]:
    """Bus bandwidth in GB/s of the all-gather of an FSDP unit over the process group, and the MiB gathered.

    Args:
        unit_mib: unsharded, in the dtype that is gathered.
        slowest: the largest of all ranks' values.
    """
    world_size = dist.get_world_size()
    mib = min(unit_mib, MAX_GATHER_MIB[device])
    if world_size == 1:
        return None, mib
    part = torch.ones(math.ceil(mib * MIB / world_size), dtype=torch.uint8, device=device)
    whole = torch.empty(part.numel() * world_size, dtype=torch.uint8, device=device)
    times_s = []
    for _ in range(NUM_GATHERS + 2):
        slowest(0.0)  # all ranks begin at once
        started = time.perf_counter()
        all_gather_single(whole, part)
        _synchronize(device)
        times_s.append(slowest(time.perf_counter() - started))
    received = whole.nbytes * (world_size - 1) / world_size
    return received / statistics.median(times_s[2:]) / 1e9, mib


def _times_s(call: Callable[[], Any], device: str, seconds: float) -> list[float]:
    times_s: list[float] = []
    call()
    _synchronize(device)
    end = time.perf_counter() + seconds
    while len(times_s) < 5 or time.perf_counter() < end:
        started = time.perf_counter()
        call()
        _synchronize(device)
        times_s.append(time.perf_counter() - started)
    return times_s


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    print(json.dumps(node_facts()))
