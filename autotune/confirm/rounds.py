"""The rounds of a confirmation: who runs when, until it is decided or the time is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autotune.confirm.decide import Decision, decide
from autotune.confirm.tuned import BASELINE, BEST, FALLBACK
from autotune.measuring import Measurer, TimeUpError
from autotune.rows import Attempt
from autotune.stages import CONFIRM
from trials.record import Knobs

ALL_MEASURED = "all rounds were run"
TIME_OVER = "the time of --within was over"


@dataclass
class Rounds:
    """One confirmation, against a runner.

    In the first round all run, with the baseline in the middle, so that each is beside it. Then the best runs in pairs
    with the baseline; the fallback does only if the best does not hold.

    Args:
        contenders: by role, in the one spelling that the real number of ranks gives them.
        num_rounds: pairs that each candidate has at most.
        ends_at: by the runner's monotonic clock. A round that would surely not end by then is not begun.
        judges_memory: see `decide`.
        note: told the decision so far after each attempt.
    """

    contenders: dict[str, Knobs]
    measurer: Measurer
    num_rounds: int
    ends_at: float
    judges_memory: bool
    note: Callable[[Decision], None]
    _attempts: list[Attempt] = field(default_factory=list)
    _next_round: int = 0
    _took_s: dict[Knobs, float] = field(default_factory=dict)

    def go(self) -> str:
        """Runs all rounds that there is time for.

        Returns:
            Why they ended.

        Raises:
            InfrastructureError: an attempt failed for reasons that are not its config's, every time.
        """
        try:
            self._first_round()
            for role in (BEST, FALLBACK):
                self._pairs(role)
                if self.decision.held == role:
                    break
        except TimeUpError:
            return TIME_OVER
        return ALL_MEASURED

    @property
    def decision(self) -> Decision:
        return decide(self.contenders, self._attempts, judges_memory=self.judges_memory)

    def _first_round(self) -> None:
        self._round([role for role in (BEST, BASELINE) if role in self.contenders])
        # Nothing beats a baseline that tuning has kept: then the fallback is for the day the baseline does not run.
        if FALLBACK in self.contenders and (BEST in self.contenders or self._problem(BASELINE)):
            self._round([FALLBACK], same=True)

    def _pairs(self, role: str) -> None:
        for number in range(1, self.num_rounds):
            if role not in self.contenders or BEST not in self.contenders:
                return
            if self._problem(role) or self._problem(BASELINE):
                return
            # Alternate who goes first, so that what drifts steadily favours neither.
            self._round([BASELINE, role] if number % 2 else [role, BASELINE])

    def _problem(self, role: str) -> str:
        return str(self.decision.standings[role]["problem"] or "")

    def _round(self, roles: Sequence[str], *, same: bool = False) -> None:
        """One run of each; if a slot was lost between them, what they ran on was not the same, and it is no pair.

        Args:
            same: of the round before.

        Raises:
            TimeUpError: there is no time for it.
        """
        number = self._next_round - 1 if same else self._next_round
        self._next_round = number + 1
        clock, runner = self.measurer.runner.clock, self.measurer.runner
        expected_s = sum(self._took_s.get(self.contenders[role], 0.0) for role in roles)
        if clock.monotonic() + expected_s > self.ends_at:
            raise TimeUpError(TIME_OVER)
        num_lost = runner.num_lost
        for role in roles:
            began = clock.monotonic()
            attempt = self.measurer.measure(self.contenders[role], CONFIRM, number, anew=True)
            self._took_s[attempt.knobs] = clock.monotonic() - began
            self._attempts.append(attempt)
            self.measurer.listener.trial_ended(attempt, None)
            self.note(self.decision)
        if runner.num_lost != num_lost:
            self.measurer.listener.message(f"  a slot was lost in round {number + 1}, which is no pair")
            self._attempts = [attempt for attempt in self._attempts if attempt.row["round"] != number]
