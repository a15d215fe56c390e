"""The knobs that exist for a job on the machine at hand, and the configs they make."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import optuna

from autotune.errors import UserError
from autotune.job import Job
from trials.record import FSDP1_KNOBS, Knobs, checkpoint_stride, digest, group_blocks, unit_cap_mb

ORDERED = ("micro_batch_size", "bucket_cap_mb", "activation_checkpointing", "num_workers", "prefetch_factor")
"""Sampled as an index into the candidates, from little to much; the others are yes or no."""

FSDP1_DEFAULTS: dict[str, Any] = {
    "limit_all_gathers": True,
    "backward_prefetch": "pre",
    "forward_prefetch": False,
}
"""torch's own."""

PINS: dict[str, dict[str, tuple[Any, ...]]] = {
    # accelerate 1.15 by default reduces on the last micro-batch only, and checkpoints all blocks or none. It also
    # makes one unit a block (see _pin).
    "accelerate": {
        "sync_each_micro_batch": (False,),
        "activation_checkpointing": ("none", "full"),
    },
    # The same of the Trainer of transformers 5.24, which leaves it to accelerate.
    "transformers": {
        "sync_each_micro_batch": (False,),
        "activation_checkpointing": ("none", "full"),
    },
}
"""What a trainer decides itself, by `export_for`: the values it can be handed, the others are not searched."""


@dataclass(frozen=True)
class Facts:
    """What the survey found that the space depends on."""

    device: str
    num_blocks: int
    block_mib: tuple[float, ...]
    cpus_allowed: int
    world_size: int = 2
    """Ranks of a trial."""


def batch_pairs(global_batch_size: int, world_size: int) -> list[tuple[int, int]]:
    """All (micro_batch_size, grad_accum_steps) with micro x accumulation x world size = global batch, exactly.

    Raises:
        UserError: the global batch does not divide by the world size.
    """
    per_rank, rest = divmod(global_batch_size, world_size)
    if rest or per_rank < 1:
        raise UserError(
            f"batch: a global batch of {global_batch_size} sequences does not divide over {world_size} ranks",
            "change batch.global_batch_size or batch.target_world_size; nothing is rounded",
        )
    return [(micro, per_rank // micro) for micro in range(1, per_rank + 1) if per_rank % micro == 0]


class SearchSpace:
    """Candidates per knob, resolved; turns Optuna's draws into canonical Knobs and back.

    Args:
        job: validated.
        facts: of the model and machine.

    Raises:
        UserError: a candidate that does not divide, or that the machine or engine has not.
    """

    def __init__(self, job: Job, facts: Facts) -> None:
        self.facts = facts
        self.notes: list[str] = []
        """For people: candidates that turned into others."""
        self.pairs = dict(batch_pairs(job.global_batch_size, job.batch.target_world_size))
        self.has_loader = not job.data.is_synthetic
        self._note_no_loader(job)
        self.baseline = self._baseline(job)
        self.candidates = self._resolve(job)
        if job.export_for is not None:
            self._pin(job)
        self.hash = digest(
            {
                "candidates": self.candidates,
                "pairs": list(self.pairs.items()),
                "baseline": self.baseline.to_dict(),
            }
        )

    def _baseline(self, job: Job) -> Knobs:
        base = job.baseline
        workers = self.default_workers(job) if base.num_workers is None else base.num_workers
        if not self.has_loader:
            workers = 0
        return self.canonical(
            Knobs(
                micro_batch_size=base.micro_batch_size,
                grad_accum_steps=self.pairs[base.micro_batch_size],
                sync_each_micro_batch=base.sync_each_micro_batch,
                reshard_after_forward=base.reshard_after_forward,
                bucket_cap_mb=max(self.facts.block_mib) if base.bucket_cap_mb is None else base.bucket_cap_mb,
                blocks_per_unit=0,
                activation_checkpointing=base.activation_checkpointing,
                num_workers=workers,
                prefetch_factor=base.prefetch_factor,
                engine=base.engine or job.training.engines[0],
                limit_all_gathers=base.limit_all_gathers,
                backward_prefetch=base.backward_prefetch,
                forward_prefetch=base.forward_prefetch,
            )
        )

    def _note_no_loader(self, job: Job) -> None:
        asked = {
            "baseline.num_workers": job.baseline.num_workers,
            "space.num_workers": job.space.num_workers,
            "space.prefetch_factor": job.space.prefetch_factor,
        }
        told = [name for name, value in asked.items() if value not in (None, 0, (0,))]
        if told and not self.has_loader:
            self.notes.append(
                f"{', '.join(told)}: synthetic data has no loader to tune; num_workers is kept at 0, which is no advice"
            )

    def default_workers(self, job: Job) -> int:
        """CPUs this process may use, shared out over the ranks, less the one each rank runs on."""
        return max(0, self.facts.cpus_allowed // job.cluster.ranks_per_node - 1)

    def _resolve(self, job: Job) -> dict[str, tuple[Any, ...]]:
        asked, base = job.space, self.baseline
        micro = asked.micro_batch_size
        found: dict[str, tuple[Any, ...]] = {
            "micro_batch_size": tuple(self.pairs) if micro == "auto" else micro or (base.micro_batch_size,),
            "sync_each_micro_batch": asked.sync_each_micro_batch or (job.baseline.sync_each_micro_batch,),
            "reshard_after_forward": asked.reshard_after_forward or (base.reshard_after_forward,),
            "bucket_cap_mb": self._bucket_caps(job),
            "activation_checkpointing": self._checkpointing(job),
            "num_workers": self._workers(job),
            "prefetch_factor": (self.has_loader and asked.prefetch_factor) or (job.baseline.prefetch_factor,),
            "engine": job.training.engines,
        }
        if "fsdp1" in job.training.engines:
            found |= self._fsdp1_knobs(job)
        return {
            name: tuple(sorted(values)) if name in ORDERED and name != "activation_checkpointing" else values
            for name, values in found.items()
        }

    def _fsdp1_knobs(self, job: Job) -> dict[str, tuple[Any, ...]]:
        found = {name: getattr(job.space, name) or (self._fsdp1_value(job, name),) for name in FSDP1_KNOBS}
        if self.facts.device == "cpu" and False in found["limit_all_gathers"]:
            self.notes.append("space.limit_all_gathers: a CPU queues no all-gathers, so it has no effect; kept at true")
            found["limit_all_gathers"] = (True,)
        return found

    @staticmethod
    def _fsdp1_value(job: Job, name: str) -> Any:
        given = getattr(job.baseline, name)
        return FSDP1_DEFAULTS[name] if given is None else given

    def _bucket_caps(self, job: Job) -> tuple[float, ...]:
        asked = job.space.bucket_cap_mb
        if asked is None:
            return (self.baseline.bucket_cap_mb,)
        if asked == "auto":
            sizes = [1]
            while sizes[-1] * 2 < self.facts.num_blocks:
                sizes.append(sizes[-1] * 2)
            caps = [max(self.facts.block_mib) * size for size in {*sizes, self.facts.num_blocks}]
        else:
            caps = list(asked)
            changed = [f"{cap} -> {self._canonical_cap(cap)[0]}" for cap in caps if cap != self._canonical_cap(cap)[0]]
            if changed:
                self.notes.append(f"space.bucket_cap_mb groups whole blocks: {', '.join(changed)} MiB")
        return tuple(sorted({self._canonical_cap(cap)[0] for cap in caps}))

    def _checkpointing(self, job: Job) -> tuple[str, ...]:
        asked = job.space.activation_checkpointing or (self.baseline.activation_checkpointing,)
        modes = dict.fromkeys(self._canonical_mode(mode) for mode in asked)
        return tuple(sorted(modes, key=recompute_rank))

    def _workers(self, job: Job) -> tuple[int, ...]:
        asked = job.space.num_workers
        if asked is None or not self.has_loader:
            return (self.baseline.num_workers,)
        if asked != "auto":
            return asked
        most = max(1, self.facts.cpus_allowed // job.cluster.ranks_per_node)
        return (0, *(2**power for power in range(most.bit_length()) if 2**power <= most))

    def _pin(self, job: Job) -> None:
        target = job.export_for
        assert target is not None
        pins = PINS[target]
        kept = dict(self.candidates)
        kept["sync_each_micro_batch"] = pins["sync_each_micro_batch"]
        kept["activation_checkpointing"] = tuple(
            mode for mode in self.candidates["activation_checkpointing"] if mode in pins["activation_checkpointing"]
        )
        kept["bucket_cap_mb"] = (self._canonical_cap(max(self.facts.block_mib))[0],)
        if not kept["activation_checkpointing"]:
            raise UserError(
                f"export_for = {target}: none of space.activation_checkpointing = "
                f"{list(self.candidates['activation_checkpointing'])} can be handed to it",
                f"it has {' and '.join(pins['activation_checkpointing'])}",
            )
        self.candidates = kept

    def canonical(self, knobs: Knobs) -> Knobs:
        """The one spelling of all configs that are the same in effect."""
        cap, blocks = self._canonical_cap(knobs.bucket_cap_mb)
        return replace(
            knobs,
            bucket_cap_mb=cap,
            blocks_per_unit=blocks,
            activation_checkpointing=self._canonical_mode(knobs.activation_checkpointing),
            # With one micro-step there is nothing to hold back.
            sync_each_micro_batch=knobs.sync_each_micro_batch or knobs.grad_accum_steps == 1,
            prefetch_factor=knobs.prefetch_factor if knobs.num_workers else None,
            **self._canonical_fsdp1(knobs),
        )

    def _canonical_fsdp1(self, knobs: Knobs) -> dict[str, Any]:
        """FSDP1's own knobs: none under another engine, and what has no effect at its default."""
        if knobs.engine != "fsdp1":
            return dict.fromkeys(FSDP1_KNOBS)
        found: dict[str, Any] = {
            name: FSDP1_DEFAULTS[name] if getattr(knobs, name) is None else getattr(knobs, name) for name in FSDP1_KNOBS
        }
        if self.facts.device == "cpu":
            found["limit_all_gathers"] = True
        if self.facts.world_size == 1:
            found["reshard_after_forward"] = False  # one rank has nothing to shard: torch makes it NO_SHARD
        return found

    def _canonical_cap(self, cap_mib: float) -> tuple[float, int]:
        """The smallest cap that groups blocks as `cap_mib` does, and the blocks of its largest unit."""
        # A cap given as a multiple of the block's size must not lose to rounding.
        units = group_blocks(self.facts.block_mib, cap_mib + 1e-6)
        return unit_cap_mb(self.facts.block_mib, units), max(units)

    def _canonical_mode(self, mode: str) -> str:
        stride = checkpoint_stride(mode)
        if stride is None:
            return mode
        return f"every_{min(stride, self.facts.num_blocks)}" if self.facts.num_blocks > 1 else "full"

    def suggest(self, trial: optuna.Trial) -> Knobs:
        """A canonical config, drawn by `trial`'s sampler. Knobs without effect are not asked for."""

        def draw(name: str) -> Any:
            values = self.candidates[name]
            if len(values) == 1:
                return values[0]
            if name in ORDERED:
                return values[trial.suggest_int(name, 0, len(values) - 1)]
            return trial.suggest_categorical(name, list(values))

        micro = draw("micro_batch_size")
        accumulation = self.pairs[micro]
        workers_first = draw("num_workers")
        engine = draw("engine")
        return self.canonical(
            Knobs(
                micro_batch_size=micro,
                grad_accum_steps=accumulation,
                sync_each_micro_batch=draw("sync_each_micro_batch") if accumulation > 1 else True,
                reshard_after_forward=draw("reshard_after_forward"),
                bucket_cap_mb=draw("bucket_cap_mb"),
                blocks_per_unit=0,
                activation_checkpointing=draw("activation_checkpointing"),
                num_workers=workers_first,
                prefetch_factor=draw("prefetch_factor") if workers_first else None,
                engine=engine,
                **({name: draw(name) for name in FSDP1_KNOBS} if engine == "fsdp1" else {}),
            )
        )

    def params(self, knobs: Knobs) -> dict[str, Any]:
        """The draws that `suggest` turns into `knobs`.

        Raises:
            ValueError: a value that is no candidate.
        """
        found: dict[str, Any] = {}
        for name, values in self.candidates.items():
            if len(values) == 1 or not self._matters(name, knobs):
                continue
            value = getattr(knobs, name)
            if value not in values:
                raise ValueError(f"{name} = {value!r} is no candidate of {values}")
            found[name] = values.index(value) if name in ORDERED else value
        return found

    def distributions(self, knobs: Knobs) -> dict[str, optuna.distributions.BaseDistribution]:
        """Optuna's distributions of `params(knobs)`."""
        return {
            name: optuna.distributions.IntDistribution(0, len(self.candidates[name]) - 1)
            if name in ORDERED
            else optuna.distributions.CategoricalDistribution(list(self.candidates[name]))
            for name in self.params(knobs)
        }

    def contains(self, knobs: Knobs) -> bool:
        return all(
            getattr(knobs, name) in values for name, values in self.candidates.items() if self._matters(name, knobs)
        )

    @staticmethod
    def _matters(name: str, knobs: Knobs) -> bool:
        if name == "sync_each_micro_batch":
            return knobs.grad_accum_steps > 1
        if name == "prefetch_factor":
            return knobs.num_workers > 0
        if name in FSDP1_KNOBS:
            return knobs.engine == "fsdp1"
        return True

    def configs(self) -> Iterator[Knobs]:
        """Every config of the space once, in canonical form."""
        seen: set[Knobs] = set()
        names = list(self.candidates)
        for values in itertools.product(*self.candidates.values()):
            drawn = dict(zip(names, values, strict=True))
            accumulation = self.pairs[drawn["micro_batch_size"]]
            knobs = self.canonical(Knobs(**drawn, grad_accum_steps=accumulation, blocks_per_unit=0))
            if knobs not in seen:
                seen.add(knobs)
                yield knobs


def recompute_rank(mode: str) -> float:
    """Orders activation checkpointing from no recomputation to all of it; every_K in between, by its share."""
    stride = checkpoint_stride(mode)
    if stride is not None:
        return 2 + 1 / stride
    return {"none": 0.0, "selective_op": 1.0, "full": 3.0}[mode]
