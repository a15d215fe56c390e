"""A `Predictor` of closed forms alone: nothing is run, and nothing has been learned from trials."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.hardware import Device, Peak, find_device
from autotune.job import Job
from autotune.preflight.activations import Setting, activations
from autotune.preflight.memory import peak
from autotune.preflight.prediction import Prediction
from autotune.preflight.shape import ModelShape
from autotune.preflight.step_time import CPU, NETWORK_GB_PER_S, Rates, step_terms
from trials.record import Knobs

GIB = 2**30


@dataclass(frozen=True)
class ClosedForm:
    """Memory and step time of configs of one model on one world."""

    shape: ModelShape | None
    """None: not of a known shape, and then nothing is predicted."""
    setting: Setting
    rates: Rates
    has_loader: bool = True
    """False: synthetic data, which costs nothing to load."""

    def predict(self, knobs: Knobs) -> Prediction | None:
        if self.shape is None:
            return None
        acts = activations(self.shape, self.setting, knobs)
        found = peak(self.shape, self.setting, knobs, acts)
        seconds = step_terms(self.shape, self.setting, knobs, self.rates, has_loader=self.has_loader, acts=acts)
        return Prediction(
            memory_terms={name: size / GIB for name, size in found.terms.items() if size},
            allocated_gib=found.allocated / GIB,
            reserved_gib=found.reserved / GIB,
            time_terms={name: term for name, term in seconds.items() if term},
            step_s=sum(seconds.values()),
        )


def closed_form(
    job: Job,
    shape: ModelShape | None,
    device: str,
    device_name: str,
    world_size: int,
    peak_tflops_per_s: float | None = None,
) -> ClosedForm:
    """The closed forms for a job's model on `world_size` ranks of a device.

    Args:
        device: `cpu` or `cuda`.
        device_name: as torch gives it; one that is not in the table has an A100's rates, which keeps the order.
        peak_tflops_per_s: of one rank, where it is known better than by the table.
    """
    setting = Setting(world_size, job.training.precision, device)
    rates = rates_of(find_device(device_name), job, device, peak_tflops_per_s)
    return ClosedForm(shape, setting, rates, has_loader=not job.data.is_synthetic)


UNKNOWN = Rates(312.0, 2039.0, 300.0, NETWORK_GB_PER_S, 8)
"""An A100's."""


def rates_of(row: Device | None, job: Job, device: str, peak_tflops_per_s: float | None = None) -> Rates:
    """Datasheet rates of a rank; what the table does not know is an A100's."""
    base = CPU if device == "cpu" else UNKNOWN
    dtype = "bf16" if job.training.precision == "bf16" else "tf32"
    known = row.tflops_per_s.get(dtype) or row.tflops_per_s.get(job.training.precision) if row else None
    return Rates(
        tflops_per_s=peak_tflops_per_s or known or base.tflops_per_s,
        memory_gb_per_s=(row and row.memory_gb_per_s) or base.memory_gb_per_s,
        link_gb_per_s=(row and row.link_gb_per_s) or base.link_gb_per_s,
        network_gb_per_s=base.network_gb_per_s,
        ranks_per_node=job.cluster.ranks_per_node if device == "cuda" else base.ranks_per_node,
    )


def mfu(prediction: Prediction, shape: ModelShape, knobs: Knobs, peak_of_rank: Peak) -> float | None:
    """Predicted MFU, a fraction; None without a peak."""
    if peak_of_rank.tflops_per_s is None:
        return None
    tokens = knobs.micro_batch_size * knobs.grad_accum_steps * shape.seq_len
    return tokens * shape.flops_per_token() / prediction.step_s / (peak_of_rank.tflops_per_s * 1e12)
