"""How long a study takes, before it has run: the trials of each stage by the rules that they are measured by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from autotune.job import Job, MeasureSettings
from autotune.search.stopping import MIN_TRIALS
from autotune.stages import BASELINE, ENDURANCE, FINALIST, ROUND, SCALE, SIDE_BY_SIDE, endurance_timeout_s, is_composed
from trials import timing
from trials.record import COMPOSED_WARMUP_STEPS, SHORT_MICRO_STEPS, Knobs, Measure

START_S = {"cpu": 0.5, "cuda": 20.0}
"""Of a trial before its first step and after its last: processes, imports, the process group, the model, clean-up. On
a GPU, assumed."""
FIRST_STEPS = {"cpu": 1.2, "cuda": 1.5}
"""Steps that the first one takes the time of."""
COMPILE_S = 60.0
"""Of all blocks, assumed."""
BLOCK_SPREAD = {"cpu": 0.03, "cuda": 0.006}
"""Standard deviation between the timed blocks of a trial, relative: it decides how many there are."""
TRACKED_STEPS = {"cpu": 1.2, "cuda": 0.0}
"""Steps whose time it takes to follow a new config's memory: a GPU's allocator counts by itself."""
SHARE_OF_PATIENCE = 1 / 3
"""Of the trials that a search with patience may still run after the fewest, those that it does: simulated studies of up
to 40 trials ended after 24 in the mean, the fewest being 16."""
PROFILER_S = {"cpu": 0.3, "cuda": 3.0}
PROFILER_SLOWDOWN = 1.2
PROFILED_SHARE = 1 / 3
"""Of the trials of the exploration: those that are the fastest so far."""
EVALUATIONS = 2 * 2 / 3
"""Of an endurance run, in micro-steps: two batches forward, before the save and after the load."""
STATE_BYTES = 12
"""Of a checkpoint, per parameter: fp32 weights and AdamW's two moments."""
STORAGE_BYTES_PER_S = 1e9
"""To or from which a node writes or reads a checkpoint. Assumed."""


@dataclass(frozen=True)
class Gang:
    """What the trials run on."""

    device: str
    """`cpu` or `cuda`."""
    num_ranks: int
    """Of one trial."""
    num_slots: int
    """Trials at once while exploring."""


@dataclass(frozen=True)
class Guess:
    """A config, and seconds of one whole optimizer step of it."""

    knobs: Knobs
    step_s: float


@dataclass(frozen=True)
class Stage:
    """One stage of a study."""

    fewest: int
    """Trials: with patience, a search may end early."""
    most: int
    trial_s: float
    """Mean seconds of one."""
    at_once: int = 1

    @property
    def expected(self) -> float:
        """Trials."""
        return self.fewest + SHARE_OF_PATIENCE * (self.most - self.fewest)

    @property
    def num_turns(self) -> float:
        """One after the other: trials that run at once count as one."""
        return self.expected / self.at_once


@dataclass(frozen=True)
class Estimate:
    """Of a whole study."""

    gang: Gang
    stages: dict[str, Stage]
    baseline_step_s: float
    longest_s: float
    """The baseline's trial until its last timed step, were there no limit: what measure.trial_timeout_s must allow."""

    @property
    def seconds(self) -> float:
        return sum(stage.num_turns * stage.trial_s for stage in self.stages.values())

    @property
    def device_hours(self) -> float:
        """Hours times the ranks that are reserved, idle ones too."""
        return self.seconds / 3600 * self.gang.num_ranks * self.gang.num_slots

    @property
    def expected_trials(self) -> float:
        return sum(stage.expected for stage in self.stages.values())

    @property
    def num_trials(self) -> tuple[int, int]:
        """Fewest and most."""
        stages = self.stages.values()
        return sum(stage.fewest for stage in stages), sum(stage.most for stage in stages)


def estimate(
    job: Job, gang: Gang, baseline: Guess, others: Sequence[Guess], num_params: int, num_configs: int
) -> Estimate:
    """What a study takes.

    Args:
        others: the configs that the search is expected to spend its trials on, fastest first; may be empty.
        num_params: of the model.
        num_configs: of the space.
    """
    measure = job.measure
    best = others[0] if others else baseline

    def mean_s(stage: str, guesses: Iterable[Guess]) -> float:
        return fmean(trial_s(measure, stage, guess, gang, num_params) for guess in guesses)

    deciding = {
        FINALIST: _always(measure.num_finalists + 1, mean_s(FINALIST, [*[best] * measure.num_finalists, baseline])),
        ROUND: _always(2 * measure.rounds, mean_s(ROUND, [best, baseline])),
    }
    if measure.endurance:
        deciding[ENDURANCE] = _always(1, mean_s(ENDURANCE, [best]))
    first = _always(1, mean_s(BASELINE, [baseline]))
    explored_s = mean_s(SIDE_BY_SIDE, [baseline, *others])
    fewest, most = _num_explored(job, gang, num_configs, first.trial_s, explored_s)
    explored = Stage(fewest, most, explored_s, gang.num_slots)
    steps = measure.warmup_steps + measure.min_steps + FIRST_STEPS[gang.device]
    return Estimate(
        gang,
        {BASELINE: first, SIDE_BY_SIDE: explored, **deciding},
        baseline.step_s,
        START_S[gang.device] + steps * baseline.step_s,
    )


def _always(number: int, trial_s: float) -> Stage:
    return Stage(number, number, trial_s)


def _num_explored(job: Job, gang: Gang, num_configs: int, before_s: float, each_s: float) -> tuple[int, int]:
    """Trials of the exploration that there are at least, as the search may lose patience, and at most."""
    budget = job.budget
    most = min(budget.trials, max(1, num_configs - 1))
    limits_s = [60 * budget.minutes] if budget.minutes is not None else []
    if budget.gpu_hours is not None:
        limits_s.append(3600 * budget.gpu_hours / gang.num_ranks / gang.num_slots)
    for limit_s in limits_s:
        # A trial that has begun in time ends after it.
        most = min(most, max(1, math.ceil((limit_s - before_s) / each_s * gang.num_slots)))
    fewest = min(most, max(MIN_TRIALS, budget.patience)) if budget.patience else most
    return fewest, most


def trial_s(measure: MeasureSettings, stage: str, guess: Guess, gang: Gang, num_params: int) -> float:
    """Seconds of one trial from its order to its row, if its config fits."""
    knobs, step_s, device = guess.knobs, guess.step_s, gang.device
    composed = is_composed(measure, knobs, stage)
    queued = knobs.num_workers * (knobs.prefetch_factor or 0)
    batches_per_step = SHORT_MICRO_STEPS if composed else knobs.grad_accum_steps
    timed_step_s = step_s * batches_per_step / knobs.grad_accum_steps
    num_warmup = min(measure.warmup_steps, COMPOSED_WARMUP_STEPS) if composed else measure.warmup_steps
    seconds = START_S[device] + (FIRST_STEPS[device] + num_warmup) * step_s + 2 * composed * timed_step_s
    limit_s = endurance_timeout_s(measure) if stage == ENDURANCE else measure.trial_timeout_s
    if stage == ENDURANCE:
        num_steps = measure.endurance_steps
        micro_s = step_s / knobs.grad_accum_steps
        seconds += 2 * step_s + EVALUATIONS * micro_s + 2 * STATE_BYTES * num_params / STORAGE_BYTES_PER_S
    else:
        sustained = math.ceil(timing.QUEUES_TIMED * queued / batches_per_step)
        num_steps = num_timed_steps(measure, timed_step_s, sustained, BLOCK_SPREAD[device])
    in_time_s = timing.TIMED_SHARE * limit_s - seconds
    seconds += max(min(num_steps * timed_step_s, in_time_s), measure.min_steps * timed_step_s)
    if stage in (BASELINE, SIDE_BY_SIDE):
        seconds += TRACKED_STEPS[device] * step_s * min(2, knobs.grad_accum_steps) / knobs.grad_accum_steps
    short = min(max(queued, 1), knobs.grad_accum_steps) / knobs.grad_accum_steps
    profiled_s = PROFILER_S[device] + PROFILER_SLOWDOWN * (1 + short) * step_s
    if stage in (BASELINE, FINALIST, SCALE):
        seconds += profiled_s
    elif stage == SIDE_BY_SIDE and not (composed and knobs.grad_accum_steps > timing.MOST_PROFILED_MICRO_STEPS):
        seconds += PROFILED_SHARE * profiled_s
    return seconds + (COMPILE_S if knobs.compile else 0.0)


def num_timed_steps(measure: MeasureSettings, step_s: float, sustained: int, spread: float) -> int:
    """Steps that `trials.timing.run_blocks` times where its blocks differ by `spread`, relative."""
    least = max(measure.min_steps, sustained)
    limit = max(measure.max_steps, least)
    per_block = max(1, min(round(Measure.block_s / max(step_s, 1e-9)), limit // 4))
    blocks = 3
    while timing.t95(blocks - 1) * spread / math.sqrt(blocks) > measure.rel_ci and blocks * per_block < limit:
        blocks += 1
    return min(limit, per_block * max(blocks, math.ceil(least / per_block)))


class Forecast:
    """What is left of a study, by stages, and corrected by what the trials so far took.

    Args:
        stages: of a study, or of a part of it.
        is_rough: their seconds say how stages compare, and no more: what is left is known once a trial has ended.
    """

    def __init__(self, stages: dict[str, Stage], is_rough: bool = False) -> None:
        self._stages = stages
        self._turns = {name: stage.num_turns for name, stage in stages.items()}
        self._factor = None if is_rough else 1.0
        self._is_first = True

    def count(self, stage: str) -> None:
        """A trial of this stage is done with."""
        if stage in self._turns:
            self._turns[stage] = max(0.0, self._turns[stage] - 1 / self._stages[stage].at_once)

    def end(self, stage: str) -> None:
        """No more of its trials come."""
        self._turns[stage] = 0.0

    def learn(self, stage: str, took_s: float) -> None:
        """Of one trial."""
        if stage not in self._stages:
            return
        found = took_s / self._stages[stage].trial_s
        self._factor = found if self._is_first or self._factor is None else 0.7 * self._factor + 0.3 * found
        self._is_first = False

    def trial_s(self, stage: str) -> float | None:
        """Of one trial of the stage; None: not known yet."""
        return None if self._factor is None else self._factor * self._stages[stage].trial_s

    def left_s(self) -> float | None:
        """Seconds of all that is left; None: not known yet."""
        if self._factor is None:
            return None
        return self._factor * sum(self._turns[name] * stage.trial_s for name, stage in self._stages.items())
