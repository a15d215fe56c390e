"""Our measured trial under Ray Tune: any of its searchers and schedulers, one real gang of ranks a Tune trial.

    from autotune import load_job
    from autotune.integrations.ray_tune import METRIC, param_space, trainable

    job = load_job("job.yaml")
    tuner = tune.Tuner(
        trainable(job),
        param_space=param_space(job),
        tune_config=tune.TuneConfig(metric=METRIC, mode="max", num_samples=20, max_concurrent_trials=1),
    )

`max_concurrent_trials` is the number of gangs that your cluster has whole nodes for: a trial of Tune takes no CPU
itself, and waits until its gang's nodes are free. A config that runs out of memory, hangs or crashes is a result with
its `outcome` and a throughput of 0, not a trial of Tune's that failed.

What `autotune run` has and this has not: memory as a constraint that the search learns, predictions, repeats beside the
baseline, the comparison of losses, a history that a killed study goes on from.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from optuna.distributions import IntDistribution
from optuna.trial import FixedTrial

from autotune.clock import Clock
from autotune.cluster.gang import GangResult, run_gang
from autotune.cluster.nodes import demand_of
from autotune.cluster.runner import device_of
from autotune.cluster.slots import make_slot
from autotune.errors import UserError
from autotune.job import Job
from autotune.measuring import make_spec
from autotune.rows import attempt_from_row, history_row
from autotune.space import SearchSpace
from autotune.stages import SIDE_BY_SIDE
from autotune.survey import Survey, ask_ranks, survey_from_content
from trials.outcome import Outcome
from trials.record import Knobs, TrialSpec

METRIC = "tokens_per_s_per_rank"
"""What is reported and maximised; 0 of a config that does not fit or failed."""
NODES_WAIT_S = 24 * 3600.0
"""For a gang's nodes: other trials of Tune have them meanwhile."""
OF_THE_CALLER = {"memory": 2**20}
"""What a trial of Tune reserves, in bytes: the gang has a placement group of its own, for which a CPU that Tune held
might be missing, and nothing at all is refused by Tune."""


@dataclass
class _OneGang:
    """Runs each attempt on a slot of its own, which is given back at its end."""

    job: Job
    device: str
    clock: Clock
    simulated: str = ""

    def __post_init__(self) -> None:
        self.world_size = self.job.cluster.world_size

    def run(self, spec: TrialSpec, log_dir: Path, timeout_s: float) -> GangResult:
        slot = make_slot(demand_of(self.job.cluster, self.device), frozenset(), NODES_WAIT_S)
        try:
            return run_gang(slot, spec, log_dir, timeout_s)
        finally:
            slot.close()


def param_space(job: Job) -> dict[str, Any]:
    """Tune's search space: a `tune.choice` of each knob that `job` searches, by the candidates' own values.

    The first call for a job runs its survey, on the ranks of one gang.

    Raises:
        UserError: the workload, its data or the space are wrong; the cluster has less than a gang needs.
        InfrastructureError: Ray or the survey failed.
    """
    from ray import tune

    space = _survey(job).space
    return {name: tune.choice(list(space.candidates[name])) for name in space.searched}


def trainable(job: Job) -> Callable[[dict[str, Any]], None]:
    """A function for `tune.Tuner`, which measures the config it is given and reports once.

    Reported: `tokens_per_s_per_rank`, `mfu` (a fraction) and `memory_gib` (worst rank, as the limit judges it), both
    NaN where not known, `memory_over_limit` (above 0: does not fit), `fits`, `outcome`, `reason`, `step_time_s`.

    Raises:
        UserError, InfrastructureError: as `param_space`.
    """
    from ray import tune

    _survey(job)
    content, device = _surveyed(job.model_dump_json())

    def measure(config: dict[str, Any]) -> None:
        tune.report(_measured(job, content, device, config, Path(tune.get_context().get_trial_dir())))

    limited: Callable[[dict[str, Any]], None] = tune.with_resources(measure, OF_THE_CALLER)
    return limited


def _measured(job: Job, content: dict[str, Any], device: str, config: dict[str, Any], folder: Path) -> dict[str, Any]:
    import time

    runner = _OneGang(job, device, time)
    survey = survey_from_content(job, runner, content)
    spec = make_spec(job, runner, knobs_of(survey.space, config), SIDE_BY_SIDE, trial=0)
    folder.mkdir(parents=True, exist_ok=True)
    result = runner.run(spec, folder, job.measure.trial_timeout_s)
    row = history_row(spec, result, survey.study, str(folder))
    attempt = attempt_from_row(row, survey.study.limits)
    fits = attempt.is_feasible
    return {
        METRIC: attempt.tokens_per_s_per_rank if fits else 0.0,
        "mfu": _number(row.get("mfu")),
        "memory_gib": _number(attempt.memory_gib),
        "memory_over_limit": attempt.told.memory_over_limit,
        "fits": fits,
        "outcome": attempt.outcome.value,
        "reason": attempt.reason,
        "step_time_s": _number(row.get("step_time_s")) if attempt.outcome is Outcome.OK else math.nan,
    }


def knobs_of(space: SearchSpace, config: dict[str, Any]) -> Knobs:
    """The config of one candidate of each searched knob.

    Raises:
        UserError: a knob is missing, or its value is no candidate.
    """
    params: dict[str, Any] = {}
    for name, distribution in space.all_distributions.items():
        known, value = space.candidates[name], config.get(name)
        if value not in known:
            raise UserError(f"{name} = {value!r}: no candidate of this job's space", f"one of {list(known)}")
        params[name] = known.index(value) if isinstance(distribution, IntDistribution) else value
    return space.suggest_flat(FixedTrial(params))


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _survey(job: Job) -> Survey:
    import time

    if job.trainer is not None:
        raise UserError("trainer: a command of your own is not measured under Ray Tune", "tune it by `autotune run`")
    content, device = _surveyed(job.model_dump_json())
    return survey_from_content(job, _OneGang(job, device, time), content)


@functools.lru_cache(maxsize=16)
def _surveyed(job_json: str) -> tuple[dict[str, Any], str]:
    """What the survey found, and the device: once a job in a process."""
    import time

    import ray

    job = Job.model_validate_json(job_json)
    if not ray.is_initialized():
        os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by default: trials would measure what others leave
        ray.init(address=job.cluster.address, log_to_driver=False)
    device = device_of(job)
    with TemporaryDirectory(prefix="autotune-survey-") as folder:
        content = ask_ranks(job, _OneGang(job, device, time), Path(folder), job.measure.trial_timeout_s)
    return content, device
