"""One profiled step beside the measurement: what kineto saw, as events that `trials.breakdown` can add up.

On a GPU what counts is what its streams run: kernels by their names, copies, and gaps. On a CPU the one training
thread does everything itself: its operators are the compute, and gloo's threads carry the collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from trials.breakdown import Breakdown, Event, Interval, Kind, break_down, subtract, union
from trials.step import DATA_MARK, OPTIMIZER_MARK, Stepper

STEP_MARK = "autotune::step"
"""Around a whole optimizer step."""

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Activities of a GPU's streams; a mark's mirror there (gpu_user_annotation) is none."""
COMM_KERNELS = ("nccl", "rccl", "nvshmem")
"""In the names of kernels that are collectives, lower case."""
MATMUL_KERNELS = (
    "gemm", "gemv", "cutlass", "xmma", "nvjet", "wgmma", "splitk", "flash", "fmha", "mha_", "sdpa", "attention",
    "cijk_",  # Tensile: rocBLAS and hipBLASLt
    "triton_tem_",  # Inductor's templates, which are matmuls and attention
)  # fmt: skip
"""In the names of kernels that do matmuls or fused attention, lower case."""
MATMUL_OPS = (
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv", "aten::addmv", "aten::_scaled_mm",
    "aten::_grouped_mm", "aten::_scaled_dot_product_", "aten::_flash_attention", "aten::_efficient_attention",
    "aten::convolution", "mkldnn::_linear_pointwise", "mkl::_mkl_linear",
)  # fmt: skip
"""How the names of CPU operators begin that do so; `aten::linear` and `aten::matmul` are only around them."""
COLLECTIVE_OPS = ("c10d::", "_c10d_functional::", "gloo:")
NO_COMPUTE_OPS = ("autograd::", "torch::autograd::", "profiler::", "autotune::")
"""Only around operators, and around waits too."""


@dataclass(frozen=True)
class Record:
    """One thing that kineto saw."""

    name: str
    activity: str
    """As kineto names it: cpu_op, user_annotation, cuda_runtime, cuda_driver, kernel, gpu_memcpy, gpu_memset, ..."""
    start_s: float
    end_s: float
    thread: int = 0
    """Of the host; of a GPU's activities the stream."""
    correlation: int = 0
    """The same for a kernel and the runtime call that launched it."""


def profile_step(
    stepper: Stepper,
    num_queued: int,
    synchronize: Callable[[], None],
    start_together: Callable[[], None],
    trace: Path | None = None,
) -> Breakdown:
    """Runs a short step and a whole one under the profiler, and breaks down the whole one.

    The short one leaves what a step finds in a long run: the profiler warm, the GPU's queue filled, and the loader's
    queue as full as the loader's own speed keeps it.

    Args:
        num_queued: batches that the loader may have got ready while the profiler started.
        start_together: waits for all ranks, so that the profiler's own start is nobody's wait.
        trace: where to write the chrome trace as .json.gz, or None.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if stepper.device == "cuda" else [])
    # No shapes, stacks or memory: each would cost several times as much.
    unmarked, stepper.mark = stepper.mark, record_function
    try:
        with profile(activities=activities) as profiler:
            start_together()
            stepper.drain(num_queued)
            with record_function(STEP_MARK):
                stepper.step(min(max(num_queued, 1), stepper.knobs.grad_accum_steps))
            with record_function(STEP_MARK):
                stepper.step()
            synchronize()
    finally:
        stepper.mark = unmarked
    results: Any = profiler.profiler
    events = results.kineto_results.events()
    origin_ns = min(event.start_ns() for event in events)
    records = [read(event, origin_ns) for event in events]
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    return break_down_records(records)


def read(event: Any, origin_ns: int) -> Record:
    """One of torch's `_KinetoEvent`: far cheaper than the profiler's own Python events.

    Args:
        origin_ns: taken from its time, which as seconds since the epoch would be too coarse for a float.
    """
    activity, start_ns = event.activity_type(), event.start_ns() - origin_ns
    return Record(
        event.name(),
        activity,
        start_ns / 1e9,
        (start_ns + event.duration_ns()) / 1e9,
        event.device_resource_id() if activity in DEVICE_WORK else event.start_thread_id(),
        event.correlation_id(),
    )


def break_down_records(records: Sequence[Record]) -> Breakdown:
    """Of the last marked step.

    Raises:
        ValueError: no marked step among the records.
    """
    steps = sorted((r for r in _marks(records, STEP_MARK)), key=lambda r: r.start_s)
    if not steps:
        raise ValueError("the profiler has not seen the step")
    if any(record.activity == "kernel" for record in records):
        return break_down(gpu_events(records), gpu_window(records, steps[-1]), has_kernels=True)
    return break_down(cpu_events(records, steps[-1].thread), (steps[-1].start_s, steps[-1].end_s))


# --- a GPU ----------------------------------------------------------------------------------------------------------


def gpu_events(records: Sequence[Record]) -> list[Event]:
    """Kernels and copies of all streams, and the host's waits for the loader."""
    in_optimizer = _launched_in(records, _spans(_marks(records, OPTIMIZER_MARK)))
    events = [Event(r.start_s, r.end_s, Kind.DATA_WAIT, r.thread) for r in _marks(records, DATA_MARK)]
    for record in records:
        kind = gpu_kind(record)
        if kind in (Kind.MATMUL, Kind.COMPUTE) and record.correlation in in_optimizer:
            kind = Kind.OPTIMIZER
        if kind is not None:
            events.append(Event(record.start_s, record.end_s, kind, record.thread))
    return events


def gpu_kind(record: Record) -> Kind | None:
    """Of what a stream ran; None for what is no work of a stream."""
    if record.activity not in DEVICE_WORK:
        return None
    if record.activity != "kernel":
        return Kind.COPY
    name = record.name.lower()
    if any(part in name for part in COMM_KERNELS):
        return Kind.COMM
    return Kind.MATMUL if any(part in name for part in MATMUL_KERNELS) else Kind.COMPUTE


def gpu_window(records: Sequence[Record], step: Record) -> Interval:
    """From the end of what was launched before the step to the end of the last work of a stream.

    The host runs ahead of the GPU: its own clock of the step would cut off the beginning and add a gap.
    """
    before = _launched_in(records, [(float("-inf"), step.start_s)])
    work = [record for record in records if gpu_kind(record) is not None]
    start_s = max((r.end_s for r in work if r.correlation in before), default=step.start_s)
    return start_s, max((r.end_s for r in work), default=step.end_s)


def _launched_in(records: Iterable[Record], spans: Sequence[Interval]) -> set[int]:
    """Correlations of runtime calls that began in one of the spans."""
    return {
        record.correlation
        for record in records
        if record.activity in ("cuda_runtime", "cuda_driver")
        and any(start <= record.start_s < end for start, end in spans)
    }


# --- a CPU ----------------------------------------------------------------------------------------------------------


def cpu_events(records: Sequence[Record], thread: int) -> list[Event]:
    """Of the thread that trains, and gloo's collectives.

    A collective is in flight from its call until gloo's threads are done with it: the training thread waits for that
    without any mark of its own. What it copies inside a call to c10d is part of the collective.
    """
    data = _spans(_marks(records, DATA_MARK))
    collectives = [r for r in records if r.name.startswith(COLLECTIVE_OPS)]
    calls = sorted(_start_end(r for r in collectives if r.activity == "cpu_op" and r.thread == thread))
    own_calls = union(calls)
    ops = [r for r in records if _is_compute_op(r, thread)]
    optimizer = _spans(_marks(records, OPTIMIZER_MARK))
    compute = subtract(_spans(ops), own_calls)
    matmul = subtract(_spans(r for r in ops if r.name.startswith(MATMUL_OPS)), own_calls)
    outside = subtract(compute, optimizer)
    in_flight = _start_end(collectives)
    carried = sorted(_start_end(r for r in collectives if r.name.startswith("gloo:")))
    if len(carried) == len(calls):  # gloo takes them in order: a call also waits for a thread to take it
        in_flight += [(call[0], done[1]) for call, done in zip(calls, carried, strict=True)]
    kinds = [
        (Kind.DATA_WAIT, data),
        # While the only thread waits for the loader, a collective that is under way delays nothing.
        (Kind.COMM, subtract(union(in_flight), data)),
        (Kind.OPTIMIZER, subtract(compute, outside)),
        (Kind.MATMUL, matmul),
        (Kind.COMPUTE, outside),
    ]
    return [Event(start, end, kind, thread) for kind, spans in kinds for start, end in spans]


def _is_compute_op(record: Record, thread: int) -> bool:
    """Names without a namespace are autograd's nodes, which are around operators and hooks that wait."""
    return (
        record.activity == "cpu_op"
        and record.thread == thread
        and "::" in record.name
        and not record.name.startswith((*COLLECTIVE_OPS, *NO_COMPUTE_OPS))
    )


def _marks(records: Iterable[Record], name: str) -> list[Record]:
    return [record for record in records if record.name == name and record.activity == "user_annotation"]


def _start_end(records: Iterable[Record]) -> list[Interval]:
    return [(record.start_s, record.end_s) for record in records]


def _spans(records: Iterable[Record]) -> list[Interval]:
    return union(_start_end(records))
