"""A finished run, as it is confirmed: its configs, and its job on the real run's ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from autotune.best import read_best
from autotune.errors import UserError
from autotune.folder import resume_command
from autotune.job import Job, divisors
from autotune.job_file import load_job
from autotune.loaded import read_study_file
from trials.record import Knobs

BEST, FALLBACK, BASELINE = "best", "fallback", "baseline"
"""The roles of the configs of a best.yaml, in the order in which they are preferred."""
MAY_CHANGE = ("cluster", "measure", "data.source")
"""Sections and keys of the job that are where it is measured and how long, not what."""


class TunedModel(BaseModel):
    """What tells one model from another."""

    model_config = ConfigDict(strict=True)

    num_params: int | None
    """None: of a trainer's own model, which the job does not declare."""
    flops_per_token: float | None


@dataclass(frozen=True)
class Tuned:
    """What is confirmed, on how many ranks."""

    run: Path
    content: dict[str, Any]
    """Of best.yaml."""
    job: Job
    """The run's, on the real run's ranks."""
    contenders: dict[str, Knobs]
    """By role; `best` is absent where the baseline was kept. The accumulation is that of these ranks."""
    study_id: str
    model: TunedModel
    tuned_world_size: int
    simulated: str
    """The modelled cluster that stood in for a real one; empty for what was measured."""

    @property
    def world_size(self) -> int:
        return self.job.cluster.world_size

    @property
    def judges_memory(self) -> bool:
        """On other ranks a config's memory is another; on as many it has been judged, and what is near the limit is
        noise."""
        return self.world_size != self.tuned_world_size


def read_tuned(run: Path, num_ranks: int | None, overrides: tuple[str, ...], simulate: str | None) -> Tuned:
    """The run in `run`, to be confirmed on `num_ranks`; None: as many as the job says that the real run has.

    Raises:
        UserError: no run there that has ended; one that was simulated, or not, as it is now; a number of ranks that
            does not divide the batch, or that whole nodes do not make; an override of what was tuned.
    """
    content, study = read_best(run), read_study_file(run)
    if not content["complete"]:
        raise UserError(
            f"{run}: its run has not ended, so nothing was chosen that could be confirmed",
            f"let it end first: {resume_command(run, study.simulated)}",
        )
    _refuse_another_world(run, study.simulated, simulate)
    refuse_other_keys(overrides)
    as_tuned = load_job(str(run / "job.yaml"), overrides)
    ranks = num_ranks or as_tuned.batch.target_world_size
    settings = {BEST: content["settings"], BASELINE: content["baseline"]["settings"]}
    if content["fallback"]:
        settings[FALLBACK] = content["fallback"]["settings"]
    found = {role: Knobs.from_dict(settings[role]) for role in (BEST, FALLBACK, BASELINE) if role in settings}
    contenders = _on_ranks(found, as_tuned.global_batch_size, ranks)
    nodes, per_node = nodes_for(as_tuned, ranks)
    job = load_job(
        str(run / "job.yaml"),
        (
            *overrides,
            "space={}",  # its candidates need not divide here, and nothing is searched
            f"baseline.micro_batch_size={contenders[BASELINE].micro_batch_size}",
            f"batch.target_world_size={ranks}",
            f"cluster.nodes_per_trial={nodes}",
            f"cluster.ranks_per_node={per_node}",
            "cluster.parallel_trials=1",
        ),
    )
    return Tuned(
        run=run,
        content=content,
        job=job,
        contenders=contenders,
        study_id=study.study_id,
        model=TunedModel(num_params=study.model.num_params, flops_per_token=study.model.flops_per_token),
        tuned_world_size=study.world_size,
        simulated=study.simulated,
    )


def _refuse_another_world(run: Path, simulated: str, simulate: str | None) -> None:
    if simulated and simulate is None:
        raise UserError(
            f"{run}: its run was simulated ({simulated}): nothing was measured that could be confirmed",
            'tune on a real cluster first; to rehearse on a simulated one: --simulate "..."',
        )
    if simulate is not None and not simulated:
        raise UserError(
            f"{run}: its run was measured, and is not confirmed on a simulated cluster", "leave out --simulate"
        )


def refuse_other_keys(overrides: tuple[str, ...]) -> None:
    """Refuses overrides of what was tuned.

    Raises:
        UserError: a key that is none of MAY_CHANGE.
    """
    for override in overrides:
        key = override.partition("=")[0]
        if not any(key == known or key.startswith(f"{known}.") for known in MAY_CHANGE):
            raise UserError(
                f"--set {override}: that would measure something else than what was tuned",
                f"what can be changed here: {', '.join(MAY_CHANGE)}; the number of ranks by --ranks",
            )


def _on_ranks(found: dict[str, Knobs], global_batch_size: int, ranks: int) -> dict[str, Knobs]:
    """The configs with the accumulation that makes the same global batch on `ranks`.

    A fallback that does not divide is left out; and the best where it is the baseline.
    """
    needed = [knobs for role, knobs in found.items() if role != FALLBACK]
    parted = math.lcm(*(knobs.model_parallel_ranks for knobs in needed))
    able = [
        n * parted
        for n in divisors(global_batch_size)
        if all(accumulation(knobs, global_batch_size, n * parted) for knobs in needed)
    ]
    if ranks not in able:
        raise UserError(
            f"{ranks} ranks: a global batch of {global_batch_size} sequences in micro-batches of "
            f"{' and '.join(str(micro) for micro in dict.fromkeys(k.micro_batch_size for k in needed))} does not "
            "divide over them; nothing is rounded",
            f"numbers of ranks that it divides over: {', '.join(map(str, able))}",
        )
    on_ranks = {
        role: replace(knobs, grad_accum_steps=steps)
        for role, knobs in found.items()
        if (steps := accumulation(knobs, global_batch_size, ranks))
    }
    if on_ranks[BEST] == on_ranks[BASELINE]:
        del on_ranks[BEST]
    return on_ranks


def accumulation(knobs: Knobs, global_batch_size: int, ranks: int) -> int:
    """Micro-steps that make exactly the global batch on so many ranks; 0: none do."""
    sequences = global_batch_size * knobs.model_parallel_ranks
    steps, left = divmod(sequences, ranks * knobs.micro_batch_size)
    return 0 if left else steps


def nodes_for(job: Job, ranks: int) -> tuple[int, int]:
    """Nodes, and ranks on each. One machine is one node; of a cluster, nodes are filled as they were in tuning."""
    per_node = job.cluster.ranks_per_node
    if job.cluster.address == "local" or ranks < per_node:
        return 1, ranks
    if ranks % per_node:
        raise UserError(
            f"{ranks} ranks do not fill whole nodes of {per_node} ranks",
            "give another number by --ranks, or --set cluster.ranks_per_node=N",
        )
    return ranks // per_node, per_node
