"""What the probes of one trial's ranks wrote (`trials.probe` has the format): outcome, throughput, what differs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trials.outcome import Outcome

Event = dict[str, Any]


@dataclass
class RankLog:
    """One rank's events; None: it never came to that."""

    path: Path
    start: Event | None = None
    steps: list[Event] = field(default_factory=list)
    applied: Event | None = None
    window: Event | None = None
    memory: Event | None = None
    end: Event | None = None
    error: Event | None = None

    @property
    def timed(self) -> list[Event]:
        return [step for step in self.steps if step["timed"]]

    @property
    def step_times_s(self) -> list[float]:
        """Of each timed step."""
        assert self.window is not None
        ends = [self.window["t"], *(step["t"] for step in self.timed)]
        return [end - start for start, end in itertools.pairwise(ends)]


def read_rank(path: Path) -> RankLog:
    """A rank that is still at work, or was killed, may have written part of a line: it is left out.

    Raises:
        ValueError: the file is not a probe's.
    """
    log = RankLog(path)
    *lines, _torn = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
            name = event["event"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number}: not written by a probe: {error!r}") from error
        if name == "step":
            log.steps.append(event)
        elif hasattr(log, name):
            setattr(log, name, event)
    return log


def read_ranks(folder: Path, world_size: int) -> list[RankLog]:
    """Of all ranks, in order; one that left no file has an empty log."""
    paths = [folder / f"rank-{rank}.jsonl" for rank in range(world_size)]
    return [read_rank(path) if path.exists() else RankLog(path) for path in paths]


@dataclass(frozen=True)
class RankOutcome:
    """How a rank's script ended by the rank's own words; the fields that `trials.outcome.RankEnd` takes."""

    outcome: Outcome | None
    """None: it says nothing."""
    reason: str = ""
    error_type: str = ""


def rank_outcome(log: RankLog) -> RankOutcome:
    """What the rank's log amounts to; whether its settings are right is another question (`differences`)."""
    if log.error is not None:
        return _of_error(log, log.error)
    if log.end is None:
        return RankOutcome(None)
    num_steps = log.end["last_step"]
    if log.end["reason"] == "script_ended":
        return _too_short(num_steps)
    if log.end["reason"] == "max_s":
        return RankOutcome(Outcome.TOO_SHORT, f"{num_steps} optimizer steps took the time that the trial has")
    if log.end["not_finite"]:
        names = ", ".join(log.end["not_finite"][:3])
        return RankOutcome(Outcome.WRONG_NUMERICS, f"after {num_steps} optimizer steps there are NaN or inf in {names}")
    return RankOutcome(Outcome.OK)


def _too_short(num_steps: int) -> RankOutcome:
    if num_steps == 0:
        return RankOutcome(
            Outcome.INVALID,
            "the script ended, and no optimizer step was seen: `attach: auto` sees steps of torch.optim's "
            "optimizers; of others say `attach: explicit`, and in the script probe.watch(model) and probe.step()",
        )
    return RankOutcome(
        Outcome.TOO_SHORT,
        f"the script ended after {num_steps} optimizer steps, before all were timed: let it train for longer, "
        "or lower measure.warmup_steps and measure.min_steps",
    )


def _of_error(log: RankLog, error: Event) -> RankOutcome:
    kind, message = error["type"], error["message"]
    if error["out_of_memory"]:
        # On a CPU a memory limit plays the part of the device's memory.
        on_device = error["out_of_memory"] == "device" or not _on_cuda(log)
        outcome = Outcome.OOM_DEVICE if on_device else Outcome.OOM_HOST
        return RankOutcome(outcome, f"out of memory in {error['phase']}: {message}", kind)
    if kind == "ProbeError":
        return RankOutcome(Outcome.INVALID, message, kind)
    return RankOutcome(Outcome.CRASHED, f"{kind} in {error['phase']}: {message}", kind)


def _on_cuda(log: RankLog) -> bool:
    return log.applied is not None and log.applied["device"]["type"] == "cuda"


@dataclass(frozen=True)
class Throughput:
    """Of the timed steps of all ranks."""

    tokens_per_s_per_rank: float
    """All tokens / all time of the slowest rank / ranks. Where ranks share a sample (tensor, context or pipeline
    parallelism), each sample counts once."""
    step_times_s: list[float]
    """Of each step, slowest rank."""
    rank_step_times_s: list[list[float]]
    tokens_per_step: float
    """Over all ranks, in the mean."""
    sample_tokens: list[float] | None
    """[min, mean, max] tokens of a sample; None if the script counts its tokens itself."""
    padding_fraction: float | None
    """Of the tokens, which count it: by the attention mask of the first steps; None without one."""
    data_wait_s: float | None
    """Seconds that the rank which waited longest waited for batches; None without a DataLoader."""
    loader_sustained: bool

    @property
    def notes(self) -> list[str]:
        """What makes the figure another one than it seems, for people."""
        said = []
        if self.padding_fraction:
            said.append(f"{self.padding_fraction:.0%} of the tokens are padding, and count as tokens")
        if self.sample_tokens is not None and self.sample_tokens[0] != self.sample_tokens[2]:
            least, mean, most = self.sample_tokens
            said.append(
                f"samples have {least:.0f} to {most:.0f} tokens, {mean:.0f} in the mean: configs are compared by "
                "tokens/s over other samples each"
            )
        if not self.loader_sustained:
            said.append("too few batches were timed to tell what the loader sustains: its queue held as many")
        return said


def throughput(logs: Sequence[RankLog], ranks_per_sample: int = 1) -> Throughput:
    """Of ranks that all timed their steps.

    Args:
        ranks_per_sample: that work on the same sample: tp x cp x pp.

    Raises:
        ValueError: a rank has no timed step, or not as many as another.
    """
    counts = {log.path.name: len(log.timed) for log in logs}
    if 0 in counts.values() or len(set(counts.values())) > 1:
        raise ValueError(f"timed steps by rank: {counts}")
    times = [log.step_times_s for log in logs]
    applied = [log.applied or {} for log in logs]
    tokens = sum(step["tokens"] for log in logs for step in log.timed) / ranks_per_sample
    waits = [[step["wait_s"] for step in log.timed] for log in logs]
    spreads = [log.end["sample_tokens"] for log in logs if log.end is not None and log.end["sample_tokens"]]
    padding = [found["padding_fraction"] for found in applied if found.get("padding_fraction") is not None]
    return Throughput(
        tokens_per_s_per_rank=tokens / max(map(sum, times)) / len(logs),
        step_times_s=[max(step) for step in zip(*times, strict=True)],
        rank_step_times_s=times,
        tokens_per_step=tokens / len(times[0]),
        sample_tokens=[min(s[0] for s in spreads), _mean([s[1] for s in spreads]), max(s[2] for s in spreads)]
        if spreads
        else None,
        padding_fraction=_mean(padding) if padding else None,
        data_wait_s=max((sum(w) for w in waits if None not in w), default=None),
        loader_sustained=all(log.window is not None and log.window["loader_sustained"] for log in logs),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True)
class Difference:
    """A setting that is not what was asked for."""

    name: str
    asked: Any
    applied: Any
    rank: int
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.name}: asked {self.asked!r}, applied {self.applied!r} on rank {self.rank}" + (
            f" ({self.hint})" if self.hint else ""
        )


HINTS = {
    "engine": "accelerate, transformers and trl leave FSDP out without a word where they find no GPU, or no FSDP in "
    "the file that they are given",
    "world_size": "the trainer made a process group of its own; look for variables of a scheduler in its environment",
    "shard_mesh_size": "weights are not sharded over these ranks; Lightning's ModelParallelStrategy does that by "
    "default: write both data_parallel_size and tensor_parallel_size",
    "micro_batch_size": "if the trainer packs samples into one row, it cannot be read: leave it out of `expect`",
    "grad_accum_steps": "forwards of the model in an optimizer step; the trainer's setting did not arrive, or it calls "
    "the model more than once a micro-batch",
    "sync_each_micro_batch": "the trainer decides this by itself; `export_for` pins it",
    "num_parameters": "it trains another model than the job declares",
}
_OF_THE_TRIAL = ("world_size", "shard_mesh_size", "num_parameters", "param_dtype")
"""What can be asked for besides knobs."""


def differences(
    logs: Sequence[RankLog], asked: Mapping[str, Any], ranks_per_sample: int = 1
) -> tuple[list[Difference], list[str]]:
    """What was applied otherwise than asked for, on the first rank that differs; and the names that could not be read.

    Args:
        asked: knobs by name, also `world_size`, `num_parameters` (unsharded), `param_dtype` (fp32, bf16) and
            `shard_mesh_size`, which follows from engine, world_size and replicate_degree if it is not there.
        ranks_per_sample: tp x cp x pp.
    """
    wanted = dict(asked)
    if str(wanted.get("engine", "")).startswith("fsdp"):
        ranks = wanted.get("world_size", len(logs)) // ranks_per_sample // (wanted.get("replicate_degree") or 1)
        wanted.setdefault("shard_mesh_size", ranks)
        if "blocks_per_unit" in wanted:
            wanted.pop("bucket_cap_mb", None)  # it says the same, by the size of a block
    found: dict[str, Difference] = {}
    unread: set[str] = set()
    for rank, log in enumerate(logs):
        if log.applied is None:
            continue
        seen = {name: log.applied.get(name) for name in _OF_THE_TRIAL} | log.applied["knobs"] | _over_the_window(log)
        for name, value in wanted.items():
            if name not in seen:
                unread.add(name)
            elif name == "sync_each_micro_batch" and seen[name] is None:
                continue  # one micro-batch a step: nothing to decide
            elif seen[name] != value and name not in found:
                found[name] = Difference(name, value, seen[name], rank, HINTS.get(name, ""))
    return list(found.values()), sorted(unread)


def _over_the_window(log: RankLog) -> dict[str, Any]:
    """What was read in one step, if it was so in all."""
    over: dict[str, Any] = {}
    numbers = sorted({step["micro_batches"] for step in log.timed} - {None, 0})
    if len(numbers) > 1:
        over["grad_accum_steps"] = f"{numbers[0]} to {numbers[-1]}"
    sizes = log.end.get("micro_batch_size") if log.end is not None else None
    if sizes and sizes[0] != sizes[2]:
        over["micro_batch_size"] = f"{sizes[0]} to {sizes[2]}"
    return over


def shared_gpus(logs: Sequence[RankLog]) -> list[str]:
    """GPUs on which more than one rank trains, as text."""
    users: dict[tuple[str, str], list[int]] = {}
    for rank, log in enumerate(logs):
        if log.start is not None and log.applied is not None and log.applied["device"]["uuid"]:
            users.setdefault((log.start["host"], log.applied["device"]["uuid"]), []).append(rank)
    return [f"ranks {ranks} on one GPU, {uuid} of {host}" for (host, uuid), ranks in users.items() if len(ranks) > 1]
