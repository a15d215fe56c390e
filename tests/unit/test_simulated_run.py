"""Whole simulated studies by the command line: labelled everywhere, resumable, and never mixed with measured ones."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from autotune.cli import cli
from autotune.errors import AutotuneError, InfrastructureError, UserError
from autotune.history import History
from autotune.job_file import load_job
from autotune.report.screen import LineScreen
from autotune.rows import Attempt

CLUSTER = "nodes=8 gpus=8 device='NVIDIA H100 80GB HBM3' seed=4"
OPTIONS = ("--set", "measure.rounds=3", "--set", "cluster.nodes_per_trial=2", "--trials", "8")


def autotune(*arguments: str) -> str:
    done = CliRunner().invoke(cli, list(arguments), standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done.output


def tune(out: Path, *more: str, simulate: str = CLUSTER) -> str:
    return autotune("run", "llama3-8b", "--simulate", simulate, "--output", str(out), *OPTIONS, *more)


def rows_of(out: Path) -> list[dict[str, Any]]:
    rows, skipped = History(out / "history").rows()
    assert skipped == []
    return rows


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("simulated") / "run"
    # By a sampler that proposes also what surely does not fit.
    (out.parent / "screen.txt").write_text(tune(out, "--set", "sampler=tpe"))
    return out


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_everything_that_is_kept_says_that_it_is_simulated(finished: Path) -> None:
    rows = rows_of(finished)
    assert {row["stage"] for row in rows} == {"baseline", "explore", "finalist", "round", "endurance"}
    assert {row["simulated"] for row in rows} == {True}
    assert all("simulated" in row["peak_source"] for row in rows if row["outcome"] != "predicted_oom")
    assert all(host.startswith("simulated-") for row in rows for host in row["hosts"])
    assert {row["ended_at"].year for row in rows} == {2000}, "no date at which anything was measured"
    text = (finished / "best.yaml").read_text()
    fingerprint = yaml.safe_load(text)["fingerprint"]
    assert "# SIMULATED: nothing here was measured" in text
    assert fingerprint["simulated"] is True
    assert fingerprint["simulated_cluster"] == CLUSTER
    assert fingerprint["written_at"].startswith("2000-01-01")
    assert yaml.safe_load((finished / "study.yaml").read_text())["simulated"] == CLUSTER


def test_everything_that_is_shown_says_so_too(finished: Path, tmp_path: Path) -> None:
    screen = (finished.parent / "screen.txt").read_text()
    assert f"SIMULATED, nothing is measured: {CLUSTER}" in screen
    lines = [line for line in screen.splitlines() if "tokens/s  MFU" in line]
    left_out = [row["trial"] for row in rows_of(finished) if row["outcome"] == "predicted_oom"]
    assert len(lines) == len(rows_of(finished)) - len(left_out)
    assert left_out
    assert all(f"trial {trial} is not run: it surely does not fit" in screen for trial in left_out)
    assert all("MFU (simulated)" in line for line in lines)
    shown = autotune("show", str(finished))
    assert "SIMULATED: nothing was measured" in shown
    assert "Result, SIMULATED" in shown
    assert " simulated min. History: " in screen
    assert all(trial["simulated"] for trial in json.loads(autotune("show", str(finished), "--json"))["trials"])
    for target in ("plain", "accelerate", "transformers"):
        autotune("export", str(finished), "--to", target, "--output", str(tmp_path))
    for path in tmp_path.iterdir():
        assert f"SIMULATED, not measured: {CLUSTER}" in path.read_text(), path.name


def test_rows_carry_what_real_ones_do(finished: Path) -> None:
    ok = [row for row in rows_of(finished) if row["outcome"] == "ok"]
    for row in ok:
        assert row["applied"] == row["knobs"]
        assert len(row["rank_step_times_s"]) == row["world_size"] == 16
        assert 0 < row["mfu"] <= row["hfu"] < 1
        assert row["allocated_gib"] <= row["reserved_gib"] < row["limit_gib"]
        assert row["losses"]
        if row["stage"] != "explore":  # of these, each new best
            assert (row["frac_compute"] is not None) == (row["stage"] in ("baseline", "finalist"))


def test_calibrating_the_peak_is_simulated_too(tmp_path: Path) -> None:
    arguments = ("measure", "llama3-8b", "--simulate", CLUSTER, "--output", str(tmp_path / "run"))
    sheet = autotune(*arguments, "--set", "cluster.calibrate_peak=true")
    assert "achievable in the model's matmuls" in sheet
    (row,) = rows_of(tmp_path / "run")
    assert row["mfu"] < row["share_of_achievable"] < 1


def test_a_winner_endures(tmp_path: Path) -> None:
    simulate = "nodes=8 gpus=8 device='NVIDIA H100 80GB HBM3'"
    tune(tmp_path / "run", "--set", "cluster.nodes_per_trial=8", "--trials", "10", simulate=simulate)
    best = yaml.safe_load((tmp_path / "run" / "best.yaml").read_text())
    assert best["gain"]["low"] > 1
    assert best["endurance"]["status"] == "passed"
    assert [phase["phase"] for phase in best["endurance"]["phases"]] == ["train", "evaluate", "save", "load"]


def test_a_study_goes_on_with_the_nodes_that_are_left(tmp_path: Path) -> None:
    """Which attempts lose a node is drawn: of a few clusters, some lose more than they have to spare."""
    screens = []
    for seed in range(6):
        cluster = f"nodes=8 gpus=8 device='NVIDIA H100 80GB HBM3' seed={seed} node_loss=0.15"
        with contextlib.suppress(InfrastructureError):  # three times the same trial
            screens.append(tune(tmp_path / str(seed), "--set", "cluster.parallel_trials=4", simulate=cluster))
            assert yaml.safe_load((tmp_path / str(seed) / "best.yaml").read_text())["complete"] is True
    assert any("is tried again" in screen for screen in screens)
    assert any("no nodes are left for more: 3 at once from here on" in screen for screen in screens)


def test_the_minutes_of_a_budget_are_the_clusters(tmp_path: Path) -> None:
    screen = tune(tmp_path / "run", "--set", "budget.minutes=5")
    assert "budget.minutes = 5 is used up" in screen
    assert len([row for row in rows_of(tmp_path / "run") if row["stage"] == "explore"]) < 8


def test_so_are_its_gpu_hours_and_study_yaml_keeps_why_the_search_ended(tmp_path: Path) -> None:
    screen = tune(tmp_path / "run", "--set", "budget.gpu_hours=1.4")
    reason = "budget.gpu_hours = 1.4 is used up (16 ranks)"
    assert f"the search ends: {reason}" in screen
    assert yaml.safe_load((tmp_path / "run" / "study.yaml").read_text())["search_ended"] == reason
    assert len([row for row in rows_of(tmp_path / "run") if row["stage"] == "explore"]) < 8


def test_equal_seeds_tell_equal_stories(finished: Path, tmp_path: Path) -> None:
    tune(tmp_path / "run", "--set", "sampler=tpe")
    figures = [
        [(row["trial"], row["knobs"], row["outcome"], row["tokens_per_s_per_rank"]) for row in rows_of(out)]
        for out in (finished, tmp_path / "run")
    ]
    assert figures[0] == figures[1]


def test_an_interrupted_study_goes_on_after_its_own_time(copy: Path) -> None:
    before = rows_of(copy)
    late = [row for row in before if row["trial"] > 4]
    for row in late:
        (copy / "history" / f"trial-{row['trial']:04d}-attempt-{row['attempt']}.parquet").unlink()
        if row["log_path"] is not None:  # of what was tried
            shutil.rmtree(copy / row["log_path"])
    kept = rows_of(copy)
    autotune("run", str(copy / "job.yaml"), "--resume", "--simulate", CLUSTER, "--output", str(copy))
    after = rows_of(copy)
    assert after[: len(kept)] == kept
    assert min(row["started_at"] for row in after[len(kept) :]) >= max(row["ended_at"] for row in kept)
    assert {row["stage"] for row in after} == {row["stage"] for row in before}
    assert yaml.safe_load((copy / "best.yaml").read_text())["complete"]


def test_a_run_that_was_moved_or_copied_is_resumed_where_it_lies(finished: Path, copy: Path) -> None:
    """Its job.yaml names the folder that it was started in."""
    before = {path.name for path in (finished / "history").iterdir()}
    last = max((copy / "history").iterdir())
    last.unlink()
    autotune("run", str(copy / "job.yaml"), "--resume", "--simulate", CLUSTER)
    assert last.exists()
    assert {path.name for path in (finished / "history").iterdir()} == before
    assert not finished.with_name("run.1").exists()


def test_reading_a_finished_run_again_changes_nothing_in_its_result(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody resumes it through `| head`, which closes the pipe in the middle."""
    before = (copy / "best.yaml").read_text()
    shown = []

    def closed(_screen: LineScreen, attempt: Attempt, _best: Attempt | None) -> None:
        shown.append(attempt.trial)
        if len(shown) == 4:
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(LineScreen, "trial_ended", closed)
    with pytest.raises(AutotuneError, match="Broken pipe"):
        autotune("run", str(copy / "job.yaml"), "--resume", "--simulate", CLUSTER)
    assert (copy / "best.yaml").read_text() == before


def test_a_finished_run_that_goes_on_is_unfinished_until_its_end(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []

    def look(_screen: LineScreen, attempt: Attempt, _best: Attempt | None) -> None:
        said.append((attempt.trial, yaml.safe_load((copy / "best.yaml").read_text())["complete"]))

    monkeypatch.setattr(LineScreen, "trial_ended", look)
    had = {row["trial"] for row in rows_of(copy)}
    budget = load_job(str(copy / "job.yaml")).budget.trials or 0
    more = ("--set", f"budget.trials={budget + 3}")
    autotune("run", str(copy / "job.yaml"), "--resume", "--simulate", CLUSTER, *more)
    new = [is_complete for trial, is_complete in said if trial not in had]
    assert new
    assert not any(new)
    assert yaml.safe_load((copy / "best.yaml").read_text())["complete"]


def test_memory_is_the_most_of_all_runs_of_a_config(finished: Path) -> None:
    best = yaml.safe_load((finished / "best.yaml").read_text())
    for config, settings in ((best["evidence"], best["settings"]), (best["baseline"], best["baseline"]["settings"])):
        runs = [row for row in rows_of(finished) if row["outcome"] == "ok" and row["knobs"] == settings]
        assert len(runs) > 3
        for name in ("allocated_gib", "reserved_gib"):
            assert config[name] == max(row[name] for row in runs)


def test_a_simulated_run_goes_on_neither_for_real_nor_on_another_cluster(copy: Path) -> None:
    resume = ("run", str(copy / "job.yaml"), "--resume", "--output", str(copy))
    with pytest.raises(UserError, match=r"on a simulated cluster .* cannot be resumed on a real cluster") as raised:
        autotune(*resume)
    assert CLUSTER in raised.value.hint
    with pytest.raises(UserError, match=r"cannot be resumed on a simulated cluster .*seed=5"):
        autotune(*resume, "--simulate", CLUSTER.replace("seed=4", "seed=5"))


def test_a_real_run_does_not_go_on_simulated(copy: Path) -> None:
    study = yaml.safe_load((copy / "study.yaml").read_text())
    (copy / "study.yaml").write_text(yaml.safe_dump(study | {"simulated": ""}))
    with pytest.raises(UserError, match="on a real cluster, which cannot be resumed on a simulated cluster"):
        autotune("run", str(copy / "job.yaml"), "--resume", "--simulate", CLUSTER, "--output", str(copy))


def test_a_bad_cluster_moves_no_earlier_run_aside(copy: Path) -> None:
    with pytest.raises(UserError, match="unknown key"):
        tune(copy, simulate=f"{CLUSTER} speed=9")
    assert (copy / "best.yaml").exists()
    assert not copy.with_name("run.1").exists()


def test_one_config_by_hand(tmp_path: Path) -> None:
    arguments = ("measure", "llama3-8b", "--simulate", CLUSTER, "--output", str(tmp_path / "run"), "--repeat", "2")
    sheet = autotune(*arguments, "--set", "micro_batch_size=2")
    assert "MFU (simulated)" in sheet
    assert "2 runs: median" in sheet
