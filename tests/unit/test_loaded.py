"""Runs read back from their folders: by the simulator's, which leaves what a real one does."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from autotune.errors import UserError
from autotune.folder import has_driver, sole_driver
from autotune.history import History
from autotune.loaded import load
from tests.unit.test_simulated_run import tune


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("loaded") / "run"
    tune(out)
    return out


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_a_run_is_read_back_whole(finished: Path) -> None:
    run = load(finished)
    rows, _ = History(finished / "history").rows()
    assert [attempt.row for attempt in run.attempts] == run.rows == rows
    assert run.study.job == run.job
    assert run.study.limits.limit_gib == rows[0]["limit_gib"]
    assert run.study.peak.tflops_per_s == rows[0]["peak_tflops_per_s"]
    assert (run.device, run.is_complete, run.is_going, run.unreadable) == ("cuda", True, False, [])
    assert run.best is not None
    assert run.best["fingerprint"]["study_id"] == run.study.study_id


def test_what_is_not_of_the_study_is_told_and_left_out(copy: Path) -> None:
    (copy / "history" / "torn.parquet").write_bytes(b"PAR1")
    path = copy / "history" / "trial-0001-attempt-0.parquet"
    table = pq.read_table(path)
    foreign = table.set_column(0, "study_id", [["another"]]).cast(table.schema)
    pq.write_table(foreign, path)
    run = load(copy)
    assert len(run.attempts) == len(run.rows) - 1
    assert [line.partition(":")[0] for line in run.unreadable] == ["torn.parquet", "trial 1"]
    assert "another" in run.unreadable[1]


def test_a_run_that_is_going_says_so(copy: Path) -> None:
    (copy / "best.yaml").unlink()
    assert not has_driver(copy)
    with sole_driver(copy):
        run = load(copy)
        assert run.is_going
        assert run.best is None
        assert not run.is_complete
    assert not load(copy).is_going


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (shutil.rmtree, "no run there that has measured anything"),
        (lambda run: shutil.rmtree(run / "history"), "no run there that has measured anything"),
        (lambda run: (run / "study.yaml").unlink(), "study.yaml: No such file"),
        (lambda run: (run / "study.yaml").write_text("study_id: 7"), "study_id: Input should be a valid string"),
        (lambda run: (run / "study.yaml").write_text("{"), "not YAML"),
        (lambda run: (run / "best.yaml").write_text("complete: 1"), "not a best.yaml"),
    ],
)
def test_a_folder_that_is_none_is_refused(copy: Path, spoil, complaint: str) -> None:  # type: ignore[no-untyped-def]
    spoil(copy)
    with pytest.raises(UserError, match=complaint) as caught:
        load(copy)
    assert caught.value.hint


def test_a_knob_that_an_older_history_has_not_had_its_default(copy: Path) -> None:
    now = load(copy)
    for path in (copy / "history").glob("*.parquet"):
        table = pq.read_table(path)
        knobs = pa.array([without(row, "compile", "fused_optimizer") for row in table["knobs"].to_pylist()])
        index = table.schema.get_field_index("knobs")
        metadata = table.schema.metadata
        older = table.set_column(index, "knobs", knobs).drop_columns(["timing"]).replace_schema_metadata(metadata)
        pq.write_table(older, path)
    then = load(copy)
    assert then.unreadable == []
    assert [attempt.knobs for attempt in then.attempts] == [attempt.knobs for attempt in now.attempts]


def without(values: dict[str, object], *names: str) -> dict[str, object]:
    return {name: value for name, value in values.items() if name not in names}


def test_it_needs_neither_torch_nor_ray(finished: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from autotune.loaded import load; load(Path(sys.argv[1])); "
        "assert not {'torch', 'ray'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(finished)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
