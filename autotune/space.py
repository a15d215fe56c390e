"""The knobs that exist for a job on the machine at hand, and the configs they make."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import optuna

from autotune.applicable import inapplicable
from autotune.canonical import Canonical, Facts
from autotune.errors import UserError
from autotune.export import EXPORTERS
from autotune.export.base import Fixed
from autotune.job import Job, divisors
from autotune.trainer.handed import model_parallel_ranks
from autotune.trainer.section import Trainer
from trials.record import ENGINE_KNOBS, KNOB_NAMES, MODEL_PARALLEL, UNTOUCHED, Custom, Knobs, checkpoint_stride, digest

ORDERED = (
    "micro_batch_size",
    "bucket_cap_mb",
    "ddp_bucket_cap_mb",
    "activation_checkpointing",
    "num_workers",
    "prefetch_factor",
    "keep_last_units",
    "reshard_group_size",
    "forward_prefetch_units",
    "backward_prefetch_units",
    "replicate_degree",
)
"""Sampled as an index into the candidates, from little to much; the others are yes or no."""

EXTRA_KNOBS = (
    *(name for name in ENGINE_KNOBS if name != "reshard_after_forward"),
    "compile",
    "attention_backend",
    "fused_optimizer",
)
"""Knobs that are searched only where they are listed."""
DECIDING = ("engine", "micro_batch_size", "num_workers", "reshard_after_forward")
"""Knobs that decide whether others have an effect (`_exists`)."""
MAX_ENUMERATED = 2**18
"""Draws of candidates up to which every config of a space is looked at; it takes seconds, once."""
DDP_CAP_MB = 25.0
"""torch's default."""
DDP_CAPS_MB = (10.0, 25.0, 50.0, 100.0, 200.0)
DDP_CAP = "ddp_bucket_cap_mb"
"""The sampler's own name for `bucket_cap_mb` under DDP, where it is another thing."""


def _fixed_by_engine(job: Job) -> dict[str, Fixed]:
    """What export_for's trainer decides itself, under each engine of the job."""
    if job.export_for is None:
        return {}
    engines = dict.fromkeys((*job.training.engines, job.baseline.engine or job.training.engines[0]))
    return {engine: EXPORTERS[job.export_for].fixed(engine) for engine in engines}


OWN = "custom."
"""Before the names of a user's own knobs, which may be those of ours."""


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
    return [(micro, per_rank // micro) for micro in divisors(per_rank)]


class SearchSpace:
    """Candidates per knob, resolved; turns Optuna's draws into canonical Knobs and back.

    Args:
        job: validated.
        facts: of the model and machine.

    Raises:
        UserError: a candidate that does not divide, or that the machine or engine has not.
    """

    def __init__(self, job: Job, facts: Facts) -> None:
        if job.trainer is not None and "bucket_cap_mb" not in job.handed:
            # Its units are the trainer's: what stands for a cap is one block.
            facts = replace(facts, block_mib=(UNTOUCHED["bucket_cap_mb"],) * facts.num_blocks)
        self.facts = facts
        self.canonical = Canonical(facts)
        self.notes: list[str] = []
        """For people: candidates that turned into others."""
        self._own = custom_candidates(job.trainer) if job.trainer is not None else None
        parted = [1] if job.trainer is None else model_parallel_ranks(job.trainer)
        self._per_rank = {ranks: job.global_batch_size * ranks // job.batch.target_world_size for ranks in parted}
        """Sequences per rank and optimizer step, by the ranks that work on the same ones."""
        self.pairs = dict(batch_pairs(math.gcd(*self._per_rank.values()), 1))
        self.has_loader = job.has_loader
        self._fixed = _fixed_by_engine(job)
        self._note_no_loader(job)
        self.baseline = self._baseline(job)
        self._check_baseline(job)
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
        engine = base.engine or job.training.engines[0]
        workers = self.default_workers(job) if base.num_workers is None else base.num_workers
        default_cap = DDP_CAP_MB if engine == "ddp" else max(self.facts.block_mib)
        extras = {name: self._baseline_value(job, name) for name in EXTRA_KNOBS}
        values: dict[str, Any] = {
            "micro_batch_size": base.micro_batch_size,
            "sync_each_micro_batch": self._baseline_sync(job, engine),
            "reshard_after_forward": base.reshard_after_forward,
            "bucket_cap_mb": base.bucket_cap_mb or default_cap,
            "activation_checkpointing": base.activation_checkpointing,
            "num_workers": workers if self.has_loader else 0,
            "prefetch_factor": base.prefetch_factor,
            "engine": engine,
            **{name: value for name, value in extras.items() if value is not None},
        }
        if self._own is None:
            return self._config(values)
        mine = {name: value for name, value in values.items() if name in ("engine", "micro_batch_size", *job.handed)}
        return self._config(UNTOUCHED | mine | {name: first for name, (first, *_) in self._own.items()})

    def _check_baseline(self, job: Job) -> None:
        for name in EXTRA_KNOBS:
            value = getattr(self.baseline, name)
            problem = "" if value is None else inapplicable(name, (value,), job, self.facts)
            if problem:
                raise UserError(f"baseline.{name} = {value}: {problem}", "remove it, or what it does not go with")

    @staticmethod
    def _baseline_value(job: Job, name: str) -> Any:
        """The baseline's value of a knob in EXTRA_KNOBS; None for torch's own."""
        return job.reduce_dtype if name == "reduce_dtype" else getattr(job.baseline, name)

    def _baseline_sync(self, job: Job, engine: str) -> bool:
        given = job.baseline.sync_each_micro_batch
        return self._fixed.get(engine, {}).get("sync_each_micro_batch", (True,))[0] if given is None else given

    def _config(self, drawn: Mapping[str, Any]) -> Knobs:
        """Canonical knobs from draws: what was not drawn has no effect, and accumulation follows."""
        values = {_field(name): value for name, value in drawn.items()}
        unset = {"sync_each_micro_batch": True, "reshard_after_forward": None, "prefetch_factor": None}
        own = None
        if self._own is not None:
            own = tuple((name.removeprefix(OWN), values[name]) for name in sorted(self._own))
            values = {name: value for name, value in values.items() if name not in self._own}
        knobs = Knobs(**(unset | values | {"custom": own, "grad_accum_steps": 1, "blocks_per_unit": 1}))
        return self.completed(knobs)

    def knows(self, custom: Custom | None) -> bool:
        """Whether a config's own knobs are those of this space, with its values."""
        if custom is None or self._own is None:
            return custom is None and self._own is None
        own: dict[str, str] = {OWN + name: value for name, value in custom}
        return own.keys() == self._own.keys() and all(value in self._own[name] for name, value in own.items())

    def completed(self, knobs: Knobs) -> Knobs:
        """With the accumulation of the global batch, in the one spelling of its effect."""
        return self.canonical(replace(knobs, grad_accum_steps=self.accumulation(knobs)))

    def accumulation(self, knobs: Knobs) -> int:
        """Micro-steps that make the global batch out of a config's micro-batches."""
        return self._per_rank[knobs.model_parallel_ranks] // knobs.micro_batch_size

    def _accumulates(self, values: Mapping[str, Any]) -> bool:
        """Whether a draw has more than one micro-step."""
        parted = math.prod(int(values[OWN + name]) for name in MODEL_PARALLEL if OWN + name in values)
        return bool(self._per_rank[parted] > values["micro_batch_size"])

    def _searched(self, drawn: Mapping[str, Any]) -> Knobs:
        """The config that a draw makes: where engines differ in what the trainer decides, each gets its own."""
        fixed = self._fixed.get(drawn["engine"], {})
        decided = {name: kept[0] for name, kept in fixed.items() if len(kept) == 1 and name in drawn}
        return self._config({**drawn, **decided})

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
        base_reshard = job.baseline.reshard_after_forward
        # What decides whether others exist comes first.
        found: dict[str, tuple[Any, ...]] = {
            **(self._own or {}),
            "engine": job.training.engines,
            "micro_batch_size": tuple(self.pairs) if micro == "auto" else micro or (base.micro_batch_size,),
            "num_workers": self._workers(job),
            "reshard_after_forward": asked.reshard_after_forward or (base_reshard,),
            "sync_each_micro_batch": asked.sync_each_micro_batch or (self._baseline_sync(job, base.engine),),
            "bucket_cap_mb": self._bucket_caps(job),
            "activation_checkpointing": self._checkpointing(job),
            "prefetch_factor": (self.has_loader and asked.prefetch_factor) or (job.baseline.prefetch_factor,),
        }
        if "ddp" in job.training.engines:
            kept = (base.bucket_cap_mb if base.engine == "ddp" else DDP_CAP_MB,)
            found[DDP_CAP] = DDP_CAPS_MB if asked.bucket_cap_mb == "auto" else asked.bucket_cap_mb or kept
        for name in EXTRA_KNOBS:
            knob = ENGINE_KNOBS.get(name)
            if knob is None or set(knob.engines) & set(job.training.engines):
                found[name] = self._extra(job, name)
        if job.trainer is not None:
            decided = {"engine", "micro_batch_size", *job.handed}
            left = [name for name in found if name in KNOB_NAMES and name not in decided]
            found |= {name: (_value(self.baseline, name),) for name in left}
        return {
            name: tuple(sorted(values)) if name in ORDERED and name != "activation_checkpointing" else values
            for name, values in found.items()
        }

    def _extra(self, job: Job, name: str) -> tuple[Any, ...]:
        """Candidates of a knob that is searched only where it is listed.

        Raises:
            UserError: the machine, or the number of ranks, has not what is asked for.
        """
        default = ENGINE_KNOBS[name].default if name in ENGINE_KNOBS else getattr(self.baseline, name)
        base = self._baseline_value(job, name)
        values: tuple[Any, ...] = getattr(job.space, name) or (default if base is None else base,)
        problem = inapplicable(name, values, job, self.facts)
        if problem:
            raise UserError(f"space.{name} = {list(values)}: {problem}", "remove it, or what it does not go with")
        if name == "limit_all_gathers" and self.facts.device == "cpu" and False in values:
            self.notes.append("limit_all_gathers: a CPU queues no all-gathers, so it has no effect; kept at true")
            return (True,)
        return values

    def _bucket_caps(self, job: Job) -> tuple[float, ...]:
        asked = job.space.bucket_cap_mb
        if asked is None:
            given = job.baseline.bucket_cap_mb if self.baseline.engine != "ddp" else None
            cap = given or max(self.facts.block_mib)
            return (self.canonical.cap(cap)[0],)
        if asked == "auto":
            sizes = [1]
            while sizes[-1] * 2 < self.facts.num_blocks:
                sizes.append(sizes[-1] * 2)
            caps = [max(self.facts.block_mib) * size for size in {*sizes, self.facts.num_blocks}]
        else:
            caps = list(asked)
            changed = [f"{cap} -> {self.canonical.cap(cap)[0]}" for cap in caps if cap != self.canonical.cap(cap)[0]]
            if changed:
                self.notes.append(f"space.bucket_cap_mb groups whole blocks: {', '.join(changed)} MiB")
        return tuple(sorted({self.canonical.cap(cap)[0] for cap in caps}))

    def _checkpointing(self, job: Job) -> tuple[str, ...]:
        asked = job.space.activation_checkpointing or (self.baseline.activation_checkpointing,)
        modes = dict.fromkeys(self.canonical.mode(mode) for mode in asked)
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
        """Leaves of each knob that export_for's trainer decides itself the values that it can be handed.

        Raises:
            UserError: a knob has none of them.
        """
        target = job.export_for
        assert target is not None
        able = {name: self._able(job, name) for engine in job.training.engines for name in self._fixed[engine]}
        if "blocks_per_unit" in able:  # one block a unit, which is a cap
            able["bucket_cap_mb"] = (self.canonical.cap(max(self.facts.block_mib))[0],)
        if EXPORTERS[target].bf16_reduces_in is not None:
            able["reduce_dtype"] = (job.reduce_dtype,)
        for name in self.candidates.keys() & able.keys():
            values, listed = self.candidates[name], getattr(job.space, name) is not None
            kept = tuple(value for value in values if value in able[name])
            if not kept and not listed and len(able[name]) == 1:
                kept = able[name]  # nobody asked for another
            if not kept:
                raise UserError(
                    f"export_for = {target}: none of space.{name} = {list(values)} can be handed to it",
                    f"it has {' and '.join(map(str, able[name]))}",
                )
            gone = [str(value) for value in values if value not in kept]
            if gone and listed:
                self.notes.append(f"space.{name}: {target} cannot be handed {', '.join(gone)}")
            self.candidates[name] = kept

    def _able(self, job: Job, name: str) -> tuple[Any, ...]:
        """The values that one engine or another can be handed; `_searched` then gives each engine its own."""
        values = [value for engine in job.training.engines for value in self._fixed[engine].get(name, ())]
        return tuple(dict.fromkeys(values))

    def suggest(self, trial: optuna.trial.BaseTrial) -> Knobs:
        """A canonical config, drawn by `trial`'s sampler. Knobs without effect are not asked for."""
        return self._searched(self._complete(lambda name: self._suggest(trial, name)))

    def suggest_flat(self, trial: optuna.trial.BaseTrial) -> Knobs:
        """As `suggest`, but every knob is asked for, be it without effect: for samplers of one flat space."""
        drawn = {name: self._suggest(trial, name) for name in self.candidates}
        return self._searched(self._complete(drawn.__getitem__))

    def _suggest(self, trial: optuna.trial.BaseTrial, name: str) -> Any:
        values = self.candidates[name]
        if len(values) == 1:
            return values[0]
        if name in ORDERED:
            return values[trial.suggest_int(name, 0, len(values) - 1)]
        return trial.suggest_categorical(name, list(values))

    def _complete(self, choose: Callable[[str], Any]) -> dict[str, Any]:
        """One draw: a candidate of every knob that has an effect beside those drawn before it."""
        drawn: dict[str, Any] = {}
        for name in self.candidates:
            if _exists(name, drawn, self._accumulates):
                drawn[name] = choose(name)
        return drawn

    @functools.cached_property
    def num_draws(self) -> int:
        """Draws of candidates there are; no fewer than configs, as some draws are the same in effect."""
        deciding = [name for name in self.candidates if name in DECIDING or name.startswith(OWN)]
        total = 0
        for values in itertools.product(*(self.candidates[name] for name in deciding)):
            one = dict(zip(deciding, values, strict=True))
            total += math.prod(
                len(candidates)
                for name, candidates in self.candidates.items()
                if name not in deciding and _exists(name, one, self._accumulates)
            )
        return total

    @property
    def is_enumerable(self) -> bool:
        """Whether the space is small enough that all of it is looked at; of a larger one, a part is drawn."""
        return self.num_draws <= MAX_ENUMERATED

    @property
    def num_configs(self) -> int:
        """Distinct configs; of a space too large to be enumerated, the draws that make them."""
        return len(self._draws) if self.is_enumerable else self.num_draws

    @functools.cached_property
    def _draws(self) -> dict[Knobs, dict[str, Any]]:
        """Every config of the space, and the first draw of candidates that makes it."""
        drawn: list[dict[str, Any]] = [{}]
        for name, values in self.candidates.items():
            drawn = [
                extended
                for one in drawn
                for extended in (
                    ({**one, name: value} for value in values) if _exists(name, one, self._accumulates) else (one,)
                )
            ]
        found: dict[Knobs, dict[str, Any]] = {}
        for one in drawn:
            found.setdefault(self._searched(one), one)
        return found

    def _draw_of(self, knobs: Knobs) -> dict[str, Any] | None:
        """The candidates that make `knobs`, the same ones each time; None if there are none."""
        if self.is_enumerable:
            return self._draws.get(knobs)
        spelled = self._spelled(knobs)

        def choose(name: str) -> Any:
            """The config's own value, or where that is no candidate the first that is the same in effect."""
            if name.startswith(OWN):
                return _value(spelled, name)
            field, values = _field(name), self.candidates[name]
            own = getattr(spelled, field)
            same = (value for value in values if self.canonical(replace(spelled, **{field: value})) == knobs)
            return own if own in values else next(same, values[0])

        drawn = self._complete(choose)
        return drawn if self._searched(drawn) == knobs else None

    def _spelled(self, knobs: Knobs) -> Knobs:
        """`knobs` without resharding, as resharding with all units kept, where that alone is among the candidates."""
        candidates = self.candidates
        if knobs.engine != "fsdp2" or knobs.reshard_after_forward in candidates.get("reshard_after_forward", ()):
            return knobs
        return replace(knobs, reshard_after_forward=True, keep_last_units=candidates.get("keep_last_units", (0,))[-1])

    def _checked_draw(self, knobs: Knobs) -> dict[str, Any]:
        drawn = self._draw_of(knobs)
        if drawn is None:
            raise ValueError(f"{knobs} is made by no candidates of {self.candidates}")
        return drawn

    def params(self, knobs: Knobs) -> dict[str, Any]:
        """The draws that `suggest` turns into `knobs`.

        Raises:
            ValueError: no candidates make that config.
        """
        return {
            name: index if name in ORDERED else self.candidates[name][index]
            for name, index in self.indices(knobs).items()
        }

    def indices(self, knobs: Knobs) -> dict[str, int]:
        """Of each searched knob that has an effect in `knobs`, the index of its candidate.

        Raises:
            ValueError: no candidates make that config.
        """
        drawn = self._checked_draw(knobs)
        return {name: self._index_of[name][drawn[name]] for name in self.searched if name in drawn}

    @functools.cached_property
    def _index_of(self) -> dict[str, dict[Any, int]]:
        return {name: {value: i for i, value in enumerate(values)} for name, values in self.candidates.items()}

    def flat_params(self, knobs: Knobs) -> dict[str, Any]:
        """The draws that `suggest_flat` turns into `knobs`: of a knob without effect, the first candidate."""
        unused = {name: 0 if name in ORDERED else self.candidates[name][0] for name in self.searched}
        return unused | self.params(knobs)

    @functools.cached_property
    def searched(self) -> tuple[str, ...]:
        """Names of the knobs that have more than one candidate."""
        return tuple(name for name, values in self.candidates.items() if len(values) > 1)

    @functools.cached_property
    def all_distributions(self) -> dict[str, optuna.distributions.BaseDistribution]:
        """Optuna's distributions of all knobs that are searched."""
        return {
            name: optuna.distributions.IntDistribution(0, len(self.candidates[name]) - 1)
            if name in ORDERED
            else optuna.distributions.CategoricalDistribution(list(self.candidates[name]))
            for name in self.searched
        }

    def distributions(self, knobs: Knobs) -> dict[str, optuna.distributions.BaseDistribution]:
        """Optuna's distributions of `params(knobs)`."""
        return {name: self.all_distributions[name] for name in self.params(knobs)}

    def contains(self, knobs: Knobs) -> bool:
        return self._draw_of(knobs) is not None

    def configs(self) -> Iterator[Knobs]:
        """Every config of the space once, in canonical form."""
        return iter(self._draws)

    def draw(self, rng: random.Random) -> Knobs:
        """A config at random, each draw of candidates as likely as any other."""
        return self._searched(self._complete(lambda name: rng.choice(self.candidates[name])))

    def neighbours(self, knobs: Knobs) -> list[Knobs]:
        """The configs that differ from `knobs` in one knob that is searched.

        A knob that has an effect only then takes the baseline's value.

        Raises:
            ValueError: no candidates make that config.
        """
        drawn = self._checked_draw(knobs)
        found: dict[Knobs, None] = {}
        for name in self.searched:
            for value in self.candidates[name] if name in drawn else ():
                changed = self._usual | drawn | {name: value}
                found[self._searched(self._complete(changed.__getitem__))] = None
        return [other for other in found if other != knobs]

    @functools.cached_property
    def _usual(self) -> dict[str, Any]:
        """Of each knob the baseline's value, or the first candidate."""
        own = {name: _value(self.baseline, name) for name in self.candidates}
        return {name: own[name] if own[name] in values else values[0] for name, values in self.candidates.items()}

    @property
    def usual_indices(self) -> dict[str, int]:
        """Of each searched knob the index of the baseline's value, or of the first candidate."""
        return {name: self._index_of[name][self._usual[name]] for name in self.searched}


def _field(name: str) -> str:
    return "bucket_cap_mb" if name == DDP_CAP else name


def _value(knobs: Knobs, name: str) -> Any:
    """Of the knob that a candidate list is for."""
    if name.startswith(OWN):
        return dict(knobs.custom or ())[name.removeprefix(OWN)]
    return getattr(knobs, _field(name))


def custom_candidates(trainer: Trainer) -> dict[str, tuple[str, ...]]:
    """Of the user's own knobs, under the sampler's names for them."""
    return {OWN + name: values for name, values in trainer.custom.items()}


def _exists(name: str, values: Mapping[str, Any], accumulates: Callable[[Mapping[str, Any]], bool]) -> bool:
    """Whether a candidate list has an effect beside `values`, which are drawn already, or a whole config."""
    engine = values.get("engine")
    if name in ENGINE_KNOBS and engine not in ENGINE_KNOBS[name].engines:
        return False
    if name in ("keep_last_units", "reshard_group_size"):
        return bool(values["reshard_after_forward"])
    if name == "sync_each_micro_batch":
        return accumulates(values)
    if name == "prefetch_factor":
        return bool(values["num_workers"])
    if name in ("bucket_cap_mb", DDP_CAP):
        return (engine == "ddp") == (name == DDP_CAP)
    return True


def recompute_rank(mode: str) -> float:
    """Orders activation checkpointing from no recomputation to all of it; every_K in between, by its share."""
    stride = checkpoint_stride(mode)
    if stride is not None:
        return 2 + 1 / stride
    return {"none": 0.0, "selective_op": 1.0, "full": 3.0}[mode]
