"""The rate that a rank reaches in the matmuls of its model: what a step could reach if it were nothing else.

Beside the data sheet's peak and never instead of it: MFU divides by the peak. GPUs reach 50 to 87 % of theirs
(github.com/stas00/ml-engineering, "Maximum Achievable Matmul FLOPS").
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trials.facts import MatmulRate, Shape
from trials.workload import Workload, checked_loss

aten = torch.ops.aten
SQUARES: dict[str, tuple[Shape, ...]] = {
    "cpu": ((1024, 1024, 1024),),
    "cuda": ((4096, 4096, 4096), (8192, 8192, 8192)),
}
"""Beside the model's own: what the device reaches at its best."""
MAX_SHAPES = 8
SHARE_OF_FLOPS = 0.95
"""The largest shapes that make up so much of the model's are timed."""
MAX_CPU_FLOPS = 2e10
"""Of one matmul on a CPU, a fifth of a second: beyond its caches, size changes little."""
COLD_BYTES = {"cpu": 0, "cuda": 2**28}
"""Operands take turns over so many bytes, so that no cache holds them as it would not in a step."""
WARM_UP_S = {"cpu": 0.0, "cuda": 1.0}
"""A cold GPU clocks higher than one at work."""
BUDGET_S = {"cpu": 2.0, "cuda": 4.0}
MIN_SAMPLES = 3


def model_matmuls(workload: Workload, seq_len: int, micro_batch_size: int) -> Counter[Shape]:
    """How often forward and backward of a micro-batch multiply which shapes; attention's own products not among them.

    Seen on `meta`, which takes neither memory nor time. Experts' grouped matmuls are not seen.

    Raises:
        TrialError: outcome `invalid`; the loss is none.
    """
    with torch.device("meta"):
        model = workload.build_model()
        tokens = torch.zeros(micro_batch_size, seq_len + 1, dtype=torch.int64)
    shapes: Counter[Shape] = Counter()
    with _Matmuls(shapes):
        checked_loss(workload.loss, model, tokens).backward()  # type: ignore[no-untyped-call]
    return shapes


class _Matmuls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, shapes: Counter[Shape]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes = shapes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.mm.default, aten.addmm.default):
            a, b = args[-2:]
            self.shapes[a.shape[0], a.shape[1], b.shape[1]] += 1
        return func(*args, **(kwargs or {}))


def measure(shapes: Counter[Shape], tokens: int, precision: str, device: str) -> MatmulRate | None:
    """Times the largest of `shapes` on this rank; None if there are none. A few seconds."""
    if not shapes:
        return None
    chosen = largest(shapes)
    cut = {shape: cut_shape(shape) if device == "cpu" else shape for shape in chosen}
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    timed = list(dict.fromkeys([*cut.values(), *SQUARES[device]]))
    timer = _time_on_cpu if device == "cpu" else _time_on_cuda
    rates: dict[Shape, float] = {}
    cpu_s = wall_s = 0.0
    for number, shape in enumerate(timed):
        wall_before, cpu_before = time.perf_counter(), time.process_time()
        multiply = _multiply(shape, dtype, device)
        _warm_up(multiply, WARM_UP_S[device] if number == 0 else 0.0)
        rates[shape] = flops(shape) / timer(multiply, flops(shape), BUDGET_S[device] / len(timed))
        wall_s += time.perf_counter() - wall_before
        cpu_s += time.process_time() - cpu_before
    total = sum(count * flops(shape) for shape, count in chosen.items())
    total_s = sum(count * flops(shape) / rates[cut[shape]] for shape, count in chosen.items())
    best = max(rates, key=rates.__getitem__)
    worst = min(cut.values(), key=rates.__getitem__)
    return MatmulRate(
        model_tflops_per_s=total / total_s / 1e12,
        best_tflops_per_s=rates[best] / 1e12,
        best_shape=best,
        worst_tflops_per_s=rates[worst] / 1e12,
        worst_shape=worst,
        tokens=tokens,
        is_cut=any(shape != cut[shape] for shape in chosen),
        busy_share=cpu_s / wall_s / torch.get_num_threads() if device == "cpu" else None,
    )


def largest(shapes: Counter[Shape]) -> dict[Shape, int]:
    """The shapes that most FLOPs go to, and how often each occurs."""
    by_flops = sorted(shapes, key=lambda shape: shapes[shape] * flops(shape), reverse=True)
    wanted = SHARE_OF_FLOPS * sum(shapes[shape] * flops(shape) for shape in shapes)
    chosen: dict[Shape, int] = {}
    for shape in by_flops[:MAX_SHAPES]:
        if sum(count * flops(other) for other, count in chosen.items()) >= wanted:
            break
        chosen[shape] = shapes[shape]
    return chosen


def flops(shape: Shape) -> float:
    return 2.0 * math.prod(shape)


def cut_shape(shape: Shape) -> Shape:
    """`shape` with its largest side halved until a CPU multiplies it in reasonable time."""
    sides = list(shape)
    while flops((sides[0], sides[1], sides[2])) > MAX_CPU_FLOPS:
        sides[sides.index(max(sides))] //= 2
    return sides[0], sides[1], sides[2]


def _multiply(shape: Shape, dtype: torch.dtype, device: str) -> Callable[[], None]:
    rows, inner, columns = shape
    each_bytes = (rows * inner + inner * columns) * dtype.itemsize
    pairs = [
        (
            torch.randn(rows, inner, device=device, dtype=dtype),
            torch.randn(inner, columns, device=device, dtype=dtype),
        )
        for _ in range(max(1, COLD_BYTES[device] // each_bytes))
    ]
    turn = 0

    def multiply() -> None:
        nonlocal turn
        a, b = pairs[turn % len(pairs)]
        torch.mm(a, b)
        turn += 1

    return multiply


def _warm_up(multiply: Callable[[], None], seconds: float) -> None:
    """The first call of a shape builds or chooses its kernel."""
    end = time.perf_counter() + seconds
    multiply()
    while time.perf_counter() < end:
        for _ in range(10):
            multiply()
        torch.cuda.synchronize()


def _time_on_cpu(multiply: Callable[[], None], num_flops: float, budget_s: float) -> float:
    """Seconds of one call at the rate of the best tenth of the samples, by CPU time, as the peak's probe takes it."""
    repeats = max(1, round(2e9 / num_flops))
    samples: list[float] = []
    end = time.perf_counter() + budget_s
    while len(samples) < MIN_SAMPLES or time.perf_counter() < end:
        started = time.process_time()
        for _ in range(repeats):
            multiply()
        samples.append((time.process_time() - started) / repeats / torch.get_num_threads())
    return statistics.quantiles(samples, n=10, method="inclusive")[0]  # of few samples, too, none beyond their range


def _time_on_cuda(multiply: Callable[[], None], num_flops: float, budget_s: float) -> float:
    """Seconds of one call: the median over samples of some milliseconds, between events."""
    repeats = max(1, round(2e12 / num_flops))
    samples: list[float] = []
    end = time.perf_counter() + budget_s
    while len(samples) < MIN_SAMPLES or time.perf_counter() < end:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        for _ in range(repeats):
            multiply()
        after.record()
        after.synchronize()
        samples.append(before.elapsed_time(after) / 1e3 / repeats)
    return statistics.median(samples)
