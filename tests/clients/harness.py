"""Runs a user's script as a trial would, with the probe copied beside it and nothing else of this project."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ports import free_port
from trials.probe_log import RankLog, read_ranks

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
DEADLINE_S = 280.0
"""No test measures time: this only ends a hang."""
_runs = itertools.count()


class Zygote:
    """A process that scripts of one rank are forked from."""

    def __init__(self) -> None:
        path = Path(__file__).with_name("zygote.py")
        self._process = subprocess.Popen(
            [sys.executable, str(path)],
            env=environment(),  # what libraries read when they are loaded: one thread
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, argv: list[str], env: dict[str, str], folder: Path, log: Path) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"argv": argv, "env": env, "cwd": str(folder), "log": str(log)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass
class Run:
    """A script that has ended."""

    codes: list[int]
    """Exit codes: of each rank, or of the launcher."""
    output: str
    logs: list[RankLog]
    folder: Path

    def printed(self) -> list[Any]:
        """What ranks printed for the test, as lines `TELL {json}`."""
        lines = self.output.splitlines()
        return [json.loads(line.partition("TELL ")[2]) for line in lines if line.startswith("TELL ")]


def environment(**changes: str) -> dict[str, str]:
    """As a launcher cleans it: nothing of another launcher or scheduler, one thread a rank."""
    foreign = ("SLURM_", "PMI", "OMPI_", "TORCHELASTIC_", "ACCELERATE_", "FSDP_")
    ranks = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign) and k not in ranks}
    return {**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", **changes}


def prepare(folder: Path, **request: Any) -> dict[str, str]:
    """A trial's folder: the probe, the request. Returns the environment that names them."""
    folder.mkdir(parents=True)
    (folder / "out").mkdir()
    shutil.copy(ROOT / "trials" / "probe.py", folder)
    asked = {
        "out": str(folder / "out"),
        "warmup_steps": 1,
        "timed_steps": 4,
        "max_s": None,
        "attach": "auto",
        "tokens": "auto",
        "knobs": {},
        "expect": {},
        **request,
    }
    (folder / "request.json").write_text(json.dumps(asked))
    return {"AUTOTUNE_PROBE": str(folder / "request.json")}


def run(
    tmp_path: Path,
    command: list[str],
    *,
    ranks: int = 2,
    by_rank: bool = True,
    requested: bool = True,
    env: dict[str, str] | None = None,
    zygote: Zygote | None = None,
    **request: Any,
) -> Run:
    """Runs `command` in a folder of its own; `{probe}` and `{scripts}` in it are filled in.

    Args:
        requested: the ranks are told of the request.
        by_rank: start it once a rank; else once, and it starts its ranks by itself.
        env: besides the cleaned environment.
        zygote: what the only rank is forked from, instead of an interpreter of its own.
        request: what differs from the request in `prepare`.
    """
    folder = tmp_path / f"run{next(_runs)}"
    names = prepare(folder, **request)
    base = environment(**(names if requested else {}), **(env or {}))
    filled = [part.format(probe=folder / "probe.py", scripts=SCRIPTS) for part in command]
    own: list[dict[str, str]] = [{}]
    if by_rank:
        world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "trial"}
        own = [world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    files = [folder / f"log{index}" for index in range(len(own))]
    if zygote is not None:
        codes = [zygote.run(filled, {**base, **own[0]}, folder, files[0])]
    else:
        codes = _wait(filled, folder, [{**base, **variables} for variables in own], files)
    output = "\n".join(path.read_text() for path in files)
    return Run(codes, output, read_ranks(folder / "out", ranks), folder)


def _wait(command: list[str], folder: Path, environments: list[dict[str, str]], files: list[Path]) -> list[int]:
    started = []
    for variables, path in zip(environments, files, strict=True):
        with path.open("w") as file:
            started.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    cwd=folder,
                    env=variables,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    try:
        return [process.wait(timeout=DEADLINE_S) for process in started]
    finally:
        for process in started:
            process.kill()
