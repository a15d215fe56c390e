"""Bad input that only a rank or a cluster can find: by the command line, with message, exit code, and nothing lost.

What is found before a rank starts is in tests/unit/test_bad_input.py.
"""

from __future__ import annotations

import io
import os
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from rich.console import Console

from autotune import survey
from autotune.cluster.runner import SlotRunner
from autotune.folder import prepare_folder
from autotune.hardware import peak_for
from autotune.job_file import load_job
from autotune.report.screen import LineScreen
from autotune.run import Run
from tests.cluster.conftest import CONFIG, write_job
from tests.cluster.test_run import autotune, rows

BAD_MODELS = Path(__file__).parents[1] / "ranks"
BROKEN_MODEL = """
    def parts():
        return [1, 2][7]


    DEFAULTS = parts()


    def make(seq_len):
        return None
"""


def make_data(folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "no-text").mkdir()
    (folder / "no-text" / "photo.jpg").write_bytes(b"x" * 1000)
    (folder / "short").mkdir()
    (folder / "short" / "a.txt").write_text("thirty-two bytes are not enough!")
    (folder / "one").mkdir()
    (folder / "one" / "a.txt").write_text("of this text, two ranks make one sequence of 33 bytes")
    (folder / "dangling").symlink_to(folder / "nowhere")
    (folder / "broken").mkdir()
    (folder / "broken" / "a.txt").symlink_to(folder / "nowhere")
    (folder / "broken_model.py").write_text(textwrap.dedent(BROKEN_MODEL))
    (folder / "syntax_model.py").write_text("def make(seq_len:\n")


def workload(name: str) -> dict[str, Any]:
    return {"model": {"workload": name, "seq_len": 32}}


def bad_model(wrong: str) -> dict[str, Any]:
    model = {"workload": "bad_model:make", "config": {"wrong": wrong, "config": CONFIG}, "seq_len": 32}
    return {"model": model | {"import_path": str(BAD_MODELS)}}


@pytest.mark.parametrize(
    ("sections", "complaints"),
    [
        ({"data": {"source": "missing"}}, ["/missing': no such file or folder"]),
        ({"data": {"source": "empty"}}, ["/empty': the folder has no file, other than empty, in .txt"]),
        ({"data": {"source": "no-text"}}, ["/no-text': the folder has no file, other than empty, in .txt"]),
        ({"data": {"source": "short"}}, ["/short': 1 text file, 32 bytes of text, 32 tokens; one sequence takes 33"]),
        ({"data": {"source": "dangling"}}, ["/dangling': no such file or folder"]),
        ({"data": {"source": "broken"}}, ["/broken': [Errno 2] No such file or directory", "/broken/a.txt"]),
        (workload("nowhere:make"), ["ModuleNotFoundError: No module named 'nowhere'"]),
        (workload("broken_model:make"), ["IndexError: list index out of range", "broken_model.py", "in parts"]),
        (workload("syntax_model:make"), ["SyntaxError: '(' was never closed", "syntax_model.py"]),
        (bad_model("no_blocks"), ["the workload's blocks() found none: nothing to shard or checkpoint"]),
        (
            {"model": {"config": CONFIG | {"vocab_size": 100}, "seq_len": 32}},
            ["data.tokenizer = byte needs a vocabulary of 256; the model's is 100", "raise the model's vocab_size"],
        ),
        (
            {"data": {"source": "one"}},
            ["1 sequences of model.seq_len = 32 tokens for 2 ranks; each needs one of its own"],
        ),
    ],
)
def test_what_a_rank_finds_wrong_exits_2(tmp_path: Path, sections: dict[str, Any], complaints: list[str]) -> None:
    make_data(tmp_path)
    write_job(tmp_path, **sections)
    done = autotune("run", "job.yaml", cwd=tmp_path)
    print(done.stderr)
    assert done.returncode == 2, done.stdout + done.stderr
    for complaint in complaints:
        assert complaint in done.stderr
    # The user's own code gets its traceback; ours is no news to anybody.
    assert ("Traceback" in done.stderr) is ("Error: " in complaints[0])
    (log,) = re.findall(r"the traceback is in (\S+)", done.stderr)
    assert "Traceback" in Path(log).read_text()
    assert not list(tmp_path.glob("run/history/*"))


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ("nan", "(wrong_numerics): the loss of the first step (no update yet: initial values or data) is nan"),
        ("unshifted", "Expected input batch_size (32) to match target batch_size (33)"),
    ],
)
def test_a_model_whose_first_step_is_wrong_exits_2_before_anything_is_searched(
    tmp_path: Path, wrong: str, complaint: str
) -> None:
    write_job(tmp_path, **bad_model(wrong))
    done = autotune("run", "job.yaml", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "the baseline failed" in done.stderr
    assert complaint in done.stderr
    (row,) = rows(tmp_path)
    assert (row["stage"], row["outcome"] == "ok") == ("baseline", False)


def test_a_data_folder_without_the_right_to_read_it_exits_2(tmp_path: Path) -> None:
    write_job(tmp_path)
    (tmp_path / "texts").chmod(0)
    if os.access(tmp_path / "texts", os.R_OK):
        pytest.skip("root reads everything")
    try:
        done = autotune("run", "job.yaml", cwd=tmp_path)
    finally:
        (tmp_path / "texts").chmod(0o755)
    assert done.returncode == 2
    assert "Permission denied" in done.stderr


def test_more_ranks_than_the_cluster_has_exits_2_within_a_minute_and_says_what_it_has(
    runner: SlotRunner, tmp_path: Path
) -> None:
    address = ray.get_runtime_context().gcs_address
    write_job(
        tmp_path,
        batch={"global_batch_size": 64, "target_world_size": 64},
        cluster={"ranks_per_node": 64, "device": "cpu", "address": address},
    )
    done = autotune("run", "job.yaml", cwd=tmp_path, timeout_s=60)
    print(done.stderr)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "64" in done.stderr
    assert re.search(r"Ray has \[4 CPU\]", done.stderr), "of tests/cluster/conftest.py"
    assert "lower cluster.ranks_per_node" in done.stderr
    assert "Traceback" not in done.stderr


def test_more_cpu_ranks_than_this_machine_has_cpus_exits_2(tmp_path: Path) -> None:
    write_job(
        tmp_path,
        batch={"global_batch_size": 1024, "target_world_size": 1024},
        cluster={"ranks_per_node": 1024, "device": "cpu"},
    )
    done = autotune("run", "job.yaml", cwd=tmp_path, timeout_s=60)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"cluster.ranks_per_node = 1024: this machine has {os.cpu_count()} CPUs" in done.stderr
    assert "lower cluster.ranks_per_node" in done.stderr


def test_a_folder_of_another_jobs_run_is_refused_and_stays_as_it_was(tmp_path: Path) -> None:
    write_job(tmp_path)
    job = load_job(str(tmp_path / "job.yaml"))
    prepare_folder(tmp_path / "run", job)
    before = (tmp_path / "run" / "job.yaml").read_bytes()
    others = {
        "space.num_workers": ("--set", "space.num_workers=[0]"),
        "space.bucket_cap_mb": ("--set", "space.bucket_cap_mb=auto"),
        "baseline.micro_batch_size": ("--set", "baseline.micro_batch_size=2"),
    }
    for key, override in others.items():
        done = autotune("run", "job.yaml", *override, "--resume", cwd=tmp_path)
        assert done.returncode == 2
        assert "holds the run of another job" in done.stderr
        assert re.search(rf"{re.escape(key)}: was .*, now ", done.stderr), done.stderr
        assert (tmp_path / "run" / "job.yaml").read_bytes() == before


def test_an_unknown_gpu_has_no_mfu_which_is_said_and_the_run_ends_well(
    runner: SlotRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = peak_for("NVIDIA Unheard-of 9000", "fp32")  # by name, as a rank on it would report it
    monkeypatch.setattr(survey, "peak_for", lambda *_, **__: unknown)
    job = load_job(str(write_job(tmp_path, budget={"trials": 1})))
    prepare_folder(tmp_path / "run", job)
    screen = io.StringIO()
    Run(job, tmp_path / "run", runner, LineScreen(Console(file=screen, width=200))).go()
    said = 'no peak known for device "NVIDIA Unheard-of 9000": MFU is not reported; set cluster.peak_tflops_per_s'
    assert said in screen.getvalue()
    for row in rows(tmp_path):
        assert row["tokens_per_s_per_rank"] > 0
        assert (row["mfu"], row["mfu_causal"], row["hfu"]) == (None, None, None)
        assert row["peak_source"] == said
    best = yaml.safe_load((tmp_path / "run" / "best.yaml").read_text())
    assert best["complete"] is True
    assert best["evidence"]["mfu"] is None
    assert best["conventions"]["peak_source"] == said
    shown = autotune("show", "run", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"MFU\W+-", shown.stdout)
