"""The figures of an attempt -> what its step is bound by, how much is to be gained at most, and what to try.

It informs people. The search does not look at it: only measured throughput decides.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from autotune.report.text import drift_words
from autotune.rows import Limits
from trials.breakdown import FRACTIONS, Breakdown

# Fractions of a step above which a part of it is named. Published: the thresholds of torch_tb_profiler (PyTorch
# Profiler's TensorBoard plugin) for its own recommendations. Guess: ours, to be calibrated.
DATA_WAIT = 0.05  # published
EXPOSED_COMM = 0.10  # published
EXPOSED_COPY = 0.05  # guess, as for data
IDLE = 0.15  # guess
OPTIMIZER = 0.10  # guess
STRAGGLER = 0.10  # guess: one rank's work beyond the middle rank's; less may be one step's noise
RECOMPUTE = 0.10  # guess: of the step, by the share of recomputed FLOPs in its compute
COMPUTE_BOUND = 0.70  # guess: of the step; below it compute is not what bounds
NON_MATMUL = 0.40  # guess: of the compute; above it memory bandwidth bounds, not the matmul units
TOO_SMALL = 0.40  # guess: compute and optimizer below this, and gaps: too little work for a step's fixed costs
DRIFT = 0.10  # guess: of the second half of the timed blocks against the first; less is a shared machine's usual noise
SHORT_KERNEL_US = 10.0  # guess: a launch takes about as long


@dataclass(frozen=True)
class Finding:
    """One thing that bounds a step."""

    name: str
    evidence: str
    """With its numbers."""
    upper_bound: float | None
    """Gain in throughput if it vanished altogether: 1 / (1 - fraction) - 1. None: it is not a share of the step."""
    to_try: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"to_try": list(self.to_try)}


def upper_bound(fraction: float) -> float:
    """Gain in throughput if `fraction` of the step vanished, and nothing else changed."""
    return 1 / (1 - min(fraction, 0.999)) - 1


def diagnose(row: dict[str, Any], limits: Limits) -> list[Finding]:
    """What bounds the attempt of `row`: scores that are written out first, since they cost time and memory whatever the
    knobs; then trouble with memory; then doubts of the figures; then the largest possible gain first.

    Without a breakdown only memory and the loader are known; of an attempt that did not measure, nothing.
    """
    if row.get("outcome") != "ok":
        return []
    first, doubts = [*_scores(row), *_memory(row, limits)], list(_doubts(row))
    read = [Breakdown.read(rank) for rank in row.get("rank_breakdowns") or []]
    ranks = [rank for rank in read if rank is not None]
    if not ranks or len(ranks) < len(read):
        return [*first, *_loader_timer(row), *doubts]
    parts = {name: row[f"frac_{name}"] for name in FRACTIONS}
    found = [
        *_data(ranks),
        *_straggler(ranks, row.get("hosts") or []),
        *_communication(parts, row["knobs"]),
        *_gaps(parts, ranks, row["knobs"]),
        *_copies(parts),
        *_optimizer(parts),
        *_compute(parts, row),
    ]
    found.sort(key=lambda finding: finding.upper_bound or 0.0, reverse=True)
    return first + (found or [_nothing_over_a_threshold(parts)]) + doubts


def _scores(row: dict[str, Any]) -> Iterator[Finding]:
    """Of the model itself: a knob that asks for the math kernel is a choice, and needs no finding."""
    if row.get("attention_backend") == "math" and row["knobs"]["attention_backend"] == "auto":
        yield Finding(
            "unfused-attention",
            "attention writes out its scores, sequence length x sequence length for each head",
            None,
            ("torch's scaled_dot_product_attention, in a form that its fused kernels take, before any knob",),
        )


def _memory(row: dict[str, Any], limits: Limits) -> Iterator[Finding]:
    less = ("a smaller micro_batch_size", "more activation_checkpointing", "reshard_after_forward on")
    if row.get("alloc_retries"):
        yield Finding(
            "allocator-retries",
            f"the allocator freed its cache and tried again {row['alloc_retries']} times while timed",
            None,
            (*less, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        )
    used = limits.judged_gib(row)
    if used is not None and limits.limit_gib is not None and limits.over_limit(used) > 0:
        usable = limits.limit_gib * (1 - limits.headroom)
        yield Finding("memory-limited", f"{used:.3g} GiB used of {usable:.3g} GiB less headroom", None, less)


def _doubts(row: dict[str, Any]) -> Iterator[Finding]:
    """What makes the throughput itself doubtful."""
    if row.get("loader_sustained") is False:
        yield Finding(
            "queue-not-drained",
            "the loader's queue could not be emptied and timed three times over in the trial's time: the throughput "
            "may be the queue's, not the loader's",
            None,
            ("a longer measure.trial_timeout_s", "a smaller prefetch_factor", "fewer num_workers"),
        )
    drift = row.get("drift") or 0.0
    if abs(drift) > DRIFT:
        yield Finding(
            "drifting",
            f"steps of the second half of the timed blocks took {drift_words(drift)} time than the first",
            None,
            ("more measure.warmup_steps", "a machine with nothing else on it", "measuring it again"),
        )


_LOADER = ("more num_workers", "a larger prefetch_factor", "tokenising beforehand")


def _loader_timer(row: dict[str, Any]) -> Iterator[Finding]:
    timed_s = (row.get("step_time_s") or 0.0) * (row.get("num_steps") or 0)
    share = (row.get("data_wait_s") or 0.0) / timed_s if timed_s else 0.0
    if share > DATA_WAIT:
        evidence = f"the host waits for batches {_percent(share)} of the timed steps"
        yield Finding("data-bound", evidence, upper_bound(share), _LOADER)


def _data(ranks: list[Breakdown]) -> Iterator[Finding]:
    shares = [rank.fractions()["data_wait"] for rank in ranks]
    share = max(shares)
    if share > DATA_WAIT:
        where = f"rank {shares.index(share)} waits" if min(shares) <= DATA_WAIT else "the ranks wait"
        evidence = f"{where} for the loader {_percent(share)} of the step"
        yield Finding("data-bound", evidence, upper_bound(share), _LOADER)


def _straggler(ranks: list[Breakdown], hosts: list[str]) -> Iterator[Finding]:
    """A slow rank makes the others wait in their collectives, as a slow network makes all ranks wait."""
    work_s = [rank.own_s - rank.data_wait_s for rank in ranks]
    slowest, middle_s = max(work_s), statistics.median_low(work_s)
    rank = work_s.index(slowest)
    share = (slowest - middle_s) / ranks[rank].window_s if ranks[rank].window_s else 0.0
    if share > STRAGGLER:
        host = f" on {hosts[rank]}" if rank < len(hosts) else ""
        evidence = (
            f"rank {rank}{host} works {_ms(slowest)} of a step, the middle rank {_ms(middle_s)} "
            f"(compute {_ms(ranks[rank].compute_s)} against {_ms(statistics.median_low([r.compute_s for r in ranks]))})"
        )
        yield Finding("straggler", evidence, upper_bound(share), ("that rank's node: no knob helps",))


def _communication(parts: dict[str, float], knobs: dict[str, Any]) -> Iterator[Finding]:
    share = parts["exposed_comm"]
    if share > EXPOSED_COMM:
        to_try = ["a larger micro_batch_size"]
        if knobs["grad_accum_steps"] > 1 and knobs["sync_each_micro_batch"]:
            to_try.append("sync_each_micro_batch off")
        if knobs["reshard_after_forward"]:
            to_try.append("reshard_after_forward off")
        to_try.append("a larger bucket_cap_mb")
        if knobs["engine"] == "fsdp1":
            to_try.append("prefetch")
        evidence = f"collectives that no compute hides take {_percent(share)} of the step, on the rank that waits least"
        yield Finding("comm-bound", evidence, upper_bound(share), tuple(to_try))


def _gaps(parts: dict[str, float], ranks: list[Breakdown], knobs: dict[str, Any]) -> Iterator[Finding]:
    idle, work = parts["idle"], parts["compute"] + parts["optimizer"]
    if idle <= IDLE:
        return
    larger = ["a larger micro_batch_size"]
    if knobs["activation_checkpointing"] != "none":
        larger.append("less activation_checkpointing")
    if work < TOO_SMALL and parts["exposed_comm"] > EXPOSED_COMM:
        lost = idle + parts["exposed_comm"]
        evidence = f"only {_percent(work)} of the step is work; gaps and collectives take {_percent(lost)}"
        yield Finding("too-small", evidence, upper_bound(lost), (*larger, "fewer ranks", "a larger model"))
        return
    kernels = [rank.median_kernel_us for rank in ranks if rank.median_kernel_us is not None]
    evidence = f"nothing runs in {_percent(idle)} of the step: Python and launches"
    if kernels:
        short = " (no longer than a launch)" if min(kernels) < SHORT_KERNEL_US else ""
        evidence += f"; the median kernel takes {min(kernels):.0f} us{short}"
    yield Finding("launch-bound", evidence, upper_bound(idle), (*larger, "torch.compile"))


def _copies(parts: dict[str, float]) -> Iterator[Finding]:
    share = parts["exposed_copy"]
    if share > EXPOSED_COPY:
        evidence = f"copies that nothing hides take {_percent(share)} of the step"
        yield Finding("copy-bound", evidence, upper_bound(share), ("pinned memory", "no offload"))


def _optimizer(parts: dict[str, float]) -> Iterator[Finding]:
    share = parts["optimizer"]
    if share > OPTIMIZER:
        evidence = f"the update takes {_percent(share)} of the step"
        yield Finding(
            "optimizer-bound",
            evidence,
            upper_bound(share),
            ("a fused optimizer", "a larger global batch", "more ranks"),
        )


def _compute(parts: dict[str, float], row: dict[str, Any]) -> Iterator[Finding]:
    compute, share = parts["compute"], row.get("non_matmul_share")
    flops, hardware = row.get("flops_per_token"), row.get("hardware_flops_per_token")
    of_attention = row.get("attention_recompute_flops_per_token") or 0.0
    again = compute * (1 - (flops + of_attention) / hardware) if flops and hardware else 0.0
    if again > RECOMPUTE:
        evidence = f"activation checkpointing computes again what takes about {_percent(again)} of the step"
        yield Finding("recompute-bound", evidence, upper_bound(again), ("less activation_checkpointing",))
    if compute >= COMPUTE_BOUND and share is not None and share > NON_MATMUL:
        evidence = f"{_percent(share)} of the compute is no matmul: memory bandwidth bounds it"
        yield Finding(
            "memory-bandwidth-bound", evidence, upper_bound(compute * share), ("torch.compile", "fused norms and loss")
        )


def _nothing_over_a_threshold(parts: dict[str, float]) -> Finding:
    compute = parts["compute"]
    if compute >= COMPUTE_BOUND:
        evidence = f"{_percent(compute)} of the step is compute: little is left to hide or to save"
        return Finding("compute-bound", evidence, upper_bound(1 - compute), ("a lower precision", "more ranks"))
    losses = sorted((name for name in parts if name != "compute"), key=lambda name: parts[name], reverse=True)[:2]
    evidence = "no part stands out; most goes to " + " and ".join(f"{name} {_percent(parts[name])}" for name in losses)
    return Finding("mixed", evidence, upper_bound(sum(parts[name] for name in losses)), ())


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
