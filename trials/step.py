"""One optimizer step: micro-batches, gradient accumulation and the update, as a trainer does it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trials import attention
from trials.engines import ShardedModel
from trials.record import Knobs
from trials.workload import checked_loss

DATA_MARK, OPTIMIZER_MARK = "autotune::data", "autotune::optimizer"
"""Around the wait for a micro-batch, and around the update."""
_NO_MARK = nullcontext()


class Stepper:
    """Runs optimizer steps, and notes what a live run shows of the knobs that act here.

    Args:
        batches: micro-batches, int64 of shape (micro_batch_size, seq_len + 1), on the host.
        loss: (model, tokens) -> mean loss of a micro-batch.
    """

    def __init__(
        self,
        model: ShardedModel,
        optimizer: torch.optim.Optimizer,
        batches: Iterator[Tensor],
        loss: Callable[[nn.Module, Tensor], Tensor],
        knobs: Knobs,
        device: str,
    ) -> None:
        self.model, self.optimizer, self.batches, self.loss = model, optimizer, batches, loss
        self.knobs, self.device = knobs, device
        self.losses: list[Tensor] = []
        self.data_wait_s = 0.0
        self.mark: Callable[[str], AbstractContextManager[Any]] = lambda _: _NO_MARK
        """Around what a profiler shall know by name. Torch's `record_function` costs 7 us even when nobody profiles,
        this 0.3: only the profiled step takes torch's."""
        self.stamp: Callable[[], object] = lambda: None
        """Called before and after each wait for a micro-batch, and before and after the update."""
        self._micro_batch_sizes: set[int] = set()
        self._micro_steps: set[int] = set()
        self._synced_early: set[bool] = set()

    def step(
        self,
        num_micro_steps: int | None = None,
        before_micro_step: Callable[[], None] | None = None,
        before_update: Callable[[], object] | None = None,
    ) -> None:
        """One optimizer step; its mean loss on this rank goes to `losses`, without a host sync.

        Args:
            num_micro_steps: fewer than grad_accum_steps.
            before_micro_step: for the memory probe and for short steps (`trials.composed`), which no trainer runs.
            before_update: for short steps.
        """
        count = num_micro_steps or self.knobs.grad_accum_steps
        total: Tensor | None = None
        for micro in range(count):
            if before_micro_step is not None:
                before_micro_step()
            last = micro == count - 1
            self.stamp()
            started = time.perf_counter()
            with self.mark(DATA_MARK):
                tokens = next(self.batches)
            self.data_wait_s += time.perf_counter() - started
            self.stamp()
            with (
                self.model.micro_step(last=last, sync=self.knobs.sync_each_micro_batch),
                attention.only(self.knobs.attention_backend),
            ):
                self._observe(tokens, last)
                on_device = tokens.to(self.device, non_blocking=True)
                loss = checked_loss(self.loss, self.model.module, on_device) / count
                loss.backward()  # type: ignore[no-untyped-call]
            total = loss.detach() if total is None else total + loss.detach()
        if before_update is not None:
            before_update()
        self.stamp()
        with self.mark(OPTIMIZER_MARK):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.stamp()
        assert total is not None
        self.losses.append(total)
        self._micro_steps.add(count)

    def _observe(self, tokens: Tensor, last: bool) -> None:
        self._micro_batch_sizes.add(tokens.shape[0])
        if not last:
            self._synced_early.add(self.model.reduces_gradients())

    def drain(self, num_batches: int, within_s: float = math.inf) -> bool:
        """Takes batches from the loader without training on them; whether it got so many in `within_s` seconds."""
        end = time.perf_counter() + within_s
        for _ in range(num_batches):
            if time.perf_counter() > end:
                return False
            next(self.batches)
        return True

    def observed(self) -> dict[str, Any]:
        """The knobs that act in the step, as seen so far."""
        return {
            "micro_batch_size": _only(self._micro_batch_sizes),
            "grad_accum_steps": _only(self._micro_steps),
            # With one micro-step there is nothing to hold back: canonical() says True.
            "sync_each_micro_batch": _only(self._synced_early) if self._synced_early else True,
        }

    def mean_losses(self, reduce_mean: Callable[[Tensor], Tensor]) -> list[float]:
        """Loss of each step so far, averaged over ranks; one collective."""
        return [float(value) for value in reduce_mean(torch.stack(self.losses).float())]


def _only(values: Sequence[Any] | set[Any]) -> Any:
    return next(iter(values)) if len(values) == 1 else sorted(values)


def make_optimizer(model: nn.Module, options: dict[str, Any], fused: bool = False) -> torch.optim.Optimizer:
    """AdamW over the sharded parameters; not fused, torch chooses (a loop over groups of tensors on CUDA)."""
    return torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=options["lr"],
        betas=tuple(options["betas"]),
        weight_decay=options["weight_decay"],
        fused=fused or None,
    )
