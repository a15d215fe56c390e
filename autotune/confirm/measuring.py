"""The process that measures, apart from the one that starts the real run: nothing that becomes of it can stop that.

    python -P -m autotune.confirm.measuring ORDER.json

What it finds out lies in FOUND_NAME beside the order, whole after each attempt.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from autotune.confirm.decide import Decision, after_failure
from autotune.confirm.rounds import Rounds
from autotune.confirm.tuned import BASELINE, BEST, FALLBACK, Tuned, TunedModel, read_tuned
from autotune.errors import AutotuneError, UserError
from autotune.estimate import Forecast, Stage
from autotune.measuring import LEAST_TIMEOUT_S, Listener, Measurer
from autotune.report.text import count
from autotune.signals import EXIT_INTERRUPTED, interrupt_in_order
from autotune.stages import CONFIRM
from autotune.survey import ask_ranks, survey_from_content
from trials.files import write_whole
from trials.lifeline import die_with_parent
from trials.record import Knobs

ORDER_NAME, FOUND_NAME = "order.json", "found.json"


@dataclass(frozen=True)
class Order:
    """What is to be measured."""

    run: str
    ranks: int
    overrides: tuple[str, ...]
    simulate: str | None
    within_s: float
    started_at: float
    """Seconds since the epoch: from then on they count."""

    def left_s(self, clock: Any) -> float:
        """For the measuring, which begins now; a simulated cluster's clock knows nothing of what went before."""
        gone_s = 0.0 if self.simulate is not None else clock.time() - self.started_at
        return max(LEAST_TIMEOUT_S, self.within_s - gone_s)


@dataclass
class Found:
    """What is known so far."""

    decision: dict[str, Any] | None = None
    """By `Decision.to_dict`; None: nothing was measured."""
    ended: str = ""
    """Why the measuring ended; empty: it has not."""
    failed: bool = False
    """It broke off."""
    refused: tuple[str, str] | None = None
    """Message and hint, where the real run must not be started: it is of another model."""
    hardware: dict[str, Any] | None = None
    """What it ran on."""


class OtherModelError(UserError):
    """What is measured is not what was tuned."""


def confirm(
    tuned: Tuned, runner: Any, listener: Listener, folder: Path, within_s: float, note: Callable[[Found], None]
) -> None:
    """Measures the contenders of `tuned`, and tells `note` of all that is found out.

    Args:
        folder: for the survey's output.
        within_s: seconds by the runner's clock in which it must end.

    Raises:
        OtherModelError: the model is not the one that was tuned.
        UserError: the workload, its data or the settings are wrong.
        InfrastructureError: ranks or nodes failed.
    """
    ends_at = runner.clock.monotonic() + within_s
    found = Found()
    content = ask_ranks(tuned.job, runner, folder / "survey", min(within_s, tuned.job.measure.trial_timeout_s))
    _refuse_another_model(tuned, TunedModel.model_validate(content["model"]))
    survey = survey_from_content(tuned.job, runner, content)
    study = replace(survey.study, study_id=tuned.study_id)
    contenders = _spelt(tuned.contenders, survey.space.canonical)
    num_trials = 2 * tuned.job.measure.rounds * (BEST in contenders) + 1
    forecast = Forecast({CONFIRM: Stage(num_trials, num_trials, 1.0)}, is_rough=True)
    measurer = Measurer(study, tuned.run, runner, listener, forecast, ends_at=ends_at, reference=contenders[BASELINE])
    measurer.leave_numbers_in_use()
    listener.message(
        f"  {survey.device_name}, {count(tuned.world_size, 'rank')}; tuned on {count(tuned.tuned_world_size, 'rank')}; "
        f"global batch {count(tuned.job.global_batch_size, 'sequence')}, as tuned"
    )
    listener.baseline_known(contenders[BASELINE])
    found.hardware = {"device_name": survey.device_name, "world_size": study.world_size, "limits": asdict(study.limits)}

    def noted(decision: Decision) -> None:
        found.decision = decision.to_dict()
        note(found)

    rounds = Rounds(contenders, measurer, tuned.job.measure.rounds, ends_at, tuned.judges_memory, noted)
    try:
        found.ended = rounds.go()
    except AutotuneError as error:
        found.ended, found.failed = str(error), True
        found.decision = after_failure(rounds.decision, contenders, error.message).to_dict()
        note(found)
        return
    noted(rounds.decision)


def _spelt(contenders: dict[str, Knobs], canonical: Callable[[Knobs], Knobs]) -> dict[str, Knobs]:
    """Each once: on other ranks, two may be the same in effect."""
    spelt = {role: canonical(knobs) for role, knobs in contenders.items()}
    if spelt.get(BEST) == spelt[BASELINE]:
        del spelt[BEST]
    if spelt.get(FALLBACK) in (spelt.get(BEST), spelt[BASELINE]):
        spelt.pop(FALLBACK, None)
    return spelt


def _refuse_another_model(tuned: Tuned, here: TunedModel) -> None:
    there = tuned.model
    if here == there:
        return
    trained = tuned.job.model.workload if tuned.job.model else "the trained model"
    raise OtherModelError(
        f"{tuned.run}: it was tuned for another model: {there.num_params:,} parameters and "
        f"{_flops(there.flops_per_token)} per token then, {here.num_params:,} and {_flops(here.flops_per_token)} now",
        f"has {trained} changed since? tune it again: autotune run {tuned.run / 'job.yaml'}",
    )


def _flops(amount: float | None) -> str:
    return "FLOPs not known" if amount is None else f"{amount:,.6g} FLOPs"


def _runner(tuned: Tuned, folder: Path, simulate: str | None) -> AbstractContextManager[Any]:
    if simulate is None:
        from autotune.cluster.runner import open_runner

        return open_runner(tuned.job, folder / "ray.log")
    from autotune.simulate.cluster import parse_cluster
    from autotune.simulate.runner import SimulatedRunner, last_end_s, make_world

    world = make_world(tuned.job, parse_cluster(simulate))
    return nullcontext(SimulatedRunner(world, last_end_s(tuned.run / "history")))


def main(order_path: Path) -> int:
    """The exit code: 0, also if the measuring failed in a way that is in the file."""
    from rich.console import Console

    from autotune.report.screen import make_screen

    values = json.loads(order_path.read_text(encoding="utf-8"))
    order = Order(**values | {"overrides": tuple(values["overrides"])})
    last = Found()

    def note(found: Found) -> None:
        nonlocal last
        last = found
        write_whole(order_path.with_name(FOUND_NAME), json.dumps(asdict(found)))

    try:
        tuned = read_tuned(Path(order.run), order.ranks, order.overrides, order.simulate)
        screen = make_screen(Console(highlight=False, stderr=True))
        with _runner(tuned, order_path.parent, order.simulate) as runner, screen:
            confirm(tuned, runner, screen, order_path.parent, order.left_s(runner.clock), note)
    except OtherModelError as error:
        note(replace(last, refused=(error.message, error.hint)))
    except AutotuneError as error:
        note(replace(last, ended=str(error), failed=True))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    die_with_parent()
    interrupt_in_order()
    sys.exit(main(Path(sys.argv[1])))
