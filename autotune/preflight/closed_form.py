"""A `Predictor` of closed forms alone: nothing is run, and nothing has been learned from trials."""

from __future__ import annotations

import dataclasses
import operator
from dataclasses import dataclass, field
from typing import Any

from autotune.hardware import Device, find_device
from autotune.hardware import Peak as PeakRate
from autotune.job import Job
from autotune.preflight.activations import Setting, activations
from autotune.preflight.memory import Peak, peak
from autotune.preflight.prediction import COLLECTIVE_RATES, Prediction
from autotune.preflight.shape import ModelShape
from autotune.preflight.step_time import CPU, FITTED, NETWORK_GB_PER_S, Rates, loader_wait_s, step_terms
from autotune.search.feasible import HOST_ONLY
from trials.record import KNOB_NAMES, Knobs

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
    _known: dict[tuple[Any, ...], tuple[Peak, dict[str, float], tuple[float, ...]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """By all knobs but the loader's: a space has many configs that differ in these alone."""

    def predict(self, knobs: Knobs) -> Prediction | None:
        if self.shape is None:
            return None
        key = _all_but_the_loader(knobs)
        if key not in self._known:
            acts = activations(self.shape, self.setting, knobs)
            terms = step_terms(self.shape, self.setting, knobs, self.rates, acts=acts)
            at_rates = tuple(
                sum(step_terms(self.shape, self.setting, knobs, self.rates, constants, acts).values())
                for constants in _AT_RATES
            )
            self._known[key] = peak(self.shape, self.setting, knobs, acts), terms, at_rates
        found, seconds, at_rates = self._known[key]
        busy_s = sum(seconds.values())
        waiting_s = self._loader_wait_s(knobs, busy_s)
        return Prediction(
            memory_terms={name: size / GIB for name, size in found.terms.items() if size},
            allocated_gib=found.allocated / GIB,
            reserved_gib=found.reserved / GIB,
            time_terms={name: term for name, term in (seconds | {"loader": waiting_s}).items() if term},
            step_s=busy_s + waiting_s,
            step_s_at_rates=tuple(each_s + self._loader_wait_s(knobs, each_s) for each_s in at_rates),
        )

    def _loader_wait_s(self, knobs: Knobs, busy_s: float) -> float:
        return loader_wait_s(self.shape, knobs, busy_s) if self.has_loader and self.shape else 0.0


_AT_RATES = tuple(dataclasses.replace(FITTED, network=FITTED.network * rate) for rate in COLLECTIVE_RATES)

_all_but_the_loader = operator.attrgetter(*(name for name in KNOB_NAMES if name not in HOST_ONLY))


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
    return ClosedForm(shape, setting, rates, has_loader=job.has_loader)


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


def mfu(prediction: Prediction, shape: ModelShape, knobs: Knobs, peak_of_rank: PeakRate) -> float | None:
    """Predicted MFU, a fraction; None without a peak."""
    if peak_of_rank.tflops_per_s is None:
        return None
    tokens = knobs.micro_batch_size * knobs.grad_accum_steps * shape.seq_len
    return tokens * shape.flops_per_token() / prediction.step_s / (peak_of_rank.tflops_per_s * 1e12)
