"""When to stop exploring, and why."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.job import Budget

MIN_TRIALS = 16
"""Before patience may end a search: the first trials find most, and not steadily."""
MIN_GAIN = 0.005
"""Relative gain that counts as one: less is within the noise of a trial."""


@dataclass
class Stopping:
    """The budget of one search, and what of it is used up.

    Args:
        num_ranks: of all trials that run at once.
    """

    budget: Budget
    num_ranks: int
    _num_trials: int = 0
    _best: float = 0.0
    _last_gain: int = 0
    """Number of the trial that gained last."""

    def count(self, throughput: float | None) -> None:
        """Takes in a trial that has ended.

        Args:
            throughput: None if it does not fit, or failed.
        """
        self._num_trials += 1
        if throughput is not None and throughput > self._best * (1 + MIN_GAIN):
            self._best, self._last_gain = throughput, self._num_trials

    def reason(self, num_proposed: int, elapsed_s: float) -> str | None:
        """Why no further trial begins; None if one does.

        Args:
            num_proposed: trials that have begun.
            elapsed_s: since the run began.
        """
        budget = self.budget
        if num_proposed >= budget.trials:
            return f"budget.trials = {budget.trials} is used up"
        if budget.minutes is not None and elapsed_s > 60 * budget.minutes:
            return f"budget.minutes = {budget.minutes:g} is used up"
        if budget.gpu_hours is not None and elapsed_s * self.num_ranks > 3600 * budget.gpu_hours:
            return f"budget.gpu_hours = {budget.gpu_hours:g} is used up ({self.num_ranks} ranks)"
        without_gain = self._num_trials - self._last_gain
        if budget.patience and self._num_trials >= MIN_TRIALS and without_gain >= budget.patience:
            return f"no gain over {MIN_GAIN:.1%} in the last {without_gain} trials (budget.patience)"
        return None
