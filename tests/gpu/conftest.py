"""Real ranks on a real GPU, each a fresh interpreter as the product starts them; skipped where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.cluster.processes import ExecLauncher, kill_groups
from tests.ports import free_port
from tests.ranks.harness import WAIT_S, Gang, make_spec, rank_env, show_logs
from trials.models import DecoderWorkload
from trials.record import KNOB_NAMES, PYTHON_STDLIB, Knobs, Measure, RankReport, TrialSpec, unit_cap_mb
from trials.wrap import block_mib

SMALL = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_layers": 4,
    "num_heads": 8,
    "num_kv_heads": 4,
    "ffn_size": 1408,
}
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    # What canonical() makes of FSDP1 on one rank: nothing to reshard.
    "fsdp1": {
        "engine": "fsdp1",
        "reshard_after_forward": False,
        "limit_all_gathers": False,
        "backward_prefetch": "pre",
        "forward_prefetch": True,
    },
    "ddp": {"engine": "ddp", "reshard_after_forward": None, "blocks_per_unit": None, "bucket_cap_mb": 25.0},
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


@pytest.fixture(scope="session")
def texts() -> Path:
    """The text that every machine has: enough of it for large batches."""
    return Path(PYTHON_STDLIB)


def gpu_spec(texts: Path, **changes: Any) -> TrialSpec:
    """A small decoder on one GPU; `changes` of knobs or of the spec."""
    values: dict[str, Any] = {
        "micro_batch_size": 2,
        "grad_accum_steps": 2,
        "sync_each_micro_batch": True,
        "reshard_after_forward": True,
        "bucket_cap_mb": _one_block_mib(changes),
        "blocks_per_unit": 1,
        "activation_checkpointing": "none",
        "num_workers": 0,
        "prefetch_factor": None,
    }
    knobs = Knobs.from_dict(values | {name: changes.pop(name) for name in list(changes) if name in KNOB_NAMES})
    return make_spec(
        texts,
        knobs,
        world_size=1,
        **(
            {
                "device": "cuda",
                "model": {"config": SMALL},
                "seq_len": 256,
                "precision": "bf16",
                "measure": Measure(warmup_steps=1, min_steps=3, max_steps=6, rel_ci=0.5, block_s=0.01),
                "hardware_flops_per_token": None,
            }
            | changes
        ),
    )


def _one_block_mib(changes: dict[str, Any]) -> float:
    config, precision = changes.get("model", {}).get("config", SMALL), changes.get("precision", "bf16")
    workload = DecoderWorkload(changes.get("seq_len", 256), config=config)
    with torch.device("meta"):
        sizes_mib = block_mib(workload.blocks(workload.build_model()), precision)
    return unit_cap_mb(sizes_mib, [1] * len(sizes_mib))


@pytest.fixture(scope="session")
def run_gpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[[TrialSpec], Gang]:
    """Runs one trial on one rank, to its end."""

    def run(spec: TrialSpec) -> Gang:
        folder = tmp_path_factory.mktemp("rank")
        report, log = folder / "rank0.json", folder / "rank0.log"
        launcher = ExecLauncher()
        order = {"spec": spec.to_json(), "report": str(report), "folder": str(folder)}
        pid = launcher.start(order, rank_env(0, 1, free_port()), log)
        deadline = time.monotonic() + WAIT_S
        codes: dict[int, int] = {}
        while not codes and time.monotonic() < deadline:
            codes = launcher.ended(1.0)
        assert kill_groups([pid]) == []
        assert codes, f"no end after {WAIT_S} s\n{show_logs([log])}"
        return Gang(
            [codes[pid]], [RankReport.from_json(report.read_text()) if report.exists() else None], [log], folder
        )

    return run
