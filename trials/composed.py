"""The time of a step of long accumulation, put together from a short one's parts.

Micro-steps differ only at the ends of a step: the first finds no gradients yet, and may be the one that gathers
weights; the last reduces gradients that were held back. All between are alike. So a step of n micro-steps takes

    first + (n - 2) x middle + last + optimizer + n x wait for a batch

and a short step, of the first, a few middle and the last micro-step and the update, shows every term.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trials.clock import Clock
from trials.record import SHORT_MICRO_STEPS
from trials.step import Stepper
from trials.timing import Block

NUM_MIDDLE = SHORT_MICRO_STEPS - 2


@dataclass(frozen=True)
class Parts:
    """Of one or several short steps on one rank, seconds; the micro-steps and the update without waits for data."""

    first_s: float = 0.0
    middle_s: float = 0.0
    """Of all NUM_MIDDLE in a step."""
    last_s: float = 0.0
    optimizer_s: float = 0.0
    data_s: float = 0.0
    """Waits for `num_batches`."""
    num_batches: int = 0
    num_steps: int = 1

    @property
    def short_s(self) -> float:
        """One short step."""
        return (self.first_s + self.middle_s + self.last_s + self.optimizer_s) / self.num_steps

    def whole(self, num_micro_steps: int) -> dict[str, float]:
        """Seconds of each part of one whole step: first, middle (all of them), last, optimizer, data; their sum is it.

        Args:
            num_micro_steps: of the whole step; at least SHORT_MICRO_STEPS.
        """
        return {
            "first": self.first_s / self.num_steps,
            "middle": self.middle_s / self.num_steps * (num_micro_steps - 2) / NUM_MIDDLE,
            "last": self.last_s / self.num_steps,
            "optimizer": self.optimizer_s / self.num_steps,
            "data": num_micro_steps * self.data_s / self.num_batches,
        }


def total(parts: Sequence[Parts]) -> Parts:
    return Parts(*(sum(column) for column in zip(*map(dataclasses.astuple, parts), strict=True)))


def batches_per_short_step(parts: Parts, num_micro_steps: int) -> float:
    """Batches that a whole step would take from the loader in the time of a short one; at least those it trains on.

    The update comes after SHORT_MICRO_STEPS instead of `num_micro_steps`: a loader that works ahead meanwhile would
    seem to keep up where it does not.
    """
    whole = parts.whole(num_micro_steps)
    whole_s = sum(whole.values()) - whole["data"]
    return max(float(SHORT_MICRO_STEPS), num_micro_steps * parts.short_s / whole_s)


class ShortSteps:
    """Runs blocks of short steps, for `timing.run_blocks`, and says what whole ones would take.

    With a loader that works ahead, each short step is followed by batches that are thrown away, so that the loader is
    asked for as many a second as by whole steps.
    """

    def __init__(self, stepper: Stepper, clock: Clock) -> None:
        self.stepper, self.clock = stepper, clock
        self.num_micro_steps = stepper.knobs.grad_accum_steps
        self.parts: list[Parts] = []
        """Of each short step since `forget`."""
        self._batches_per_step = float(SHORT_MICRO_STEPS)
        self._owed = 0.0

    def forget(self) -> None:
        """Begins anew, at the pace that is known by now."""
        self.parts = []

    def whole_step(self) -> dict[str, float]:
        """Parts of a whole step, by all short ones so far."""
        return total(self.parts).whole(self.num_micro_steps)

    def run(self, count: int) -> Block:
        """A block: `count` short steps, as the seconds of so many whole ones."""
        stamps: list[list[Any]] = []
        before = self.stepper.stamp
        self.clock.synchronize()
        try:
            for _ in range(count):
                stamps.append([])
                self.stepper.stamp = _stamper(self.clock, stamps[-1])
                self._step()
        finally:
            self.stepper.stamp = before
        self.clock.synchronize()
        block = [self._read(of_step) for of_step in stamps]
        self.parts += block
        if self.stepper.knobs.num_workers:
            self._batches_per_step = batches_per_short_step(total(self.parts), self.num_micro_steps)
        whole_s = sum(total(block).whole(self.num_micro_steps).values())
        return count * whole_s, [sum(parts.whole(self.num_micro_steps).values()) for parts in block]

    def _step(self) -> None:
        self.stepper.step(SHORT_MICRO_STEPS)
        self._owed += self._batches_per_step - SHORT_MICRO_STEPS
        for _ in range(int(self._owed)):
            self.stepper.stamp()
            self.stepper.drain(1)
            self.stepper.stamp()
        self._owed -= int(self._owed)

    def _read(self, stamps: Sequence[Any]) -> Parts:
        """A step's stamps are (before a wait, after it) for each micro-step, then for the update, then for each batch
        that is thrown away."""
        spans = [self.clock.seconds(start, end) for start, end in itertools.pairwise(stamps)]
        update = 2 * SHORT_MICRO_STEPS  # index of the span between its stamps
        waits = spans[:update:2] + spans[update + 2 :: 2]
        micro_steps = spans[1:update:2]
        return Parts(
            first_s=micro_steps[0],
            middle_s=sum(micro_steps[1:-1]),
            last_s=micro_steps[-1],
            optimizer_s=spans[update],
            data_s=sum(waits),
            num_batches=len(waits),
        )


def _stamper(clock: Clock, stamps: list[Any]) -> Callable[[], None]:
    return lambda: stamps.append(clock.mark())
