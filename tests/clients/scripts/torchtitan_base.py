"""A config of torchtitan's as its user has it: the debug model, and metrics that also tell the test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.components.metrics import MetricsProcessor
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer
from toy import tell


class Told(MetricsProcessor):
    """Of each step: its number, the tokens that this rank's `tps` counts, and `n_tokens_seen`."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(self, step: int, *args: Any, extra_metrics: dict[str, Any], **kwargs: Any) -> None:
        tell(step=step, tokens=self.ntokens_since_last_log, seen=extra_metrics["n_tokens_seen"])
        super().log(step, *args, extra_metrics=extra_metrics, **kwargs)


def debug() -> Trainer.Config:
    config = llama3_debugmodel()
    config.metrics = Told.Config(log_freq=1)
    config.training.steps = 1000
    return config
