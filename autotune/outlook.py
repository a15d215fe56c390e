"""What a run takes, as it is seen after its survey and before its first trial: for the screen, and to count down."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.estimate import Estimate, Forecast, Gang, Guess, estimate
from autotune.preflight.fastest import Room, fastest, looked_at
from autotune.preflight.guarded import Guarded
from autotune.preflight.prediction import Predictor
from autotune.report.text import SIMULATED, duration
from autotune.survey import Survey
from trials.timing import TIMED_SHARE

MOST_LOOKED_AT = 2000
"""Configs of the space; of a larger one so many are drawn."""
NUM_GUESSED = 10
"""Fastest predicted configs, that the search is taken to spend its trials on."""
ASSUMED_MFU = 0.5
"""Of a model whose step time is not predicted."""
BUSY = 0.85
"""Share of its CPUs' time under which a rank has lost a good deal to others."""
HALF_THE_PEAK, PREDICTED, UNKNOWN = "assuming half the peak", "predicted", ""


@dataclass(frozen=True)
class Outlook:
    estimate: Estimate
    basis: str
    """Of the step times; empty: there is none, and the estimate says no more than how stages compare."""
    trial_timeout_s: float
    simulated: bool
    cpu_share: float = 1.0
    """By which steps take longer than predicted."""

    def forecast(self) -> Forecast:
        return Forecast(self.estimate.stages, is_rough=not self.basis)

    def describe(self, finished: Sequence[str]) -> list[str]:
        """For the screen.

        Args:
            finished: the stage of each trial that an earlier life of the run has measured.
        """
        made = self.estimate
        ahead = self.forecast()
        for stage in finished:
            ahead.count(stage)
        left_s = ahead.left_s()
        if left_s is None:
            return ["estimate: known once the baseline has run"]
        fewest, most = (max(0, number - len(finished)) for number in made.num_trials)
        unit = "GPU-hours" if made.gang.device == "cuda" else "rank-hours"
        hours = left_s / 3600 * made.gang.num_ranks * made.gang.num_slots
        clock = f" {SIMULATED}" if self.simulated else ""
        early = f"{fewest} to " if fewest < most else ""
        lines = [
            f"estimate: about {duration(left_s)}{clock}, {hours:.2g} {unit}, for {early}{most} runs of a trial "
            f"(baseline {made.baseline_step_s:.2g} s a step, {self.basis}); refined as trials end"
        ]
        if self.cpu_share < BUSY:
            lines.append(
                f"other programs want this machine's CPUs: the ranks had {self.cpu_share:.0%} of theirs, so that steps "
                "take longer, and unsteadily"
            )
        if made.longest_s > TIMED_SHARE * self.trial_timeout_s:
            lines.append(too_long(made, self.trial_timeout_s))
        return lines


def too_long(made: Estimate, trial_timeout_s: float) -> str:
    """What to say of a baseline that may not end in its time."""
    return (
        f"the baseline may time out: its trial takes about {duration(made.longest_s)} at least, and "
        f"measure.trial_timeout_s = {trial_timeout_s:g}; raise it, or lower measure.min_steps and warmup_steps"
    )


def make_outlook(survey: Survey, num_slots: int, predictor: Predictor) -> Outlook:
    """The outlook of a run that has been surveyed."""
    study, space = survey.study, survey.space
    predictor = Guarded(predictor, lambda _: None)  # the search says it
    job, limits = study.job, study.limits
    gang = Gang(limits.device, study.world_size, num_slots)
    baseline, basis = _guess_of_the_baseline(survey, predictor)
    others: list[Guess] = []
    if basis == PREDICTED:
        drawn = looked_at(space, random.Random(job.seed), MOST_LOOKED_AT)
        found = {knobs: predictor.predict(knobs) for knobs in drawn}
        known = {knobs: prediction for knobs, prediction in found.items() if prediction is not None}
        room = Room(limits.limit_gib, limits.device, limits.headroom)
        others = [
            Guess(knobs, known[knobs].step_s / survey.cpu_share) for knobs in fastest(known.items(), room, NUM_GUESSED)
        ]
    made = estimate(job, gang, baseline, others, study.model.num_params, space.num_configs)
    return Outlook(made, basis, job.measure.trial_timeout_s, bool(study.simulated), survey.cpu_share)


def _guess_of_the_baseline(survey: Survey, predictor: Predictor) -> tuple[Guess, str]:
    study, knobs = survey.study, survey.space.baseline
    found = predictor.predict(knobs)
    if found is not None:
        return Guess(knobs, found.step_s / survey.cpu_share), PREDICTED
    flops, peak = study.model.flops_per_token, study.peak.tflops_per_s
    if flops is None or peak is None or study.job.seq_len is None:
        return Guess(knobs, 1.0), UNKNOWN
    tokens = knobs.micro_batch_size * knobs.grad_accum_steps * study.job.seq_len
    return Guess(knobs, tokens * flops / (ASSUMED_MFU * peak * 1e12) / survey.cpu_share), HALF_THE_PEAK
