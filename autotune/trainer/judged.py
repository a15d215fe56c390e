"""What only all ranks of a user's own trainer can tell together: whether they did what was asked, and how fast."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trials.outcome import OUT_OF_MEMORY, Outcome
from trials.record import RankReport, TrialSpec
from trials.timing import drift

if TYPE_CHECKING:
    from autotune.cluster.gang import GangResult

NUM_BLOCKS = 8
"""That timed steps are put together in; single ones are too alike to their neighbours to say how sure their mean is."""
HINTS = {
    "engine": "say training.engines: [{found}], if that is how your script shards; `none` is a model that is not wrapped",
    "micro_batch_size": "hand it over ({{micro_batch_size}} in the command), or say baseline.micro_batch_size: {found}",
    "grad_accum_steps": "hand it over ({{grad_accum_steps}} in the command); micro_batch_size x grad_accum_steps x "
    "data-parallel ranks is batch.global_batch_size",
    "world_size": "each rank took itself for a world of {found}: does the script start ranks of its own (launcher: self)?",
    "shard_mesh_size": "the model is sharded over {found} ranks; Lightning's ModelParallelStrategy needs "
    "data_parallel_size and tensor_parallel_size written out",
    "num_parameters": "the job's `model` declares another model than the script trains: mend or remove it",
}
HANDED = "the value is handed over, and the script does not use it: look where it goes in trainer.command"


def judged(spec: TrialSpec, result: GangResult) -> GangResult:
    """The gang's result once its ranks have been looked at side by side."""
    if not result.reports:
        return result
    shared = _shared_device(result.reports)
    if shared:
        return replace(result, outcome=Outcome.INVALID, reason=shared)
    difference = _difference(spec, result.reports)
    if difference and result.outcome in {Outcome.OK, Outcome.TOO_SHORT, *OUT_OF_MEMORY}:
        rank, reason = difference
        return replace(result, outcome=Outcome.MISAPPLIED, reason=reason, failed_rank=rank)
    if result.outcome is Outcome.OK:
        problem = _join(result.reports)
        if problem:
            return replace(result, outcome=Outcome.INVALID, reason=problem)
    return result


def _shared_device(reports: dict[int, RankReport]) -> str:
    """Ranks on one GPU would each be half as fast as they are."""
    devices = [(report.observed or {}).get("device") or {} for report in reports.values()]
    on = Counter(device["uuid"] for device in devices if device.get("type") == "cuda" and device.get("uuid"))
    crowded = [uuid for uuid, number in on.items() if number > 1]
    if not crowded:
        return ""
    return (
        f"{on[crowded[0]]} ranks on one GPU ({crowded[0]}): does the script choose its device by LOCAL_RANK "
        "(torch.cuda.set_device)?"
    )


def _difference(spec: TrialSpec, reports: dict[int, RankReport]) -> tuple[int, str] | None:
    """The first rank that shows something else than was asked, and what."""
    assert spec.trainer is not None
    expect: dict[str, Any] = spec.trainer["expect"]
    for rank, report in sorted(reports.items()):
        found = {**(report.observed or {}), **(report.applied or {})}
        for name, asked in expect.items():
            # What could not be read is not there; a knob that has no effect in this trial is null.
            if found.get(name) is not None and found[name] != asked:
                hint = HINTS.get(name, HANDED).format(found=found[name])
                return rank, f"{name}: asked for {asked}, read back {found[name]} on rank {rank}\n  hint: {hint}"
    return None


def _join(reports: dict[int, RankReport]) -> str:
    """Gives each report the gang's times: of each step the slowest rank's, of tokens the mean over ranks.

    Returns:
        Why that cannot be; empty if it can.
    """
    if any(report.tokens_per_step is None for report in reports.values()):
        return (
            "the tokens of a step are not known: no integer batch (samples, sequence) was seen in the model's forward; "
            "say trainer.tokens: N (tokens per sequence), or call probe.step(tokens=...)"
        )
    times = [report.own_step_times_s for report in reports.values()]
    num_steps = min(len(one) for one in times)
    slowest = [max(own[step] for own in times) for step in range(num_steps)]
    block = max(1, num_steps // NUM_BLOCKS)
    parts = [slowest[start : start + block] for start in range(0, num_steps, block)]
    tokens = sum(report.tokens_per_step or 0.0 for report in reports.values()) / len(reports)
    for report in reports.values():
        report.block_times_s = [sum(part) / len(part) for part in parts]
        report.block_steps = [len(part) for part in parts]
        report.num_steps = num_steps
        report.tokens_per_step = tokens
        report.drift = drift(report.block_times_s)
    return ""
