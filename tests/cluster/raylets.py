"""A running cluster of several raylets on this machine, and a process of its own that drives it.

The raylets share one IP and one host name: what is real is Ray's scheduling, its agents, the ranks and the ways nodes
die. No network lies between them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray._private.authentication.authentication_token_setup import (
    enable_token_auth_by_default,
    ensure_token_if_auth_enabled,
)
from ray.cluster_utils import Cluster

from autotune.cluster.runner import SlotRunner
from autotune.cluster.slots import ray_session
from autotune.job import Job

_session: list[Any] = []


@contextlib.contextmanager
def raylets(*nodes: dict[str, Any]) -> Iterator[Cluster]:
    """A cluster with a raylet for each of `nodes` (arguments of `ray start`), the first its head.

    With tokens, as `ray start` has them where a token exists; and in a temporary folder of its own. What is started
    meanwhile finds it as `auto`.
    """
    enable_token_auth_by_default()
    ensure_token_if_auth_enabled(None, create_token_if_missing=True)
    temporary = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_TMPDIR", temporary)
        cluster = Cluster()
        try:
            for node in nodes:
                cluster.add_node(**node)
            # Else `auto` may be another Ray that happens to run on this machine.
            environment.setenv("RAY_ADDRESS", cluster.address)
            yield cluster
        finally:
            cluster.shutdown()
            shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def driver(address: str, log: Path) -> Iterator[Callable[..., Future[Any]]]:
    """A process that has joined the cluster; yields its `submit`. Functions and what they return are pickled."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _join, (address, log)) as pool:
        yield pool.submit
        pool.submit(_leave).result()


def _join(address: str, log: Path) -> None:
    session = ray_session(address, 1, log)
    session.__enter__()
    _session.append(session)


def _leave() -> None:
    _session.pop().__exit__(None, None, None)


@contextlib.contextmanager
def slot_runner(job: Job) -> Iterator[SlotRunner]:
    """In the driver's process: slots as the job asks for them."""
    runner = SlotRunner(job, "cpu")
    try:
        yield runner
    finally:
        runner.close()


def in_use(settle_s: float = 0.0) -> dict[str, Any]:
    """In a driver's process: what is held on the cluster, by whomever; empty if nothing.

    Args:
        settle_s: how long to wait for nothing; Ray gives back what was reserved a moment later.
    """
    import ray

    deadline = time.monotonic() + settle_s
    while True:
        groups = [group["name"] for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
        num_cpus = ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0.0)
        held = {what: amount for what, amount in {"groups": groups, "CPUs": num_cpus}.items() if amount}
        if not held or time.monotonic() > deadline:
            return held
        time.sleep(0.1)


def agents_of(node: Any) -> list[int]:
    """Pids of the agents on a node of the cluster."""
    (raylet,) = node.all_processes["raylet"]
    found = []
    for child in psutil.Process(raylet.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "ray::NodeAgent" in " ".join(child.cmdline()):
                found.append(child.pid)
    return found
