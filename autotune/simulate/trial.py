"""What one attempt takes, phase by phase: by the rules that ranks go by (`trials.rank`), on the modelled clock."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from autotune.simulate.world import Truth, World
from trials import composed, timing
from trials.record import SHORT_MICRO_STEPS, Knobs, TrialSpec

START_S, BUILD_S = 9.0, 3.0
DRAWN_PER_S = 5e9
"""Numbers that a GPU draws: each rank draws all of the model's first values."""
FIRST_S = 2.0
"""Of the first step: kernels are loaded, NCCL connects, the allocator's pools grow."""
FIRST_MICRO_STEPS = 1.5
"""That the first step takes longer for the rest, in micro-steps."""
COMPILE_S = 75.0
EVALUATION_COMPILE_S = 30.0
READY_BATCH_S = 2e-3
"""To take a batch that waits in the loader's queue."""
COUNT_FLOPS_S = 3.0
PROFILER_S, PROFILER_SLOWDOWN = 3.0, 1.15
"""To start it and to read what it saw; and how much longer a step takes under it."""
BLOCK_SD = 0.004
"""Between blocks of one run."""
COMPOSED_BIAS, COMPOSED_SD = 0.006, 0.01
"""Of a step that is put together from parts, against whole ones: as tests/benchmarks/composed.py found."""
DRIFT_PERIOD_S = 5 * 3600.0
CHECKPOINT_GB_PER_S = 2.0
"""Of a node, to and from storage that nodes share."""
STATE_BYTES = 12
"""fp32 weights and both of AdamW's moments."""
NUM_EVALUATION_BATCHES = 2


@dataclass
class Trial:
    """One attempt of a config that fits.

    Args:
        step_s: of a whole optimizer step in this run.
        now_s: when it starts.
        drawn: noise comes from here.
    """

    world: World
    spec: TrialSpec
    truth: Truth
    step_s: float
    now_s: float
    drawn: random.Random
    phase_s: dict[str, float] = field(default_factory=dict)
    """Seconds by what the ranks do, in order."""
    measured: timing.Timing = field(default_factory=timing.Timing)
    step_parts_s: dict[str, float] | None = None
    """Of a composed step."""
    loader_sustained: bool = True
    profiled: bool = False
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        knobs = self.spec.knobs
        assert knobs is not None
        self.knobs: Knobs = knobs
        self.micro_s = self.step_s / knobs.grad_accum_steps
        self._parts = self._short_parts()
        self._queued = knobs.num_workers * (knobs.prefetch_factor or 0)
        self._thrown_away = 0.0
        """Batches of each short step that it does not train on."""

    def begin(self) -> dict[str, float]:
        """Up to the first step, whose end not every config sees."""
        world, knobs = self.world, self.knobs
        first_s = self.step_s + FIRST_MICRO_STEPS * self.micro_s + FIRST_S
        self.phase_s |= {
            "start": START_S,
            "data": 1.0 + 0.1 * knobs.num_workers,
            "process_group": 2.0 + 0.02 * world.world_size,
            "build": BUILD_S + world.shape.num_params / DRAWN_PER_S,
            "compile" if knobs.compile else "first_step": first_s + (COMPILE_S if knobs.compile else 0.0),
        }
        return self.phase_s

    def finish(self) -> None:
        """Warm-up, timed blocks, and what is found out beside."""
        spec, knobs = self.spec, self.knobs
        self.phase_s["warmup"] = spec.num_warmup_steps * self.step_s
        expected_s, batches_per_step = self.step_s, knobs.grad_accum_steps
        if spec.composed:
            batches_per_step = SHORT_MICRO_STEPS
            self.phase_s["warmup"] += self._short_s()
            if self._queued:
                self._thrown_away = sum(composed.num_thrown_away(self._parts, knobs.grad_accum_steps, self._queued))
            expected_s = self._short_s()
            self.phase_s["warmup"] += expected_s
        left_s = self._left_s()
        drain_s = self._drain_s()
        self.phase_s["drain"] = min(drain_s, timing.DRAIN_SHARE * left_s)
        sustained_steps = math.ceil(timing.QUEUES_TIMED * self._queued / batches_per_step)
        self._time(expected_s, max(spec.measure.min_steps, sustained_steps))
        self.loader_sustained = drain_s <= self.phase_s["drain"] and self.measured.num_steps >= sustained_steps
        if not self.loader_sustained:
            self.warnings.append(timing.NOT_SUSTAINED)
        if spec.checkpoint_dir is not None:
            self._endure()
        self.phase_s["memory"] = 0.0
        self._profile()
        self.phase_s["flops"] = COUNT_FLOPS_S if spec.hardware_flops_per_token is None else 0.0

    @property
    def compile_s(self) -> float:
        return self.phase_s.get("compile", 0.0)

    @property
    def mean_step_s(self) -> float:
        return timing.mean_step_s(self.measured.block_times_s, self.measured.block_steps)

    @property
    def data_wait_s(self) -> float:
        """In the timed steps."""
        return self.truth.parts["data_wait"] / self.truth.step_s * self.mean_step_s * self.measured.num_steps

    # --- the clock --------------------------------------------------------------------------------------------

    def _time(self, expected_s: float, min_steps: int) -> None:
        began_s = self.now_s + sum(self.phase_s.values())
        now_s = began_s
        is_composed = self.spec.composed
        bias = math.exp(self.drawn.gauss(math.log1p(COMPOSED_BIAS), COMPOSED_SD)) if is_composed else 1.0

        def run(count: int) -> timing.Block:
            nonlocal now_s
            factor = drift_factor(self.world, now_s) * math.exp(self.drawn.gauss(0.0, BLOCK_SD))
            now_s += count * factor * (self._short_s() if is_composed else self.step_s)
            each_s = self.step_s * factor * bias
            return count * each_s, [each_s] * count

        self.measured = timing.run_blocks(
            run, lambda seconds: seconds, self.spec.measure, expected_s, min_steps, self._left_s(), lambda: now_s
        )
        self.phase_s["timed"] = now_s - began_s
        if is_composed:
            parts = self._parts.whole(self.knobs.grad_accum_steps)
            scale = self.mean_step_s / sum(parts.values())
            self.step_parts_s = {name: seconds * scale for name, seconds in parts.items()}

    def _left_s(self, share: float = timing.TIMED_SHARE) -> float:
        """Until this share of the trial's time is over; compiling has a time of its own."""
        return max(0.0, share * self.spec.timeout_s - (sum(self.phase_s.values()) - self.compile_s))

    def _short_parts(self) -> composed.Parts:
        """Of one short step, such that the whole one takes `step_s`."""
        count, scale = self.knobs.grad_accum_steps, self.step_s / self.truth.step_s
        data_s = self.truth.parts["data_wait"] * scale
        update_s = (self.truth.parts["optimizer"] + self.truth.parts["exposed_copy"]) * scale
        first, inner, last = self.world.micro_step_times(self.knobs)
        unit = (self.step_s - data_s - update_s) / (first + max(0, count - 2) * inner + last)
        return composed.Parts(
            first_s=first * unit,
            middle_s=composed.NUM_MIDDLE * inner * unit,
            last_s=last * unit,
            optimizer_s=update_s,
            data_s=data_s / count * SHORT_MICRO_STEPS,
            num_batches=SHORT_MICRO_STEPS,
        )

    def _short_s(self) -> float:
        """A short step with the batches that it throws away."""
        num_batches = SHORT_MICRO_STEPS + self._thrown_away
        return self._parts.short_s + num_batches * self._parts.data_s / self._parts.num_batches

    def _drain_s(self) -> float:
        """A loader that keeps up has its queue ready; the queue of one that does not is empty."""
        if not self._queued:
            return 0.0
        each_s = self.world.loader_batch_s(self.knobs)
        return self._queued * (READY_BATCH_S if each_s < self.micro_s else each_s)

    # --- beside it --------------------------------------------------------------------------------------------

    def _endure(self) -> None:
        evaluation_s = NUM_EVALUATION_BATCHES * self.micro_s / 3 + (EVALUATION_COMPILE_S if self.knobs.compile else 0.0)
        storage_s = checkpoint_s(self.world)
        self.phase_s |= {
            "evaluate": evaluation_s,
            "save": storage_s,
            "step_after_save": self.step_s,
            "load": storage_s + evaluation_s,
            "step_after_load": self.step_s,
        }

    def _profile(self) -> None:
        """As `trials.rank` decides it: what was asked for, is fast enough, and has the time."""
        spec, knobs = self.spec, self.knobs
        rate = knobs.micro_batch_size * knobs.grad_accum_steps * spec.seq_len / self.mean_step_s
        is_short = not spec.composed or knobs.grad_accum_steps <= timing.MOST_PROFILED_MICRO_STEPS
        is_fast = spec.profile_above is None or rate > spec.profile_above
        needed_s = self.phase_s["drain"] + timing.PROFILED_STEPS * self.mean_step_s
        self.profiled = bool(spec.profile) and is_short and is_fast and needed_s <= self._left_s(1.0)
        if self.profiled:
            short_s = min(max(self._queued, 1), knobs.grad_accum_steps) * self.micro_s
            steps_s = PROFILER_SLOWDOWN * (short_s + self.step_s)
            self.phase_s["profile"] = self.phase_s["drain"] + steps_s + PROFILER_S


def checkpoint_s(world: World) -> float:
    """To write or to read the sharded state."""
    own_bytes = STATE_BYTES * world.shape.num_params / world.world_size
    return own_bytes * world.job.cluster.ranks_per_node / (1e9 * CHECKPOINT_GB_PER_S)


def drift_factor(world: World, now_s: float) -> float:
    """How the cluster's step times wander with its temperature and its neighbours."""
    phase = 2 * math.pi * random.Random(f"{world.cluster.seed}:drift").random()
    return 1 + world.cluster.drift * math.sin(2 * math.pi * now_s / DRIFT_PERIOD_S + phase)
