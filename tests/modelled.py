"""A runner whose trials take no time: the driver's own decisions, over outcomes and times from a model.

It stands in for ranks only where the driver is what is looked at; what ranks do is tested on real ones.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.clock import Clock
from autotune.cluster.gang import GangResult
from autotune.measuring import Listener
from autotune.rows import Attempt
from trials.outcome import Outcome
from trials.record import Knobs, RankReport, TrialSpec

MODEL: dict[str, Any] = {
    "num_params": 3_000_000,
    "num_matmul_params": 2_900_000,
    "num_blocks": 4,
    "block_mib": [2.8145] * 4,
    "flops_per_token": 2e7,
    "flops_per_token_causal": 1.9e7,
    "flops_convention": "6N + 12LHds",
    "is_random": False,
    "num_sequences": 1000,
    "data": "text",
    "cpus_allowed": 4,
    "cpu_peak_tflops_per_s": 0.1,
}


@dataclass
class Drift:
    """What a machine's speed does beside the config's: every run a step of a slow random walk, and noise of its own.

    Args:
        noise: standard deviation of a run's log throughput.
        walk: of the drift from one run to the next.
    """

    random: random.Random
    noise: float = 0.0
    walk: float = 0.0
    _log: float = 0.0

    def factor(self) -> float:
        self._log += self.random.gauss(0, self.walk)
        return math.exp(self._log + self.random.gauss(0, self.noise))


class ModelledRunner:
    """Ends every attempt at once, as `behave` says.

    Args:
        behave: what becomes of an order: tokens/s per rank, or how it fails and why.
        model: what the survey finds of the model, where it is not MODEL's.
        reserved_gib: of every trial that ends well.
    """

    world_size, device, num_lost, num_slots = 2, "cpu", 0, 1
    clock: Clock = time
    simulated = ""

    def __init__(
        self,
        behave: Callable[[TrialSpec], float | tuple[Outcome, str]],
        model: dict[str, Any] | None = None,
        reserved_gib: Callable[[Knobs], float] = lambda _: 0.1,
    ) -> None:
        self._behave, self._model, self._reserved_gib = behave, MODEL | (model or {}), reserved_gib
        self.specs: list[TrialSpec] = []
        self._ended: list[tuple[TrialSpec, GangResult]] = []

    def is_free(self) -> bool:
        return not self._ended

    def start(self, spec: TrialSpec, log_dir: Path, timeout_s: float) -> None:
        self._ended.append((spec, self.run(spec, log_dir, timeout_s)))

    def next_ended(self) -> tuple[TrialSpec, GangResult]:
        return self._ended.pop()

    def run(self, spec: TrialSpec, log_dir: Path, timeout_s: float) -> GangResult:
        self.specs.append(spec)
        found = self._behave(spec) if spec.knobs is not None else 1.0
        outcome, reason = found if isinstance(found, tuple) else (Outcome.OK, "")
        rate = found if isinstance(found, float) else math.nan
        reports = {rank: self._report(spec, rank, rate) for rank in range(self.world_size)}
        now = time.time()
        failed_rank = None if outcome is Outcome.OK else 0
        return GangResult(outcome, reason, failed_rank, reports, ["host"] * self.world_size, now, now)

    def _report(self, spec: TrialSpec, rank: int, rate: float) -> RankReport:
        report = RankReport(rank, host="host", device_name="modelled", torch_version="2.13.0", outcome="ok")
        if spec.knobs is None:
            report.survey = self._model
            return report
        report.micro_batch_tokens = spec.knobs.micro_batch_size * spec.seq_len
        step_s = report.micro_batch_tokens * spec.knobs.grad_accum_steps / rate
        report.block_times_s, report.block_steps, report.num_steps = [step_s] * 3, [1] * 3, 3
        report.own_step_times_s = [step_s] * 3
        report.reserved_bytes = round(self._reserved_gib(spec.knobs) * 2**30)
        report.applied = spec.knobs.to_dict()
        report.losses = [5.0, 4.9, 4.8]
        return report


class Silent(Listener):
    """Keeps what the screen would have been told."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)

    def baseline_known(self, knobs: Knobs) -> None: ...

    def trial_started(self, spec: TrialSpec, remaining_s: float | None) -> None: ...

    def trial_ended(self, attempt: Attempt, best: Attempt | None) -> None: ...
