"""The history: one schema, whole files only, readable by the tools that people have."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from autotune.history import SCHEMA, SCHEMA_VERSION, History
from tests.unit.conftest import make_space
from trials.record import KNOB_NAMES

FROZEN = """
study_id trial attempt stage spec_digest started_at ended_at knobs applied outcome reason failed_rank
log_path tokens_per_s_per_rank tokens_per_s_per_rank_low tokens_per_s_per_rank_high step_time_s predicted_step_time_s
block_times_s rank_step_times_s num_steps drift mfu mfu_causal hfu model_tflops_per_s_per_rank flops_per_token
flops_convention peak_tflops_per_s peak_dtype peak_source predicted_gib allocated_gib reserved_gib limit_gib
alloc_retries frac_compute frac_exposed_comm frac_exposed_copy frac_data_wait frac_optimizer frac_idle losses
world_size hosts device_name torch_version driver_version nccl_version workload_digest simulated
"""


def row(trial: int, **changes: Any) -> dict[str, Any]:
    return {
        "study_id": "s",
        "trial": trial,
        "attempt": 0,
        "stage": "explore",
        "started_at": datetime(2026, 1, 1, tzinfo=UTC),
        "knobs": make_space().baseline.to_dict(),
        "outcome": "ok",
        "tokens_per_s_per_rank": 1000.0 + trial,
        "block_times_s": [0.5, 0.6],
        "rank_step_times_s": [[0.5], [0.6]],
        "phase_s": {"timed": 1.5},
        "hosts": ["a", "a"],
        "simulated": False,
    } | changes


def test_names_that_tools_rely_on_are_there() -> None:
    assert set(FROZEN.split()) <= set(SCHEMA.names)
    assert {field.name for field in SCHEMA.field("knobs").type} == set(KNOB_NAMES)
    assert SCHEMA.field("applied").type == SCHEMA.field("knobs").type
    assert SCHEMA.metadata[b"schema_version"] == str(SCHEMA_VERSION).encode()


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    history = History(tmp_path / "history")
    written = [row(1), row(0), row(1, attempt=1, outcome="oom_device", tokens_per_s_per_rank=None, reason="no room")]
    for one in written:
        history.append(one)
    rows, skipped = history.rows()
    assert skipped == []
    assert [(r["trial"], r["attempt"]) for r in rows] == [(0, 0), (1, 0), (1, 1)]
    for found in rows:
        (wanted,) = [w for w in written if (w["trial"], w["attempt"]) == (found["trial"], found["attempt"])]
        assert {key: found[key] for key in wanted} == wanted


def test_pandas_polars_and_duckdb_read_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "history"
    for trial in range(3):
        History(folder).append(row(trial))
    assert pd.read_parquet(folder)["tokens_per_s_per_rank"].tolist() == [1000.0, 1001.0, 1002.0]
    assert pl.read_parquet(f"{folder}/*.parquet")["knobs"].struct.field("micro_batch_size").to_list() == [1, 1, 1]
    query = f"select max(tokens_per_s_per_rank) from read_parquet('{folder}/*.parquet')"
    assert duckdb.sql(query).fetchall() == [(1002.0,)]


def test_an_attempt_is_one_whole_file(tmp_path: Path) -> None:
    path = History(tmp_path).append(row(7, attempt=2))
    assert path.name == "trial-0007-attempt-2.parquet"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    metadata = pq.read_metadata(path)
    assert metadata.num_rows == 1
    assert metadata.row_group(0).column(0).compression == "ZSTD"


def test_torn_and_foreign_files_are_told_and_skipped(tmp_path: Path) -> None:
    history = History(tmp_path)
    path = history.append(row(0))
    (tmp_path / "torn.parquet").write_bytes(path.read_bytes()[:200])
    pq.write_table(pa.table({"a": [1]}), tmp_path / "foreign.parquet")
    other = SCHEMA.with_metadata({"product": "fsdp-autotune", "schema_version": "99"})
    pq.write_table(pa.Table.from_pylist([row(1)], schema=other), tmp_path / "later.parquet")
    (tmp_path / ".trial-0009-attempt-0.parquet.part").write_bytes(b"half")
    rows, skipped = history.rows()
    assert len(rows) == 1
    assert [line.split(":")[0] for line in skipped] == ["foreign.parquet", "later.parquet", "torn.parquet"]
    assert "schema version 99" in skipped[1]


def test_a_field_the_schema_has_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bogus"):
        History(tmp_path).append(row(0, bogus=1))
