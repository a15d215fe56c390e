"""Each attempt in a few figures, and the Pareto front of throughput and memory."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from autotune.loaded import LoadedRun
from autotune.report.text import differences
from autotune.rows import Attempt
from autotune.stages import baseline_settings
from trials.conventions import utilisation
from trials.outcome import OUT_OF_MEMORY, Outcome

FOLLOW = frozenset({"grad_accum_steps", "blocks_per_unit"})
"""Of the global batch and the micro-batch; of the cap. No choices of their own."""
MOST_OF_A_REASON = 300
"""Characters; the history has all of it."""
RAN_OUT = frozenset(str(outcome) for outcome in OUT_OF_MEMORY)


@dataclass(frozen=True)
class Trial:
    trial: int
    attempt: int
    stage: str
    outcome: str
    reason: str
    """The beginning of its first line; empty of what went well."""
    world_size: int | None
    """Ranks; the figures of one run's trials compare on as many."""
    fits: bool
    """It ran, within the limit less headroom, and without retries of the allocator."""
    differs: str
    """From the baseline, in short."""
    settings: dict[str, Any]
    """Knobs that the engine has, and that a trainer of one's own is handed."""
    measure_options: str
    """Of `autotune measure RUN/job.yaml`, to measure it again by hand; empty for the baseline."""
    export_lines: list[str]
    """What differs from the baseline, as `autotune export --to plain` writes it, e.g. `micro_batch_size: 8`."""
    tokens_per_s_per_rank: float | None
    mfu: float | None
    hfu: float | None
    memory_gib: float | None
    """Peak on the scale that the limit judges: of live tensors on a GPU, reserved on a CPU."""
    step_time_s: float | None
    predicted_memory_gib: float | None
    """On the same scale, before the trial."""
    predicted_step_time_s: float | None
    predicted_tokens_per_s_per_rank: float | None
    predicted_mfu: float | None
    drift: float | None
    """Second half of the timed blocks over the first, minus 1."""
    timing: str | None
    """`whole`, or `composed` of the parts of short steps."""


def trials(run: LoadedRun) -> list[Trial]:
    """In the order of the history."""
    base = baseline_settings([attempt.row for attempt in run.attempts])
    return [_trial(run, attempt, base) for attempt in run.attempts]


def _trial(run: LoadedRun, attempt: Attempt, baseline: dict[str, Any]) -> Trial:
    row, knobs = attempt.row, run.study.told(attempt.knobs)
    is_ok = attempt.outcome is Outcome.OK
    predicted_s = row.get("predicted_step_time_s")
    tokens = attempt.knobs.micro_batch_size * attempt.knobs.grad_accum_steps * (run.job.seq_len or 0)
    predicted_rate = tokens / predicted_s if predicted_s and tokens else None
    return Trial(
        trial=attempt.trial,
        attempt=row["attempt"],
        stage=attempt.stage,
        outcome=str(attempt.outcome),
        reason="" if is_ok else (attempt.reason.splitlines() or [""])[0][:MOST_OF_A_REASON],
        world_size=row["world_size"],
        fits=attempt.is_feasible,
        differs=differences(knobs, baseline),
        settings={name: value for name, value in knobs.items() if value is not None},
        measure_options=_measure_options(knobs, baseline),
        export_lines=[f"{name}: {shown(value)}" for name, value in _changed(knobs, baseline).items()],
        tokens_per_s_per_rank=attempt.tokens_per_s_per_rank,
        mfu=row["mfu"] if is_ok else None,
        hfu=row["hfu"] if is_ok else None,
        memory_gib=attempt.memory_gib if is_ok else None,
        step_time_s=row["step_time_s"] if is_ok else None,
        predicted_memory_gib=row.get("predicted_gib"),
        predicted_step_time_s=predicted_s,
        predicted_tokens_per_s_per_rank=predicted_rate,
        predicted_mfu=_mfu(run, predicted_rate),
        drift=row["drift"] if is_ok else None,
        timing=row.get("timing"),
    )


def _changed(knobs: dict[str, Any], baseline: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in knobs.items() if value is not None and value != baseline.get(name)}


def _measure_options(knobs: dict[str, Any], baseline: dict[str, Any]) -> str:
    chosen = {
        name: value
        for name, value in _changed(knobs, baseline).items()
        if name not in FOLLOW and not isinstance(value, dict)
    }
    return " ".join(f"--set {shlex.quote(f'{name}={shown(value)}')}" for name, value in chosen.items())


def shown(value: Any) -> str:
    """A setting as YAML has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _mfu(run: LoadedRun, rate: float | None) -> float | None:
    flops, peak = run.study.model.flops_per_token, run.study.peak.tflops_per_s
    return None if rate is None or flops is None or peak is None else utilisation(rate, flops, peak)


def comparable(told: list[Trial]) -> list[Trial]:
    """Those that ran on as many ranks as the baseline did: `confirm` and `scale` measure on others."""
    most = max((one.world_size or 0 for one in told), default=0)  # of a job that was scaled and not tuned
    ranks = next((one.world_size for one in told if one.stage == "baseline"), most)
    return [one for one in told if one.world_size == ranks]


def pareto_front(told: list[Trial]) -> list[int]:
    """Numbers of the trials that fit, to each of which no other is both faster and smaller; by memory."""
    fitting = [one for one in comparable(told) if one.fits]
    front: list[int] = []
    fastest = 0.0
    for one in sorted(fitting, key=lambda one: (one.memory_gib or 0.0, -(one.tokens_per_s_per_rank or 0.0))):
        if (one.tokens_per_s_per_rank or 0.0) > fastest:
            fastest = one.tokens_per_s_per_rank or 0.0
            front.append(one.trial)
    return front
