"""What holds for every exporter, whatever the settings."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.export import EXPORTERS, Best, Exported, export
from autotune.export.base import unchecked
from autotune.export.lines import SCRIPTED
from trials.record import BACKWARD_PREFETCH, ENGINES, KNOB_NAMES, Knobs

from .conftest import settings

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
# Steps that have no factor in common with the product's, so that each value of a knob meets most of the others'.
KNOBS = FSDP2_KNOBS[::3] + [
    replace(
        knobs, engine="fsdp1", limit_all_gathers=limit, backward_prefetch=backward, forward_prefetch=backward != "pre"
    )
    for limit in (True, False)
    for knobs, backward in zip(FSDP2_KNOBS[::5], itertools.cycle(BACKWARD_PREFETCH), strict=False)
]
DDP_KNOBS = [
    replace(knobs, engine="ddp", bucket_cap_mb=cap)
    for knobs, cap in zip(FSDP2_KNOBS[::7], itertools.cycle((25.0, 12.5)), strict=False)
]
RARE_KNOBS = [
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
        {"reduce_dtype": "bf16"},
    )
]
KNOBS += DDP_KNOBS + RARE_KNOBS
EACH_ENGINE = [(to, engine) for to, exporter in EXPORTERS.items() for engine in exporter.engines]


def settings_for(to: str) -> list[Knobs]:
    """Those that the trainer can be handed."""
    return [knobs for knobs in KNOBS if knobs.engine in EXPORTERS[to].engines]


def comments(name: str, text: str) -> list[str]:
    """A file's comments, without their signs. JSON has none, so there they are one key."""
    if name.endswith(".json"):
        return [line for line in json.loads(text)["_comment"] if line]
    return [line.lstrip("# ") if line == "#" else line[2:] for line in text.splitlines() if line.startswith("#")]


def said(files: dict[str, str]) -> set[str]:
    """What the files say to the trainer, apart from comments."""
    found = set()
    for name, text in files.items():
        bare = json.dumps(json.loads(text) | {"_comment": []}) if name.endswith(".json") else text
        found.add("\n".join(line for line in bare.splitlines() if not line.lstrip().startswith("#")))
    return found


@pytest.mark.parametrize("to", EXPORTERS)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_every_knob_is_carried_or_named_in_a_comment(to: str, precision: str, best: Best) -> None:
    for knobs in settings_for(to):
        exported = export(to, replace(best, knobs=knobs, precision=precision))
        lines = [line for name, text in exported.files.items() for line in comments(name, text)]
        assert not set(exported.carried) & set(exported.lost)
        assert {*exported.carried, *exported.lost} == set(KNOB_NAMES)
        for name, need in exported.lost.items():
            assert f"- {name}: {need}" in lines
            assert len(need) > 20 and need.endswith((".", ".)"))
        for note in exported.notes:
            assert f"- {note}" in lines


def changes(knobs: Knobs) -> dict[str, Any]:
    """For each knob a value other than that in `knobs`, which the engine has and which has an effect."""
    found: dict[str, Any] = {
        "micro_batch_size": 4,
        "grad_accum_steps": 3,
        "sync_each_micro_batch": not knobs.sync_each_micro_batch,
        "bucket_cap_mb": 50.0,
        "num_workers": 7,
        "prefetch_factor": 9,
        "compile": True,
        "attention_backend": "math",
        "fused_optimizer": True,
    }
    found |= {f"activation_checkpointing {mode}": mode for mode in ("none", "every_5", "selective_op")}
    if knobs.engine != "ddp":
        found |= {"reshard_after_forward": not knobs.reshard_after_forward, "blocks_per_unit": 3}
        found |= {"replicate_degree": 4, "reduce_dtype": "bf16"}
    if knobs.engine == "fsdp2":
        found |= {"keep_last_units": 1, "reshard_group_size": 2, "forward_prefetch_units": 2}
        found |= {"backward_prefetch_units": 2, "cpu_offload": True}
    if knobs.engine == "fsdp1":
        found |= {"limit_all_gathers": True, "backward_prefetch": "pre", "forward_prefetch": False}
    return found


@pytest.mark.parametrize(("to", "engine"), EACH_ENGINE)
def test_what_is_called_carried_is_in_a_file(to: str, engine: str, best: Best) -> None:
    """Two values of a knob that are both carried cannot make the same files."""
    best = settings(best, engine)
    before = export(to, best)
    for label, value in changes(best.knobs).items():
        name = label.split()[0]
        after = export(to, replace(best, knobs=replace(best.knobs, **{name: value})))
        if name in before.carried and name in after.carried:
            grouped_by_cap = name in ("bucket_cap_mb", "blocks_per_unit") and engine != "ddp"
            assert said(before.files) != said(after.files) or grouped_by_cap, name


@pytest.mark.parametrize(("to", "engine"), EACH_ENGINE)
def test_what_a_trainer_decides_is_carried_as_it_decides_it(to: str, engine: str, best: Best) -> None:
    """Nothing has to be written for what export_for pins a knob to; another value is lost, or needs a key."""
    best = settings(best, engine)
    for name, kept in EXPORTERS[to].fixed(engine).items():
        for value in kept:
            exported = export(to, replace(best, knobs=replace(best.knobs, **{name: value})))
            assert name in exported.carried, (name, value)
        other = {"sync_each_micro_batch": True not in kept, "activation_checkpointing": "every_7"}.get(name, 2)
        assert other not in kept
        otherwise = export(to, replace(best, knobs=replace(best.knobs, **{name: other})))
        assert name in otherwise.lost or said(otherwise.files) != said(exported.files)


@pytest.mark.parametrize("to", [to for to, exporter in EXPORTERS.items() if exporter.bf16_reduces_in])
def test_the_dtype_that_a_trainer_reduces_in_is_lost_where_another_was_measured(to: str, best: Best) -> None:
    own = EXPORTERS[to].bf16_reduces_in
    for engine in set(EXPORTERS[to].engines) - {"ddp"}:
        for dtype in ("fp32", "bf16"):
            knobs = replace(settings(best, engine).knobs, reduce_dtype=dtype)
            assert ("reduce_dtype" in export(to, replace(best, knobs=knobs)).lost) is (dtype != own)


@pytest.mark.parametrize("to", EXPORTERS)
def test_a_knob_that_few_trainers_have_is_in_a_file_or_lost_with_its_line(to: str, best: Best) -> None:
    plain = export(to, replace(best, knobs=replace(RARE_KNOBS[0], keep_last_units=0)))
    assert not set(plain.lost) & set(SCRIPTED)
    for knobs in RARE_KNOBS[: len(SCRIPTED)]:
        (name,) = (name for name in SCRIPTED if getattr(knobs, name) != getattr(FSDP2_KNOBS[-1], name))
        exported = export(to, replace(best, knobs=knobs))
        assert name in exported.lost or said(exported.files) != said(plain.files)


@pytest.mark.parametrize("to", EXPORTERS)
def test_figures_versions_and_product_head_every_file(to: str, best: Best) -> None:
    for name, text in export(to, best).files.items():
        head = comments(name, text)
        assert "fsdp-autotune" in head[0]
        assert "16 ranks, bf16" in head[1]
        assert best.evidence == head[2:4]
        for package, series in EXPORTERS[to].checked.items():
            assert f"{package} {series}" in head[4]


@pytest.mark.parametrize("to", EXPORTERS)
def test_another_version_of_the_trainer_is_warned_of(to: str, best: Best, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = EXPORTERS[to].checked
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"{checked[name]}1.7")  # 0.31.7 is not of 0.3
    assert len(EXPORTERS[to].warnings) == len(checked)
    for name, text in export(to, best).files.items():
        for package, series in checked.items():
            (line,) = [line for line in comments(name, text) if line.startswith(f"WARNING: {package} ")]
            assert f"{package} {series}1.7 is installed here" in line and f"checked with {series} only" in line
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"{checked[name]}.0+cpu")
    assert EXPORTERS[to].warnings == ()


def test_a_trainer_that_is_not_installed_is_not_warned_of() -> None:
    assert unchecked({"no-such-distribution": "1.0"}) == ()


@pytest.mark.parametrize("to", EXPORTERS)
def test_evidence_cannot_leave_its_comment(to: str, best: Best) -> None:
    for name, text in export(to, replace(best, evidence=["one\ntwo: 2\r\nthree"])).files.items():
        assert comments(name, text)[2:5] == ["one", "two: 2", "three"]


@pytest.mark.parametrize(("to", "engine"), EACH_ENGINE)
def test_golden_files(to: str, engine: str, best: Best) -> None:
    """After a wanted change: UPDATE_GOLDEN=1 pytest tests/export, and read the difference."""
    files = export(to, settings(best, engine)).files
    folder = GOLDEN / (to if engine == "fsdp2" else f"{to}-{engine}")
    if os.environ.get("UPDATE_GOLDEN"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    assert {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.*")} == files


@pytest.mark.parametrize("to", EXPORTERS)
def test_a_length_that_only_the_users_trainer_knows_is_no_setting(to: str, best: Best) -> None:
    with_it, without = (export(to, one).files for one in (best, replace(best, seq_len=None)))
    assert with_it.keys() == without.keys()
    for name, text in without.items():
        new = set(text.splitlines()) - set(with_it[name].splitlines())
        assert all("sequences per optimizer step" in line for line in new), "the header, which gave the tokens of it"
        assert "2048" not in text


def test_an_unknown_trainer_is_answered_with_the_nearest(best: Best) -> None:
    with pytest.raises(UserError, match=r"'acelerate': no such trainer\n.*did you mean accelerate\?"):
        export("acelerate", best)
    with pytest.raises(UserError, match="known: accelerate, axolotl, deepspeed"):
        export("nothing like it", best)


@pytest.mark.parametrize("to", EXPORTERS)
def test_settings_that_a_trainer_cannot_express_are_refused_with_those_that_can(to: str, best: Best) -> None:
    for engine in set(ENGINES) - set(EXPORTERS[to].engines):
        with pytest.raises(
            UserError, match=f"for {engine}, which {to} has not; .*\n.*export them to plain or "
        ) as error:
            export(to, settings(best, engine))
        assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("carried", "lost"),
    [(KNOB_NAMES[1:], {}), (KNOB_NAMES, {KNOB_NAMES[0]: "twice"})],
    ids=["neither", "both"],
)
def test_an_exporter_that_forgets_a_knob_is_caught(carried: tuple[str, ...], lost: dict[str, str]) -> None:
    with pytest.raises(AssertionError, match="part the knobs"):
        Exported(files={}, carried=carried, lost=lost)
