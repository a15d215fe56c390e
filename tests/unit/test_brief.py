"""`show --brief`: a dozen plain lines, whatever the run."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from autotune.best import read_best
from autotune.cli import cli
from autotune.errors import UserError
from autotune.history import History
from autotune.report.brief import MAX_LINES, WIDTH, brief_lines
from autotune.report.tables import print_best


def check_form(lines: list[str]) -> None:
    assert 0 < len(lines) <= MAX_LINES == 12
    assert all(len(line) <= WIDTH and line.isprintable() for line in lines)
    assert not any(0x2500 <= ord(char) < 0x2600 for line in lines for char in line), "no box characters"


def test_it_says_what_a_channel_wants_to_know(simulated_run: Path) -> None:
    shown = CliRunner().invoke(cli, ["show", str(simulated_run), "--brief"]).output
    best = read_best(simulated_run)
    check_form(shown.splitlines())
    assert "SIMULATED, 64 ranks" in shown
    assert f"verdict: {best['verdict'][:20]}" in shown
    assert f"baseline: {best['baseline']['tokens_per_s_per_rank']:,.0f} tokens/s per rank" in shown
    assert f"best: {best['evidence']['tokens_per_s_per_rank']:,.0f} tokens/s per rank" in shown
    assert "best differs by: " in shown
    assert "a step of baseline: compute" in shown
    assert "what bounds best: " in shown
    assert "--to plain" in shown


def test_a_kept_baseline_and_an_unfinished_run_say_so(simulated_run: Path) -> None:
    best = read_best(simulated_run)
    kept = best | {"settings": best["baseline"]["settings"], "evidence": best["baseline"]}
    assert "best: the baseline" in brief_lines(simulated_run, kept, [])
    assert any("next: keep your baseline" in line for line in brief_lines(simulated_run, kept, []))
    unfinished = brief_lines(Path("runs/x"), best | {"complete": False}, [])
    assert any("--resume" in line for line in unfinished)


def test_rounds_too_noisy_to_tell_are_said_to_be_so(simulated_run: Path) -> None:
    best = read_best(simulated_run)
    base = best["baseline"]["settings"]
    gain = best["gain"] | {"ratio": 1.01, "low": 0.71, "high": 1.45}
    noisy = best | {"settings": base, "evidence": best["baseline"], "gain": gain}
    assert "measure again on a machine with nothing else" in brief_lines(simulated_run, noisy, [])[-1]
    close = noisy | {"gain": gain | {"low": 0.99, "high": 1.03}}
    assert "keep your baseline" in brief_lines(simulated_run, close, [])[-1]
    screen = io.StringIO()
    print_best(Console(width=200, file=screen), noisy)
    shown = screen.getvalue()
    for said in ("gain of the config compared, 95 % interval", "Compared with the baseline, the fastest", "to tell"):
        assert said in shown


def test_what_was_confirmed_is_said_instead_of_asked_for(simulated_run: Path) -> None:
    best = read_best(simulated_run) | {"confirmed": {"held": "fallback", "world_size": 512}}
    lines = brief_lines(Path("runs/x"), best, [])
    check_form(lines)
    assert (
        lines[-1] == "next: on 512 ranks the fallback held; `autotune export runs/x --to plain --confirmed` writes it"
    )


def test_a_run_without_a_result_names_its_last_attempt(simulated_run: Path) -> None:
    rows, _ = History(simulated_run / "history").rows()
    died = rows[0] | {"outcome": "oom_device", "reason": "out of memory: " + "tried to allocate 9 GiB; " * 40}
    lines = brief_lines(Path("runs/x"), None, [died])
    check_form(lines)
    assert "1 attempt" in lines[0]
    assert "trial 0 (baseline) ended in oom_device" in lines[1]
    check_form(brief_lines(Path("runs/x"), None, []))


@pytest.mark.parametrize("hostile", ["\x1b[31m" * 60, "a\nb\n" * 200, "═╬" + "x" * 5000, ""])
def test_hostile_words_keep_the_form(simulated_run: Path, hostile: str) -> None:
    best: dict[str, Any] = copy.deepcopy(read_best(simulated_run))
    best["verdict"] = best["fingerprint"]["device_name"] = hostile
    best["evidence"]["bottlenecks"][0]["evidence"] = hostile
    lines = brief_lines(Path(hostile or "."), best, [])
    assert 0 < len(lines) <= MAX_LINES
    assert all(len(line) <= WIDTH and line.isprintable() for line in lines)


def test_it_stands_alone(simulated_run: Path) -> None:
    done = CliRunner().invoke(cli, ["show", str(simulated_run), "--brief", "--json"], standalone_mode=False)
    assert isinstance(done.exception, UserError)
