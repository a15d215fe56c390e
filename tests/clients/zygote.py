"""Forks scripts from a process that has torch already: to import it takes longer than all that they do.

Each line on stdin is an order, {"argv": script and its arguments, "env", "cwd", "log"}; answered by its exit code.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch.utils.data  # noqa: F401

DEADLINE_S = 200
"""No test measures time: this only ends a hang."""


def become(order: dict[str, Any]) -> None:
    """This process is `python ARGV` from here on, and ends as that does."""
    signal.alarm(DEADLINE_S)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    sys.argv = order["argv"]
    paths = [path for path in order["env"].get("PYTHONPATH", "").split(":") if path]
    sys.path[:1] = [str(Path(sys.argv[0]).parent), *paths]
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            become(json.loads(line))
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
