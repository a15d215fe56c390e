"""First values of parameters: each from a generator seeded by its name, on its full shape.

So the weights do not depend on the number of ranks, on the engine or on how the model is wrapped.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from trials.outcome import Outcome, TrialError
from trials.workload import Workload

CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."


LARGEST_ON_A_GPU = 2**30
"""Elements: 4 GiB in fp32, for a moment, before there are gradients or an optimizer's states."""


def full_value(workload: Workload, seed: int, name: str, shape: torch.Size, device: torch.device) -> Tensor:
    """The whole (unsharded) value of the parameter `name`, fp32.

    Args:
        name: as in the model, with or without checkpoint wrappers.
        device: what the rank trains on. A GPU draws a billion numbers in the time in which a host draws a few million,
            and each rank draws all of them.
    """
    plain = name.replace(CHECKPOINT_PREFIX, "")
    number = int.from_bytes(hashlib.sha256(f"{seed}/{plain}".encode()).digest()[:7], "big")
    drawn_on = device_to_draw_on(shape, device)
    with drawn_on:
        return workload.init_parameter(plain, shape, torch.Generator(drawn_on).manual_seed(number))


def device_to_draw_on(shape: torch.Size, device: torch.device) -> torch.device:
    """The host for a table so large that the whole of it may not fit beside the shards of the others."""
    return device if shape.numel() < LARGEST_ON_A_GPU else torch.device("cpu")


def fill_buffers(model: nn.Module, workload: Workload, device: torch.device) -> None:
    """Moves all buffers of a model on `meta` to `device`, with the values that the workload gives them."""
    for module in model.modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[leaf] = torch.empty_like(buffer, device=device)
    with torch.no_grad():
        workload.init_buffers(model)


class Materialiser:
    """Moves parameters from `meta` to a device, whole, with their first values; tied ones stay tied.

    For engines that shard what is there already. (`to_empty` would untie them.)
    """

    def __init__(self, model: nn.Module, workload: Workload, device: torch.device, seed: int) -> None:
        self._workload, self._device, self._seed = workload, device, seed
        self.names = {module: name for name, module in model.named_modules()}
        self._done: set[nn.Parameter] = set()

    def __call__(self, unit: nn.Module) -> None:
        """All modules in `unit` that are not materialised yet.

        Raises:
            TrialError: outcome `invalid`; a parameter is tied to one of a unit that is done: they shard apart.
        """
        made: dict[nn.Parameter, nn.Parameter] = {}
        for module in unit.modules():
            for leaf, parameter in module._parameters.items():
                if parameter is None or not parameter.is_meta:
                    continue
                name = f"{self.names[module]}.{leaf}".lstrip(".")
                if parameter in self._done:
                    raise TrialError(
                        Outcome.INVALID, f"fsdp1: {name} is tied to a parameter of another FSDP unit; use fsdp2"
                    )
                if parameter not in made:
                    made[parameter] = self._value(name, parameter)
                module._parameters[leaf] = made[parameter]
        self._done |= made.keys()

    def _value(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        full = full_value(self._workload, self._seed, name, parameter.shape, self._device)
        return nn.Parameter(full.to(self._device, parameter.dtype), requires_grad=parameter.requires_grad)
