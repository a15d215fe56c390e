"""One config by hand, by the command line, on a real local Ray."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.measure import overrides_of
from tests.cluster.conftest import write_job
from tests.cluster.test_run import autotune


def test_the_sheet_of_each_engine_has_what_was_asked_applied_and_measured(tmp_path: Path) -> None:
    write_job(tmp_path)
    for engine in ("fsdp2", "fsdp1", "ddp"):
        settings = ("--set", f"engine={engine}", "--set", "micro_batch_size=2", "--repeat", "2")
        done = autotune("measure", "job.yaml", *settings, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        for part in (
            "asked",
            "applied",
            "tokens/s per rank",
            "samples/s per rank",
            "MFU (cpu probe)",
            "HFU",
            "FLOPs per token",
            "peak reserved per rank",
            "A step of this config: ",
            "2 runs: median",
        ):
            assert part in done.stdout, (engine, part)
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("\u2502 engine"))
        assert line.count(engine) == 2
    assert (tmp_path / "run-measure.2").exists(), "each is kept"
    assert not (tmp_path / "run").exists(), "the folder of the search is another"


def test_json_is_alone_on_standard_output_and_a_trace_is_kept(tmp_path: Path) -> None:
    write_job(tmp_path)
    done = autotune("measure", "job.yaml", "--profile", "--json", "--output", "here", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(done.stdout)
    assert (row["stage"], row["outcome"]) == ("measure", "ok")
    traces = sorted((tmp_path / "here" / row["log_path"]).glob("trace-rank-*.json.gz"))
    assert [trace.name for trace in traces] == ["trace-rank-0.json.gz", "trace-rank-1.json.gz"]
    assert json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]


def test_a_config_that_does_not_fit_exits_3(tmp_path: Path) -> None:
    write_job(tmp_path, model={"preset": "tiny", "seq_len": 256}, space={})
    done = autotune("measure", "job.yaml", "--set", "cluster.memory_limit_gib=0.03", cwd=tmp_path)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "the config ended in oom_device" in done.stderr


def test_knobs_become_the_baseline_and_unknown_ones_are_refused() -> None:
    assert overrides_of(("micro_batch_size=4", "reduce_dtype=bf16", "model.seq_len=64")) == (
        "space={}",
        "export_for=null",
        "baseline.micro_batch_size=4",
        "training.reduce_dtype=bf16",
        "model.seq_len=64",
    )
    assert "training.engines=[ddp]" in overrides_of(("engine=ddp",)), "a knob of another engine is none"
    with pytest.raises(UserError, match="did you mean micro_batch_size"):
        overrides_of(("micro_batchsize=4",))
