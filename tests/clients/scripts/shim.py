"""For the tests only: accelerate, which shards on GPUs alone, shards on a CPU, too. Nothing else of it is changed."""

from __future__ import annotations

import functools
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def allow_cpu() -> None:
    make = AcceleratorState.__init__

    @functools.wraps(make)
    def with_fsdp(self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is not None:
            self.distributed_type = DistributedType.FSDP
            if self._mixed_precision != "no":
                plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = plugin
            PartialState._shared_state |= {"distributed_type": self.distributed_type, "device": torch.device("cpu")}
            self.__dict__.update(PartialState._shared_state)

    AcceleratorState.__init__ = with_fsdp
