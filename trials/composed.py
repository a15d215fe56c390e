"""The time of a step of long accumulation, put together from a short one's parts.

Micro-steps differ only at the ends of a step: the first finds no gradients yet, and may be the one that gathers
weights; the last reduces gradients that were held back. All between are alike. So a step of n micro-steps takes

    first + (n - 2) x middle + last + optimizer + n x wait for a batch

and a short step, of the first, a few middle and the last micro-step and the update, shows every term.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
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


def num_thrown_away(parts: Parts, num_micro_steps: int, queued: int) -> tuple[float, float]:
    """Batches that a short step must take from the loader besides its own, for the loader to be asked for as many a
    second as by whole steps: after the first micro-step, and after the last.

    While the first and last micro-steps take longer than one between, and during the update, a loader works ahead.
    Where that comes every SHORT_MICRO_STEPS instead of every `num_micro_steps`, it would seem to keep up where it does
    not. During the update it works ahead by its queue at most, and by what it makes while that is emptied.

    Args:
        queued: what the loader's queue holds.
    """
    whole = parts.whole(num_micro_steps)
    whole_s = sum(whole.values())
    without_data_s = whole_s - whole["data"]
    each_s = without_data_s / num_micro_steps
    update = min(whole["optimizer"] / each_s, queued * whole_s / without_data_s)
    middle = parts.middle_s / parts.num_steps / each_s - NUM_MIDDLE  # below 0: `each_s` has its share of all parts
    after_last = max(0.0, whole["last"] / each_s - 1 + middle + update)
    return max(0.0, whole["first"] / each_s - 1), after_last


class ShortSteps:
    """Runs blocks of short steps, for `timing.run_blocks`, and says what whole ones would take.

    With a loader that works ahead, each short step also takes batches that it throws away (`num_thrown_away`).
    """

    def __init__(self, stepper: Stepper, clock: Clock) -> None:
        self.stepper, self.clock = stepper, clock
        self.num_micro_steps = stepper.knobs.grad_accum_steps
        self.parts: list[Parts] = []
        """Of each short step since `forget`."""
        self._queued = stepper.knobs.num_workers * (stepper.knobs.prefetch_factor or 0)
        self._thrown_away = 0.0, 0.0
        self._owed = [0.0, 0.0]

    def forget(self) -> None:
        """Begins anew, at the pace that is known by now."""
        self.parts = []

    def whole_step(self) -> dict[str, float]:
        """Parts of a whole step, by all short ones so far."""
        return total(self.parts).whole(self.num_micro_steps)

    def run(self, count: int) -> Block:
        """A block: `count` short steps, as the seconds of so many whole ones."""
        before = self.stepper.stamp
        self.clock.synchronize()
        try:
            taken = [self._step() for _ in range(count)]
        finally:
            self.stepper.stamp = before
        self.clock.synchronize()
        block = [self._read(stamps, num_after_first) for stamps, num_after_first in taken]
        self.parts += block
        if self._queued:
            self._thrown_away = num_thrown_away(total(self.parts), self.num_micro_steps, self._queued)
        whole_s = sum(total(block).whole(self.num_micro_steps).values())
        return count * whole_s, [sum(parts.whole(self.num_micro_steps).values()) for parts in block]

    def _step(self) -> tuple[list[Any], int]:
        """One short step: its stamps, and the number of batches that were thrown away after its first micro-step."""
        stamps: list[Any] = []
        self.stepper.stamp = lambda: stamps.append(self.clock.mark())
        begun, after_first = itertools.count(), 0

        def before_micro_step() -> None:
            nonlocal after_first
            if next(begun) == 1:
                after_first = self._throw_away(0)

        # Before the update, in whose time the loader makes up for it.
        self.stepper.step(SHORT_MICRO_STEPS, before_micro_step, lambda: self._throw_away(1))
        return stamps, after_first

    def _throw_away(self, place: int) -> int:
        self._owed[place] += self._thrown_away[place]
        count = int(self._owed[place])
        self._owed[place] -= count
        for _ in range(count):
            self.stepper.stamp()
            self.stepper.drain(1)
            self.stepper.stamp()
        return count

    def _read(self, stamps: Sequence[Any], num_after_first: int) -> Parts:
        """Stamps are before and after each wait, for a micro-step or for what is thrown away; then of the update."""
        *spans, update_s = [self.clock.seconds(start, end) for start, end in itertools.pairwise(stamps)]
        waits, between = spans[::2], spans[1::2]
        second = 1 + num_after_first
        return Parts(
            first_s=between[0],
            middle_s=sum(between[second : second + NUM_MIDDLE]),
            last_s=between[second + NUM_MIDDLE],
            optimizer_s=update_s,
            data_s=sum(waits),
            num_batches=len(waits),
        )
