"""Scaling efficiencies out of rows: by their definitions, with what is missing, and what is predicted apart."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import UserError
from autotune.history import History
from autotune.preflight.shape import of_model
from autotune.report.text import json_safe
from autotune.scaling.measuring import targets
from autotune.scaling.points import Scaling, scaling
from autotune.scaling.predicted import extrapolated
from autotune.scaling.rounds import rounds
from autotune.scaling.subject import contenders_of, outline
from tests.unit.conftest import make_job, make_space
from tests.unit.test_simulated_run import autotune
from trials.record import Knobs

SEQ_LEN, BATCH, TARGET = 256, 16, 4
BASE = make_space().baseline.to_dict()


def row(
    role: str, world_size: int, per_rank: int, number: int, step_s: float, outcome: str = "ok", trial: int = 0
) -> dict[str, Any]:
    """Of `per_rank` sequences a step and rank."""
    ok = outcome == "ok"
    return {
        "stage": "scale",
        "trial": trial,
        "role": role,
        "world_size": world_size,
        "round": number,
        "outcome": outcome,
        "knobs": BASE | {"micro_batch_size": 1, "grad_accum_steps": per_rank},
        "tokens_per_s_per_rank": per_rank * SEQ_LEN / step_s if ok else None,
        "step_time_s": step_s if ok else None,
        "mfu": per_rank / step_s * 1e-3 if ok else None,
        "frac_exposed_comm": 0.1 * world_size if ok else None,
        "simulated": False,
    }


def measured(
    strong_s: dict[int, float], weak_s: dict[int, float], role: str = "best", noise: float = 0.0
) -> list[dict[str, Any]]:
    rng = random.Random(0)
    rows = []
    for number in range(3):
        drift = 1 + 0.2 * number
        for sizes, batch in ((strong_s, lambda n: BATCH // n), (weak_s, lambda n: BATCH // TARGET)):
            for world_size, step_s in sizes.items():
                rows.append(
                    row(role, world_size, batch(world_size), number, step_s * drift * (1 + rng.gauss(0, noise)))
                )
    return rows


def found(rows: list[dict[str, Any]]) -> Scaling:
    made = scaling(rows, BATCH, TARGET)
    assert made is not None
    json.loads(json.dumps(json_safe(made.to_dict())))
    return made


def efficiency(made: Scaling, mode: str, world_size: int) -> float:
    (point,) = (p for p in made.points if (p.mode, p.world_size) == (mode, world_size))
    assert point.efficiency is not None
    return point.efficiency.value


@pytest.mark.parametrize("seed", range(10))
def test_strong_is_t1_over_n_tn_and_weak_is_t1_over_tn_whatever_drifts(seed: int) -> None:
    rng = random.Random(seed)
    strong, weak = ({n: rng.uniform(1, 9) for n in (1, 2, 8)} for _ in range(2))
    made = found(measured(strong, weak))
    for n in (1, 2, 8):
        assert efficiency(made, "strong", n) == pytest.approx(strong[1] / (n * strong[n]), rel=1e-9)
        assert efficiency(made, "weak", n) == pytest.approx(weak[1] / weak[n], rel=1e-9)
    for point in made.points:
        assert point.step_time_s is not None and point.exposed_comm_share is not None
        assert point.exposed_comm_s == pytest.approx(point.exposed_comm_share * point.step_time_s.value)
        assert point.global_batch_size == (BATCH if point.mode == "strong" else 4 * point.world_size)


def test_perfect_scaling_is_one_and_a_point_of_both_modes_is_in_both() -> None:
    made = found(measured({1: 16.0, 2: 8.0, 4: 4.0}, {1: 4.0, 2: 4.0}))
    modes = [(point.mode, point.world_size) for point in made.points]
    assert modes == [("strong", 1), ("strong", 2), ("strong", 4), ("weak", 1), ("weak", 2), ("weak", 4)]
    assert all(point.efficiency and point.efficiency.value == pytest.approx(1) for point in made.points)


def test_a_mode_that_was_not_measured_has_no_points() -> None:
    made = found(measured({1: 16.0, 2: 8.0, 4: 4.0}, {}))
    assert {point.mode for point in made.points} == {"strong"}
    assert scaling([], BATCH, TARGET) is None


def test_what_does_not_fit_on_few_ranks_is_a_missing_point_and_the_next_is_the_reference() -> None:
    rows = [one for one in measured({1: 16.0, 2: 8.0, 8: 4.0}, {}) if one["world_size"] > 1]
    rows.append(row("best", 1, BATCH, 0, 0.0, outcome="oom_device", trial=7))
    made = found(rows)
    first = made.points[0]
    assert (first.world_size, first.efficiency, first.problem) == (1, None, "oom_device in trial 7")
    assert efficiency(made, "strong", 2) == 1.0
    assert efficiency(made, "strong", 8) == pytest.approx(2 * 8.0 / (8 * 4.0))


def test_the_interval_covers_and_configs_are_ranked_on_the_most_ranks() -> None:
    rows = measured({1: 16.0, 2: 9.0}, {}, noise=0.01) + measured({1: 8.0, 2: 6.0}, {}, "baseline", noise=0.01)
    rows += [row("fallback", 2, 8, number, 7.0 * (1 + 0.2 * number)) for number in range(3)]
    made = found(rows)
    assert [ranked.role for ranked in made.ranking] == ["baseline", "fallback", "best"]
    assert made.ranking[1].ratio_to_first.value == pytest.approx(6 / 7, rel=0.03)
    assert (made.ranked_world_size, made.ranked_mode) == (2, "strong")
    (two,) = (p for p in made.points if (p.role, p.world_size) == ("best", 2))
    assert two.efficiency and two.efficiency.low and two.efficiency.high
    assert two.efficiency.low < 16 / 18 < two.efficiency.high


# --- what is measured, and what is predicted --------------------------------------------------------------------------


def test_each_mode_keeps_what_it_says_and_others_than_best_and_baseline_run_on_the_most_ranks() -> None:
    job = make_job(batch={"global_batch_size": 16, "target_world_size": 4}, baseline={"micro_batch_size": 2})
    contenders = {"best": outline(job), "baseline": outline(job), "fallback": outline(job)}
    made = targets(job, contenders, (1, 2, 4), ("strong", "weak"))
    assert [(one.world_size, one.mode) for one in made] == [
        (1, "strong"),
        (1, "weak"),
        (2, "strong"),
        (2, "weak"),
        (4, "strong"),
    ]
    for one in made:
        knobs = one.contenders["best"]
        batch = knobs.micro_batch_size * knobs.grad_accum_steps * one.world_size
        assert batch == (16 if one.mode == "strong" else 4 * one.world_size) == one.job.global_batch_size
        assert one.job.cluster.world_size == one.world_size
        assert ("fallback" in one.contenders) == (one.world_size == 4)


def test_ranks_that_nothing_divides_over_are_refused_and_a_config_that_does_not_is_said() -> None:
    job = make_job()
    with pytest.raises(UserError, match="--ranks 3: a global batch of 16"):
        targets(job, {"baseline": outline(job)}, (1, 3), ("strong",))
    wide = Knobs.from_dict(BASE | {"micro_batch_size": 8, "grad_accum_steps": 1})
    narrow = Knobs.from_dict(BASE | {"micro_batch_size": 1, "grad_accum_steps": 8})
    made = targets(job, {"best": wide, "baseline": narrow}, (1, 8), ("strong",))
    assert set(made[1].contenders) == {"baseline"}
    assert "does not divide over 8" in made[1].problems["best"]


def test_each_config_of_a_run_has_one_role() -> None:
    other = BASE | {"activation_checkpointing": "none"}
    third = BASE | {"activation_checkpointing": "every_2"}
    content = {"settings": other, "baseline": {"settings": BASE}, "fallback": {"settings": third}}
    finalists = [
        {"stage": "finalist", "outcome": "ok", "trial": 5 + n, "knobs": k} for n, k in enumerate([other, BASE])
    ]
    assert set(contenders_of(content, finalists)) == {"best", "baseline", "fallback"}
    kept = content | {"settings": BASE, "fallback": None}
    assert set(contenders_of(kept, finalists)) == {"baseline", "finalist-5"}


def test_the_role_is_that_of_the_config_now_and_an_earlier_best_is_left_out() -> None:
    """A run that is resumed after its scaling may find another best; the finalist that it was has been measured."""
    earlier = BASE | {"activation_checkpointing": "none"}
    later = BASE | {"activation_checkpointing": "every_2"}
    rows = []
    for number in range(3):
        for n in (1, 2):
            for role, settings, step_s in (("best", earlier, 1.0), ("finalist-7", later, 2.0), ("baseline", BASE, 4.0)):
                one = row(role, n, BATCH // n, number, step_s / n)
                rows.append(one | {"knobs": settings | {"micro_batch_size": 1, "grad_accum_steps": BATCH // n}})
    now = {"best": later, "baseline": BASE}
    contenders = {role: Knobs.from_dict(one | {"micro_batch_size": 1}) for role, one in now.items()}
    made = scaling(rows, BATCH, TARGET, contenders)
    assert made is not None
    assert {point.role: point.num_runs for point in made.points} == {"best": 3, "baseline": 3}
    (best,) = (p for p in made.points if (p.role, p.world_size) == ("best", 1))
    assert best.step_time_s is not None
    assert best.step_time_s.value == pytest.approx(2.0)


def test_what_the_ranks_decide_makes_no_other_config() -> None:
    """One rank shards nothing, and one micro-step holds nothing back: the spelling of the config says so."""
    held = Knobs.from_dict(BASE | {"micro_batch_size": 1, "grad_accum_steps": 4, "sync_each_micro_batch": False})
    alone = row("best", 1, 4, 0, 4.0)
    alone["knobs"] |= {"reshard_after_forward": False, "sync_each_micro_batch": False}
    wide = row("best", 4, 1, 0, 1.0)
    wide["knobs"] |= {"sync_each_micro_batch": True}
    made = scaling([alone, wide], 4, TARGET, {"best": held})
    assert made is not None
    assert [(point.role, point.world_size) for point in made.points] == [("best", 1), ("best", 4)]


def test_a_run_named_by_a_dot_is_scaled_on_a_modelled_cluster_beside_it(
    simulated_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(shutil.copytree(simulated_run, tmp_path / "run"))
    study = yaml.safe_load((run / "study.yaml").read_text())
    cluster = study.pop("simulated")
    (run / "study.yaml").write_text(yaml.safe_dump(study))  # as of a real one
    monkeypatch.chdir(run)
    autotune("scale", ".", "--ranks", "64", "--repeats", "2", "--simulate", cluster)
    assert {row["stage"] for row in History(tmp_path / "run-scale" / "history").rows()[0]} == {"scale"}


def test_a_prediction_starts_from_what_was_measured_and_stands_apart() -> None:

    job = make_job(batch={"global_batch_size": 64, "target_world_size": 16})
    knobs = {"micro_batch_size": 1}
    rows = []
    for number in range(3):
        for n in (1, 2):
            one = row("best", n, 64 // n, number, 64.0 / n)
            one["knobs"] |= knobs
            rows.append(one)
    made = scaling(rows, 64, 16)
    assert made is not None
    ahead = extrapolated(made, job, of_model(job.model), "cpu", "a CPU", 0.1)
    (point,) = (p for p in ahead.points if p.is_predicted)
    assert (point.world_size, point.mode, point.num_runs) == (16, "strong", 0)
    assert point.settings["grad_accum_steps"] == 4
    assert point.step_time_s and point.step_time_s.low and point.step_time_s.high
    assert point.step_time_s.low <= point.step_time_s.value <= point.step_time_s.high
    assert 64 / 16 * 0.5 < point.step_time_s.value < 64 / 16 * 2
    assert ahead.points[:-1] == made.points
    unknown = extrapolated(made, job, None, "cpu", "a CPU", 0.1)
    assert unknown.points == made.points and unknown.prediction_problem


def test_a_point_that_left_too_little_memory_free_says_so() -> None:
    rows = measured({1: 4.0, 2: 2.0, 4: 1.0}, {})
    for trial, one in enumerate(rows):
        one["trial"] = trial
    full = [one["trial"] for one in rows if one["world_size"] == 1][:2]
    made = scaling(rows, BATCH, TARGET, not_fitting=full)
    assert made is not None
    said = {point.world_size: point.notes() for point in made.points}
    assert said[2] == said[4] == []
    assert "best, strong, on 1 rank: 2 of 3 runs left less memory free" in said[1][0]


def places(*sizes: int) -> set[tuple[int, int]]:
    return {(size, BATCH) for size in sizes}


def test_an_interrupted_scaling_goes_on_and_a_larger_one_is_measured_whole() -> None:
    rows = measured({1: 4.0, 2: 2.0}, {})
    assert rounds([], places(1, 2), 3) == [0, 1, 2]
    assert rounds(rows, places(1, 2), 3) == [0, 1, 2], "all is there"
    assert rounds(rows, places(1, 2), 5) == [0, 1, 2, 3, 4], "two more"
    assert rounds(rows, places(2), 2) == [0, 1], "fewer are among them"
    assert rounds(rows[:-1], places(1, 2), 3) == [0, 1, 2], "the last round was interrupted"
    assert rounds(rows[:1], places(1, 2), 3) == [0, 1, 2], "the first was"
    assert rounds(rows, places(1, 2, 4), 3) == [3, 4, 5], "four ranks beside one and two"
    both = rows + [one | {"round": one["round"] + 3} for one in measured({1: 4.0, 2: 2.0, 4: 1.0}, {})]
    assert rounds(both, places(1, 2, 4), 3) == [3, 4, 5]
    begun = [one for one in both if one["round"] < 3] + [one for one in both if one["round"] == 3][-1:]
    assert rounds(begun, places(1, 2, 4), 3) == [3, 4, 5], "it was interrupted in its first round"


def test_what_failed_on_some_ranks_makes_no_new_rounds() -> None:
    rows = measured({2: 2.0, 4: 1.0}, {})
    rows.append(row("best", 1, BATCH, 0, 0.0, outcome="oom_device"))
    assert rounds(rows, places(1, 2, 4), 3) == [0, 1, 2]


@given(st.integers(2, 5), st.lists(st.booleans(), min_size=15, max_size=15), st.integers(2, 6))
def test_rounds_are_as_many_as_asked_and_each_once(num_rounds: int, kept: list[bool], repeats: int) -> None:
    whole = [row("best", size, BATCH // size, number, 1.0) for number in range(num_rounds) for size in (1, 2, 4)]
    rows = [one for one, keep in zip(whole, kept, strict=False) if keep]
    found = rounds(rows, places(1, 2, 4), repeats)
    assert len(found) == len(set(found)) == repeats
