"""What the export tests start from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.export import Best
from trials.record import Knobs

FSDP = ("fsdp2", "fsdp1")
DEADLINE_S = 200.0
"""No test measures time: this only ends a hang."""


def run_ranks(module: str, folder: Path, world_size: int, **environment: str) -> list[dict[str, Any]]:
    """Runs `tests.export.<module>` as gloo ranks; what each wrote to rank<N>.json in `folder`."""
    logs = [folder / f"rank{rank}.log" for rank in range(world_size)]
    ranks = []
    for rank, log in enumerate(logs):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
        with log.open("w") as file:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", f"tests.export.{module}", str(folder)],
                    cwd=Path(__file__).parents[2],
                    env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **own, **environment},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = [rank.wait(timeout=DEADLINE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * world_size, "\n".join(log.read_text()[-4000:] for log in logs)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]


@pytest.fixture
def best() -> Best:
    """Settings that every trainer can be handed whole, except what its script sets."""
    return Best(
        knobs=Knobs(
            micro_batch_size=8,
            grad_accum_steps=2,
            sync_each_micro_batch=False,
            reshard_after_forward=False,
            bucket_cap_mb=0.05,
            blocks_per_unit=1,
            activation_checkpointing="full",
            num_workers=2,
            prefetch_factor=4,
        ),
        precision="bf16",
        world_size=16,
        seq_len=2048,
        evidence=[
            "measured: 1234 tokens/s per rank, MFU 0.31 (95 % interval 0.30 to 0.32), 2026-11-29",
            'job: "quickstart": 4 ranks',
        ],
    )


def fsdp1(best: Best) -> Best:
    """The same settings for FSDP1, with those of its own knobs that are not the default."""
    knobs = replace(
        best.knobs, engine="fsdp1", limit_all_gathers=False, backward_prefetch="post", forward_prefetch=True
    )
    return replace(best, knobs=knobs)


def ddp(best: Best) -> Best:
    """The same settings for DDP."""
    return replace(best, knobs=replace(best.knobs, engine="ddp", bucket_cap_mb=25.0))


def settings(best: Best, engine: str) -> Best:
    """The same settings for `engine`."""
    return {"fsdp2": lambda it: it, "fsdp1": fsdp1, "ddp": ddp}[engine](best)
