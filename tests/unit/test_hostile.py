"""Files that somebody hostile wrote: nothing of them is run, leaves its folder, or steers the terminal."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.best import read_best, to_exportable
from autotune.errors import UserError
from autotune.export import EXPORTERS, export
from autotune.history import History
from autotune.job_file import load_job
from tests.unit.conftest import QUICK, make_space
from tests.unit.test_history import row

ROOT = Path(__file__).parents[2]
AUTOTUNE = str(Path(sys.executable).with_name("autotune"))
ESCAPE = "\x1b]0;owned\x07\x1b[31m[bold red]x[/bold red]"


def best(**changes: Any) -> dict[str, Any]:
    settings = make_space().baseline.to_dict()
    evidence = {
        "trial": 0,
        "measured_in": "trial 0",
        "tokens_per_s_per_rank": 1.0,
        "mfu": None,
        "mfu_causal": None,
        "hfu": None,
        "allocated_gib": None,
        "reserved_gib": None,
    }
    return {
        "complete": True,
        "verdict": "v",
        "settings": settings,
        "training": {"precision": "fp32", "reduce_dtype": "fp32", "target_world_size": 2, "seq_len": 32},
        "evidence": evidence,
        "gain": None,
        "baseline": {"settings": settings} | evidence,
        "fallback": None,
        "conventions": {"flops_convention": "c", "peak_source": "p", "limit_gib": None},
        "fingerprint": {"world_size": 2, "device_name": "d", "torch_version": "t", "written_at": "2026-01-01"},
    } | changes


def write(run: Path, content: dict[str, Any]) -> Path:
    run.mkdir(exist_ok=True)
    (run / "best.yaml").write_text(yaml.safe_dump(content))
    return run


@pytest.mark.parametrize(
    "bad",
    [
        {"activation_checkpointing": 'none"\nimport os; os.system("touch owned")\n#'},
        {"micro_batch_size": "__import__('os').system('true')"},
        {"engine": "../../etc/passwd"},
        {"num_workers": True},
        {"bucket_cap_mb": None},
        {"unheard_of": 1},
    ],
)
def test_settings_that_are_none_are_refused(tmp_path: Path, bad: dict[str, Any]) -> None:
    content = best()
    content["settings"] = content["settings"] | bad
    with pytest.raises(UserError, match=r"not a best\.yaml"):
        read_best(write(tmp_path / "run", content))


@pytest.mark.parametrize("target", EXPORTERS)
def test_hostile_words_stay_inside_comments(tmp_path: Path, target: str) -> None:
    content = best(verdict='fine\nimport os\nos.system("touch owned")\nfsdp_config: {evil: 1}\u2028x: 1')
    exported = export(target, to_exportable(read_best(write(tmp_path / "run", content))))
    for name, text in exported.files.items():
        assert "/" not in name
        for line in text.splitlines():
            assert "owned" not in line or line.startswith("#")
            assert "evil" not in line or line.startswith("#")


def test_yaml_cannot_run_code(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "best.yaml").write_text("settings: !!python/object/apply:os.system ['touch owned']\n")
    with pytest.raises(UserError, match=r"not a best\.yaml"):
        read_best(run)


@pytest.mark.parametrize(
    "changes",
    [
        {"evidence": None},
        {"evidence": {"tokens_per_s_per_rank": ESCAPE}},
        {"baseline": 7},
        {"training": {"precision": "fp32\nimport os", "reduce_dtype": "fp32", "target_world_size": 2, "seq_len": 32}},
        {"training": {"precision": "fp32", "reduce_dtype": "fp32", "target_world_size": "2; evil", "seq_len": 32}},
        {"gain": {"ratio": "1"}},
        {"conventions": {}},
        {"fingerprint": []},
        {"verdict": None},
        {"complete": "yes"},
    ],
    ids=str,
)
def test_a_best_yaml_of_another_shape_is_refused_by_every_command(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"not a best\.yaml"):
        read_best(write(tmp_path / "run", best(**changes)))


def test_a_best_yaml_that_breaks_parsers_is_refused(tmp_path: Path) -> None:
    for text in ("a: " + "[" * 5000, "a: 2026-13-45", "- a", "", "a: \x01"):
        (write(tmp_path / "run", {}) / "best.yaml").write_text(text)
        done = subprocess.run([AUTOTUNE, "show", "run"], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "not a best.yaml" in done.stderr
        assert "Traceback" not in done.stderr


def test_what_is_shown_does_not_steer_the_terminal(tmp_path: Path) -> None:
    run = write(tmp_path / "run", best(verdict=ESCAPE))
    history = History(run / "history")
    history.append(row(0, stage=ESCAPE, outcome=ESCAPE, reason=ESCAPE, log_path="../../" + ESCAPE, hosts=[ESCAPE]))
    (history.folder / f"{ESCAPE.replace('/', '')}.parquet").write_bytes(b"torn")
    for arguments in (["show", str(run)], ["show", str(run), "--trial", "0"], ["show", str(run), "--json"]):
        done = subprocess.run([AUTOTUNE, *arguments], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stderr.startswith("skipped ")
        for steers in ("\x1b", "\x07"):
            assert steers not in done.stdout + done.stderr
        assert "[bold red]x" in done.stdout, "markup is shown, not obeyed"


def test_an_errors_own_words_do_not_steer_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({f"key{ESCAPE}": 1}))
    done = subprocess.run([AUTOTUNE, "run", "job.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "[bold red]x" in done.stderr
    assert "\x1b" not in done.stderr


def test_numbers_that_are_none_are_null_for_machines_and_shown_to_people(tmp_path: Path) -> None:
    run = write(tmp_path / "run", best())
    nothing = {"tokens_per_s_per_rank": math.nan, "mfu": math.inf, "block_times_s": [-math.inf], "allocated_gib": 1e300}
    History(run / "history").append(row(0, **nothing))
    shown = subprocess.run([AUTOTUNE, "show", str(run)], capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    text = subprocess.run([AUTOTUNE, "show", str(run), "--json"], capture_output=True, text=True, check=True).stdout
    (trial,) = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["trials"]
    assert trial["tokens_per_s_per_rank"] is None
    assert trial["mfu"] is None
    assert trial["block_times_s"] == [None]


def test_a_jobs_code_runs_on_ranks_alone(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("open('owned', 'w').write('owned')\nmake = 1\n")
    job = QUICK | {"model": {"workload": "evil:make", "seq_len": 256}, "output": "run"}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    run = write(tmp_path / "run", best())
    (run / "job.yaml").write_text(load_job(str(tmp_path / "job.yaml")).to_yaml())
    History(run / "history").append(row(0))
    for arguments in (
        ["init", "-o", "other.yaml"],
        ["show", "run"],
        ["show", "run", "--trial", "0"],
        ["export", "run", "--to", "accelerate"],
        ["run", "job.yaml", "--resume", "--set", "seed=7"],
    ):
        done = subprocess.run(
            [AUTOTUNE, *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == (2 if "--resume" in arguments else 0), done.stderr
        assert not (tmp_path / "owned").exists(), arguments
        assert not (run / "owned").exists(), arguments
    subprocess.run([sys.executable, "-c", "import evil"], cwd=tmp_path, check=True)
    assert (tmp_path / "owned").exists(), "the trap works"


def dangerous_calls(source: str) -> list[str]:
    """Calls that run what a file says: eval and its kin, unpickling, YAML that makes objects, a shell."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            shell = any(keyword.arg == "shell" for keyword in node.keywords)
            if DANGEROUS.fullmatch(name) or shell:
                found.append(f"line {node.lineno}: {name}")
    return found


DANGEROUS = re.compile(
    r"eval|exec|compile|(.*\.)?(system|popen)"
    r"|yaml\.(load|load_all|unsafe_load|full_load|unsafe_load_all|full_load_all)"
    r"|(pickle|cloudpickle|dill|marshal|shelve|joblib)\.\w+|torch\.load"
)
OUR_SOURCES = [path for name in ("autotune", "trials", "search_spaces") for path in sorted((ROOT / name).rglob("*.py"))]


@pytest.mark.parametrize("path", OUR_SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_our_own_code_runs_nothing_that_a_file_says(path: Path) -> None:
    found = dangerous_calls(path.read_text())
    if path.name == "probe.py":  # whose purpose is to run the script that its user names
        assert {call.partition(": ")[2] for call in found} == {"exec", "compile"}
        return
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "pickle.loads(data)",
        "eval(text)",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_the_search_for_dangerous_calls_finds_them(source: str) -> None:
    assert dangerous_calls(f"def f():\n    {source}") != []


def test_the_environments_secrets_are_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "s3cr3t")
    job = load_job("quickstart")
    assert "s3cr3t" not in job.to_yaml()
