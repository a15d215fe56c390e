"""Collectives by the names of this torch: 2.13 calls `all_gather_into_tensor` and its like by new ones."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

_NAMES: Any = dist
all_gather_single = getattr(dist, "all_gather_single", None) or _NAMES.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or _NAMES.reduce_scatter_tensor
