"""What is wrong with a job's data."""

from __future__ import annotations

from trials.outcome import Outcome, TrialError


class DataError(TrialError):
    """The job's data cannot be used as it says; the outcome is `invalid`. The message names key, value and file."""

    def __init__(self, message: str) -> None:
        # A DataLoader makes a worker's exception anew from the text of its traceback, which ends in our own words.
        name = f"{type(self).__module__}.{type(self).__qualname__}: "
        super().__init__(Outcome.INVALID, message.rpartition(name)[2].rstrip())
