"""What is trained: the protocol a model comes through, and where it is found by name."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trials.outcome import Outcome, TrialError


@dataclass(frozen=True)
class AttentionShape:
    """One attention layer, as FLOP counting needs it."""

    num_heads: int
    """Query heads; grouped-query attention does not make scores cheaper."""
    head_dim: int


class Workload(Protocol):
    """A model and its loss. The trial shards, checkpoints, initialises and trains it; `build_model` only builds it.

    A class with these members is all that `workload: package.module:factory` needs to return.
    """

    vocab_size: int
    """Tokens are integers in [0, vocab_size)."""

    def build_model(self) -> nn.Module:
        """The whole model. Called with `meta` as the default device: no memory is taken, no value is kept."""
        ...

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The repeated blocks of `model` in order of execution: the units of sharding and checkpointing."""
        ...

    def attention_shapes(self) -> Sequence[AttentionShape] | None:
        """One entry an attention layer; None when unknown, and then FLOPs are counted on `meta`."""
        ...

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Mean next-token loss of a micro-batch.

        Args:
            tokens: int64, shape (micro_batch_size, seq_len + 1).
        """
        ...

    def init_parameter(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """A new full (unsharded) value, fp32, for the parameter `name`.

        The default device is the generator's here: `torch.normal(0.0, 0.02, shape, generator=generator)` is right on a
        host and on a GPU.
        """
        ...

    def init_buffers(self, model: nn.Module) -> None:
        """Fills buffers that `build_model` computed: after `to_empty` they hold garbage."""
        ...


def default_init_parameter(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Norm weights 1, biases 0, everything else normal with standard deviation 0.02 (GPT-2's)."""
    if len(shape) <= 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    return torch.normal(0.0, 0.02, tuple(shape), generator=generator)


def checked_loss(loss: Callable[[nn.Module, Tensor], Tensor], model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss of a micro-batch, seen to be one.

    Raises:
        TrialError: outcome `invalid`; it is no single number, or nothing that is trained.
    """
    value = loss(model, tokens)
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TrialError(
            Outcome.INVALID, f"the workload's loss() returned {found}; it must be the micro-batch's mean, one number"
        )
    if not value.requires_grad:
        raise TrialError(
            Outcome.INVALID, "the workload's loss() does not depend on a trainable parameter: nothing to train"
        )
    return value


def load_workload(name: str, arguments: dict[str, Any], import_paths: Sequence[str] = ()) -> Workload:
    """The workload called `decoder` or `hf`, or what `package.module:factory` returns for `arguments`.

    Args:
        import_paths: folders searched for the user's module after everything else on sys.path.

    Raises:
        TrialError: outcome `invalid`; the factory does not import, or does not return a workload.
    """
    if name == "decoder":
        from trials.models import DecoderWorkload

        return DecoderWorkload(**arguments)
    if name == "hf":
        from trials.hf import HfWorkload

        return HfWorkload(**arguments)
    module_name, _, attribute = name.partition(":")
    if not attribute:
        raise TrialError(
            Outcome.INVALID, f"model.workload = {name!r}: expected 'decoder', 'hf' or 'package.module:factory'"
        )
    sys.path.extend(path for path in import_paths if path not in sys.path)
    try:
        factory: Callable[..., Workload] = getattr(importlib.import_module(module_name), attribute)
        workload = factory(**arguments)
    except Exception as error:
        raise TrialError(
            Outcome.INVALID,
            f"model.workload = {name!r} failed: {type(error).__name__}: {error}\n{traceback.format_exc()}",
        ) from error
    missing = [member for member in _members() if not hasattr(workload, member)]
    if missing:
        raise TrialError(
            Outcome.INVALID,
            f"model.workload = {name!r} returned a {type(workload).__name__} without {missing}",
        )
    return workload


def _members() -> list[str]:
    return [
        "vocab_size",
        *(name for name, value in vars(Workload).items() if callable(value) and not name.startswith("_")),
    ]
