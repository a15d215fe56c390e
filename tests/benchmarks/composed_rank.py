"""One rank of composed.py: whole and short steps of each config in turn, on one live model.

`torchrun --nproc-per-node 2 composed_rank.py ORDER RESULT`. ORDER is {"specs": [TrialSpec, ...], "rounds": N}; RESULT
gets a line for each spec: pairs of (composed, whole) seconds of a step, slowest rank.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from trials import composed, data, wrap
from trials.clock import HostClock
from trials.record import TrialSpec
from trials.step import Stepper, make_optimizer
from trials.timing import whole_steps
from trials.workload import load_workload

SHORT_STEPS = 3
"""For each whole step, as a composed trial takes many in the time of one."""


def pairs_of(spec: TrialSpec, rounds: int) -> list[tuple[float, float]]:
    assert spec.knobs is not None
    workload = load_workload(spec.workload, {"seq_len": spec.seq_len, **spec.model})
    dataset = data.make_dataset(spec.data, spec.seq_len, workload.vocab_size)
    batches = iter(data.make_loader(dataset, spec.knobs, dist.get_rank(), spec.world_size, spec.seed, "cpu"))
    mesh = init_device_mesh("cpu", (spec.world_size,))
    model = wrap.build(workload, spec.knobs, spec.precision, mesh, torch.device("cpu"), spec.seed)
    stepper = Stepper(model, make_optimizer(model.module, spec.optimizer), batches, workload.loss, spec.knobs, "cpu")
    clock = HostClock()
    whole, short = whole_steps(stepper.step, clock), composed.ShortSteps(stepper, clock)
    whole(1)
    short.run(2)
    pairs = []
    for number in range(rounds):
        taken: dict[str, float] = {}
        # Alternate which comes first, so that what drifts steadily favours neither.
        for name in ("composed", "whole") if number % 2 else ("whole", "composed"):
            dist.barrier()
            taken[name] = short.run(SHORT_STEPS)[0] / SHORT_STEPS if name == "composed" else whole(1)[0]
        seconds = torch.tensor([taken["composed"], taken["whole"]], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        pairs.append((float(seconds[0]), float(seconds[1])))
    return pairs


def main(order: dict[str, Any], result: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for text in order["specs"]:
        pairs = pairs_of(TrialSpec.from_json(text), order["rounds"])
        if dist.get_rank() == 0:
            with result.open("a") as file:
                file.write(json.dumps(pairs) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
