"""The device table: each device its own dense peak, and never another's."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.hardware import Device, Peak, device_table, peak_for

NAMES = Path(__file__).parents[1] / "data" / "device_names.csv"
"""Names that torch gives devices and the row each must hit; with a multiprocessor count where it decides."""
MI250_NAME = "AMD Instinct MI250X / MI250"
SLICE = "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
LOOK_ALIKES = [
    "NVIDIA GeForce GTX 1080",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 5090 D",
    "NVIDIA GeForce RTX 5090 Laptop GPU",
    "NVIDIA RTX 6000",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "NVIDIA A100-SXM-64GB",
    "NVIDIA A1000",
    "NVIDIA A10M",
    "NVIDIA H800 NVL",
    "NVIDIA A100X",
    "NVIDIA A30X",
    "NVIDIA H100L",
    "NVIDIA L20",
    "NVIDIA L40G",
    "NVIDIA L400",
    "NVIDIA T4G",
    "NVIDIA GB10",
    "Tesla V100-DGXS-32GB",
    "AMD Instinct MI300A",
    "AMD Instinct MI308X",
    "TPU v4 lite",
    "TPU v7",
    "NVIDIA T400",
    "Quadro RTX 6000",
    "nvidia h100 80gb hbm3",
    "AMD EPYC 9755 128-Core Processor",
    "cpu",
    "",
]


def named_devices() -> list[tuple[str, int | None, str]]:
    with NAMES.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [(row["device_name"], int(row["sm_count"]) if row["sm_count"] else None, row["row"]) for row in rows]


def row_named(name: str) -> Device:
    return next(device for device in device_table() if device.name == name)


def test_table_has_50_devices_each_named_once_with_a_source() -> None:
    names = [device.name for device in device_table()]
    assert len(names) == len(set(names)) == 50
    assert all(device.source for device in device_table())


def test_every_row_has_a_known_name_that_hits_it() -> None:
    assert {row for _, _, row in named_devices()} == {device.name for device in device_table()}


@pytest.mark.parametrize(("device_name", "sm_count", "row"), named_devices())
def test_device_name_hits_its_own_row_alone(device_name: str, sm_count: int | None, row: str) -> None:
    hits = [device.name for device in device_table() if device.match.search(device_name)]
    if device_name != MI250_NAME:
        assert hits == [row]
    dtype = "bf16" if "bf16" in row_named(row).tflops_per_s else "fp32"
    peak = peak_for(device_name, dtype, sm_count=sm_count)
    assert peak == Peak(row_named(row).tflops_per_s[dtype], dtype, f"device table: {row} (dense {dtype})")


@pytest.mark.parametrize("device_name", LOOK_ALIKES)
def test_look_alike_or_unknown_device_has_no_peak(device_name: str) -> None:
    assert peak_for(device_name, "bf16", sm_count=84) == Peak(
        None,
        "bf16",
        f'no peak known for device "{device_name}": MFU is not reported; set cluster.peak_tflops_per_s',
    )


@pytest.mark.parametrize(
    ("device_name", "tflops_per_s"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),  # published matchers give it the H200's 989
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40", 181.05),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA GeForce RTX 4090", 165.2),  # not 82.6 of the CUDA cores, not 330 sparse
        ("AMD Instinct MI300X VF", 1307.4),
    ],
)
def test_names_that_contain_each_other_keep_their_own_peaks(device_name: str, tflops_per_s: float) -> None:
    assert peak_for(device_name, "bf16").tflops_per_s == tflops_per_s


def test_no_peak_is_above_the_next_narrower_dtypes() -> None:
    for device in device_table():
        peaks = [device.tflops_per_s[dtype] for dtype in ("fp32", "tf32", "bf16") if dtype in device.tflops_per_s]
        assert peaks == sorted(peaks), device.name


@pytest.mark.parametrize("device_name", ["Tesla V100-SXM2-32GB", "Tesla V100-PCIE-16GB", "Tesla T4"])
def test_bf16_is_refused_on_a_device_without_bf16_tensor_cores(device_name: str) -> None:
    peak = peak_for(device_name, "bf16")
    assert peak.tflops_per_s is None
    assert "no bf16 tensor cores" in peak.source and "cluster.peak_tflops_per_s" in peak.source
    assert peak_for(device_name, "fp32").tflops_per_s is not None


def test_dtype_without_a_figure_has_no_peak_though_the_device_is_known() -> None:
    peak = peak_for("TPU v4", "fp32")
    assert peak.tflops_per_s is None
    assert peak.source.startswith("no dense fp32 peak for TPU v4")


def test_fp32_takes_the_tf32_peak_only_where_tf32_is_allowed_and_exists() -> None:
    assert peak_for("NVIDIA A100-SXM4-80GB", "fp32").tflops_per_s == 19.5
    allowed = peak_for("NVIDIA A100-SXM4-80GB", "fp32", tf32=True)
    assert allowed == Peak(156.0, "tf32", "device table: A100 SXM4 80GB (dense tf32)")
    assert peak_for("NVIDIA A100-SXM4-80GB", "bf16", tf32=True).tflops_per_s == 312.0
    assert peak_for("Tesla T4", "fp32", tf32=True) == peak_for("Tesla T4", "fp32")


@pytest.mark.parametrize(
    ("device_name", "sm_count", "tflops_per_s"),
    [
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 14, 312 * 14 / 108),
        ("NVIDIA A100-PCIE-40GB MIG 2g.10gb", 28, 312 * 28 / 108),
        ("NVIDIA A30 MIG 1g.6gb", 14, 165 * 14 / 56),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16, 989.4 * 16 / 132),
        ("NVIDIA H100 PCIe MIG 4g.40gb", 64, 756 * 64 / 114),
        ("NVIDIA H200 MIG 3g.71gb", 60, 989.4 * 60 / 132),
        ("NVIDIA B200 MIG 1g.23gb", 18, 2250 * 18 / 148),
    ],
)
def test_a_slice_of_each_card_is_scaled_by_its_own_whole(device_name: str, sm_count: int, tflops_per_s: float) -> None:
    peak = peak_for(device_name, "bf16", sm_count=sm_count)
    assert peak.tflops_per_s == pytest.approx(tflops_per_s)
    assert f"{sm_count} of " in peak.source


@pytest.mark.parametrize(
    "device_name", ["NVIDIA A40-48Q", "NVIDIA A10-24Q", "NVIDIA L40S-8Q", "GRID A100-PCIE-40GB-10C"]
)
def test_a_virtual_gpu_has_not_its_cards_peak(device_name: str) -> None:
    peak = peak_for(device_name, "bf16", sm_count=84)
    assert peak.tflops_per_s is None
    assert "virtual GPU" in peak.source


def test_mi250x_and_mi250_are_told_apart_by_their_compute_units() -> None:
    assert peak_for(MI250_NAME, "bf16", sm_count=110).tflops_per_s == 191.5
    assert peak_for(MI250_NAME, "bf16", sm_count=104).tflops_per_s == 181.0


def test_mig_slice_gets_the_share_of_its_multiprocessors() -> None:
    peak = peak_for(SLICE, "bf16", sm_count=42)
    assert peak.tflops_per_s == pytest.approx(312 * 42 / 108)
    assert peak.source == "device table: A100 SXM4 40GB (dense bf16, 42 of 108 multiprocessors)"


def test_mig_slice_of_unknown_size_has_no_peak() -> None:
    peak = peak_for(SLICE, "bf16")
    assert peak.tflops_per_s is None
    assert "slice of unknown size" in peak.source


def test_partition_that_carries_the_whole_devices_name_is_scaled_too() -> None:
    peak = peak_for("AMD Instinct MI300X", "bf16", sm_count=38)
    assert peak.tflops_per_s == pytest.approx(1307.4 * 38 / 304)


@pytest.mark.parametrize(("sm_count", "scaled"), [(108, False), (105, False), (104, True), (None, False)])
def test_peak_is_scaled_below_97_percent_of_the_multiprocessors(sm_count: int | None, scaled: bool) -> None:
    peak = peak_for("NVIDIA A100-SXM4-40GB", "bf16", sm_count=sm_count)
    assert (peak.tflops_per_s != 312.0) == scaled
    assert ("multiprocessors" in peak.source) == scaled


@pytest.mark.parametrize("sm_count", [None, 96])
def test_name_shared_by_two_devices_has_no_peak_unless_the_count_tells(sm_count: int | None) -> None:
    peak = peak_for(MI250_NAME, "bf16", sm_count=sm_count)
    assert peak.tflops_per_s is None
    assert "MI250X (one GCD) or MI250 (one GCD)" in peak.source


def test_job_beats_cpu_probe_beats_table() -> None:
    everything = {"given_tflops_per_s": 100.0, "cpu_probe_tflops_per_s": 0.4}
    assert peak_for("NVIDIA H200", "bf16", sm_count=16, **everything) == Peak(
        100.0, "bf16", "job: cluster.peak_tflops_per_s"
    )
    assert peak_for("NVIDIA H200", "fp32", cpu_probe_tflops_per_s=0.4) == Peak(0.4, "fp32", "cpu probe")


def test_unknown_precision_is_a_programmers_error() -> None:
    with pytest.raises(AssertionError):
        peak_for("NVIDIA H200", "fp8")


def test_import_loads_neither_torch_nor_ray() -> None:
    code = "import sys, autotune.hardware as h; h.device_table(); assert not {'torch', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
