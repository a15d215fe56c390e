"""What people write by hand: one config, trained for a few steps under torchrun. The yardstick of overhead.py.

`torchrun --nproc-per-node 2 plain_train.py SPEC RESULT`. Builds, wraps and steps by the product's own functions, so
that only what lies around the steps differs: start-up, rendezvous, supervision, exit.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from trials import data, wrap
from trials.record import TrialSpec
from trials.step import Stepper, make_optimizer
from trials.workload import load_workload


def main(spec: TrialSpec, result: Path) -> None:
    assert spec.knobs is not None
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    workload = load_workload(spec.workload, {"seq_len": spec.seq_len, **spec.model})
    dataset = data.make_dataset(spec.data, spec.seq_len, workload.vocab_size)
    batches = iter(data.make_loader(dataset, spec.knobs, rank, spec.world_size, spec.seed, spec.device))
    mesh = init_device_mesh("cpu", (spec.world_size,))
    model = wrap.build(workload, spec.knobs, spec.precision, mesh, torch.device("cpu"), spec.seed)
    optimizer = make_optimizer(model.module, spec.optimizer)
    stepper = Stepper(model, optimizer, batches, workload.loss, spec.knobs, "cpu")
    dist.barrier()
    started = time.perf_counter()
    for _ in range(spec.measure.warmup_steps + spec.measure.min_steps):
        stepper.step()
    dist.barrier()
    if rank == 0:
        result.write_text(json.dumps({"steps_s": time.perf_counter() - started}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(TrialSpec.from_json(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
