"""One module an engine: how it shards a model, holds gradients back, and what it can be read back as."""

from __future__ import annotations

from collections.abc import Callable

from trials.engines.base import Plan, ShardedModel
from trials.engines.ddp import Ddp
from trials.engines.fsdp1 import Fsdp1
from trials.engines.fsdp2 import Fsdp2

__all__ = ["SHARD", "Plan", "ShardedModel"]

SHARD: dict[str, Callable[[Plan], ShardedModel]] = {"fsdp2": Fsdp2, "fsdp1": Fsdp1, "ddp": Ddp}
"""By `Knobs.engine`."""
