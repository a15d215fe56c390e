"""What a resumed run takes from its folder, and what in it is skipped with a line: torn, foreign, hostile."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from autotune.cluster.gang import GangResult
from autotune.errors import UserError
from autotune.hardware import Peak
from autotune.history import History
from autotune.measuring import Measurer, make_spec
from autotune.report.screen import LineScreen
from autotune.rows import Limits, ModelFacts, Study
from autotune.survey import load_survey
from tests.unit.conftest import make_job, make_space
from tests.unit.test_history import row
from trials.outcome import Outcome
from trials.record import Knobs, RankReport, TrialSpec

RUNNER: Any = SimpleNamespace(world_size=2, device="cpu", simulated="")
OK = {"reserved_gib": 0.1, "alloc_retries": 0, "hosts": ["a", "a"]}
ALSO = replace(make_space().baseline, activation_checkpointing="none")


@pytest.fixture
def measurer(tmp_path: Path) -> Measurer:
    (tmp_path / "logs").mkdir()
    study = Study(
        study_id="s",
        job=make_job(),
        model=ModelFacts(1, 1, 1.0, 1.0, "c"),
        peak=Peak(None, "fp32", "none"),
        limits=Limits("cpu", 0.25, 0.05),
        space_hash="h",
        world_size=2,
    )
    screen: LineScreen = LineScreen(SimpleNamespace())  # type: ignore[arg-type]
    return Measurer(study, tmp_path, RUNNER, screen)


def order(measurer: Measurer, trial: int, knobs: Knobs = ALSO) -> TrialSpec:
    return make_spec(measurer.study.job, RUNNER, knobs, "explore", trial)


def write_order(measurer: Measurer, trial: int, text: str) -> None:
    folder = measurer.out / "logs" / f"trial-{trial:04d}"
    folder.mkdir()
    (folder / "spec.json").write_text(text)


def test_what_was_finished_and_what_was_begun_is_taken_up(measurer: Measurer) -> None:
    History(measurer.out / "history").append(row(0, **OK))
    write_order(measurer, 1, order(measurer, 1).to_json())
    assert measurer.recall() == []
    assert measurer.begun("explore") == [make_space().baseline, ALSO]


@pytest.mark.parametrize(
    "changes",
    [
        {"outcome": "owned\x1b[31m"},
        {"outcome": None},
        {"stage": "../../etc"},
        {"trial": -1},
        {"trial": 2**31 - 1},
        {"attempt": 2**31 - 1},
        {"tokens_per_s_per_rank": math.nan},
        {"tokens_per_s_per_rank": math.inf},
        {"tokens_per_s_per_rank": 0.0},
        {"tokens_per_s_per_rank": None},
        {"reserved_gib": None},
        {"reserved_gib": -1.0},
        {"allocated_gib": math.inf},
        {"timing": "guessed"},
        {"step_time_s": math.nan},
        {"hardware_flops_per_token": math.nan},
        {"hosts": None},
        {"hosts": [None]},
        {"study_id": "another"},
        {"study_id": None},
        {"knobs": make_space().baseline.to_dict() | {"activation_checkpointing": "rm -rf"}},
        {"knobs": make_space().baseline.to_dict() | {"micro_batch_size": None}},
        {"knobs": make_space().baseline.to_dict() | {"engine": "warp"}},
    ],
    ids=str,
)
def test_a_row_that_no_run_wrote_is_a_skipped_line(measurer: Measurer, changes: dict[str, Any]) -> None:
    History(measurer.out / "history").append(row(0, **OK))
    History(measurer.out / "history").append(row(1, **OK) | {"knobs": ALSO.to_dict()} | changes)
    skipped = measurer.recall()
    assert len(skipped) == 1
    assert skipped[0].startswith("trial")  # or its file, where the number itself is none
    assert measurer.begun("explore") == [make_space().baseline]


def test_only_long_accumulation_in_the_search_is_composed(measurer: Measurer) -> None:
    job = make_job(batch={"global_batch_size": 32, "target_world_size": 2})

    def composed(stage: str, grad_accum_steps: int) -> bool:
        return make_spec(job, RUNNER, replace(ALSO, grad_accum_steps=grad_accum_steps), stage, 0).composed

    assert composed("explore", 16)
    assert not composed("explore", job.measure.compose_above)
    assert not any(composed(stage, 16) for stage in ("baseline", "finalist", "round", "measure"))


def test_trials_side_by_side_have_taken_the_time_of_one_and_trials_in_a_row_their_sum(measurer: Measurer) -> None:
    first = datetime(2026, 1, 1, tzinfo=UTC)
    for trial, (begin_s, end_s) in enumerate([(0, 60), (100, 160), (100, 150), (130, 200), (110, 120), (300, 290)]):
        times = {"started_at": first + timedelta(seconds=begin_s), "ended_at": first + timedelta(seconds=end_s)}
        History(measurer.out / "history").append(row(trial, **OK) | times)
    assert measurer.recall() == []
    assert measurer.recalled_s == 60 + 100


def changed(**changes: Any) -> Callable[[str], str]:
    return lambda text: json.dumps(json.loads(text) | changes)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:100],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace("explore", "\ud800"),
        changed(trial="../../x"),
        changed(trial=8),
        changed(knobs={"micro_batch_size": 1}),
        changed(knobs=ALSO.to_dict() | {"num_workers": "many"}),
        changed(measure=None),
        changed(round=[1]),
        changed(stage={}),
        changed(unheard_of=1),
    ],
)
def test_an_order_that_is_torn_or_not_ours_is_a_skipped_line(measurer: Measurer, damage: Callable[[str], str]) -> None:
    write_order(measurer, 7, "")
    text = damage(order(measurer, 7).to_json())
    (measurer.out / "logs" / "trial-0007" / "spec.json").write_bytes(text.encode(errors="surrogatepass"))
    write_order(measurer, 3, order(measurer, 3).to_json())
    skipped = measurer.recall()
    assert len(skipped) == 1
    assert skipped[0].startswith("trial-0007/spec.json: not an order")
    assert measurer.begun("explore") == [ALSO]


def test_no_later_trial_overwrites_what_was_skipped(measurer: Measurer) -> None:
    history = History(measurer.out / "history")
    history.append(row(0, **OK))
    (history.folder / "trial-0004-attempt-0.parquet").write_bytes(b"torn")
    write_order(measurer, 6, "torn")
    (measurer.out / "logs" / "trial-99999999999999").mkdir()
    measurer.recall()
    assert measurer._next_trial == 7


CONTENT: dict[str, Any] = {
    "study_id": "s",
    "device_name": "d",
    "world_size": 2,
    "space_hash": make_space().hash,
    "candidates": {name: list(values) for name, values in make_space().candidates.items()},
    "peak": {"tflops_per_s": None, "dtype": "fp32", "source": "none"},
    "model": {
        "num_params": 1,
        "num_matmul_params": 1,
        "num_blocks": 4,
        "block_mib": [2.8145] * 4,
        "cpus_allowed": 2,
        "num_sequences": 100,
        "data": "text",
        "flops_per_token": 1.0,
        "flops_per_token_causal": 1.0,
        "flops_convention": "c",
    },
}


def survey(folder: Path, content: Any, **sections: Any) -> Any:
    (folder / "study.yaml").write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return load_survey(make_job(**sections), RUNNER, folder)


def test_another_space_is_refused_with_the_difference(tmp_path: Path) -> None:
    assert survey(tmp_path, CONTENT).study.study_id == "s"
    with pytest.raises(UserError) as caught:
        survey(tmp_path, CONTENT, space={**make_job().space.model_dump(exclude_none=True), "prefetch_factor": [2, 8]})
    assert "the search space is another one now: prefetch_factor: [2, 4] -> [2, 8]" in str(caught.value)
    # `auto` candidates follow from the machine: the same job may make another space on another one.
    larger = CONTENT | {"model": CONTENT["model"] | {"cpus_allowed": 8}}
    with pytest.raises(UserError, match="the batch, the baseline or fsdp-autotune itself changed"):
        survey(tmp_path, larger)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "- a",
        "a: [1",
        "a: " + "[" * 5000,
        CONTENT | {"study_id": 7},
        CONTENT | {"peak": {"tflops_per_s": "fast", "dtype": "fp32", "source": "x"}},
        CONTENT | {"peak": None},
        CONTENT | {"candidates": 3},
        CONTENT | {"model": CONTENT["model"] | {"block_mib": ["a"]}},
        CONTENT | {"model": CONTENT["model"] | {"block_mib": []}},
        CONTENT | {"model": CONTENT["model"] | {"num_params": "many"}},
        CONTENT | {"model": CONTENT["model"] | {"device_memory_gib": "all"}},
        CONTENT | {"model": {}},
    ],
)
def test_a_study_that_is_not_ours_is_refused(tmp_path: Path, content: Any) -> None:
    with pytest.raises(UserError, match=r"not a study\.yaml"):
        survey(tmp_path, content)


def test_a_study_of_other_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="measured on 4 ranks, now 2"):
        survey(tmp_path, CONTENT | {"world_size": 4})


@pytest.mark.parametrize("timing", ["whole", "composed"])
def test_losses_are_compared_where_the_references_steps_are_whole(measurer: Measurer, timing: str) -> None:
    """A composed trial goes on in short steps, which see other samples: a scaling's baseline may be one."""
    measurer.reference = make_space().baseline
    losses = {"losses": [5.0, 4.0, 3.0, 3.5], "timing": timing, "step_time_s": 1.0, "step_parts_s": {"body": 1.0}}
    History(measurer.out / "history").append(row(0, **OK | losses))
    assert measurer.recall() == []
    spec = order(measurer, 1)
    assert spec.num_warmup_steps + 1 > 3, "whole steps of the one that is compared"

    def outcome(found: list[float]) -> str:
        result: Any = GangResult(Outcome.OK, "", None, {0: RankReport(rank=0, losses=found)}, ["a"], 0.0, 0.0)
        return str(measurer._compared(spec, result).outcome)

    assert outcome([5.0, 4.0, 3.0]) == "ok"
    assert outcome([5.0, 4.5, 3.0]) == "wrong_numerics"
    assert outcome([5.0, 4.0, 2.5]) == ("wrong_numerics" if timing == "whole" else "ok")
