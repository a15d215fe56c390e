"""Whole runs by the command line, on a real local Ray, as a user starts them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.history import History
from tests.cluster.columns import missing_where_simulated
from tests.cluster.conftest import write_job
from trials.breakdown import FRACTIONS

AUTOTUNE = str(Path(sys.executable).with_name("autotune"))


SECRET = f"hf_{uuid.uuid4().hex}"


def autotune(
    *arguments: str, cwd: Path, timeout_s: float = 240, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [AUTOTUNE, *arguments],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, in a folder that holds a user's own modules under our packages' names."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "trials").mkdir()
    for name in ("trials/__init__.py", "trials/entry.py", "autotune.py", "data.py", "models.py", "search_spaces.py"):
        (folder / name).write_text("raise ImportError('the wrong module was imported')\n")
    write_job(folder)
    done = autotune("run", "job.yaml", cwd=folder, HF_TOKEN=SECRET)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    (folder / "stdout.txt").write_text(done.stdout)
    (folder / "stderr.txt").write_text(done.stderr)
    return folder


def rows(folder: Path) -> list[dict[str, Any]]:
    found, skipped = History(folder / "run" / "history").rows()
    assert skipped == []
    return found


def test_the_screen_ends_in_the_table_and_the_next_command(finished: Path) -> None:
    text = (finished / "stdout.txt").read_text()
    for part in (
        "estimate:",
        "baseline",
        "explore",
        "MFU (cpu probe)",
        "HFU",
        "memory",
        "A step of baseline: ",
        "Verdict:",
        "export run --to plain",
    ):
        assert part in text
    assert (finished / "stderr.txt").read_text() == "", "other libraries' chatter goes to the log"


def test_the_run_leaves_its_files(finished: Path) -> None:
    run = finished / "run"
    assert {path.name for path in run.iterdir()} == {"job.yaml", "study.yaml", "best.yaml", "history", "logs"}
    assert (run / "logs" / "trial-0000" / "rank-1.log").exists()
    best = yaml.safe_load((run / "best.yaml").read_text())
    assert best["complete"] is True
    assert best["fingerprint"]["world_size"] == 2
    won = best["gain"] is not None and best["gain"]["low"] > 1
    assert best["settings"] == (best["gain"]["settings"] if won else best["baseline"]["settings"])


def test_every_trial_is_in_the_history_with_what_it_applied(finished: Path) -> None:
    found = rows(finished)
    assert [row["trial"] for row in found] == list(range(len(found)))
    assert found[0]["stage"] == "baseline"
    assert sum(row["stage"] == "explore" for row in found) == 3
    assert len({row["spec_digest"] for row in found if row["stage"] in ("baseline", "explore")}) == 4
    for row in found:
        assert row["outcome"] == "ok", row["reason"]
        assert row["applied"] == row["knobs"]
        knobs = row["knobs"]
        assert knobs["micro_batch_size"] * knobs["grad_accum_steps"] * row["world_size"] == 8


def test_the_figures_of_every_row_agree(finished: Path) -> None:
    for row in rows(finished):
        knobs = row["knobs"]
        tokens = knobs["micro_batch_size"] * knobs["grad_accum_steps"] * 32
        assert row["tokens_per_s_per_rank"] * row["step_time_s"] == pytest.approx(tokens)
        peak = row["peak_tflops_per_s"] * 1e12
        flops_per_s = row["tokens_per_s_per_rank"] * row["flops_per_token"]
        assert row["model_tflops_per_s_per_rank"] * 1e12 == pytest.approx(flops_per_s)
        assert min(row["block_times_s"]) <= row["step_time_s"] * (1 + 1e-9)
        assert row["step_time_s"] <= max(row["block_times_s"]) * (1 + 1e-9)
        assert row["mfu"] == pytest.approx(row["tokens_per_s_per_rank"] * row["flops_per_token"] / peak)
        assert row["hfu"] == pytest.approx(row["mfu"] * row["hardware_flops_per_token"] / row["flops_per_token"])
        assert row["attention_backend"] == "flash"
        executed = row["flops_per_token"] + row["attention_recompute_flops_per_token"]
        if knobs["activation_checkpointing"] == "none":
            assert row["hardware_flops_per_token"] == pytest.approx(executed)
        else:
            assert row["hardware_flops_per_token"] > executed
        assert len(row["rank_step_times_s"]) == 2
        assert row["mfu_causal"] < row["mfu"]


def test_a_simulated_history_has_a_value_wherever_a_real_one_has(finished: Path, tmp_path: Path) -> None:
    assert missing_where_simulated(rows(finished), finished / "job.yaml", tmp_path / "simulated") == {}


def test_what_runs_is_counted_once_for_each_checkpointing_and_attention_kernel(finished: Path) -> None:
    counted: dict[str, float] = {}
    for row in rows(finished):
        given = json.loads((finished / "run" / row["log_path"] / "spec.json").read_text())["hardware_flops_per_token"]
        mode = row["knobs"]["activation_checkpointing"]
        assert given == counted.get(mode), "the first trial of a mode is given none, and counts"
        counted[mode] = row["hardware_flops_per_token"] - row["attention_recompute_flops_per_token"]
    assert len(counted) == 2


def test_baseline_each_new_best_and_finalists_say_where_their_step_goes(finished: Path) -> None:
    to_beat, num_bests = 0.0, 0
    for row in rows(finished):
        fractions = [row[name] for name in row if name.startswith("frac_")]
        is_best = row["stage"] in ("baseline", "explore") and row["tokens_per_s_per_rank"] > to_beat
        if is_best:
            to_beat, num_bests = row["tokens_per_s_per_rank"], num_bests + 1
        if is_best or row["stage"] == "finalist":
            assert sum(fractions) == pytest.approx(1)
            assert len(row["rank_breakdowns"]) == row["world_size"]
        else:
            assert fractions == [None] * 6
    assert (finished / "stdout.txt").read_text().count("  what bounds the best so far: ") == num_bests >= 1
    best = yaml.safe_load((finished / "run" / "best.yaml").read_text())
    for part in (best["baseline"], best["evidence"]):
        assert part["bottlenecks"]
        assert sum(part["breakdown"][name] for name in FRACTIONS) == pytest.approx(1)


def test_a_config_trains_on_the_same_data_to_the_same_losses(finished: Path) -> None:
    first = rows(finished)[0]["losses"]
    for row in rows(finished)[1:]:
        assert row["losses"][:2] == pytest.approx(first[:2], rel=1e-5)


def test_show_and_export_read_the_run(finished: Path) -> None:
    shown = autotune("show", "run", cwd=finished)
    assert shown.returncode == 0
    assert "Verdict:" in shown.stdout
    data = json.loads(autotune("show", "run", "--json", cwd=finished).stdout)
    assert len(data["trials"]) == len(rows(finished))
    one = autotune("show", "run", "--trial", "1", cwd=finished)
    assert "spec_digest" in one.stdout
    for target in ("plain", "transformers", "accelerate"):
        exported = autotune("export", "run", "--to", target, cwd=finished)
        assert exported.returncode == 0, exported.stderr
        assert "carried: " in exported.stdout
    assert "not carried: micro_batch_size" in exported.stdout
    for target, files in (("accelerate", ["mine.yaml"]), ("plain", ["autotune_best.py", "mine.yaml"])):
        autotune("export", "run", "--to", target, "-o", f"{target}/mine.yaml", cwd=finished)
        assert sorted(path.name for path in (finished / target).iterdir()) == files


def test_no_secret_of_the_environment_is_recorded(finished: Path) -> None:
    files = [path for path in (finished / "run").rglob("*") if path.is_file()]
    assert finished / "run" / "logs" / "ray.log" in files
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path
    assert SECRET not in str(rows(finished)), "Parquet is compressed"
    assert SECRET not in (finished / "stdout.txt").read_text()


def test_a_folder_with_hostile_files_is_resumed_without_them(finished: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    shutil.copytree(finished, work)
    measured, history = rows(work), History(work / "run" / "history")
    hostile = measured[1] | {"reason": "\x1b]0;owned\x07", "log_path": "../../../owned"}
    history.append(hostile | {"trial": 70, "outcome": "owned\x1b[31m"})
    swamp = measured[1]["knobs"] | {"num_workers": 100_000}
    history.append(hostile | {"trial": 71, "outcome": "interrupted", "knobs": swamp})
    (history.folder / "trial-0072-attempt-0.parquet").write_bytes(b"torn")
    order = work / "run" / "logs" / "trial-0073" / "spec.json"
    order.parent.mkdir()
    order.write_text((work / "run" / "logs" / "trial-0001" / "spec.json").read_text()[:300])
    done = autotune("run", "run/job.yaml", "--resume", cwd=work)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    for line in (
        "skipped trial-0072-attempt-0.parquet: unreadable",
        "skipped trial 70: not an attempt of fsdp-autotune",
        "skipped trial-0073/spec.json: not an order of fsdp-autotune",
        "skipped configs of the history that are not in the space",
    ):
        assert line in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    found, _ = history.rows()
    assert [row for row in found if row["trial"] < 70] == measured, "nothing measured is lost, nothing is run again"
    assert [row["trial"] for row in found if row["trial"] >= 70] == [70, 71], "nothing that is not asked for is run"
    assert [path.name for path in tmp_path.iterdir()] == ["work"]
