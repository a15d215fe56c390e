"""The same real Ray and tiny trial as tests/cluster; a user's model that gets into each kind of trouble."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.cluster.conftest import runner, texts

__all__ = ["runner", "texts", "troubled"]

TROUBLED = """
    import ctypes
    import os
    import signal
    import time

    import psutil
    import torch

    from trials.models import DecoderWorkload

    HUGE = 2**40  # elements; no machine has room


    class BackwardAllocates(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad + torch.ones(HUGE)[0]


    class Troubled(DecoderWorkload):
        def __init__(self, seq_len, trouble, config):
            super().__init__(seq_len=seq_len, config=config)
            self.trouble = trouble if os.environ["RANK"] == "1" else ""
            self.calls = 0

        def init_parameter(self, name, shape, generator):
            if self.trouble == "oom_build":
                torch.ones(HUGE)
            return super().init_parameter(name, shape, generator)

        def loss(self, model, tokens):
            self.calls += 1
            if self.calls == 3 and self.trouble:
                getattr(self, self.trouble, lambda: None)()
            loss = super().loss(model, tokens)
            return BackwardAllocates.apply(loss) if self.trouble == "oom_backward" and self.calls == 3 else loss

        def oom_forward(self):
            torch.ones(HUGE)

        def oom_optimizer(self):
            from torch.optim.optimizer import register_optimizer_step_pre_hook

            register_optimizer_step_pre_hook(lambda *_: torch.ones(HUGE))

        def killed(self):
            os.kill(os.getpid(), signal.SIGKILL)

        def eats_memory(self):
            kept = []
            while True:
                kept.append(torch.ones(2**22))  # 16 MiB, every page of it written

        def stopped(self):
            os.kill(os.getpid(), signal.SIGSTOP)

        def stuck(self):
            while True:
                time.sleep(1)

        def exits_0(self):
            os._exit(0)

        def raises(self):
            raise ValueError("no such thing")

        def aborts(self):
            os.abort()

        def segfaults(self):
            ctypes.string_at(0)

        def worker_dies(self):
            for child in psutil.Process().children():
                child.kill()
            time.sleep(1)

        def floods(self):
            for _ in range(3000):
                print("x" * 4096)


    def make(seq_len, trouble, config):
        if trouble == "slow_import":
            time.sleep(60)
        return Troubled(seq_len, trouble, config)
"""


@pytest.fixture(scope="session")
def troubled(texts: Path) -> Path:
    (texts / "troubled_model.py").write_text(textwrap.dedent(TROUBLED))
    return texts
