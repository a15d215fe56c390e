"""What the export tests start from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.export import Best
from trials.record import Knobs


@pytest.fixture
def best() -> Best:
    """Settings that every trainer can be handed whole, except what its script sets."""
    return Best(
        reduce_dtype="fp32",
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
