"""First values of parameters: each from a generator seeded by its name, on its full shape.

So the weights do not depend on the number of ranks, on the engine or on how the model is wrapped.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from trials.workload import Workload

CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."


def full_value(workload: Workload, seed: int, name: str, shape: torch.Size) -> Tensor:
    """The whole (unsharded) value of the parameter `name`, fp32 on the host.

    Args:
        name: as in the model, with or without checkpoint wrappers.
    """
    plain = name.replace(CHECKPOINT_PREFIX, "")
    number = int.from_bytes(hashlib.sha256(f"{seed}/{plain}".encode()).digest()[:7])
    return workload.init_parameter(plain, shape, torch.Generator().manual_seed(number))
