"""One config by hand, measured as the search would measure it, as often as asked."""

from __future__ import annotations

from pathlib import Path

from autotune.cluster.runner import Runner
from autotune.errors import InfrastructureError, NothingFitsError, UserError, nearest
from autotune.estimate import Forecast, Stage
from autotune.job import Job
from autotune.job_space import Baseline
from autotune.measuring import Listener, Measurer
from autotune.rows import Attempt
from autotune.stages import BY_HAND
from autotune.survey import Survey, take_survey
from trials.outcome import OF_THE_WORKLOAD, OUT_OF_MEMORY, Outcome

ELSEWHERE = {"reduce_dtype": "training.reduce_dtype"}
"""Knobs whose value for one config is no key of `baseline`."""


def overrides_of(settings: tuple[str, ...]) -> tuple[str, ...]:
    """`knob=value`, as overrides of a job whose baseline is the config to measure; `section.key=value` stays.

    Raises:
        UserError: a name without a dot that is no knob.
    """
    known = {**{name: name for name in Job.model_fields}, **ELSEWHERE}
    known |= {name: f"baseline.{name}" for name in Baseline.model_fields}
    found = ["space={}", "export_for=null"]  # nothing is searched or handed over, so no candidate can be wrong
    # Of one engine alone: a knob of another one is an error.
    found += [
        f"training.engines=[{setting.partition('=')[2]}]" for setting in settings if setting.startswith("engine=")
    ]
    for setting in settings:
        key, equals, value = setting.partition("=")
        if "." not in key and key not in known:
            raise UserError(f"--set {setting}: no such knob", nearest(key, known))
        found.append(f"{known.get(key, key)}{equals}{value}")
    return tuple(found)


def measure(
    job: Job, out: Path, runner: Runner, listener: Listener, repeat: int, keep_traces: bool
) -> tuple[Survey, list[Attempt]]:
    """Measures the job's baseline.

    Args:
        out: made by `prepare_folder`.
        keep_traces: of the profiled step; each rank's lies in its trial's folder.

    Raises:
        NothingFitsError: it ran out of memory.
        UserError: the workload, its data or the settings are wrong.
        InfrastructureError: it failed for another reason.
    """
    survey = take_survey(job, runner, out)
    listener.message(survey.describe())
    forecast = Forecast({BY_HAND: Stage(repeat, repeat, 1.0)}, is_rough=True)
    measurer = Measurer(survey.study, out, runner, listener, forecast, keep_traces=keep_traces)
    listener.baseline_known(survey.space.baseline)
    attempts: list[Attempt] = []
    for number in range(repeat):
        attempt = measurer.measure(survey.space.baseline, BY_HAND, number)
        listener.trial_ended(attempt, None)
        if attempt.outcome is not Outcome.OK:
            raise _failure(attempt, out)
        attempts.append(attempt)
    return survey, attempts


def _failure(attempt: Attempt, out: Path) -> Exception:
    kind: type[NothingFitsError | UserError | InfrastructureError] = InfrastructureError
    if attempt.outcome in OUT_OF_MEMORY:
        kind = NothingFitsError
    elif attempt.outcome in OF_THE_WORKLOAD:
        kind = UserError
    return kind(
        f"the config ended in {attempt.outcome}: {attempt.reason}", f"its output is in {out / attempt.row['log_path']}"
    )
