"""Microseconds that the probe adds to an optimizer step: steps that do nothing, without it and then with it.

CPU time, since the probe only computes and writes. `python -m tests.benchmarks.probe`; it fails above LIMIT_US.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

PROBE = Path(__file__).parents[2] / "trials" / "probe.py"
LIMIT_US = 20.0
"""At one micro-batch a step."""
ROUNDS = 3
ACCUMULATED = (1, 8)
SCRIPT = """
import sys, time
import torch
from torch.utils.data import DataLoader
import probe

STEPS = 2000
accumulated = int(sys.argv[1])

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, tokens):
        return tokens

def train(steps):
    started = time.process_time()
    for _ in range(steps):
        for _ in range(accumulated):
            model(next(batches))
        optimizer.step()
        probe.step()
    return (time.process_time() - started) / steps * 1e6

torch.set_num_threads(1)
model = Model()
model.register_forward_pre_hook(lambda module, args: None)  # as fully_shard does
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
rows = [torch.zeros(8, dtype=torch.long)] * (2 * accumulated * (STEPS + 10))
batches = iter(DataLoader(rows, batch_size=1))
probe._REQUESTED = False
train(10)
bare = train(STEPS)
probe._REQUESTED = True
probe.watch(model)
train(10)
print(bare, train(STEPS))
"""


def us_per_step(folder: Path, accumulated: int) -> tuple[float, float]:
    """Without the probe, and with it."""
    out = Path(tempfile.mkdtemp(dir=folder))
    request = {"out": str(out), "warmup_steps": 1, "timed_steps": 10**9, "max_s": None, "attach": "explicit"}
    (out / "request.json").write_text(json.dumps({**request, "tokens": "auto", "knobs": {}, "expect": {}}))
    environment = {**os.environ, "AUTOTUNE_PROBE": str(out / "request.json"), "PYTHONPATH": str(PROBE.parent)}
    command = [sys.executable, "-c", SCRIPT, str(accumulated)]
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, cwd=out).stdout
    bare, probed = map(float, said.split())
    return bare, probed


def main() -> None:
    table = Table("micro-batches a step", "without, us", "with, us", "the probe, us a step")
    added: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as name:
        for accumulated in ACCUMULATED:
            pairs = [us_per_step(Path(name), accumulated) for _ in range(ROUNDS)]
            added[accumulated] = statistics.median(probed - bare for bare, probed in pairs)
            bare, probed = (statistics.median(column) for column in zip(*pairs, strict=True))
            table.add_row(str(accumulated), f"{bare:.0f}", f"{probed:.0f}", f"{added[accumulated]:.1f}")
    Console().print(table)
    sys.exit(added[1] > LIMIT_US)


if __name__ == "__main__":
    main()
