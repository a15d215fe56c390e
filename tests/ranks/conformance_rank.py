"""One rank of the conformance run: every config of ORDER in turn, with the steps that `trials.rank` takes.

`python -P conformance_rank.py ORDER RESULT` under torchrun's environment; what the two JSON files hold is in
`test_conformance.both_ranks` and `main`. The reference is the same model, unsharded, on the whole batch.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trials import attention, data, wrap
from trials.engines import ShardedModel, fsdp2
from trials.record import Knobs
from trials.step import Stepper, make_optimizer
from trials.workload import Workload, load_workload


class CountCollectives(TorchDispatchMode):
    """Counts what the process group is really asked for, whatever Python name FSDP calls it by."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


@dataclass
class Reference:
    weights: dict[str, Tensor]
    """Before the first update."""
    gradients: dict[str, Tensor]
    """Of the first update."""
    losses: list[float]


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """FSDP1 shows whole weights and gradients only inside this."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            yield
    else:
        yield


def weights(model: nn.Module, blocks_per_unit: int = 1) -> dict[str, Tensor]:
    with whole(model):
        return {_plain(name, blocks_per_unit): full(parameter) for name, parameter in model.named_parameters()}


def gradients(model: nn.Module, blocks_per_unit: int = 1) -> dict[str, Tensor]:
    with whole(model):
        return {
            _plain(name, blocks_per_unit): full(p.grad if p.grad is not None else torch.full_like(p, torch.nan))
            for name, p in model.named_parameters()
            if p.requires_grad
        }


def _plain(name: str, blocks_per_unit: int) -> str:
    """As in the plain model: without wrappers, and with the blocks in FSDP1's groups under their own numbers."""
    name = name.replace("_checkpoint_wrapped_module.", "").replace("_fsdp_wrapped_module.", "").removeprefix("module.")
    return re.sub(
        r"\b(layers|h)\.(\d+)\.blocks\.(\d+)",
        lambda found: f"{found[1]}.{int(found[2]) * blocks_per_unit + int(found[3])}",
        name,
    )


def reference(order: dict[str, Any], workload: Workload, batch_size: int) -> Reference:
    """No FSDP, checkpointing, loader or micro-batches: the first samples of the shuffled data, by index."""
    model = workload.build_model()
    fsdp2.initialise(model, workload, torch.device("cpu"), order["seed"])
    dataset = data.make_dataset({"source": order["source"]}, order["seq_len"], workload.vocab_size)
    shuffled = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(order["seed"])).tolist()
    optimizer = make_optimizer(model, order["optimizer"])
    found = Reference(weights(model), {}, [])
    for step in range(order["num_steps"]):
        indices = shuffled[step * batch_size : (step + 1) * batch_size]
        loss = workload.loss(model, torch.stack([dataset[index] for index in indices]))
        loss.backward()
        found.gradients = found.gradients or gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        found.losses.append(loss.item())
    return found


def relative_errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference in each tensor, over its largest value."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return {
        name: ((found[name].double() - value.double()).abs().max() / value.double().abs().max()).item()
        for name, value in expected.items()
    }


def equal_weights(model: nn.Module, expected: dict[str, Tensor], blocks_per_unit: int = 1) -> list[str]:
    """Names of the parameters that are not bit for bit as expected."""
    found = weights(model, blocks_per_unit)
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


def build(order: dict[str, Any], config: dict[str, Any], workload: Workload, mesh: DeviceMesh) -> ShardedModel:
    """As `trials.rank.Rank` builds it."""
    return wrap.build(
        workload,
        Knobs.from_dict(config["knobs"]),
        config["precision"],
        mesh,
        torch.device("cpu"),
        order["seed"],
    )


def run_config(
    order: dict[str, Any],
    config: dict[str, Any],
    workload: Workload,
    mesh: DeviceMesh,
    expected: Reference,
    loader: Any,
    batches: Any,
) -> dict[str, Any]:
    knobs = Knobs.from_dict(config["knobs"])
    model = build(order, config, workload, mesh)
    different = equal_weights(model.module, expected.weights, knobs.blocks_per_unit or 1)
    optimizer = make_optimizer(model.module, order["optimizer"], knobs.fused_optimizer)
    before_update: list[dict[str, Tensor]] = []
    optimizer.register_step_pre_hook(
        lambda *_: before_update.append(gradients(model.module, knobs.blocks_per_unit or 1))
    )
    stepper = Stepper(model, optimizer, batches, workload.loss, knobs, "cpu")
    with nullcontext() if knobs.compile else attention.Watch(order["seq_len"]) as watch:
        stepper.step()
    errors = relative_errors(before_update[0], expected.gradients)
    optimizer._optimizer_step_pre_hooks.clear()  # reading gradients is a collective too
    with CountCollectives() as collectives:
        stepper.step()
    for _ in range(order["num_steps"] - 2):
        stepper.step()
    applied = {
        **wrap.read_back(model),
        **stepper.observed(),
        **data.read_loader(loader, batches),
        "attention_backend": "auto" if knobs.attention_backend == "auto" else watch.used,
        "fused_optimizer": bool(optimizer.defaults["fused"]),
    }

    def mean(values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values / mesh.size()

    return {
        "different_weights": different,
        "gradient_errors": errors,
        "losses": stepper.mean_losses(mean),
        "reference_losses": expected.losses,
        "collectives": dict(collectives.counts),
        "applied": applied,
    }


def main(order_path: str, result_path: str) -> None:
    order = json.loads(Path(order_path).read_text())
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    workloads = {
        name: load_workload(
            order.get("workload", "decoder"),
            {"seq_len": order["seq_len"], "config": model},
            [str(Path(__file__).parent)],
        )
        for name, model in order["models"].items()
    }
    loaders = {}
    for key, config in order["configs"].items():  # before any thread exists, as in trials.entry
        dataset = data.make_dataset({"source": order["source"]}, order["seq_len"], 256)
        knobs = Knobs.from_dict(config["knobs"])
        loader = data.make_loader(dataset, knobs, rank, world_size, order["seed"], "cpu")
        loaders[key] = (loader, iter(loader))
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world_size,))
    references = {name: reference(order, workload, order["global_batch_size"]) for name, workload in workloads.items()}
    alone = [dist.new_group([member]) for member in range(world_size)][rank]
    one_rank = build(
        order,
        next(iter(order["configs"].values())),
        next(iter(workloads.values())),
        DeviceMesh.from_group(alone, "cpu"),
    )
    result = {
        "different_weights_on_one_rank": equal_weights(one_rank.module, next(iter(references.values())).weights),
        "configs": {
            key: run_config(order, config, workloads[config["model"]], mesh, references[config["model"]], *loaders[key])
            for key, config in order["configs"].items()
        },
    }
    Path(result_path).write_text(json.dumps(result))
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
