"""Whether a trainer does what was exported for it: what the probe reads back, beside the tuned settings."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.export import Best
from trials.outcome import Outcome
from trials.probe_log import differences, rank_outcome, throughput

from .harness import Run

NOT_READ = {"attention_backend"}
"""Knobs that no object shows."""


def check(ran: Run, tuned: Best, lost: Mapping[str, str], num_parameters: int, seq_len: int) -> None:
    """What was exported is what is read back, but for what the exporter says that it cannot carry."""
    assert set(ran.codes) == {0}, ran.output
    assert [rank_outcome(log).outcome for log in ran.logs] == [Outcome.OK] * tuned.world_size, ran.output
    knobs = tuned.knobs.to_dict()
    asked = {name: value for name, value in knobs.items() if value is not None or name == "prefetch_factor"}
    asked |= {"world_size": tuned.world_size, "num_parameters": num_parameters, "param_dtype": tuned.precision}
    different, unread = differences(ran.logs, asked)
    assert ([str(each) for each in different], set(unread)) == ([], NOT_READ), lost
    rows = tuned.knobs.micro_batch_size * tuned.knobs.grad_accum_steps
    assert throughput(ran.logs).tokens_per_step == tuned.world_size * rows * seq_len
