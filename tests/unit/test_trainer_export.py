"""The best config of a trainer's run as its own command, and templates to start from."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.best import left_to_the_trainer
from autotune.errors import UserError
from autotune.export.base import Best
from autotune.job_file import load_job
from autotune.templates import ADDED, write_template
from autotune.trainer.exported import export_command
from autotune.trainer.handed import untouched
from tests.unit.conftest import make_job
from tests.unit.test_trainer_job import COMMAND, space_of, trainer_job

SHOWS_ITS_WORDS = '#!/bin/sh\nprintf "%s\\n" "$@" "TOKEN=$TOKEN"\n'


def words_of(run: Path, trainer: dict[str, Any], **sections: Any) -> list[str]:
    """What the exported script hands to the program it starts."""
    job = trainer_job(trainer | {"folder": str(run)}, **sections)
    run.mkdir(exist_ok=True)
    (run / "job.yaml").write_text(job.to_yaml())
    knobs = replace(space_of(job).baseline, micro_batch_size=2, grad_accum_steps=2)
    exported = export_command(run, Best(knobs, "fp32", 4, 0, ["Measured: $(rm -rf /) `x`"]))
    for name, text in exported.files.items():
        (run / name).write_text(text)
    (run / "python").write_text(SHOWS_ITS_WORDS)
    (run / "python").chmod(0o755)
    done = subprocess.run(
        ["sh", str(run / "train.sh"), "more"],
        env={"PATH": f"{run}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_command_of_one_rank_is_started_by_torchrun(tmp_path: Path) -> None:
    words = words_of(tmp_path, {"command": [*COMMAND, "it's", "$HOME", "{{}}"], "env": {"TOKEN": "a b $c"}})
    torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", "0", "--nproc-per-node", "2"]
    assert words[: len(torchrun)] == torchrun
    assert words[len(torchrun) + 4 :] == [
        *("train.py", "--mbs", "2", "--accum", "2", "it's", "$HOME", "{}", "more"),
        "TOKEN=a b $c",
    ]


def test_a_command_that_starts_its_own_ranks_keeps_its_words(tmp_path: Path) -> None:
    command = ["python", "-m", "launch", "--n={nproc}", "{probe}", "train.py", "--c={conf}", "{micro_batch_size}"]
    words = words_of(
        tmp_path,
        {"command": command, "launcher": "self", "render": {"conf": "transformers"}},
        export_for="transformers",
    )
    assert words[:4] == ["-m", "launch", "--n=2", "train.py"]
    assert words[4] == f"--c={tmp_path}/training_args.yaml"
    assert (tmp_path / "training_args.yaml").is_file()
    assert words[5:7] == ["2", "more"]


def test_a_run_of_our_own_ranks_has_no_command(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(make_job().to_yaml())
    with pytest.raises(UserError, match="did not tune a command"):
        export_command(tmp_path, Best(space_of(trainer_job()).baseline, "fp32", 2, 0, []))


def test_what_was_left_to_the_trainer_is_said() -> None:
    job = trainer_job({"command": [*COMMAND, "{num_workers}"]})
    settings = untouched(space_of(job).baseline.to_dict(), job.handed)
    assert "activation_checkpointing" in left_to_the_trainer({"settings": settings})
    assert "num_workers" not in left_to_the_trainer({"settings": settings})


@pytest.mark.parametrize("name", sorted(ADDED))
def test_a_template_is_a_job_that_loads(name: str, tmp_path: Path) -> None:
    lines = write_template(name, tmp_path / "job.yaml")
    job = load_job(str(tmp_path / "job.yaml"))
    assert job.trainer is not None
    assert job.trainer.folder == str(tmp_path)
    assert any("job.yaml" in line for line in lines)
    with pytest.raises(UserError, match="exists already"):
        write_template(name, tmp_path / "job.yaml")


def test_the_batch_script_of_slurm_is_one_that_bash_reads(tmp_path: Path) -> None:
    write_template("slurm", tmp_path / "job.yaml")
    script = tmp_path / "autotune.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    assert "#SBATCH --ntasks-per-node=1" in text
    assert "SLURM_JOB_ID" in text
