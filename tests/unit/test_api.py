"""The same from Python: typed, and as lazy as the command line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import autotune
from autotune import load_job, load_run, tune
from autotune.errors import UserError
from autotune.history import SCHEMA, History

README = Path(__file__).parents[2] / "README.md"


def test_a_run_is_what_its_folder_says(simulated_run: Path) -> None:
    run, best = load_run(simulated_run), yaml.safe_load((simulated_run / "best.yaml").read_text())
    assert run.best.settings.to_dict() == best["settings"]
    assert run.verdict == best["verdict"]
    assert run.gain is not None
    assert (run.gain.low, run.gain.high) == (best["gain"]["low"], best["gain"]["high"])
    assert (run.complete, run.simulated, run.is_win) == (True, True, best["gain"]["low"] > 1)
    assert run.best.tokens_per_s_per_rank == best["evidence"]["tokens_per_s_per_rank"]


def test_the_history_is_a_table_of_the_schema(simulated_run: Path) -> None:
    run = load_run(simulated_run)
    table, rows = run.history(), History(simulated_run / "history").rows()[0]
    assert table.schema.names == SCHEMA.names
    assert table["tokens_per_s_per_rank"].to_pylist() == [row["tokens_per_s_per_rank"] for row in rows]
    assert list(run.to_pandas()["trial"]) == [row["trial"] for row in rows]


def test_a_job_is_tuned_and_resumed(simulated_run: Path, tmp_path: Path) -> None:
    options = ["measure.rounds=3", "cluster.nodes_per_trial=8", "budget.trials=3", f"output={tmp_path / 'run'}"]
    cluster = "nodes=8 gpus=8 device='NVIDIA H100 80GB HBM3'"
    job = load_job("llama3-8b", options)
    run = tune(job, simulate=cluster)
    assert run.folder == tmp_path / "run"
    assert run.complete
    again = tune(job, resume=True, simulate=cluster)
    assert again.history().num_rows == run.history().num_rows
    warm = tune(
        load_job("llama3-8b", [*options, f"output={tmp_path / 'b'}"]), warm_start=[run.folder], simulate=cluster
    )
    assert warm.content["warm_start"]


def test_errors_are_the_command_lines() -> None:
    with pytest.raises(UserError, match="shipped job"):
        load_job("quickstrat")
    with pytest.raises(UserError, match="no run there"):
        load_run("nowhere")


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    code = (
        "import sys, autotune\nassert not {'torch', 'ray', 'pyarrow', 'autotune.api'} & set(sys.modules)\n"
        "from autotune import load_run\nassert 'autotune.api' in sys.modules\nassert 'ray' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="no attribute 'tuen'"):
        _ = autotune.tuen
    assert (Path(autotune.__file__).parent / "py.typed").exists()


def test_the_readmes_python_example_runs(tmp_path: Path) -> None:
    """As it stands there, but on a modelled cluster: what it does on a real one is what `autotune run` does."""
    (code,) = re.findall(r"```python\n(from autotune import .*?)```", README.read_text(), flags=re.DOTALL)
    assert code.count("tune(job)") == code.count('["output=runs/python"]') == 1
    gpus = '["output=runs/python", "cluster.device=cuda", "cluster.memory_limit_gib=null"]'
    code = code.replace('["output=runs/python"]', gpus)
    code = code.replace("tune(job)", "tune(job, simulate=\"nodes=1 gpus=8 device='NVIDIA H100 80GB HBM3'\")")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "python" / "best.yaml").exists()
    assert "95 % interval" in done.stdout
