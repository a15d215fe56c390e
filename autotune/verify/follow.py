"""Follows the real run from outside: reads what its probes write, and says a line when one is due."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import shutil
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from autotune.errors import printable
from autotune.report.text import duration
from autotune.verdict import Spread
from autotune.verify.lines import HostMemory, difference_lines, stretch_line
from autotune.verify.promise import Promise
from autotune.verify.watched import Point, Watched
from trials.host_memory import available_bytes, growth_bytes_per_step, resident_bytes

MARKS = (50, 200, 1000)
"""Steps at which a line is due."""
POLL_S = 1.0
MAX_SAMPLES = 1200
"""Of the host's memory; then every second one is kept, and they are taken half as often."""
CHILDREN_S = 30.0
"""Between looks at what the ranks started: it takes a look at all processes of the host."""
NOTHING_SEEN_S = 600.0
"""After which it is said that no step was seen."""


class HostSamples:
    """Resident memory of the ranks of this host and what they started, at even intervals."""

    def __init__(self) -> None:
        self._samples: list[int] = []
        self._every_s = POLL_S
        self._next_s = self._next_look_s = -math.inf
        self._pids: list[int] = []

    def take(self, now_s: float, pids: list[int]) -> None:
        """Of the ranks `pids`, if it is time."""
        if now_s < self._next_s or not pids:
            return
        self._next_s = now_s + self._every_s
        if now_s >= self._next_look_s:
            self._pids, self._next_look_s = _with_children(pids), now_s + CHILDREN_S
        resident = resident_bytes(self._pids)
        if resident:  # they are not over
            self._samples.append(resident)
        if len(self._samples) >= MAX_SAMPLES:
            self._samples, self._every_s = self._samples[::2], self._every_s * 2

    def read(self) -> HostMemory | None:
        if not self._samples:
            return None
        growth = growth_bytes_per_step(self._samples)
        per_s = None if growth is None else growth / self._every_s
        return HostMemory(self._samples[-1], per_s, available_bytes())


def _with_children(pids: list[int]) -> list[int]:
    found = list(pids)
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return found


class Follower:
    """Says lines on one run.

    Args:
        say: takes a line.
        every_s: between lines after the last mark.
    """

    def __init__(self, watched: Watched, promise: Promise, say: Callable[[str], None], every_s: float) -> None:
        self.watched, self.promise, self.say, self.every_s = watched, promise, say, every_s
        self._began_s = self._said_s = time.monotonic()
        self._host = HostSamples()
        self._anew()
        self._said_nothing_seen = False

    def _anew(self) -> None:
        self._marks = list(MARKS)
        self._before: dict[int, Point] | None = None
        """Where the last line's stretch ended."""
        self._said_differences = False
        self._let_go: set[int] = set()

    def look(self, now_s: float) -> None:
        """Reads on, and says what is due."""
        if self.watched.read():
            self.say("the ranks were started again: counting anew")
            self._anew()
        # From the timed steps on: before, they import and allocate.
        self._host.take(now_s, [rank.log.start["pid"] for rank in self.watched.counting if rank.log.start])
        self._say_what_let_go()
        if not self.watched.counting:
            if now_s - self._began_s > NOTHING_SEEN_S and not self._said_nothing_seen:
                self._said_nothing_seen = True
                self.say(f"no optimizer step was seen in {duration(NOTHING_SEEN_S)}")
            return
        while self._marks and self.watched.reached(self._marks[0]):
            mark = self._marks.pop(0)
            self._say_stretch(f"step {mark:,}", self.watched.points(mark), now_s)
        if now_s - self._said_s >= self.every_s:
            self._say_stretch(f"after {duration(now_s - self._began_s)}, step {self._last_step():,}", None, now_s)

    def end(self) -> None:
        """The run is over: what came since the last line."""
        self.watched.read()
        self._say_what_let_go()
        if not self.watched.counting:
            self.say("the run ended, and no optimizer step was seen")
            return
        self._say_stretch(f"the run ended after step {self._last_step():,}", None, time.monotonic())

    def _last_step(self) -> int:
        return max(rank.last.n for rank in self.watched.counting if rank.last is not None)

    def _say_stretch(self, when: str, end: dict[int, Point] | None, now_s: float) -> None:
        self._said_s = now_s
        ranks = self.watched.counting
        if not self._said_differences:
            self._said_differences = True
            world_size = max((rank.log.applied or {}).get("world_size", 1) for rank in ranks)
            for line in difference_lines(ranks, self.promise, world_size):
                self.say(line)
        end = end or self.watched.points(None)
        begin = self._before or {rank.number: rank.begin for rank in ranks if rank.begin is not None}
        stretch = self.watched.stretch(begin, end)
        if stretch is None:
            self.say(f"{when}: no step since the last line")
            return
        self._before = end
        self.say(stretch_line(when, stretch, self.promise, ranks, self._host.read()))

    def _say_what_let_go(self) -> None:
        for rank in self.watched.ranks.values():
            error = rank.log.error
            if error is not None and rank.number not in self._let_go:
                self._let_go.add(rank.number)
                who = "the probe let go of it, and it goes on" if error["by"] == "probe" else "its script failed"
                self.say(f"rank {rank.number}: {who}: {error['type']}: {_first_line(error['message'])}")


def _first_line(text: str) -> str:
    return (text.splitlines() or [""])[0]


def _say_to(log: Path) -> Callable[[str], None]:
    """To the log and to standard error; a full disk, or a terminal that is gone, stops neither."""

    def say(text: str) -> None:
        line = printable(text)
        with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now(UTC).isoformat(timespec='seconds')}  {line}\n")
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), f"autotune verify: {line}\n".encode())

    return say


def _promise(values: dict[str, Any]) -> Promise:
    return Promise(**values | {"rates": Spread(**values["rates"])})


def main(order_path: Path) -> None:
    """Follows until the run's process is gone."""
    order = json.loads(order_path.read_text(encoding="utf-8"))
    probed, say = Path(order["probed"]), _say_to(Path(order["log"]))
    try:
        promise = _promise(order["promise"])
        follower = Follower(Watched(probed, MARKS), promise, say, order["every_s"])
        with contextlib.suppress(ProcessLookupError):  # it is over already
            run = os.pidfd_open(order["pid"])
            while not select.select([run], [], [], POLL_S)[0]:
                follower.look(time.monotonic())
        follower.end()
    except Exception as error:  # noqa: BLE001 (whatever it is, it must not be silent)
        say(f"stopped, and the run goes on: {type(error).__name__}: {error}")
    finally:
        shutil.rmtree(probed, ignore_errors=True)
