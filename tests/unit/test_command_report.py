"""What a rank's probe wrote and how its command ended, as the rank's report."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from trials.command import Command
from trials.command_env import clean_environment
from trials.command_report import Ended, report_of
from trials.outcome import VANISHED, Outcome, RankEnd, combine

COMMAND = Command(
    command=[], env={}, launcher="self", attach="auto", tokens="auto", values={}, files={}, knobs={}, expect={},
    warmup_steps=2, timed_steps=6, min_steps=3, max_s=60.0, folder=".", python=None, prefix=[],
)  # fmt: skip
START = {"event": "start", "host": "here", "torch": "2.13", "rank": 0}


def step(number: int, timed: bool) -> dict[str, Any]:
    return {"event": "step", "n": number, "t": float(number), "tokens": 8, "wait_s": 0.0, "timed": timed}


def outcome(folder: Path, exit_code: int, *events: dict[str, Any], torn: str = "") -> Any:
    log = folder / "rank-0.jsonl"
    if events:
        log.write_text("".join(json.dumps(event) + "\n" for event in events) + torn)
    return report_of(0, log, Ended(exit_code, COMMAND, "cpu", None))


def end(reason: str, last_step: int) -> dict[str, Any]:
    return {"event": "end", "reason": reason, "last_step": last_step, "not_finite": []}


def test_an_exit_code_of_0_says_nothing(tmp_path: Path) -> None:
    report = outcome(tmp_path, 0)
    assert report.outcome == Outcome.INVALID
    assert "no probe was attached" in report.reason
    report = outcome(tmp_path, 0, START, end("script_ended", 0))
    assert report.outcome == Outcome.INVALID
    assert "no optimizer step" in report.reason


def test_a_script_that_ends_by_itself_needs_enough_steps(tmp_path: Path) -> None:
    few = [START, *(step(n, timed=n > 2) for n in range(1, 5)), end("script_ended", 4)]
    assert outcome(tmp_path, 0, *few).outcome == Outcome.TOO_SHORT
    enough = [START, *(step(n, timed=n > 2) for n in range(1, 6)), end("script_ended", 5)]
    assert outcome(tmp_path, 0, *enough).outcome == Outcome.OK


def test_a_script_that_fails_after_its_last_step_is_well(tmp_path: Path) -> None:
    done = [START, *(step(n, timed=n > 2) for n in range(1, 9)), end("done", 8)]
    assert outcome(tmp_path, 1, *done).outcome == Outcome.OK


@pytest.mark.parametrize(
    ("out_of_memory", "kind", "expected"),
    [
        ("device", "OutOfMemoryError", Outcome.OOM_DEVICE),
        (None, "ValueError", Outcome.CRASHED),
        (None, "ProbeError", Outcome.INVALID),
    ],
)
def test_an_error_is_the_ranks_own(tmp_path: Path, out_of_memory: str | None, kind: str, expected: Outcome) -> None:
    error = {"event": "error", "type": kind, "message": "it", "traceback": "", "phase": "warmup"}
    report = outcome(tmp_path, 1, START, error | {"out_of_memory": out_of_memory}, torn='{"event": "st')
    assert report.outcome == expected
    assert "it" in report.reason
    assert report.probe_log.endswith('{"event": "st')


def test_a_script_that_gives_up_has_crashed(tmp_path: Path) -> None:
    report = outcome(tmp_path, 2, START, end("script_ended", 0))
    assert report.outcome == Outcome.CRASHED
    assert report.reason == "the command exited with code 2 before its first optimizer step"


def test_a_rank_that_was_killed_reports_nothing(tmp_path: Path) -> None:
    assert outcome(tmp_path, -signal.SIGKILL, START, step(1, timed=False)) is None


def test_a_rank_that_vanished_under_its_launcher_may_have_been_killed_for_memory(tmp_path: Path) -> None:
    report = outcome(tmp_path, 1, START, step(1, timed=False))
    assert (report.outcome, report.error_type) == (Outcome.CRASHED, VANISHED)

    def gang(oom_kills: int) -> Outcome:
        rank = RankEnd(0, 70, Outcome(report.outcome), report.reason, report.error_type, 1.0, oom_kills=oom_kills)
        return combine([rank], timed_out=False, timeout_s=60.0)[0]

    assert gang(0) is Outcome.CRASHED
    assert gang(1) is Outcome.OOM_HOST


def test_only_a_rank_is_told_that_it_is_one(tmp_path: Path) -> None:
    inherited = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "SLURM_PROCID"), "3")
    inherited |= {"HOME": "/root", "TORCHELASTIC_RUN_ID": "old", "PMI_RANK": "1", "OMPI_COMM_WORLD_RANK": "1"}
    of_rank = clean_environment(inherited, tmp_path, "run-7", is_rank=True)
    of_launcher = clean_environment(inherited, tmp_path, "run-7", is_rank=False)
    assert of_rank["RANK"] == of_rank["NODE_RANK"] == "3"
    assert of_rank["TORCHELASTIC_RUN_ID"] == "run-7"
    assert of_launcher["HOME"] == of_rank["HOME"] == "/root"
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "PMI_RANK"} & of_launcher.keys()
    assert not {"SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK"} & of_rank.keys()
    assert of_rank["TRITON_CACHE_DIR"].startswith(str(tmp_path))
