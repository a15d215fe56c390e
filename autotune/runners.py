"""What measures a job's trials: the slots of a Ray cluster, or a modelled one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from autotune.job import Job


def runner_of(job: Job, out: Path, simulate: str | None) -> tuple[Callable[[], AbstractContextManager[Any]], str]:
    """What opens the runner, and the modelled cluster's name; empty for a real one.

    Raises:
        UserError: `simulate` describes no cluster, or none that the job can run on.
    """
    if simulate is None:
        from autotune.cluster.runner import open_runner

        return lambda: open_runner(job, out / "logs" / "ray.log"), ""
    from autotune.simulate.cluster import parse_cluster
    from autotune.simulate.runner import SimulatedRunner, last_end_s, make_world

    cluster = parse_cluster(simulate)
    world = make_world(job, cluster)
    return lambda: nullcontext(SimulatedRunner(world, last_end_s(out / "history"))), str(cluster)
