"""Models on simulated clusters, with spaces of 64k to 128k configs whose true optimum is known by enumeration.

Each seed is a landscape of its own: other hidden effects, other fragments, other noise. The mechanisms were calibrated
on CALIBRATION_SEEDS, so that stock samplers find them as hard as in earlier studies; what is reported is found on
REPORTING_SEEDS, which nobody tunes anything on.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.canonical import Facts
from autotune.job import Job
from autotune.job_file import validate
from autotune.preflight.closed_form import closed_form
from autotune.preflight.shape import of_model
from autotune.rows import Limits
from autotune.search.pool import Pool
from autotune.search.study import Told
from autotune.simulate.cluster import parse_cluster
from autotune.simulate.hidden import MEMORY_KNOBS
from autotune.simulate.machine import GIB, block_params
from autotune.simulate.reports import MEMORY_SD
from autotune.simulate.world import World, judge
from autotune.space import SearchSpace
from trials.outcome import Outcome
from trials.record import Knobs
from trials.shapes import PRESETS

Numbers = NDArray[np.float64]

CALIBRATION_SEEDS = range(100)
REPORTING_SEEDS = range(2000, 2100)
"""1000 to 1004 were looked at between two calibrations, and are spent."""

_EVERY_SPACE = {
    "micro_batch_size": "auto",
    "sync_each_micro_batch": [True, False],
    "reshard_after_forward": [True, False],
    "activation_checkpointing": ["none", "selective_op", "every_2", "full"],
    "fused_optimizer": [False, True],
}
_FSDP2_AHEAD = {"forward_prefetch_units": [0, 2], "backward_prefetch_units": [0, 2]}
_COMPILE = {"compile": [False, True]}
_LOADER = {"num_workers": [0, 1, 2, 4], "prefetch_factor": [2, 4]}
_BF16_REDUCE = {"reduce_dtype": ["fp32", "bf16"]}


@dataclass(frozen=True)
class Scenario:
    """A model, a cluster, a batch, and the knobs to search."""

    name: str
    preset: str
    seq_len: int
    per_rank_batch: int
    nodes: int
    gpus: int
    cluster: str
    """More keys of `--simulate`."""
    blocks_per_unit: tuple[int, ...]
    space: tuple[Mapping[str, object], ...]
    engines: tuple[str, ...] = ("fsdp2",)

    def job(self) -> Job:
        world_size = self.nodes * self.gpus
        space: dict[str, object] = {}
        for part in (_EVERY_SPACE, *self.space):
            space |= part
        return validate(
            Job,
            {
                "model": {"preset": self.preset, "seq_len": self.seq_len},
                "data": {"source": "/data/tokens.txt", "tokenizer": "/data/tokenizer.json"},
                "batch": {
                    "global_batch_size": self.per_rank_batch * world_size,
                    "target_world_size": world_size,
                },
                "cluster": {
                    "address": "auto",
                    "device": "cuda",
                    "nodes_per_trial": self.nodes,
                    "ranks_per_node": self.gpus,
                },
                "training": {"engines": list(self.engines)},
                "space": space | {"bucket_cap_mb": [self._cap_mb(blocks) for blocks in self.blocks_per_unit]},
                "baseline": {"sync_each_micro_batch": True, "num_workers": 2},
            },
            self.name,
        )

    def _cap_mb(self, blocks: int) -> float:
        return _block_mib(self.preset) * blocks + 0.01

    def world(self, seed: int) -> World:
        text = f"nodes={self.nodes} gpus={self.gpus} seed={seed} drift=0 slow_nodes=0 {self.cluster}"
        return World(self.job(), parse_cluster(text))


@functools.cache
def _block_mib(preset: str) -> float:
    """Of a block's weights in bf16."""
    return block_params(PRESETS[preset]) * 2 / 2**20


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "1b-8xA10G", "llama3.2-1b", 2048, 16, 1, 8, "device='NVIDIA A10G' cpus=48", (1, 2, 4),
            (_FSDP2_AHEAD, _COMPILE, {"num_workers": [0, 1, 2, 4], "prefetch_factor": [2]}, _BF16_REDUCE,
             {"keep_last_units": [0, 1], "attention_backend": ["auto", "efficient"]}),
        ),
        Scenario(
            "7b-16xH100-eth", "llama2-7b", 4096, 8, 2, 8, "device='NVIDIA H100 80GB HBM3' network_gb_per_s=3",
            (1, 2, 4, 8), (_COMPILE, {"num_workers": [0, 2, 4], "prefetch_factor": [2]}, _BF16_REDUCE,
             {"limit_all_gathers": [True, False], "backward_prefetch": ["pre", "post"],
              "forward_prefetch": [False, True],
              "replicate_degree": [1, 2], "backward_prefetch_units": [0, 2], "keep_last_units": [0, 1]}),
            ("fsdp2", "fsdp1"),
        ),
        Scenario(
            "7b-64xA100-40", "llama2-7b", 2048, 16, 8, 8,
            "device='NVIDIA A100-SXM4-40GB' network_gb_per_s=12.5", (1, 2, 4, 8),
            (_FSDP2_AHEAD, _COMPILE, {"num_workers": [0, 2, 4], "prefetch_factor": [2, 4]}, _BF16_REDUCE,
             {"reshard_group_size": [0, 8]}),
        ),
        Scenario(
            "13b-8xH100-8k", "llama2-13b", 8192, 8, 1, 8, "device='NVIDIA H100 80GB HBM3'", (1, 2, 4, 10),
            (_FSDP2_AHEAD, _COMPILE, _LOADER, _BF16_REDUCE, {"keep_last_units": [0, 1]}),
        ),
        Scenario(
            "13b-32xA100", "llama2-13b", 4096, 8, 4, 8,
            "device='NVIDIA A100-SXM4-80GB' network_gb_per_s=25", (1, 2, 5),
            (_COMPILE, {"num_workers": [1, 2, 4], "prefetch_factor": [2, 4], "limit_all_gathers": [True, False],
             "backward_prefetch": ["pre", "post", "none"], "forward_prefetch": [False, True],
             "replicate_degree": [1, 2], "forward_prefetch_units": [0, 2],
             "keep_last_units": [0, 1]}),
            ("fsdp2", "fsdp1"),
        ),
        Scenario(
            "70b-512xH100", "llama3-70b", 4096, 4, 64, 8, "device='NVIDIA H100 80GB HBM3'", (1, 2, 4, 8),
            (_FSDP2_AHEAD, _COMPILE, _LOADER, _BF16_REDUCE,
             {"replicate_degree": [1, 2], "reshard_group_size": [0, 8]}),
        ),
        Scenario(
            "3b-32xL40S", "llama3.2-3b", 4096, 8, 4, 8, "device='NVIDIA L40S' network_gb_per_s=6", (1, 2, 4, 7),
            (_FSDP2_AHEAD, _COMPILE, {"num_workers": [0, 2, 4], "prefetch_factor": [2, 4]}, _BF16_REDUCE,
             {"replicate_degree": [1, 4]}),
        ),
        Scenario(
            "8b-64xH200", "llama3-8b", 8192, 8, 8, 8, "device='NVIDIA H200' network_gb_per_s=50", (1, 2, 4, 8),
            (_FSDP2_AHEAD, _COMPILE, _LOADER, _BF16_REDUCE, {"reshard_group_size": [0, 8]}),
        ),
    )
}  # fmt: skip
HELD_OUT = frozenset({"3b-32xL40S", "8b-64xH200"})
"""Added once all else was settled: nothing was calibrated or tuned on them."""


class Physics:
    """A scenario's configs and what the mechanisms alone make of them: the part that all its seeds share."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.job = scenario, scenario.job()
        self.world = scenario.world(0)
        shape, cluster = self.world.shape, self.world.cluster
        facts = Facts(
            "cuda",
            shape.num_layers,
            (shape.block_bytes / 2**20,) * shape.num_layers,
            cluster.cpus_per_node,
            self.world.world_size,
        )
        self.space = SearchSpace(self.job, facts)
        self.configs = list(self.space.configs())
        self.index = {knobs: number for number, knobs in enumerate(self.configs)}
        found = [self._of(knobs) for knobs in self.configs]
        self.step_s, self.allocated, self.pools, self.data_wait = np.array(found).T
        self._codes = {name: _codes(self.configs, name) for name in self.world.hidden.names}
        device = self.world.cluster.device
        predictor = closed_form(self.job, of_model(self.job.built_in[0]), "cuda", device, self.world.world_size)
        limit_gib, headroom = self.world.machine.memory_bytes / GIB, self.job.cluster.memory_headroom
        self.config_pools = {
            predicts: Pool(self.space, predictor if predicts else None, limit_gib, headroom)
            for predicts in (True, False)
        }
        """With and without predictions: made once, for all searches."""
        self.predictor = predictor

    def table(self, name: str, effect: Callable[[str, object], float]) -> Numbers:
        """A knob's effect in each config."""
        values, codes = self._codes[name]
        return np.array([effect(name, value) for value in values])[codes]

    def pair_table(self, pair: tuple[str, str], effect: Callable[[str, object, str, object], float]) -> Numbers:
        """The same of two knobs together."""
        (values, codes), (others, other_codes) = self._codes[pair[0]], self._codes[pair[1]]
        effects = [[effect(pair[0], value, pair[1], other) for other in others] for value in values]
        return np.array(effects)[codes, other_codes]

    def _of(self, knobs: Knobs) -> tuple[float, float, float, float]:
        parts, _, _ = self.world.step_parts(knobs)
        peaks, seconds = self.world.peaks(knobs), sum(parts.values())
        return seconds, peaks.allocated, peaks.pools, parts["data_wait"] / seconds


def _codes(configs: list[Knobs], name: str) -> tuple[list[object], NDArray[np.int64]]:
    """The knob's values, and which of them each config has."""
    column = [getattr(knobs, name) for knobs in configs]
    values = list(dict.fromkeys(column))
    numbers = {value: number for number, value in enumerate(values)}
    return values, np.array([numbers[value] for value in column])


@functools.cache
def physics(name: str) -> Physics:
    return Physics(SCENARIOS[name])


class Landscape:
    """One scenario under one seed's hidden effects: the truth of every config, and noisy trials of them."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.seed = name, seed
        self._physics = physics(name)
        self.job, self.space, self.configs = self._physics.job, self._physics.space, self._physics.configs
        self.world = self._physics.scenario.world(seed)
        self.predictor = self._physics.predictor
        self.config_pools = self._physics.config_pools
        self.limit_gib = self.world.machine.memory_bytes / GIB
        self.limits = Limits("cuda", self.limit_gib, self.job.cluster.memory_headroom)
        self._enumerate()

    def _enumerate(self) -> None:
        """All of `World.truth` at once."""
        shared, hidden, world = self._physics, self.world.hidden, self.world
        effects = [shared.table(name, hidden.level) for name in hidden.names]
        effects += [shared.pair_table(pair, hidden.pair) for pair in hidden.pairs]
        memory = np.exp(np.sum([shared.table(name, hidden.memory_level) for name in MEMORY_KNOBS], axis=0))
        fragments = np.array([hidden.fragments(knobs) for knobs in self.configs])
        judged = judge(shared.allocated * memory, shared.pools * memory, fragments, world.capacity_bytes)
        tokens = self.job.global_batch_size // self.job.batch.target_world_size * (self.job.seq_len or 0)
        self.rates = tokens / (shared.step_s * np.exp(np.sum(effects, axis=0)) * (1 + judged.retry_cost))
        self.allocated_gib, self.needed_gib = shared.allocated * memory / GIB, judged.needed / GIB
        self.retries, self.reserved_gib = judged.retries, judged.reserved / GIB
        over = self.limits.over_limit
        self.out_of_memory = self.needed_gib > world.capacity_bytes / GIB
        self.fits = ~self.out_of_memory & (self.retries == 0) & np.array([over(gib) <= 0 for gib in self.allocated_gib])
        if not self.fits.any():
            raise ValueError(f"{self.name}, seed {self.seed}: no config fits")
        self.optimum = float(self.rates[self.fits].max())
        """Tokens/s per rank of the best config that fits, under the job's own headroom."""

    def truth(self, knobs: Knobs) -> tuple[float, float, bool]:
        """Tokens/s per rank, GiB that live, and whether it fits under the headroom."""
        number = self._physics.index[knobs]
        return float(self.rates[number]), float(self.allocated_gib[number]), bool(self.fits[number])

    def regret(self, knobs: Knobs) -> float:
        """How far below the optimum a config that fits truly is, a fraction."""
        return 1 - self.truth(knobs)[0] / self.optimum

    def measure(self, knobs: Knobs, seed: int) -> Told:
        """One trial, as the search is told of it; equal seeds give equal noise."""
        number = self._physics.index[knobs]
        drawn = random.Random(f"{self.seed}:{seed}:{number}")
        run_factor = float(np.exp(drawn.gauss(0.0, self.world.cluster.noise)))
        needed_gib = self.needed_gib[number] * (1 + drawn.gauss(0.0, MEMORY_SD))
        if needed_gib > self.world.capacity_bytes / GIB:
            return Told(Outcome.OOM_DEVICE, None, self.limits.least_oom_over_limit)
        over = self.limits.over_limit(float(self.allocated_gib[number]))
        if self.retries[number] and over <= 0:
            over = self.limits.least_oom_over_limit
        return Told(
            Outcome.OK,
            float(self.rates[number]) / run_factor,
            over,
            data_wait_share=float(self._physics.data_wait[number]),
            reserved_share=float(self.reserved_gib[number]) / self.limit_gib,
            allocator_was_full=bool(self.retries[number]),
        )
