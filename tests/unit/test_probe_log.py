"""What ranks wrote, read: throughput of the slowest, what differs from what was asked and what to do, outcomes."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from trials import probe
from trials.outcome import OUT_OF_MEMORY, Outcome, classify_exception
from trials.probe_log import RankLog, differences, rank_outcome, read_ranks, shared_gpus, throughput

KNOBS = {"engine": "fsdp2", "micro_batch_size": 4, "grad_accum_steps": 2, "sync_each_micro_batch": True}


def rank(number: int, ends_s: list[float], tokens: float = 64, **applied: Any) -> RankLog:
    """A rank whose clock started at 100 s."""
    found = {"knobs": KNOBS, "world_size": 2, "shard_mesh_size": 2, "padding_fraction": None, **applied}
    step = {"tokens": tokens, "samples": 8, "micro_batches": 2, "wait_s": 0.25, "timed": True}
    return RankLog(
        Path(f"rank-{number}.jsonl"),
        start={"host": "a", "rank": number},
        steps=[{**step, "n": n, "t": 100 + end} for n, end in enumerate(ends_s, 3)],
        applied={"device": {"type": "cuda", "uuid": f"GPU-{number}"}, **found},
        window={"t": 100.0, "loader_sustained": True},
        end={"sample_tokens": [8, 8, 8], "micro_batch_size": [4, 4, 4], "reason": "done", "not_finite": []},
    )


def test_throughput_is_of_all_tokens_in_the_slowest_ranks_time() -> None:
    found = throughput([rank(0, [1.0, 2.0]), rank(1, [1.5, 4.0], tokens=32)])
    assert found.tokens_per_s_per_rank == (2 * 64 + 2 * 32) / 4.0 / 2
    assert found.step_times_s == [1.5, 2.5]
    assert found.rank_step_times_s == [[1.0, 1.0], [1.5, 2.5]]
    assert (found.tokens_per_step, found.data_wait_s, found.notes) == (96, 0.5, [])


def test_ranks_that_share_their_samples_count_them_once() -> None:
    logs = [rank(number, [1.0]) for number in range(4)]
    assert throughput(logs, ranks_per_sample=2).tokens_per_s_per_rank == 4 * 64 / 2 / 1.0 / 4


def test_ranks_must_have_timed_the_same_steps() -> None:
    with pytest.raises(ValueError, match=r"'rank-0.jsonl': 2, 'rank-1.jsonl': 1"):
        throughput([rank(0, [1.0, 2.0]), rank(1, [1.0])])


def test_what_differs_comes_with_a_hint_and_what_cannot_be_read_by_name() -> None:
    logs = [rank(0, [1.0]), rank(1, [1.0], shard_mesh_size=1, knobs={**KNOBS, "engine": "ddp"})]
    asked = {**KNOBS, "bucket_cap_mb": 25.0, "blocks_per_unit": 1, "compile": False, "world_size": 2}
    different, unread = differences(logs, asked)
    assert [(each.name, each.asked, each.applied, each.rank) for each in different] == [
        ("engine", "fsdp2", "ddp", 1),
        ("shard_mesh_size", 2, 1, 1),
    ]
    assert "where they find no GPU" in str(different[0]) and "data_parallel_size" in str(different[1])
    assert unread == ["blocks_per_unit", "compile"]


def test_a_micro_batch_or_accumulation_that_changes_in_the_timed_steps_differs() -> None:
    log = rank(0, [1.0, 2.0], world_size=1, shard_mesh_size=1)
    log.steps[1]["micro_batches"] = 3
    log.end["micro_batch_size"] = [1, 3.5, 4]  # type: ignore[index]
    different, _ = differences([log], KNOBS)
    assert {each.name: each.applied for each in different} == {
        "grad_accum_steps": "2 to 3",
        "micro_batch_size": "1 to 4",
    }


def test_replicas_and_tensor_parallelism_leave_fewer_ranks_to_shard_over() -> None:
    logs = [rank(number, [1.0], world_size=8, shard_mesh_size=2) for number in range(8)]
    assert differences(logs, {"engine": "fsdp2", "replicate_degree": 2}, ranks_per_sample=2)[0] == []
    assert [each.name for each in differences(logs, {"engine": "fsdp2"})[0]] == ["shard_mesh_size"]


def test_two_ranks_on_one_gpu() -> None:
    logs = [rank(0, [1.0]), rank(1, [1.0], device={"type": "cuda", "uuid": "GPU-0"})]
    assert shared_gpus(logs) == ["ranks [0, 1] on one GPU, GPU-0 of a"]
    assert shared_gpus([rank(0, [1.0]), rank(1, [1.0])]) == []


@pytest.mark.parametrize(("device", "outcome"), [("cuda", Outcome.OOM_HOST), ("cpu", Outcome.OOM_DEVICE)])
def test_host_memory_is_the_devices_on_a_cpu(device: str, outcome: Outcome) -> None:
    log = rank(0, [1.0], device={"type": device, "uuid": None})
    log.error = {"type": "MemoryError", "message": "", "phase": "timed", "out_of_memory": "host"}
    assert rank_outcome(log).outcome is outcome


def test_a_rank_without_a_file(tmp_path: Path) -> None:
    (tmp_path / "rank-1.jsonl").write_text(json.dumps({"event": "start", "rank": 1}) + "\n")
    first, second = read_ranks(tmp_path, 2)
    assert first.start is None and second.start is not None
    assert rank_outcome(first).outcome is None


CAUSED = RuntimeError("the loader failed")
CAUSED.__cause__ = RuntimeError("CUDA error: out of memory")
ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:1] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("HIP error: HIPBLAS_STATUS_ALLOC_FAILED when calling x"),
    RuntimeError("he said: CUDA out of memory. Tried to allocate"),
    RuntimeError("Caught RuntimeError in DataLoader worker process 0.\nTraceback\nRuntimeError: std::bad_alloc"),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    OSError(errno.ENOSPC, "No space left on device"),
    ValueError("std::bad_alloc"),
    CAUSED,
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{type(error).__name__}: {error}"[:40])
def test_the_probe_knows_an_out_of_memory_as_the_trials_do(error: Exception) -> None:
    where = probe.out_of_memory(error)
    outcome = classify_exception(error, "cuda")
    assert where == {Outcome.OOM_DEVICE: "device", Outcome.OOM_HOST: "host"}.get(outcome)
    assert (where is not None) is (outcome in OUT_OF_MEMORY)


ROWS = torch.zeros(2, 8, dtype=torch.long)


@pytest.mark.parametrize(
    ("args", "kwargs", "place"),
    [
        ((ROWS,), {}, (0,)),
        ((torch.zeros(2, 3), ROWS), {}, (1,)),
        ((), {"labels": ROWS, "input_ids": ROWS}, ("input_ids",)),
        (({"mask": ROWS.bool(), "input_ids": ROWS},), {}, (0, "input_ids")),
        (([torch.zeros(2, 3), ROWS],), {}, (0, 1)),
        ((), {"pixels": torch.zeros(2, 3, 4, 4), "text": None}, ("pixels",)),
        ((3, "x"), {}, ()),
    ],
)
def test_the_batch_is_found_among_a_forwards_arguments(args: Any, kwargs: Any, place: tuple[Any, ...]) -> None:
    found, batch = probe.find_batch(args, kwargs)
    assert found == place
    assert isinstance(batch, Tensor) is bool(place)


class Expert(nn.Linear):
    pass


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(8, 8)
        self.experts = nn.ModuleList(Expert(8, 8) for _ in range(4))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleDict({str(index): Layer() for index in range(3)})
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16))


def test_blocks_are_the_repeated_layers_not_what_repeats_in_them() -> None:
    model = Model()
    assert probe.find_blocks(model) == list(model.layers.values())
    model.layers["1"] = checkpoint_wrapper(model.layers["1"])
    blocks = probe.find_blocks(model)
    assert blocks == list(model.layers.values())
    assert [probe.class_name(probe.inside(block)[-1]) for block in blocks] == ["Layer"] * 3


def test_the_root_is_the_largest_tree_that_the_optimizer_trains() -> None:
    class Lit(nn.Module):
        def __init__(self, model: Model) -> None:
            super().__init__()
            self.model, self.metric = model, nn.Module()

    lit, _other = Lit(Model()), Model()
    optimizer = torch.optim.SGD(lit.model.parameters(), lr=1.0)
    assert probe.find_root(optimizer) is lit
    assert probe.heavy_chain(lit)[:2] == [lit, lit.model]
    with pytest.raises(probe.ProbeError, match="no module holds the parameters that SGD steps"):
        probe.find_root(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0))
