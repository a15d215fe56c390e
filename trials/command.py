"""Stands for ranks of a user's own trainer: starts its command, waits, reports in their name, leaves nothing behind.

`python -P -m trials.command ORDER`. ORDER is a JSON file: {"spec": TrialSpec, "reports": {rank: path}, "scratch": a
folder of the node, for all trials}. One process for each rank that the command is (`launcher: rank`), or one a node,
whose command starts its own ranks (`launcher: self`). Ranks and rendezvous are in the environment, as torchrun sets
them. The command may run under another interpreter, or in a container: what it needs of us is one file, or one zip.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trials.adopted import become_subreaper, end_children, reap
from trials.command_env import PACKAGE, PROBE, clean_environment
from trials.command_report import Ended, report_of
from trials.files import write_whole
from trials.lifeline import die_with_parent
from trials.outcome import EXIT_FAILED, EXIT_OOM, OUT_OF_MEMORY, Outcome
from trials.record import RankReport, TrialSpec
from trials.segments import Segments

POLL_S = 0.02


@dataclass(frozen=True)
class Command:
    """What a TrialSpec says of a trainer (its `trainer`): plain values, since it travels as JSON."""

    command: list[str]
    """Program and arguments, with placeholders."""
    env: dict[str, str]
    """Variables, with placeholders."""
    launcher: str
    """`rank` or `self`."""
    attach: str
    tokens: str | int
    values: dict[str, str]
    """Placeholder to text: knobs, and what is known of the batch."""
    files: dict[str, dict[str, str]]
    """Placeholder to files by name: it becomes the path of the first."""
    knobs: dict[str, Any]
    """For `probe.knob`."""
    expect: dict[str, Any]
    """What the ranks must show to have applied."""
    warmup_steps: int
    timed_steps: int
    min_steps: int
    """Timed steps that are enough, should the script end by itself."""
    max_s: float
    """From the start of the process until the timed steps must be over."""
    folder: str
    """Of the command's relative files."""
    python: str | None
    """The interpreter that `python` stands for; None: the one that runs this, or in a container its own."""
    prefix: list[str]
    """Before the command: a container's."""

    @staticmethod
    def of(spec: TrialSpec) -> Command:
        assert spec.trainer is not None
        return Command(**{field.name: spec.trainer[field.name] for field in fields(Command)})


class Supervisor:
    """One command, from its environment to the reports of its ranks.

    Args:
        reports: path by rank, of those that the command is or starts.
        scratch: a folder of the node; each trial has one of its own in it, and all share the compilers' caches.
    """

    def __init__(self, spec: TrialSpec, reports: dict[int, Path], scratch: Path) -> None:
        self.spec, self.reports = spec, reports
        self.command = Command.of(spec)
        self.python = self.command.python or (None if self.command.prefix else sys.executable)
        self.node = scratch
        first = min(reports)
        self.folder = scratch / f"trial-{spec.trial}-{spec.attempt}-{first}"
        self.out = self.folder / "probe"
        self.work = self.folder / "work"

    def run(self) -> int:
        """Starts the command and waits for it; its exit code, by which a signal is negative.

        Raises:
            OSError: it cannot be started.
        """
        self.out.mkdir(parents=True)
        self.work.mkdir()
        values = self._values()
        environment = self._environment(values)
        process = subprocess.Popen(
            self._argv(values),
            cwd=self.work,
            env=environment,
            stdin=subprocess.DEVNULL,
            preexec_fn=die_with_parent,  # noqa: PLW1509 (this process has one thread)
        )
        return self._wait(process.pid)

    def _wait(self, pid: int) -> int:
        self.segments = Segments({rank: self.out / f"rank-{rank}.jsonl" for rank in self.reports})
        while True:
            ended = reap()  # orphans of the command, too
            if pid in ended:
                return ended[pid]
            if self.spec.device == "cpu":
                self.segments.sample(self.spec.memory_limit_gib)
            time.sleep(POLL_S)

    def report(self, exit_code: int | None, problem: str = "") -> list[RankReport]:
        """Of each rank that left something to report: not of one that was killed.

        Args:
            exit_code: None: the command was not started, for the reason in `problem`.
        """
        found = []
        for rank, path in self.reports.items():
            if exit_code is None:
                report = RankReport(rank, outcome=Outcome.INVALID.value, reason=problem, error_type="CommandError")
            else:
                ended = Ended(exit_code, self.command, self.spec.device, self.segments.growth_bytes(rank), last_line())
                told = report_of(rank, self.out / f"rank-{rank}.jsonl", ended)
                if told is None:
                    continue
                report = told
            write_whole(path, report.to_json())
            found.append(report)
        return found

    def _values(self) -> dict[str, str]:
        values = self.command.values | {
            "probe": str(self.node / PROBE),
            "nnodes": os.environ["GROUP_WORLD_SIZE"],
            "node_rank": os.environ["GROUP_RANK"],
            "nproc": os.environ["LOCAL_WORLD_SIZE"],
            "master_addr": os.environ["MASTER_ADDR"],
            "master_port": os.environ["MASTER_PORT"],
            "job_dir": self.command.folder,
            "scratch": str(self.work),
        }
        for placeholder, files in self.command.files.items():
            folder = self.folder / placeholder
            folder.mkdir()
            for name, text in files.items():
                (folder / name).write_text(text)
            values[placeholder] = str(folder / next(iter(files)))
        return values

    def _argv(self, values: dict[str, str]) -> list[str]:
        words = [self._found(word.format(**values)) for word in self.command.command]
        if words[0] in ("python", "python3") and self.python is not None:
            words[0] = self.python
        return [*self.command.prefix, *words]

    def _found(self, word: str) -> str:
        """A relative path of a file in the job's folder, whole: the command runs in a folder of its own.

        Not of a folder: it may be where the trainer writes, and what it wrote before must not be touched.
        """
        path = Path(self.command.folder) / word
        return str(path) if word and not Path(word).is_absolute() and path.is_file() else word

    def _environment(self, values: dict[str, str]) -> dict[str, str]:
        request = self.folder / "request.json"
        command = self.command
        asked = {
            "out": str(self.out),
            "warmup_steps": command.warmup_steps,
            "timed_steps": command.timed_steps,
            "max_s": command.max_s,
            "attach": command.attach,
            "tokens": command.tokens,
            "knobs": command.knobs,
            "expect": command.expect,
            "memory_limit_gib": self.spec.memory_limit_gib,
        }
        write_whole(request, json.dumps(asked))
        run_id = f"autotune-{self.spec.trial}-{self.spec.attempt}"
        found = clean_environment(dict(os.environ), self.node, run_id, is_rank=command.launcher == "rank")
        if self.python is not None and "/" in self.python:  # torchrun and accelerate lie beside it
            found["PATH"] = f"{Path(self.python).parent}{os.pathsep}{found.get('PATH', os.defpath)}"
        paths = [str(self.node / PACKAGE), command.folder, *filter(None, [found.get("PYTHONPATH")])]
        found |= {"AUTOTUNE_PROBE": str(request), "PYTHONPATH": os.pathsep.join(paths)}
        return found | {name: text.format(**values) for name, text in command.env.items()}


def last_line(num_bytes: int = 4096) -> str:
    """Of what the command has written, where that is a file."""
    log = Path("/proc/self/fd/1")
    if not log.is_file():
        return ""
    with log.open("rb") as output:
        output.seek(max(0, log.stat().st_size - num_bytes))
        lines = output.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:200]


def main(order: dict[str, Any]) -> int:
    """Exit code 0 only if each rank has reported that all is well; the command's own never decides."""
    spec = TrialSpec.from_json(order["spec"])
    reports = {int(rank): Path(path) for rank, path in order["reports"].items()}
    supervisor = Supervisor(spec, reports, Path(order["scratch"]))
    exit_code: int | None = None
    problem = ""
    try:
        exit_code = supervisor.run()
    except OSError as error:
        problem = f"the command cannot be started: {error.filename or supervisor.command.command[0]}: {error.strerror}"
        sys.stderr.write(problem + "\n")
    end_children()
    told = supervisor.report(exit_code, problem)
    shutil.rmtree(supervisor.folder, ignore_errors=True)
    if exit_code is not None and exit_code < 0 and len(told) < len(reports):
        # As the rank itself would have ended: the agent asks the kernel why.
        signal.signal(-exit_code, signal.SIG_DFL) if -exit_code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -exit_code)
    outcomes = {Outcome(report.outcome) for report in told}
    if len(told) == len(reports) and outcomes == {Outcome.OK}:
        return 0
    return EXIT_OOM if outcomes & OUT_OF_MEMORY else EXIT_FAILED


def _end(number: int, _frame: Any) -> None:
    """What started this process is gone."""
    end_children()
    os._exit(128 + number)


if __name__ == "__main__":
    become_subreaper()
    signal.signal(signal.SIGTERM, _end)
    die_with_parent(signal.SIGTERM)
    code = main(json.loads(Path(sys.argv[1]).read_text()))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
