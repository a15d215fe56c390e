"""Files that somebody hostile wrote: nothing of them is run, leaves its folder, or steers the terminal."""

from __future__ import annotations

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
from tests.unit.conftest import make_space
from tests.unit.test_history import row

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


def test_what_is_shown_does_not_steer_the_terminal(tmp_path: Path) -> None:
    run = write(tmp_path / "run", best(verdict=ESCAPE))
    History(run / "history").append(row(0, stage=ESCAPE, outcome=ESCAPE, reason=ESCAPE, log_path="../../" + ESCAPE))
    for arguments in (["show", str(run)], ["show", str(run), "--trial", "0"], ["show", str(run), "--json"]):
        done = subprocess.run([AUTOTUNE, *arguments], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout
        assert "\x07" not in done.stdout
        assert "[bold red]x" in done.stdout, "markup is shown, not obeyed"


def test_the_environments_secrets_are_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune.job import load_job

    monkeypatch.setenv("HF_TOKEN", "s3cr3t")
    job = load_job("quickstart")
    assert "s3cr3t" not in job.to_yaml()
