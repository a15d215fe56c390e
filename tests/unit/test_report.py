"""What a report says of a run: all of it follows from the run's own files, and it is right of odd runs too."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from autotune.cost import Assumptions, training_cost
from autotune.errors import UserError
from autotune.folder import sole_driver
from autotune.history import SCHEMA, History
from autotune.loaded import LoadedRun, load
from autotune.report.brief import brief_lines
from autotune.report.facts import SUMMARY_VERSION, Summary, summarise
from autotune.report.facts.headline import NOTHING_TUNED
from autotune.report.facts.knobs import MOST_RECKONED
from autotune.report.facts.trials import comparable
from tests.unit.test_simulated_run import autotune


@pytest.fixture(scope="session")
def waterfall_run(simulated_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with its gain taken apart, and scaled."""
    run = Path(shutil.copytree(simulated_run, tmp_path_factory.mktemp("waterfall") / "run"))
    autotune("waterfall", str(run), "--repeats", "2")
    cluster = yaml.safe_load((run / "study.yaml").read_text())["simulated"]
    autotune("scale", str(run), "--ranks", "16,32", "--mode", "weak", "--repeats", "2", "--simulate", cluster)
    return run


@pytest.fixture(scope="session")
def run(waterfall_run: Path) -> LoadedRun:
    return load(waterfall_run)


@pytest.fixture(scope="session")
def summary(run: LoadedRun) -> Summary:
    return summarise(run)


@pytest.fixture
def copy(simulated_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(simulated_run, tmp_path / "run"))


def rewrite(run: Path, **columns: Any) -> None:
    """Puts other values into all rows of a history, as somebody else may have written them."""
    for path in (run / "history").glob("*.parquet"):
        row = pq.read_table(path).to_pylist(maps_as_pydicts="strict")[0] | columns
        pq.write_table(pa.Table.from_pylist([row], schema=SCHEMA), path)


def with_trials(run: LoadedRun, number: int) -> LoadedRun:
    """The run as if it had explored so many configs: its explored trials again and again."""
    first = [attempt for attempt in run.attempts if attempt.stage == "explore"]
    more = [
        replace(attempt, trial=trial, row=attempt.row | {"trial": trial})
        for trial, attempt in ((1000 + number, first[number % len(first)]) for number in range(number))
    ]
    attempts = [*run.attempts, *more]
    return replace(run, attempts=attempts, rows=[attempt.row for attempt in attempts])


def test_the_figures_are_those_of_best_yaml_and_of_the_history(run: LoadedRun, summary: Summary) -> None:
    assert run.best is not None
    by_role = {config.role: config for config in summary.configs}
    for role, figures in {"baseline": run.best["baseline"], "best": run.best["evidence"]}.items():
        for name in ("tokens_per_s_per_rank", "mfu", "hfu", "allocated_gib", "reserved_gib", "trial"):
            assert getattr(by_role[role], name) == figures[name]
    assert by_role["best"].settings == run.best["settings"]
    assert summary.headline.kind == "win"
    assert summary.headline.gain is not None
    assert summary.headline.gain.low == run.best["gain"]["low"]
    for trial, row in zip(summary.trials, run.rows, strict=True):
        assert (trial.trial, trial.stage, trial.outcome) == (row["trial"], row["stage"], row["outcome"])
        assert (trial.mfu, trial.step_time_s, trial.predicted_memory_gib) == (
            row["mfu"],
            row["step_time_s"],
            row["predicted_gib"],
        )
    failed = Counter(row["outcome"] for row in run.rows if row["outcome"] != "ok")
    assert Counter({one.outcome: one.num_attempts for one in summary.failures}) == failed


def test_the_front_has_what_no_other_trial_beats(summary: Summary) -> None:
    front = set(summary.pareto_trials)
    assert front
    fitting = [one for one in summary.trials if one.fits]

    def is_beaten(one: Any) -> bool:
        return any(
            other.tokens_per_s_per_rank > one.tokens_per_s_per_rank and other.memory_gib <= one.memory_gib
            for other in fitting
        )

    assert front == {one.trial for one in fitting if not is_beaten(one)}


def test_the_best_so_far_only_grows_and_hours_are_those_of_all_attempts(run: LoadedRun, summary: Summary) -> None:
    bests = [one.best_tokens_per_s_per_rank for one in summary.progress if one.best_tokens_per_s_per_rank is not None]
    assert bests == sorted(bests)
    explored = [one for one in summary.trials if one.stage in ("baseline", "explore") and one.fits]
    assert bests[-1] == max(one.tokens_per_s_per_rank or 0.0 for one in explored)
    hours = sum((row["ended_at"] - row["started_at"]).total_seconds() * row["world_size"] for row in run.rows) / 3600
    assert summary.progress[-1].rank_hours == pytest.approx(hours)
    ranks = {row["trial"]: row["world_size"] for row in run.rows}
    elsewhere = [one for one in summary.progress if ranks[one.trial] != ranks[0]]
    assert elsewhere, "its scaling was on other ranks too"
    assert all(one.tokens_per_s_per_rank is None and one.mfu is None for one in elsewhere), "they do not compare"


def test_shares_sum_to_one(summary: Summary) -> None:
    assert {one.label.partition(" (")[0] for one in summary.step_parts} >= {"baseline", "best"}
    for one in summary.step_parts:
        assert sum(one.fractions.values()) == pytest.approx(1)
        assert one.bottlenecks
    if summary.importance.shares:
        assert sum(summary.importance.shares.values()) == pytest.approx(1)


def test_slices_count_every_searched_trial(summary: Summary) -> None:
    explored = [one for one in summary.trials if one.stage in ("baseline", "explore")]
    for one in summary.slices:
        counted = sum(value.num_measured for value in one.values)
        assert counted == sum(trial.fits and one.knob in trial.settings for trial in explored), one.knob


def test_what_was_measured_afterwards_is_in_it(summary: Summary) -> None:
    assert summary.waterfall is not None
    assert not any("autotune waterfall" in line for line in summary.not_measured)
    assert summary.scaling is not None
    assert {point.world_size for point in summary.scaling.points if not point.is_predicted} == {16, 32}
    assert any(point.is_predicted for point in summary.scaling.points), "for the real run's ranks"
    assert not any("autotune scale" in line for line in summary.not_measured)
    assert summary.headline.simulated
    assert summary.not_measured[0].startswith("Everything")


def test_what_was_not_measured_afterwards_has_its_command(simulated_run: Path) -> None:
    told = summarise(load(simulated_run))
    assert (told.waterfall, told.scaling) == (None, None)
    for command in ("autotune waterfall", "autotune scale"):
        assert any(command in line for line in told.not_measured)


def test_every_exporter_is_asked(summary: Summary) -> None:
    assert len(summary.exports) == 7
    plain = next(one for one in summary.exports if one.to == "plain")
    assert "micro_batch_size:" in plain.files["autotune-best.yaml"]
    assert all(bool(one.files) != bool(one.problem) for one in summary.exports)


def test_summary_json_is_json_with_null_for_what_is_no_number(run: LoadedRun) -> None:
    odd = replace(run.attempts[0], row=run.attempts[0].row | {"drift": math.nan})
    told = summarise(replace(run, attempts=[odd, *run.attempts[1:]])).to_json()

    def refuse(name: str) -> None:
        raise AssertionError(name)

    content = json.loads(told, parse_constant=refuse)
    assert content["summary_version"] == SUMMARY_VERSION
    assert content["trials"][0]["drift"] is None
    assert list(content)[:3] == ["summary_version", "run", "headline"]


def test_the_cost_is_that_of_the_cost_command(run: LoadedRun) -> None:
    asked = Assumptions(tokens=1e12, num_gpus=512, price_per_hour=2.5)
    told = summarise(run, asked)
    assert run.best is not None
    assert told.cost == training_cost(run.best, run.rows, asked)
    with pytest.raises(UserError, match="--price"):
        summarise(run, replace(asked, price_per_hour=0.0))


def test_a_run_that_has_not_ended_says_so(copy: Path) -> None:
    path = copy / "best.yaml"
    content = yaml.safe_load(path.read_text()) | {"complete": False, "gain": None, "verdict": "not yet"}
    path.write_text(yaml.safe_dump(content))
    stopped = summarise(load(copy)).headline
    assert (stopped.complete, stopped.is_going, stopped.kind) == (False, False, "unfinished")
    assert any('job.yaml --resume --simulate "nodes=8 gpus=8' in note for note in stopped.notes)
    with sole_driver(copy):
        going = summarise(load(copy)).headline
    assert going.is_going
    assert any("still going" in note for note in going.notes)


def test_a_run_without_a_winner_or_with_one_trial_has_no_figures_that_nobody_measured(copy: Path) -> None:
    for path in sorted((copy / "history").glob("*.parquet"))[1:]:
        path.unlink()
    (copy / "best.yaml").unlink()
    told = summarise(load(copy))
    assert told.headline.kind == "none"
    assert (len(told.trials), told.configs, told.exports, told.waterfall) == (1, [], [], None)
    assert told.pareto_trials == [0]
    assert not told.importance.shares
    assert "too few" in told.importance.why_none
    assert told.slices == []
    with pytest.raises(UserError, match="no cost"):
        summarise(load(copy), Assumptions(tokens=1e12, num_gpus=8))


def test_a_baseline_that_is_kept_is_the_only_config(copy: Path) -> None:
    path = copy / "best.yaml"
    content = yaml.safe_load(path.read_text())
    content |= {"settings": content["baseline"]["settings"], "fallback": None, "gain": None, "verdict": "keep it"}
    path.write_text(yaml.safe_dump(content))
    told = summarise(load(copy))
    assert told.headline.kind == "keep"
    assert [config.role for config in told.configs] == ["baseline"]
    assert not any("autotune waterfall" in line for line in told.not_measured)


def test_a_win_that_did_not_hold_on_the_real_ranks_is_said_at_the_top(copy: Path) -> None:
    path = copy / "best.yaml"
    content = yaml.safe_load(path.read_text())
    held = {"held": "baseline", "why": "best: oom_device in trial 30", "at": "now", "world_size": 512}
    rates = dict.fromkeys(("tokens_per_s_per_rank", "tokens_per_s_per_rank_low", "tokens_per_s_per_rank_high"))
    content["confirmed"] = held | rates | {"settings": content["baseline"]["settings"]}
    path.write_text(yaml.safe_dump(content))
    told = summarise(load(copy))
    assert any(
        "512 ranks the baseline held, and not the best: best: oom_device" in note for note in told.headline.notes
    )
    content["confirmed"] |= {"held": "best", "settings": content["settings"]}
    path.write_text(yaml.safe_dump(content))
    assert not any(" held" in note for note in summarise(load(copy)).headline.notes)


def test_a_job_that_was_scaled_alone_is_no_run_to_go_on_with(copy: Path) -> None:
    history = History(copy / "history")
    first = history.rows()[0][0]
    for path in (copy / "history").iterdir():
        path.unlink()
    (copy / "best.yaml").unlink()
    for number, (size, sequences) in enumerate(((16, 32), (64, 8), (16, 32), (64, 8))):
        knobs = first["knobs"] | {"grad_accum_steps": sequences}
        of_scale = {"stage": "scale", "role": "baseline", "round": number // 2, "world_size": size, "knobs": knobs}
        history.append(first | of_scale | {"trial": number, "hosts": ["host"] * size})
    told = summarise(load(copy))
    assert (told.headline.kind, told.headline.sentence) == ("none", NOTHING_TUNED)
    assert not any("--resume" in note for note in told.headline.notes)
    assert told.scaling is not None
    assert [point.world_size for point in told.scaling.points if not point.is_predicted] == [16, 64]
    assert {one.world_size for one in comparable(told.trials)} == {64}, "figures compare on the most ranks"
    assert "nothing was tuned" in brief_lines(Path("runs/mine"), None, history.rows()[0])[0]


def test_null_fields_of_an_older_history_are_left_out(copy: Path) -> None:
    rows, _ = History(copy / "history").rows()
    parts = next(row["rank_breakdowns"] for row in rows if row["rank_breakdowns"])
    rewrite(copy, rank_breakdowns=[parts[0] | dict.fromkeys(parts[0]), *parts[1:]])
    told = summarise(load(copy))
    assert told.rank_times
    assert told.step_parts
    assert all((rank.work_s is None) == (rank.rank == 0) for one in told.rank_times for rank in one.ranks)
    rewrite(copy, rank_step_times_s=[[1.0, None]] * 64)
    assert summarise(load(copy)).rank_times == []


def test_without_a_peak_there_is_no_mfu_and_it_is_said(copy: Path) -> None:
    rewrite(copy, mfu=None, mfu_causal=None, hfu=None, peak_tflops_per_s=None)
    path = copy / "study.yaml"
    study = yaml.safe_load(path.read_text())
    study["peak"] = {"tflops_per_s": None, "dtype": "bf16", "source": "unknown device X"}
    path.write_text(yaml.safe_dump(study))
    told = summarise(load(copy))
    assert all(one.mfu is None and one.predicted_mfu is None for one in told.trials)
    assert any("unknown device X" in line for line in told.not_measured)


def test_what_is_alike_but_for_its_numbers_is_one_cause(run: LoadedRun) -> None:
    rows = [
        replace(one, outcome=type(one.outcome).CRASHED, reason=f"rank {number} exited with code 1: at 0x{number}")
        for number, one in enumerate(run.attempts[1:4])
    ]
    told = summarise(replace(run, attempts=[run.attempts[0], *rows]))
    assert [(one.outcome, one.num_attempts) for one in told.failures] == [("crashed", 3)]
    assert told.failures[0].trials == [one.trial for one in rows]


def test_five_thousand_trials_are_all_told(run: LoadedRun) -> None:
    told = summarise(with_trials(run, 5000))
    assert len(told.trials) == len(run.attempts) + 5000
    assert told.importance.num_measured == MOST_RECKONED
    assert sum(value.num_measured for value in told.slices[0].values) > 4000


def test_the_history_tells_how_far_it_is(simulated_run: Path) -> None:
    told: list[tuple[int, int]] = []
    rows, _ = History(simulated_run / "history").rows(told=lambda done, of: told.append((done, of)))
    assert told == [(number, len(rows)) for number in range(1, len(rows) + 1)]
