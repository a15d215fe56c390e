"""A process that has imported torch once and forks a rank in milliseconds. For CPU ranks only.

`python -P -m trials.forkserver`. Reads one JSON object a line on stdin and answers one a line on stdout:

    {"start": {"order": {...}, "env": {...}, "log": path}}  ->  {"started": pid}
    (a child ends)                                          ->  {"ended": pid, "exit_code": n}

Each child leads its own process group, so that killing the group takes its DataLoader workers too. When stdin
closes (the agent is gone) every child's group is killed and the server leaves. It never starts a thread and never
runs an operator, so its children may use autograd and OpenMP; what libraries read when they load (OMP_NUM_THREADS)
is fixed here and must be set before the server starts.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
from typing import Any

from trials.lifeline import die_with_parent

PRELOAD = (
    "torch._dynamo",  # the first optimizer step imports it
    "torch.distributed._tools.mem_tracker",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.data",
    "trials.entry",
    "trials.models",
)
EXIT_NO_START = 71


def serve() -> None:
    die_with_parent()
    for module in PRELOAD:
        __import__(module)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _say({"ready": os.getpid()})
    children: set[int] = set()
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(wake_read, selectors.EVENT_READ)
    pending = b""
    while True:
        for key, _ in selector.select():
            chunk = os.read(key.fd, 65536)
            if key.fd == wake_read:
                continue
            if not chunk:
                for pid in children:
                    _kill_group(pid)
                return
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                pid = _start(json.loads(line)["start"], (wake_read, wake_write))
                children.add(pid)
                _say({"started": pid})
        for pid in list(children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                children.discard(pid)
                _say({"ended": pid, "exit_code": os.waitstatus_to_exitcode(status)})


def _start(start: dict[str, Any], own_fds: tuple[int, int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        _become_rank(start, own_fds)
    finally:
        os._exit(EXIT_NO_START)  # whatever happened, a child never runs the server's loop


def _become_rank(start: dict[str, Any], own_fds: tuple[int, int]) -> None:
    os.setsid()
    die_with_parent()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for fd in own_fds:
        os.close(fd)
    log = os.open(start["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(start["env"])
    from trials.entry import run_rank

    run_rank(start["order"])


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve()
