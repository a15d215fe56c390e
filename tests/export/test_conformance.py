"""What holds for every exporter, whatever the settings."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.export import ENGINES, EXPORTERS, Best, Exported, export
from autotune.export.lines import SCRIPTED
from trials.record import BACKWARD_PREFETCH, KNOB_NAMES, Knobs

from .conftest import fsdp1

GOLDEN = Path(__file__).parent / "golden"

FSDP2_KNOBS = [
    Knobs(
        micro_batch_size=micro,
        grad_accum_steps=accumulation,
        sync_each_micro_batch=sync,
        reshard_after_forward=reshard,
        bucket_cap_mb=1.25 * blocks,
        blocks_per_unit=blocks,
        activation_checkpointing=checkpointing,
        num_workers=workers,
        prefetch_factor=2 if workers else None,
    )
    for micro, accumulation, sync, reshard, blocks, checkpointing, workers in itertools.product(
        (1, 8),
        (1, 2),
        (False, True),
        (False, True),
        (1, 2),
        ("none", "full", "every_3", "selective_op"),
        (0, 4),
    )
]
KNOBS = FSDP2_KNOBS + [
    replace(
        knobs, engine="fsdp1", limit_all_gathers=limit, backward_prefetch=backward, forward_prefetch=backward != "pre"
    )
    for limit in (True, False)
    for knobs, backward in zip(FSDP2_KNOBS, itertools.cycle(BACKWARD_PREFETCH), strict=False)
]
KNOBS += [
    replace(FSDP2_KNOBS[-1], reshard_after_forward=True, **change)  # type: ignore[arg-type]
    for change in (
        {"keep_last_units": 2},
        {"reshard_group_size": 8},
        {"forward_prefetch_units": 2},
        {"backward_prefetch_units": 3},
        {"replicate_degree": 2},
        {"cpu_offload": True},
        {"compile": True},
        {"attention_backend": "cudnn"},
        {"fused_optimizer": True},
    )
]


@pytest.mark.parametrize("to", EXPORTERS)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_every_knob_is_carried_or_named_in_a_comment(to: str, precision: str, best: Best) -> None:
    for knobs in KNOBS:
        exported = export(to, replace(best, knobs=knobs, precision=precision))
        comments = [line.lstrip() for text in exported.files.values() for line in text.splitlines() if "#" in line]
        assert not set(exported.carried) & set(exported.lost)
        assert {*exported.carried, *exported.lost} == set(KNOB_NAMES)
        for name, need in exported.lost.items():
            assert f"# - {name}: {need}" in comments
        for note in exported.notes:
            assert f"# - {note}" in comments


@pytest.mark.parametrize("to", EXPORTERS)
def test_a_knob_that_no_file_carries_is_lost_with_its_line_only_where_it_is_set(to: str, best: Best) -> None:
    assert not set(export(to, best).lost) & set(SCRIPTED)
    for knobs in KNOBS[-len(SCRIPTED) :]:
        (name,) = (name for name in SCRIPTED if getattr(knobs, name) != getattr(FSDP2_KNOBS[-1], name))
        assert name in export(to, replace(best, knobs=knobs)).lost


@pytest.mark.parametrize("to", EXPORTERS)
def test_evidence_and_product_head_every_file(to: str, best: Best) -> None:
    for text in export(to, best).files.values():
        head = [line for line in text.splitlines() if line.startswith("#")]
        assert "fsdp-autotune" in head[0]
        assert [f"# {line}" for line in best.evidence] == head[2:4]


@pytest.mark.parametrize("to", EXPORTERS)
def test_evidence_cannot_leave_its_comment(to: str, best: Best) -> None:
    for text in export(to, replace(best, evidence=["one\ntwo: 2\r\nthree"])).files.values():
        assert "# one\n# two: 2\n# three\n" in text


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("to", EXPORTERS)
def test_golden_files(to: str, engine: str, best: Best) -> None:
    """After a wanted change: UPDATE_GOLDEN=1 pytest tests/export, and read the difference."""
    files = export(to, best if engine == "fsdp2" else fsdp1(best)).files
    folder = GOLDEN / (to if engine == "fsdp2" else f"{to}-{engine}")
    if os.environ.get("UPDATE_GOLDEN"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    assert {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.*")} == files


def test_an_unknown_trainer_is_answered_with_the_nearest(best: Best) -> None:
    with pytest.raises(UserError, match=r"'acelerate': no such trainer\n.*did you mean accelerate\?"):
        export("acelerate", best)
    with pytest.raises(UserError, match="known: accelerate, plain, transformers"):
        export("nothing like it", best)


def test_settings_of_another_engine_are_refused(best: Best) -> None:
    with pytest.raises(UserError, match="engine 'ddp'"):
        export("plain", replace(best, knobs=replace(best.knobs, engine="ddp")))


@pytest.mark.parametrize(
    ("carried", "lost"),
    [(KNOB_NAMES[1:], {}), (KNOB_NAMES, {KNOB_NAMES[0]: "twice"})],
    ids=["neither", "both"],
)
def test_an_exporter_that_forgets_a_knob_is_caught(carried: tuple[str, ...], lost: dict[str, str]) -> None:
    with pytest.raises(AssertionError, match="part the knobs"):
        Exported(files={}, carried=carried, lost=lost)
