"""A real Ray on this machine, started once for the whole folder; jobs small enough to take seconds."""

from __future__ import annotations

import contextlib
import os
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from autotune.cluster.runner import SlotRunner
from autotune.cluster.slots import ray_session
from tests.unit.conftest import make_job
from trials.record import Knobs, Measure, TrialSpec

MARK = uuid.uuid4().hex
os.environ["AUTOTUNE_TESTS"] = MARK  # inherited by all that is started here

CONFIG = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 64,
}

# A user's own model, with trouble on demand: MODE is what rank 1 does in its first forward.
FAULTY = """
    import os
    import time

    import torch

    from trials.models import DecoderWorkload


    class Faulty(DecoderWorkload):
        def __init__(self, seq_len, mode, config):
            super().__init__(seq_len=seq_len, config=config)
            self.mode = mode

        def loss(self, model, tokens):
            if os.environ["RANK"] == "1":
                if self.mode == "oom":
                    self.kept = torch.ones(2**40)
                if self.mode == "raise":
                    raise ValueError("no such thing")
                if self.mode == "hang":
                    time.sleep(3600)
                if self.mode == "exit0":
                    os._exit(0)
                if self.mode == "nan":
                    return super().loss(model, tokens) * float("nan")
            loss = super().loss(model, tokens)
            if self.mode == "sums":  # where a mean is due: right at one sequence only
                loss = loss * tokens.shape[0]
            if self.mode == "item":
                print(loss.item())  # which a tensor on meta has not
            return loss


    def make(seq_len, mode, config):
        return Faulty(seq_len, mode, config)
"""


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text, and beside it a user's module."""
    root = tmp_path_factory.mktemp("user")
    (root / "texts").mkdir()
    (root / "texts" / "a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 2000)
    (root / "faulty_model.py").write_text(textwrap.dedent(FAULTY))
    return root


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlotRunner]:
    log = tmp_path_factory.mktemp("ray") / "ray.log"
    with ray_session("local", 4, log):  # room for a second slot of two ranks
        runner = SlotRunner(make_job(), "cpu")
        yield runner
        runner.close()


def spec(texts: Path, mode: str = "", **changes: Any) -> TrialSpec:
    """A trial of the tiny model; with `mode`, of the user's model that gets into that trouble."""
    knobs = Knobs(
        micro_batch_size=2,
        grad_accum_steps=2,
        sync_each_micro_batch=True,
        reshard_after_forward=True,
        bucket_cap_mb=0.04,
        blocks_per_unit=1,
        activation_checkpointing="none",
        num_workers=1,
        prefetch_factor=2,
    )
    values: dict[str, Any] = {
        "trial": 0,
        "stage": "explore",
        "workload": "faulty_model:make" if mode else "decoder",
        "model": {"config": CONFIG} | ({"mode": mode} if mode else {}),
        "seq_len": 32,
        "data": {"source": str(texts / "texts"), "tokenizer": "byte"},
        "global_batch_size": 8,
        "precision": "fp32",
        "optimizer": {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1},
        "world_size": 2,
        "device": "cpu",
        "seed": 0,
        "measure": Measure(warmup_steps=1, min_steps=3, max_steps=6, rel_ci=0.5, block_s=0.01),
        "knobs": knobs,
        "import_paths": (str(texts),),
    }
    return TrialSpec(**(values | changes))


def write_job(folder: Path, **sections: Any) -> Path:
    """A job file over the tiny model, its own text and a small space."""
    (folder / "texts").mkdir(exist_ok=True)
    (folder / "texts" / "a.txt").write_text("All happy families are alike; " * 3000)
    job = {
        "model": {"config": CONFIG, "seq_len": 32},
        "data": {"source": "texts"},
        "batch": {"global_batch_size": 8, "target_world_size": 2},
        "training": {"precision": "fp32"},
        "cluster": {"ranks_per_node": 2, "device": "cpu"},
        "space": {
            "micro_batch_size": "auto",
            "activation_checkpointing": ["none", "full"],
            "num_workers": [0, 1],
        },
        "budget": {"trials": 3},
        "measure": {"warmup_steps": 2, "min_steps": 3, "max_steps": 6, "rounds": 3, "num_finalists": 2},
        "output": "run",
    } | sections
    job["measure"] = {"endurance_steps": 6} | job["measure"]
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def rank_processes() -> set[int]:
    """Every rank, DataLoader worker of one, or fork server that these tests started; not those of another run."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or [])
        if "trials.forkserver" not in command and "trials.entry" not in command:
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("AUTOTUNE_TESTS") == MARK:
                found.add(process.pid)
    return found
