"""Which configs are scaled, and the job of each point: a config's own, on so many ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.confirm.tuned import accumulation, nodes_for
from autotune.errors import UserError
from autotune.job import Job
from autotune.scaling.points import batch_on
from trials.outcome import Outcome
from trials.record import Knobs

BEST, BASELINE, FALLBACK, FINALIST = "best", "baseline", "fallback", "finalist"
CURVES = (BEST, BASELINE)
"""Roles that are measured on every number of ranks; the others only on the most, to be ranked there."""


@dataclass(frozen=True)
class Target:
    """What is to be measured on one number of ranks, in one mode."""

    world_size: int
    mode: str
    job: Job
    contenders: dict[str, Knobs]
    """By role. The accumulation is that of these ranks."""
    problems: dict[str, str]
    """By role, why it cannot be measured here."""


def contenders_of(content: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Knobs]:
    """The configs of a run by role, each once: best, baseline, fallback and the other finalists.

    Args:
        content: of best.yaml.
        rows: of its history.
    """
    settings = {BEST: content["settings"], BASELINE: content["baseline"]["settings"]}
    if content["fallback"]:
        settings[FALLBACK] = content["fallback"]["settings"]
    for row in rows:
        if row["stage"] == FINALIST and row["outcome"] == Outcome.OK:
            settings[f"{FINALIST}-{row['trial']}"] = row["knobs"]
    found = {role: Knobs.from_dict(values) for role, values in settings.items()}
    if found[BEST] == found[BASELINE]:
        del found[BEST]
    first = {knobs: role for role, knobs in reversed(found.items())}
    return {role: knobs for role, knobs in found.items() if first[knobs] == role}


def outline(job: Job) -> Knobs:
    """Of a job's baseline, what must divide over the ranks; its other knobs are known once the model is surveyed."""
    base = job.baseline
    return Knobs(
        micro_batch_size=base.micro_batch_size,
        grad_accum_steps=1,
        sync_each_micro_batch=True,
        reshard_after_forward=base.reshard_after_forward,
        bucket_cap_mb=1.0,
        blocks_per_unit=1,
        activation_checkpointing=base.activation_checkpointing,
        num_workers=0,
        prefetch_factor=None,
        engine=base.engine or job.training.engines[0],
        replicate_degree=base.replicate_degree,
        reshard_group_size=base.reshard_group_size,
    )


def target(job: Job, contenders: dict[str, Knobs], world_size: int, mode: str) -> Target:
    """The configs on `world_size` ranks: strong scaling keeps the job's global batch, weak scaling each rank's share.

    A config whose micro-batch does not divide there is one with a problem.

    Raises:
        UserError: the ranks do not fill whole nodes.
    """
    batch = batch_on(job.global_batch_size, job.batch.target_world_size, world_size, mode)
    able: dict[str, Knobs] = {}
    problems: dict[str, str] = {}
    for role, knobs in contenders.items():
        micro, degree = knobs.micro_batch_size, knobs.replicate_degree or 1
        steps = accumulation(knobs, batch, world_size)
        if not steps:
            problems[role] = f"a global batch of {batch} in micro-batches of {micro} does not divide over {world_size}"
        elif degree > 1 and (world_size % degree or degree >= world_size):
            problems[role] = f"replicate_degree = {degree} does not divide {world_size} ranks"
        elif (group := knobs.reshard_group_size or 0) and (world_size // degree) % group:
            problems[role] = f"reshard_group_size = {group} does not divide {world_size // degree} ranks"
        else:
            able[role] = replace(knobs, grad_accum_steps=steps)
    nodes, per_node = nodes_for(job, world_size)
    cluster = job.cluster.model_copy(
        update={"nodes_per_trial": nodes, "ranks_per_node": per_node, "parallel_trials": 1}
    )
    micro = next((knobs.micro_batch_size for knobs in able.values()), 1)
    here = job.model_copy(
        update={
            "cluster": cluster,
            "batch": job.batch.model_copy(
                update={"global_batch_size": batch, "global_batch_tokens": None, "target_world_size": world_size}
            ),
            "space": type(job.space)(),  # its candidates need not divide here, and nothing is searched
            "baseline": job.baseline.model_copy(
                update={"micro_batch_size": micro, "replicate_degree": None, "reshard_group_size": None}
            ),
            "export_for": None,
        }
    )
    return Target(world_size, mode, here, able, problems)


def refuse_what_never_divides(targets: Sequence[Target]) -> None:
    """Refuses a scaling without a point of a curve.

    Raises:
        UserError: no config divides on some number of ranks in any mode.
    """
    for ranks in sorted({one.world_size for one in targets}):
        of_ranks = [one for one in targets if one.world_size == ranks]
        if not any(role in one.contenders for one in of_ranks for role in CURVES):
            why = next(why for one in of_ranks for why in one.problems.values())
            raise UserError(f"--ranks {ranks}: {why}; nothing is rounded", "give other numbers of ranks by --ranks")


def spelt(one: Target, canonical: Callable[[Knobs], Knobs]) -> dict[str, Knobs]:
    """The configs in the one spelling that this number of ranks gives them, each once."""
    found = {role: canonical(knobs) for role, knobs in one.contenders.items()}
    first = {knobs: role for role, knobs in reversed(found.items())}
    return {role: knobs for role, knobs in found.items() if first[knobs] == role}
