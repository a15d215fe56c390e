"""What a run's folder promises of its config: throughput and its interval, and what the step was made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotune.verdict import Spread


@dataclass(frozen=True)
class Promise:
    """Of the config that was confirmed, or of the best of the tuning run."""

    rates: Spread
    """Tokens/s per rank."""
    where: str
    """What it comes from, for people."""
    world_size: int
    settings: dict[str, Any]
    num_parameters: int | None
    data_wait_share: float | None
    """Of a step."""
    reserved_gib: float | None
    """On a GPU, worst rank; None on a CPU, where what was measured is no part of a whole process."""

    def asked(self, world_size: int) -> dict[str, Any]:
        """For `trials.probe_log.differences`: what the real run should have applied."""
        asked = {name: value for name, value in self.settings.items() if value is not None}
        if asked.get("attention_backend") == "auto":
            del asked["attention_backend"]
        if world_size != self.world_size:
            asked.pop("grad_accum_steps", None)
        return asked | ({"num_parameters": self.num_parameters} if self.num_parameters else {})
