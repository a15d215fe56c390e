"""Real rank processes for tests: start them, wait with a deadline, and show their logs when they fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autotune.cluster.processes import ForkLauncher, kill_groups
from tests.ports import free_port
from trials.outcome import Outcome, RankEnd, combine
from trials.record import Knobs, Measure, RankReport, TrialSpec

HERE = Path(__file__).parent
WAIT_S = 150.0
"""No test measures time: this only ends a hang."""
GRACE_S = 20.0
"""How long the peers of a failed rank are waited for, before they are killed as the product would."""

SEQ_LEN = 32
# 257 does not divide by two ranks: the embedding and the head are sharded unevenly.
TINY = {
    "vocab_size": 257,
    "hidden_size": 32,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 64,
}
OPTIMIZER = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}


def write_text(folder: Path) -> Path:
    """A folder with a few thousand bytes of text in several files."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(3):
        lines = (f"{number}.{line}: a rank reads {line * 37 % 101} bytes of line {line}\n" for line in range(150))
        (folder / f"part{number}.txt").write_text("".join(lines))
    return folder


def rank_env(rank: int, world_size: int, port: int, num_threads: int = 1) -> dict[str, str]:
    """What torchrun sets, for ranks of one host."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(num_threads),
    }


def show_logs(logs: Sequence[Path]) -> str:
    return "\n".join(
        f"--- {log.name}\n{log.read_text(errors='replace')[-6000:] if log.exists() else '(none)'}" for log in logs
    )


def make_spec(source: Path, knobs: Knobs, world_size: int = 2, **changes: Any) -> TrialSpec:
    values: dict[str, Any] = {
        "trial": 0,
        "stage": "explore",
        "workload": "decoder",
        "model": {"config": TINY},
        "seq_len": SEQ_LEN,
        "data": {"source": str(source), "tokenizer": "byte"},
        "global_batch_size": knobs.micro_batch_size * knobs.grad_accum_steps * world_size,
        "precision": "fp32",
        "optimizer": OPTIMIZER,
        "world_size": world_size,
        "device": "cpu",
        "seed": 0,
        "measure": Measure(warmup_steps=1, min_steps=1, max_steps=1, block_s=0.01),
        "knobs": knobs,
        "process_group_timeout_s": 60.0,
        "hardware_flops_per_token": 1.0,  # given, so that rank 0 need not count
    }
    return TrialSpec(**{**values, **changes})


@dataclass
class Gang:
    """How the ranks of one trial ended."""

    exit_codes: list[int | None]
    """None: killed, since a peer had failed."""
    reports: list[RankReport | None]
    logs: list[Path]
    folder: Path
    """Where the trial leaves what it keeps beside its reports."""

    @property
    def outcome(self) -> Outcome:
        """As the driver sees it."""
        ends = [
            RankEnd(rank, code)
            if report is None
            else RankEnd(rank, code, Outcome(report.outcome), report.reason, report.error_type)
            for rank, (code, report) in enumerate(zip(self.exit_codes, self.reports, strict=True))
        ]
        return combine(ends, timed_out=False, timeout_s=WAIT_S)[0]

    def __str__(self) -> str:
        lines = []
        for rank, (code, report) in enumerate(zip(self.exit_codes, self.reports, strict=True)):
            said = f"{report.outcome} ({report.reason})" if report else "no report"
            lines.append(f"rank {rank}: exit code {code}, {said}")
        return "\n".join([*lines, show_logs(self.logs)])


class RankServer:
    """Runs trials through `trials.entry.run_rank`, each rank forked from a warm server as on CPU always."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_runs = 0
        self._launcher = ForkLauncher({"OMP_NUM_THREADS": "1"}, folder / "forkserver.log", WAIT_S)

    def run(self, spec: TrialSpec, num_threads: int = 1) -> Gang:
        """One trial, from its first rank's start to its last rank's end; nothing of it is left running."""
        folder = self._folder / f"run{self._num_runs}"
        self._num_runs += 1
        folder.mkdir()
        ranks = range(spec.world_size)
        reports = [folder / f"rank{rank}.json" for rank in ranks]
        logs = [folder / f"rank{rank}.log" for rank in ranks]
        port = free_port()
        pids = [
            self._launcher.start(
                {"spec": spec.to_json(), "report": str(reports[rank]), "folder": str(folder)},
                rank_env(rank, spec.world_size, port, num_threads),
                logs[rank],
            )
            for rank in ranks
        ]
        codes: dict[int, int] = {}
        deadline = time.monotonic() + WAIT_S
        while len(codes) < len(pids) and time.monotonic() < deadline:
            codes.update({pid: code for pid, code in self._launcher.ended(1.0).items() if pid in pids})
            if any(codes.values()):
                deadline = min(deadline, time.monotonic() + GRACE_S)
        left = kill_groups(pids)
        if not any(codes.values()) and len(codes) < len(pids):
            pytest.fail(f"no end after {WAIT_S} s\n{show_logs(logs)}")
        assert not left, f"left over after the kill: {left}"
        return Gang(
            [codes.get(pid) for pid in pids],
            [RankReport.from_json(path.read_text()) if path.exists() else None for path in reports],
            logs,
            folder,
        )

    def close(self) -> None:
        self._launcher.close()


def run_script(script: Path, order: dict[str, Any], world_size: int, folder: Path, wait_s: float = WAIT_S) -> list[Any]:
    """Runs `python -P script ORDER RESULT` once a rank; returns each rank's RESULT (JSON)."""
    order_path = folder / "order.json"
    order_path.write_text(json.dumps(order))
    results = [folder / f"result{rank}.json" for rank in range(world_size)]
    logs = [folder / f"rank{rank}.log" for rank in range(world_size)]
    port = free_port()
    processes = []
    for rank in range(world_size):
        with logs[rank].open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", str(script), str(order_path), str(results[rank])],
                    env={**os.environ, **rank_env(rank, world_size, port)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    deadline = time.monotonic() + wait_s
    try:
        codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        pytest.fail(f"{script.name} has not ended in {wait_s:.0f} s\n{show_logs(logs)}")
    finally:
        kill_groups([process.pid for process in processes])
    if any(codes):
        pytest.fail(f"{script.name} ended with {codes}\n{show_logs(logs)}")
    return [json.loads(path.read_text()) for path in results]
