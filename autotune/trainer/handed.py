"""Which knobs a trainer's command is really handed, and what cannot be searched because nothing takes it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autotune.export import export
from autotune.export.base import Best, Exported
from autotune.section import Section
from autotune.trainer.section import KNOBS, Trainer
from trials.record import MODEL_PARALLEL, UNTOUCHED, Knobs

ALWAYS_COMPARED = ("engine", "micro_batch_size", "grad_accum_steps")
"""Of every trial: what a step is made of, whoever decides it."""
OF_BLOCKS = ("bucket_cap_mb", "keep_last_units", "forward_prefetch_units", "backward_prefetch_units")
"""Knobs that count blocks, or add up their sizes."""


_USUAL = Knobs(
    **UNTOUCHED | {"num_workers": 1},
    micro_batch_size=1,
    grad_accum_steps=2,
    reshard_after_forward=True,
    prefetch_factor=2,
)
_OTHER: dict[str, dict[str, Any]] = {
    "micro_batch_size": {"micro_batch_size": 2},
    "grad_accum_steps": {"grad_accum_steps": 4},
    "sync_each_micro_batch": {"sync_each_micro_batch": False},
    "reshard_after_forward": {"reshard_after_forward": False},
    "bucket_cap_mb": {"bucket_cap_mb": 2.0, "blocks_per_unit": 2},
    "activation_checkpointing": {"activation_checkpointing": "full"},
    "num_workers": {"num_workers": 2},
    "prefetch_factor": {"prefetch_factor": 4},
    "keep_last_units": {"keep_last_units": 1},
    "reshard_group_size": {"reshard_group_size": 2},
    "forward_prefetch_units": {"forward_prefetch_units": 1},
    "backward_prefetch_units": {"backward_prefetch_units": 2},
    "replicate_degree": {"replicate_degree": 2},
    "reduce_dtype": {"reduce_dtype": "bf16"},
    "cpu_offload": {"cpu_offload": True},
    "compile": {"compile": True},
    "attention_backend": {"attention_backend": "flash"},
    "fused_optimizer": {"fused_optimizer": True},
}
"""Of each knob of FSDP2, a value that `_USUAL` has not."""


def handed(trainer: Trainer) -> frozenset[str]:
    """Knobs of ours that the command is given: by placeholders, by the environment, in rendered files."""
    found = {name for name in trainer.handed_by_name() if name in KNOBS}
    for exporter in trainer.render.values():
        found |= carried_by(exporter)
    return frozenset(found)


def carried_by(exporter: str) -> set[str]:
    """Knobs that change an exporter's files; its `carried` also names what is left at the trainer's default."""
    usual = _exported(exporter, _USUAL)
    found = set()
    for name, other in _OTHER.items():
        changed = _exported(exporter, replace(_USUAL, **other))
        if name in changed.carried and changed.files != usual.files:
            found.add(name)
    return found


def _exported(exporter: str, knobs: Knobs) -> Exported:
    return export(exporter, Best(knobs, "bf16", world_size=4, seq_len=1, evidence=[]))


def check_handed(trainer: Trainer, space: Section, baseline: Section, engines: Sequence[str]) -> None:
    """Refuses what would change nothing.

    Raises:
        ValueError: a knob that is searched, or set in the baseline, and that nothing takes.
    """
    taken = handed(trainer)
    for name, values in space:
        if values is None or name in taken or (isinstance(values, tuple) and len(values) == 1 and name not in KNOBS):
            continue
        raise ValueError(_not_handed(f"space.{name}", name, trainer))
    if len(engines) > 1 and "engine" not in taken:
        raise ValueError(_not_handed("training.engines", "engine", trainer))
    for name, value in baseline:
        own = name in (*ALWAYS_COMPARED, *taken)
        if not own and value != type(baseline).model_fields[name].default:
            raise ValueError(_not_handed(f"baseline.{name}", name, trainer))
    sizes = getattr(space, "micro_batch_size", None)
    derived = {"grad_accum_steps", *(() if "global_batch_size" not in trainer.placeholders() else ("derived",))}
    if sizes is not None and sizes != (1,) and not derived & (taken | {"derived"}):
        raise ValueError(
            "space.micro_batch_size: nothing takes the accumulation that goes with it, so the global batch would "
            "change\n    hint: write {grad_accum_steps} in the command, or for a trainer that derives it "
            "{global_batch_size}"
        )


def check_blocks(space: Section, baseline: Section) -> None:
    """Refuses what counts blocks where nobody has said how many there are.

    Raises:
        ValueError: such a knob, or every_K checkpointing.
    """
    modes = (
        *(getattr(space, "activation_checkpointing", None) or ()),
        getattr(baseline, "activation_checkpointing", ""),
    )
    wrong = [f"space.{name}" for name in OF_BLOCKS if getattr(space, name, None)]
    wrong += [f"activation_checkpointing = {mode}" for mode in modes if mode.startswith("every_")]
    if wrong:
        raise ValueError(
            f"{wrong[0]}: it goes by the model's blocks, which only your trainer knows\n    hint: declare the shape "
            "under `model` (workload hf and its config.json, or decoder), or search it as a knob of your own "
            "(trainer.custom)"
        )


def _not_handed(key: str, name: str, trainer: Trainer) -> str:
    known = ", ".join(sorted(handed(trainer) | set(trainer.custom))) or "none"
    return (
        f"{key}: nothing hands it to your trainer, so it would change nothing; handed over: {known}\n"
        f"    hint: write {{{name}}} in trainer.command, declare trainer.via: {{{name}: env}} and read it by "
        f'`trials.probe.knob("{name}", default)`, or remove it'
    )


def model_parallel_ranks(trainer: Trainer) -> list[int]:
    """tp x cp x pp of each combination of the user's own knobs."""
    degrees = [[int(value) for value in trainer.custom[name]] for name in MODEL_PARALLEL if name in trainer.custom]
    return sorted({math.prod(one) for one in itertools.product(*degrees)})


def check_ranks(trainer: Trainer, target_world_size: int, world_size: int, global_batch_size: int) -> None:
    """Refuses numbers of ranks that do not part.

    Raises:
        ValueError: the ranks, or the batch over the data-parallel ones, do not divide.
    """
    for parted in model_parallel_ranks(trainer):
        for key, ranks in (("batch.target_world_size", target_world_size), ("a trial's world size", world_size)):
            if ranks % parted:
                raise ValueError(f"trainer.custom: tp x cp x pp = {parted} does not divide {key} = {ranks}")
        if global_batch_size * parted % target_world_size:
            raise ValueError(
                f"batch.global_batch_size = {global_batch_size} is no multiple of the {target_world_size // parted} "
                f"data-parallel ranks (batch.target_world_size / {parted}); nothing is rounded"
            )


def untouched(knobs: dict[str, Any], taken: frozenset[str]) -> dict[str, Any]:
    """`knobs` with null for what the trainer decides itself."""
    own = {"custom", *ALWAYS_COMPARED, *taken}
    return {name: value if name in own else None for name, value in knobs.items()}
