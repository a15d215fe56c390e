"""A plan on the screen, and as JSON."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.estimate import Estimate
from autotune.outlook import too_long
from autotune.plan import CPUS_PER_GPU, Plan, Planned
from autotune.preflight.fastest import CONTEXT_GIB, LEAST_OF_ALLOCATED, MOST_OF_RESERVED, SAFE
from autotune.preflight.step_time import NETWORK_GB_PER_S
from autotune.report.text import differences, duration, gib, percent
from trials.timing import TIMED_SHARE

MOST_LISTED = 12
LEAST_SHOWN_GIB = 0.001
FITS = {"safe": "fits", "risky": "may fit", "sure_oom": "does not fit"}


def print_plan(console: Console, plan: Plan) -> None:
    for line in _head(plan):
        console.print(Text(line), soft_wrap=True)
    if plan.baseline is None:
        console.print(
            Text(
                "nothing is predicted: the closed forms know decoders of blocks that are alike, dense and trained as a "
                "whole, or a mixture that transformers' config describes; the search learns from its trials alone"
            ),
            soft_wrap=True,
        )
        return
    console.print(_top_table(plan))
    for line in (*_memory_lines(plan), *_tail(plan)):
        console.print(Text(line), soft_wrap=True)


def _head(plan: Plan) -> list[str]:
    job, shape = plan.job, plan.shape
    size = f"{_count(shape.num_params)} parameters, " if shape else ""
    blocks = f"{plan.space.facts.num_blocks} blocks; " if job.model is not None else ""
    limit = "none known" if plan.limit_gib is None else f"{gib(plan.limit_gib)} a rank"
    known = f"{plan.peak.tflops_per_s:.4g} TFLOP/s ({plan.peak.source})" if plan.peak.tflops_per_s else plan.peak.source
    lines = [
        "the job is valid; predictions only, nothing has been measured",
        f"  model: {size}{blocks}{plan.counted}",
        f"  global batch: {job.batch_text}",
        f"  device: {plan.device_name or plan.device}; memory: {limit}; peak: {known}",
        f"  ranks: {plan.trial_world} a trial, {job.batch.target_world_size} in the real run",
        f"  space: {plan.num_configs:,} configs of "
        + ", ".join(f"{len(values)} {name}" for name, values in plan.space.candidates.items() if len(values) > 1),
    ]
    if plan.device == "cuda" and max(plan.worlds) > job.cluster.ranks_per_node:
        lines.append(f"  network: {NETWORK_GB_PER_S:g} GB/s a GPU between nodes are assumed")
    if plan.device == "cuda" and job.space.num_workers == "auto":
        lines.append(f"  CPUs: {CPUS_PER_GPU} a GPU are assumed; the run asks the nodes")
    if len(plan.configs) not in (0, plan.num_configs):
        lines.append(f"  {len(plan.configs):,} of them were drawn at random, and only those are predicted")
    return lines + [f"  {note}" for note in plan.space.notes]


def _count(number: int) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"


def _shown(plan: Plan) -> list[tuple[str, Planned]]:
    assert plan.baseline is not None
    return [("baseline", plan.baseline), *((str(i + 1), one) for i, one in enumerate(plan.top()))]


def _memory_lines(plan: Plan) -> list[str]:
    """Largest terms first."""
    lines = [f"Predicted peak memory of a rank, {plan.trial_world} ranks:"]
    for name, one in _shown(plan):
        found = one.at[plan.trial_world]
        terms = sorted(found.memory_terms.items(), key=lambda term: -term[1])
        named = [f"{term.replace('_', ' ')} {gib(size)}" for term, size in terms if size >= LEAST_SHOWN_GIB]
        lines.append(
            f"  {name:>8}: {gib(found.allocated_gib)} live ({', '.join(named)}); {gib(found.reserved_gib)} "
            f"reserved: {FITS[plan.zone(one, plan.trial_world)]}"
        )
    return lines


def _top_table(plan: Plan) -> Table:
    what = "step time" if plan.peak.tflops_per_s is None else "MFU"
    table = Table(title=f"Predicted {what} and peak memory by ranks: the order is worth more than the figures")
    table.title_justify = "left"
    table.add_column("")
    for world in plan.worlds:
        table.add_column(f"{world} ranks", justify="right")
    table.add_column("settings")
    assert plan.baseline is not None
    base = plan.baseline.knobs.to_dict()
    for name, one in _shown(plan):
        cells = [f"{_speed(plan, one, world)}, {gib(one.at[world].reserved_gib)}" for world in plan.worlds]
        knobs = one.knobs.to_dict()
        text = "the job's baseline" if name == "baseline" else differences(knobs, base)
        table.add_row(name, *cells, Text(text))
    return table


def _speed(plan: Plan, one: Planned, world: int) -> str:
    share = plan.mfu(one, world)
    return f"{one.at[world].step_s:.3g} s" if share is None else percent(share)


def _tail(plan: Plan) -> list[str]:
    lines = []
    for world in plan.worlds:
        zones = plan.zones(world)
        lines.append(
            f"{world} ranks: of {sum(zones.values()):,} configs {zones['safe']:,} fit, {zones['risky']:,} may, "
            f"{zones['sure_oom']:,} surely do not"
        )
    if plan.limit_gib is not None:
        kept = f", {gib(CONTEXT_GIB)} of it kept for CUDA and NCCL" if plan.device == "cuda" else ""
        lines.append(
            f"  surely not: {LEAST_OF_ALLOCATED:.0%} of the predicted live tensors exceed the limit{kept}; may: "
            f"{MOST_OF_RESERVED:.0%} of the predicted reserved memory does, less the headroom"
        )
    failing = _by_micro_batch(plan)
    if failing:
        more = f"; and {len(failing) - MOST_LISTED} more sizes" if len(failing) > MOST_LISTED else ""
        lines.append(f"surely fails in a trial, whatever else is set: {'; '.join(failing[:MOST_LISTED])}{more}")
    target, only = plan.job.batch.target_world_size, plan.only_at_target()
    if only and plan.baseline is not None:
        fit, base = sum(plan.zone(one, target) == SAFE for one in only), plan.baseline.knobs
        # Of the loader nothing is known there.
        best = replace(only[0].knobs, num_workers=base.num_workers, prefetch_factor=base.prefetch_factor)
        lines.append(
            f"only on {target} ranks {fit:,} configs fit, and {len(only) - fit:,} more may, that surely fail in trials "
            f"on {plan.trial_world}; "
            f"the fastest, {_speed(plan, only[0], target)}: {differences(best.to_dict(), base.to_dict())}"
        )
    elif target in plan.worlds and target != plan.trial_world and plan.limit_gib is not None:
        lines.append(f"only on {target} ranks fits: nothing that surely fails in a trial")
    made = plan.estimate()
    return lines + (_cost_lines(plan, made) if made is not None else [])


def _by_micro_batch(plan: Plan) -> list[str]:
    """What has no chance in a trial: sizes, with the checkpointing modes of each."""
    modes: dict[int, list[str]] = {}
    for micro, mode, _ in plan.surely_failing():
        modes.setdefault(micro, []).append(mode)
    all_modes = set(plan.space.candidates.get("activation_checkpointing", ()))
    return [
        f"micro-batch {micro} with {'any checkpointing' if set(failing) >= all_modes else ' or '.join(failing)}"
        for micro, failing in modes.items()
    ]


def _cost_lines(plan: Plan, made: Estimate) -> list[str]:
    fewest, most = made.num_trials
    budget, measure = plan.job.budget, plan.job.measure
    lines = [
        f"tuning: {f'{fewest} to ' if fewest < most else ''}{most} runs of a trial, about {duration(made.seconds)}, "
        f"{made.device_hours:.3g} {'GPU-hours' if plan.device == 'cuda' else 'rank-hours'}"
    ]
    for name, stage in made.stages.items():
        number = f"{stage.fewest} to {stage.most}" if stage.fewest < stage.most else f"{stage.most}"
        at_once = f", {stage.at_once} at once" if stage.at_once > 1 else ""
        lines.append(f"  {name}: {number} x {duration(stage.trial_s)}{at_once}")
    if fewest < most:
        lines.append(
            f"  fewer than {most} if {budget.patience} trials in a row gain nothing (budget.patience); the time is for "
            f"{made.expected_trials:.0f}"
        )
    if made.longest_s > TIMED_SHARE * measure.trial_timeout_s:
        lines.append(too_long(made, measure.trial_timeout_s))
    return lines


def plan_content(plan: Plan) -> dict[str, Any]:
    """What `--json` prints; sizes in GiB, times in seconds, MFU as a fraction."""
    made = plan.estimate()
    return {
        "device_name": plan.device_name or None,
        "limit_gib": plan.limit_gib,
        "peak_tflops_per_s": plan.peak.tflops_per_s,
        "peak_source": plan.peak.source,
        "model": {
            "num_params": plan.shape.num_params if plan.shape else None,
            "num_blocks": plan.space.facts.num_blocks,
            "counted": plan.counted,
        },
        "num_configs": plan.num_configs,
        "num_predicted": len(plan.configs),
        "candidates": {name: list(values) for name, values in plan.space.candidates.items()},
        "trial_world_size": plan.trial_world,
        "target_world_size": plan.job.batch.target_world_size,
        "zones": {world: plan.zones(world) for world in plan.worlds},
        "baseline": _config(plan, plan.baseline) if plan.baseline else None,
        "top": [_config(plan, one) for one in plan.top()],
        "surely_failing": [
            {"micro_batch_size": micro, "activation_checkpointing": mode, "num_configs": count}
            for micro, mode, count in plan.surely_failing()
        ],
        "only_at_target": [_config(plan, one) for one in plan.only_at_target()[:MOST_LISTED]],
        "cost": _cost(made) if made is not None else None,
        "notes": plan.space.notes,
    }


def _cost(made: Estimate) -> dict[str, Any]:
    return {
        "fewest_trials": made.num_trials[0],
        "most_trials": made.num_trials[1],
        "hours": made.seconds / 3600,
        "device_hours": made.device_hours,
        "stages": {
            name: {"fewest": stage.fewest, "most": stage.most, "trial_s": stage.trial_s, "at_once": stage.at_once}
            for name, stage in made.stages.items()
        },
    }


def _config(plan: Plan, planned: Planned) -> dict[str, Any]:
    return {
        "knobs": planned.knobs.to_dict(),
        "predicted": {
            world: {
                "memory_terms_gib": dict(found.memory_terms),
                "allocated_gib": found.allocated_gib,
                "reserved_gib": found.reserved_gib,
                "zone": plan.zone(planned, world),
                "time_terms_s": dict(found.time_terms),
                "step_s": found.step_s,
                "mfu": plan.mfu(planned, world),
            }
            for world, found in planned.at.items()
        },
    }
