"""The endurance run's figures: growth of host memory, what is made of all ranks' reports, and what it leaves."""

from __future__ import annotations

import multiprocessing
import os
import random
from pathlib import Path
from typing import Any

import pytest

from autotune.endurance import endurance_lines
from autotune.history import History
from autotune.job_file import load_job
from autotune.rows import gang_endurance
from autotune.run import Run
from tests.cluster.conftest import write_job
from tests.modelled import ModelledRunner, Silent
from tests.unit.conftest import make_job
from tests.unit.test_history import row
from trials.host_memory import available_bytes, growth_bytes_per_step, resident_bytes
from trials.outcome import Outcome
from trials.record import RankReport, TrialSpec

MIB = 2**20


@pytest.mark.parametrize("num_steps", [30, 31, 32, 100])
def test_a_leak_is_found_in_bytes_per_step_under_noise_and_a_first_jump(num_steps: int) -> None:
    noise = random.Random(num_steps)
    leak = 40 * MIB
    samples = [500 * MIB + step * leak + noise.randrange(5 * MIB) + (step > 1) * 100 * MIB for step in range(num_steps)]
    assert growth_bytes_per_step(samples) == pytest.approx(leak, rel=0.35)


@pytest.mark.parametrize(
    "samples",
    [
        [500 * MIB] * 30,
        [500 * MIB + (step >= 17) * 900 * MIB for step in range(30)],  # rises once
        [500 * MIB + min(step, 12) * 50 * MIB for step in range(36)],  # levels off
        [500 * MIB + step % 3 * 60 * MIB for step in range(30)],  # goes up and down
        [500 * MIB - step * 10 * MIB for step in range(30)],
        [500 * MIB + step * MIB // 4 for step in range(30)],  # less than allocators do of themselves
    ],
    ids=["flat", "once", "levels off", "saw", "shrinks", "small"],
)
def test_memory_that_does_not_go_on_growing_is_no_leak(samples: list[int]) -> None:
    assert growth_bytes_per_step(samples) == 0


@pytest.mark.parametrize("num_steps", [0, 5, 29])
def test_a_run_of_few_steps_cannot_tell(num_steps: int) -> None:
    assert growth_bytes_per_step([500 * MIB + step * 100 * MIB for step in range(num_steps)]) is None


def _hold(ready: Any, done: Any) -> None:
    kept = bytearray(os.urandom(1) * (64 * MIB))
    ready.set()
    done.wait(60)
    assert kept


def test_what_workers_hold_is_counted_and_one_that_has_ended_is_not() -> None:
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    worker = context.Process(target=_hold, args=(ready, done))
    before = resident_bytes([os.getpid()])
    worker.start()
    assert ready.wait(60)
    assert resident_bytes([os.getpid(), worker.pid or 0]) > before + 64 * MIB
    done.set()
    worker.join()
    assert resident_bytes([worker.pid or 0]) == 0
    assert 0 < available_bytes() < 2**50


def report(rank: int, host: str, growth: float, seconds: float, available: int = 1000 * MIB) -> RankReport:
    phases = [
        {"phase": name, "seconds": seconds, "allocated_bytes": None, "reserved_bytes": rank * MIB, "host_bytes": MIB}
        for name in ("train", "evaluate", "save", "load")
    ]
    found = {"phases": phases, "host_growth_bytes_per_step": growth, "host_available_bytes": available}
    return RankReport(rank, host=host, endurance=found)


def test_a_host_fills_by_all_its_ranks_and_the_first_that_is_full_counts(tmp_path: Path) -> None:
    reports = [
        report(0, "a", 1.0 * MIB, 1.0),
        report(1, "a", 3.0 * MIB, 2.0),
        report(2, "b", 2.0 * MIB, 1.0, 100 * MIB),
    ]
    found = gang_endurance(dict(enumerate(reports)), step_s=36.0)
    assert found is not None
    assert found["host_growth_mib_per_step"] == 4
    assert found["hours_to_host_limit"] == pytest.approx(100 / 2 * 36 / 3600)
    assert found["phases"][1] == {
        "phase": "evaluate",
        "seconds": 2.0,
        "allocated_gib": None,
        "reserved_gib": 2 / 1024,
        "host_gib": 1 / 1024,
    }
    History(tmp_path).append(row(0, stage="endurance", endurance=found))
    assert History(tmp_path).rows()[0][0]["endurance"] == found
    content = {"status": "passed", "reason": "", "num_steps": 9, "longest_sequence_tokens": 8, "failed": [], **found}
    assert "grows by 4 MiB a step and host: at this rate it is full after 0.5 hours" in "\n".join(
        endurance_lines(content)
    )


def test_without_growth_no_hours_are_told_and_no_other_trial_has_any() -> None:
    found = gang_endurance({0: report(0, "a", 0.0, 1.0)}, step_s=1.0)
    assert found is not None
    assert found["hours_to_host_limit"] is None
    content = {"status": "passed", "reason": "", "num_steps": 9, "longest_sequence_tokens": 8, "failed": [], **found}
    assert "hours" not in "\n".join(endurance_lines(content))
    assert gang_endurance({0: RankReport(0)}, step_s=1.0) is None


def test_what_killed_ranks_leave_of_a_checkpoint_is_removed(tmp_path: Path) -> None:
    def behave(spec: TrialSpec) -> Any:
        assert spec.knobs is not None
        if spec.checkpoint_dir is not None:
            folder = Path(spec.checkpoint_dir)
            assert folder.parent == tmp_path / "scratch"
            folder.mkdir(parents=True)
            (folder / "__0_0.distcp").write_bytes(b"half of it")
            return Outcome.CRASHED, "rank 1 was killed by SIGSEGV"
        return 130.0 if spec.knobs.activation_checkpointing == "none" else 100.0

    measure = {"rounds": 3, "checkpoint_dir": str(tmp_path / "scratch")}
    job = make_job(space={"activation_checkpointing": ["none", "full"]}, measure=measure)
    (tmp_path / "run" / "logs").mkdir(parents=True)
    Run(job, tmp_path / "run", ModelledRunner(behave), Silent()).go()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_the_checkpoints_folder_is_relative_to_the_job(tmp_path: Path) -> None:
    path = write_job(tmp_path, measure={"checkpoint_dir": "scratch"})
    assert load_job(str(path)).measure.checkpoint_dir == str(tmp_path / "scratch")
