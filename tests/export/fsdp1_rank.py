"""One rank of test_plain_fsdp1: applies each exported snippet to the toy decoder, trains it, writes what it saw.

Two ranks, since FSDP1 makes NO_SHARD of every strategy when it is alone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FullyShardedDataParallel

from trials.engines import fsdp1
from trials.models import DecoderWorkload

WORLD_SIZE = 2
SEQ_LEN = 16
NUM_LAYERS = 4
SHAPE = {"vocab_size": 256, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "ffn_size": 48}


def make_workload() -> DecoderWorkload:
    return DecoderWorkload(SEQ_LEN, config={**SHAPE, "num_layers": NUM_LAYERS})


def build(workload: DecoderWorkload) -> nn.Module:
    torch.manual_seed(0)
    model = workload.build_model()
    workload.init_buffers(model)
    return model


def load_snippet(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"snippet_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tokens(rank: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randint(256, (2, SEQ_LEN + 1), generator=generator)


def trained_without_fsdp(workload: DecoderWorkload, num_micro_steps: int) -> nn.Module:
    """One optimizer step on what all ranks read."""
    model = build(workload)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    readers = [tokens(rank) for rank in range(WORLD_SIZE)]
    for _ in range(num_micro_steps):
        for batches in readers:
            (workload.loss(model, next(batches)) / num_micro_steps / WORLD_SIZE).backward()
    optimizer.step()
    return model


def read_unit(unit: FullyShardedDataParallel) -> dict[str, Any]:
    """What the live unit holds; names, so that it can be written as JSON."""
    policy = unit.mixed_precision
    inside = [module for module in unit.modules() if type(module).__name__ == "Block"]
    return {
        "blocks": len(inside),
        "strategy": unit.sharding_strategy.name,
        "limit_all_gathers": unit.limit_all_gathers,
        "backward_prefetch": unit.backward_prefetch.name if unit.backward_prefetch else None,
        "forward_prefetch": unit.forward_prefetch,
        "use_orig_params": unit._use_orig_params,
        "dtypes": [str(policy.param_dtype), str(policy.reduce_dtype), str(policy.buffer_dtype)],
    }


def wrapped_blocks(sharded: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """As the trials hold them: the checkpoint wrapper where there is one."""
    around = {m._checkpoint_wrapped_module: m for m in sharded.modules() if isinstance(m, CheckpointWrapper)}
    return [around.get(block, block) for block in blocks]


def check(path: Path, rank: int) -> dict[str, Any]:
    snippet, workload = load_snippet(path), make_workload()
    model = build(workload)
    blocks = list(workload.blocks(model))
    sharded = snippet.apply(model, blocks, torch.device("cpu"))
    units = [module for module in sharded.modules() if isinstance(module, FullyShardedDataParallel)]
    wrappers = [module for module in sharded.modules() if isinstance(module, CheckpointWrapper)]
    checkpointed = {id(wrapper._checkpoint_wrapped_module) for wrapper in wrappers}
    synced: list[bool] = []

    def loss_fn(model: FullyShardedDataParallel, batch: Tensor) -> Tensor:
        synced.append(all(unit._sync_gradients for unit in units))
        return workload.loss(model, batch)

    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    batches = tokens(rank)
    losses = [float(snippet.train_step(sharded, optimizer, batches, loss_fn))]
    reference = trained_without_fsdp(workload, snippet.GRAD_ACCUM_STEPS)
    with FullyShardedDataParallel.summon_full_params(sharded):
        pairs = zip(reference.parameters(), sharded.parameters(), strict=True)
        difference = max(float((expected - found).abs().max()) for expected, found in pairs)
    return {
        "read_by_the_trials": fsdp1.read(sharded, wrapped_blocks(sharded, blocks)),
        "units": [read_unit(unit) for unit in units],
        "checkpointed": [id(block) in checkpointed for block in blocks],
        "selective": any(
            getattr(wrapper.checkpoint_fn, "keywords", {}).get("context_fn") is snippet.selective_contexts
            for wrapper in wrappers
        ),
        "unit_holds_wrapper": not any(isinstance(w._checkpoint_wrapped_module, type(sharded)) for w in wrappers),
        "synced": synced,
        "losses": losses,
        "difference": difference,
        "names": [name for name, _ in sharded.named_parameters()],
    }


def main(rank: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), WORLD_SIZE)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE, store=store)
    found = {path.stem: check(path, rank) for path in sorted(folder.glob("case*.py"))}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    # FSDP1 has been seen to abort in the interpreter's own exit.
    os._exit(0)


if __name__ == "__main__":
    main(int(os.environ["RANK"]), Path(sys.argv[1]))
