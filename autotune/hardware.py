"""The dense peak FLOP/s of one rank's device, and where the figure comes from.

An unknown device has no peak: a figure borrowed from another device has printed 88 % MFU for 12 %.
"""

from __future__ import annotations

import csv
import functools
import importlib.resources
import re
from collections.abc import Mapping
from dataclasses import dataclass

WHOLE_DEVICE = 0.97
"""A device that shows less than this share of its row's multiprocessors is a slice (MIG, CPX) or cut down."""
GIB_OF_NOMINAL_GB = 0.99
"""torch finds 79.2 GiB on a card of 80 GB, 139.8 on one of 141: the firmware keeps the rest."""
VGPU = re.compile(r"-\d+[ABCQ]\b")
"""Ends the name of a virtual GPU (GRID V100S-8Q, NVIDIA A40-48Q): an unknown share of the card it is named after."""
_NOT_REPORTED = "MFU is not reported; set cluster.peak_tflops_per_s"


@dataclass(frozen=True)
class Peak:
    """Dense peak of one rank: what MFU divides by."""

    tflops_per_s: float | None
    """None: not known, and then there is no MFU."""
    dtype: str
    """Of the matmuls: `bf16`, `fp32` or `tf32`."""
    source: str
    """For people: where the figure comes from, or why there is none."""


@dataclass(frozen=True)
class Device:
    """One row of devices.csv."""

    name: str
    match: re.Pattern[str]
    """Found (case-sensitively) in the device names that torch gives this device, and in no other's."""
    tflops_per_s: Mapping[str, float]
    """Dense peak by dtype; a dtype that the device lacks, or whose figure is not known, is absent."""
    sm_count: int | None
    """Multiprocessors of the whole device, as torch counts them: SMs, on AMD compute units."""
    memory_gb: tuple[float, ...]
    """Nominal, as its name says; several for a name that is sold with several. Empty if not known."""
    memory_gb_per_s: float | None
    """Of reading and writing the device's memory."""
    link_gb_per_s: float | None
    """To the other devices of its node, in one direction: NVLink, xGMI, else PCIe."""
    source: str
    note: str

    def memory_gib(self, device_name: str) -> float | None:
        """What torch reports as total memory: the one size, the one that the name tells, or the smallest."""
        named = [size for size in self.memory_gb if re.search(rf"\b{size:g}GB\b", device_name)]
        sizes = named or self.memory_gb
        return min(sizes) * GIB_OF_NOMINAL_GB if sizes else None


@functools.cache
def device_table() -> tuple[Device, ...]:
    """The rows of `autotune/devices.csv`."""
    text = importlib.resources.files("autotune").joinpath("devices.csv").read_text(encoding="utf-8")
    return tuple(_device(row) for row in csv.DictReader(text.splitlines()))


def _device(row: dict[str, str]) -> Device:
    peaks = {dtype: row[f"{dtype}_tflops_per_s"] for dtype in ("bf16", "tf32", "fp32")}
    return Device(
        name=row["name"],
        match=re.compile(row["match"]),
        tflops_per_s={dtype: float(peak) for dtype, peak in peaks.items() if peak},
        sm_count=int(row["sm_count"]) if row["sm_count"] else None,
        memory_gb=tuple(float(size) for size in row["memory_gb"].split("|") if size),
        memory_gb_per_s=float(row["memory_gb_per_s"]) if row["memory_gb_per_s"] else None,
        link_gb_per_s=float(row["link_gb_per_s"]) if row["link_gb_per_s"] else None,
        source=row["source"],
        note=row["note"],
    )


def find_device(device_name: str, sm_count: int | None = None) -> Device | None:
    """The table's row for a device name that torch gives; None if there is none, or several that it could be."""
    found = [device for device in device_table() if device.match.search(device_name)]
    if len(found) > 1:
        found = [device for device in found if device.sm_count == sm_count]
    return found[0] if len(found) == 1 and not VGPU.search(device_name) else None


def peak_for(
    device_name: str,
    precision: str,
    *,
    sm_count: int | None = None,
    given_tflops_per_s: float | None = None,
    cpu_probe_tflops_per_s: float | None = None,
    tf32: bool = False,
) -> Peak:
    """The peak of one rank: the job's, else the CPU probe's, else the table's, else none and the reason.

    Args:
        device_name: as torch gives it.
        precision: `bf16` or `fp32`, the dtype of the matmuls.
        sm_count: multiprocessors visible to the rank; a slice of a device gets its share of the peak.
        given_tflops_per_s: the job's `cluster.peak_tflops_per_s`.
        cpu_probe_tflops_per_s: measured, on a CPU.
        tf32: fp32 matmuls may run as tf32, as `torch.set_float32_matmul_precision("high")` allows.
    """
    assert precision in ("bf16", "fp32"), precision
    if given_tflops_per_s is not None:
        return Peak(given_tflops_per_s, precision, "job: cluster.peak_tflops_per_s")
    if cpu_probe_tflops_per_s is not None:
        return Peak(cpu_probe_tflops_per_s, precision, "cpu probe")
    if VGPU.search(device_name):
        return Peak(None, precision, f'"{device_name}" is a virtual GPU, an unknown share of its card: {_NOT_REPORTED}')
    found = [device for device in device_table() if device.match.search(device_name)]
    if len(found) > 1:  # the MI250X and the MI250 share one name
        names = " or ".join(device.name for device in found)
        found = [device for device in found if device.sm_count == sm_count]
        if not found:
            count = sm_count or "unknown"
            reason = f'device "{device_name}" is {names}, and its multiprocessor count ({count}) does not tell'
            return Peak(None, precision, f"{reason}: {_NOT_REPORTED}")
    if not found:
        return Peak(None, precision, f'no peak known for device "{device_name}": {_NOT_REPORTED}')
    return _from_table(found[0], device_name, precision, sm_count, tf32)


def _from_table(device: Device, device_name: str, precision: str, sm_count: int | None, tf32: bool) -> Peak:
    dtype = "tf32" if precision == "fp32" and tf32 and "tf32" in device.tflops_per_s else precision
    if dtype not in device.tflops_per_s:
        note = f" ({device.note})" if device.note else ""
        return Peak(None, dtype, f"no dense {dtype} peak for {device.name}{note}: {_NOT_REPORTED}")
    peak, source = device.tflops_per_s[dtype], f"device table: {device.name} (dense {dtype}"
    if sm_count is None or device.sm_count is None:
        if " MIG " in device_name:
            reason = f'device "{device_name}" is a slice of unknown size'
            return Peak(None, dtype, f"{reason}: {_NOT_REPORTED}")
        return Peak(peak, dtype, f"{source})")
    share = sm_count / device.sm_count
    if share >= WHOLE_DEVICE:
        return Peak(peak, dtype, f"{source})")
    return Peak(peak * share, dtype, f"{source}, {sm_count} of {device.sm_count} multiprocessors)")
