"""Bad input that needs no rank to be found: by the command line, with message, exit code, and nothing touched.

What only a rank or a cluster can find is in tests/faults/test_bad_input.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from autotune.errors import UserError
from autotune.folder import prepare_folder, sole_driver
from autotune.history import SCHEMA, History
from autotune.job_file import load_job
from tests.unit.conftest import QUICK
from tests.unit.test_cli import autotune
from tests.unit.test_history import row


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def refused(arguments: list[str], complaint: str, folder: Path) -> None:
    """The command ends with exit code 2 and the complaint; an earlier run in its output folder stays as it was."""
    History(folder / "run" / "history").append(row(0))
    before = tree(folder)
    done = autotune(*arguments, cwd=folder)
    assert done.returncode == 2, done.stdout + done.stderr
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
    assert tree(folder) == before


def job_file(folder: Path, **sections: Any) -> None:
    (folder / "job.yaml").write_text(yaml.safe_dump(QUICK | {"output": "run"} | sections))


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"budget": {"trails": 3}}, "budget.trails: unknown key\n    hint: did you mean trials?"),
        ({"spaec": {}}, "spaec: unknown key\n    hint: did you mean space?"),
        ({"space": {"micro_batch_size": [3]}}, "space.micro_batch_size = 3: the per-rank batch is 8"),
        ({"baseline": {"micro_batch_size": 5}}, "divisors: 1, 2, 4, 8"),
        ({"batch": {"global_batch_size": 16, "target_world_size": 3}}, "nothing is rounded"),
        ({"training": {"engines": ["fsdp2"]}, "space": {"limit_all_gathers": [True]}}, "limit_all_gathers"),
        ({"space": "defualt"}, "defualt: neither a file nor a shipped space\n  hint: did you mean default?"),
        ({"space": "missing.yaml"}, "missing.yaml: no such file"),
    ],
)
def test_a_bad_key_or_value_exits_2(sections: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    job_file(tmp_path, **sections)
    refused(["run", "job.yaml"], complaint, tmp_path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"- a\n- b\n", "expected a mapping of sections, found list"),
        (b"", "expected a mapping of sections, found NoneType"),
        (b"model: \xff\xfe", "a job is a UTF-8 YAML file"),
        (b"model: [1", "not YAML"),
        (b"output: 2026-13-45\n", "not YAML: month must be in 1..12"),
    ],
)
def test_a_file_that_is_no_job_exits_2(content: bytes, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes(content)
    refused(["run", "job.yaml"], complaint, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["init", "--template", "own-modle"], "own-modle: no such template\n  hint: did you mean own-model?"),
        (["run", "own-modle"], "own-modle: neither a file nor a shipped job\n  hint: did you mean own-model?"),
        (["run", "quickstrat.yaml"], "quickstrat.yaml: no such file\n  hint: did you mean quickstart?"),
        (["run", "x" * 300], "File name too long"),
    ],
)
def test_a_name_that_is_nothing_exits_2_with_the_nearest(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    refused(arguments, complaint, tmp_path)


def test_a_job_that_cannot_be_read_exits_2(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "dangling.yaml").symlink_to("nowhere")
    refused(["run", "folder.yaml"], "Is a directory", tmp_path)
    refused(["run", "dangling.yaml"], "no such file", tmp_path)
    job_file(tmp_path)
    (tmp_path / "job.yaml").chmod(0)
    if not os.access(tmp_path / "job.yaml", os.R_OK):  # root reads everything
        done = autotune("run", "job.yaml", cwd=tmp_path)
        assert done.returncode == 2
        assert "Permission denied" in done.stderr


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: " + "[" * 5000, "not YAML"),
        ("a: " + "9" * 5000, "not YAML"),
        ("a: &a [*a]", "Circular reference"),
        ("? [a]\n: 1", "not YAML"),
        ("2026-01-01: 1", "only strings, numbers"),
    ],
)
def test_yaml_that_breaks_parsers_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(UserError, match=complaint):
        load_job(str(tmp_path / "job.yaml"))


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("batch.global_batch_size=1000000000000000", "batch.global_batch_size = 1000000000000000: should be less"),
        ("batch.global_batch_size=2000000014", "divisors: 1, "),
        ("budget.minutes=.inf", "budget.minutes = inf: should be a finite number"),
        ("cluster.memory_limit_gib=.nan", "cluster.memory_limit_gib = nan: should be a finite number"),
        ("data.source=~nobody-of-this-name/texts", "give a whole path"),
        ("model={workload: 'a:b', import_path: 5, seq_len: 8}", "model.import_path = 5"),
    ],
)
def test_values_that_are_too_much_or_not_at_all_are_refused(override: str, complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        load_job("quickstart", (override, "baseline.micro_batch_size=7"))
    assert complaint in str(caught.value)


@pytest.mark.parametrize("name", ["/", "run\0", "x" * 300])
def test_an_output_that_can_be_no_folder_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give a folder you can write to"), sole_driver(tmp_path / name):
        pytest.fail("no such folder can be")


def test_torn_and_foreign_parquet_files_are_told_and_the_rest_is_shown(tmp_path: Path) -> None:
    history = History(tmp_path / "run" / "history")
    path = history.append(row(0))
    for number in range(3):
        (history.folder / f"trial-000{number + 1}-attempt-0.parquet").write_bytes(path.read_bytes()[: 200 * number])
    pq.write_table(pa.table({"a": [1]}), history.folder / "foreign.parquet")
    before = tree(tmp_path)
    done = autotune("show", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == [
        "skipped foreign.parquet",
        *(f"skipped trial-000{number}-attempt-0.parquet" for number in (1, 2, 3)),
    ]
    assert "1,000" in done.stdout
    assert tree(tmp_path) == before
    path.unlink()
    alone = autotune("show", "run", cwd=tmp_path)
    assert alone.returncode == 2
    assert "skipped foreign.parquet: not written by fsdp-autotune" in alone.stderr


@pytest.mark.parametrize(
    "changed",
    [
        {"trial": pa.array(["x"])},
        {"trial": pa.nulls(1, pa.int32())},
        {"knobs": pa.array([1.5])},
        {"knobs": pa.nulls(1)},
        {"started_at": pa.array([2**62], pa.timestamp("us", tz="UTC"))},
        {"reason": pa.array([b"\xff"], pa.binary())},
        {"phase_s": pa.array([[("a", 1.0), ("a", 2.0)]], pa.map_(pa.string(), pa.float64()))},
    ],
    ids=["a text trial", "no trial", "a number for knobs", "no knobs", "a far date", "no text", "a key twice"],
)
def test_a_file_with_other_columns_under_our_name_is_told_and_skipped(tmp_path: Path, changed: dict[str, Any]) -> None:
    history = History(tmp_path)
    path = history.append(row(0))
    table = pq.read_table(path, partitioning=None)
    for name, column in changed.items():
        table = table.set_column(table.schema.get_field_index(name), name, column)
    pq.write_table(table.replace_schema_metadata(SCHEMA.metadata), tmp_path / "trial-0001-attempt-0.parquet")
    rows, skipped = history.rows()
    assert [found["trial"] for found in rows] == [0]
    assert len(skipped) == 1
    assert skipped[0].startswith("trial-0001-attempt-0.parquet: ")


def test_what_a_killed_run_leaves_half_written_does_not_bar_the_next(tmp_path: Path) -> None:
    job = load_job("quickstart")
    (tmp_path / "early" / "logs").mkdir(parents=True)
    (tmp_path / "early" / ".job.yaml").write_text("half a jo")
    assert prepare_folder(tmp_path / "early", job) is None
    assert prepare_folder(tmp_path / "late", job) is None
    (tmp_path / "late" / ".best.yaml").write_text("half")
    History(tmp_path / "late" / "history").append(row(0))
    assert prepare_folder(tmp_path / "late", job) == tmp_path / "late.1"
    (tmp_path / "theirs" / "logs").mkdir(parents=True)
    (tmp_path / "theirs" / "logs" / "diary.txt").write_text("years of work")
    with pytest.raises(UserError, match="holds something that is no run"):
        prepare_folder(tmp_path / "theirs", job)
