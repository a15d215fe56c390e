"""How far the verdict can be trusted: whole studies of two configs, by the driver itself, over modelled throughputs.

    python -m tests.benchmarks.verdict [--runs 400] [--json FILE]

Two equal configs must not win by luck, and a small true gain must be found. Each run is a study from its survey to
best.yaml; only the ranks are modelled: a run's throughput has 1.5 % noise of its own, and the machine drifts: a random
walk of 0.5 % from run to run, or in the harsh rows as much as the noise.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from autotune.job import Job
from autotune.job_file import validate
from autotune.run import Run
from tests.modelled import Drift, ModelledRunner, Silent
from trials.record import TrialSpec

NOISE, WALK, HARSH_WALK, ROUNDS = 0.015, 0.005, 0.015, 7
MAX_FALSE_WINS, TRUE_GAIN, MIN_POWER = 0.05, 0.03, 0.80


@dataclass(frozen=True)
class Tally:
    """Of `num_runs` studies in which the other config is truly `gain` faster than the baseline."""

    gain: float
    walk: float
    num_runs: int
    num_rounds: int
    num_compared: int
    """Studies whose finalists' round let the other config come to the fresh rounds."""
    num_wins: int

    @property
    def wins(self) -> float:
        return self.num_wins / self.num_runs


def job(rounds: int) -> Job:
    """Two configs: the baseline, and the same without checkpointing."""
    return validate(
        Job,
        {
            "model": {"preset": "tiny", "seq_len": 256},
            "data": {"source": "python-stdlib"},
            "batch": {"global_batch_size": 16, "target_world_size": 2},
            "cluster": {"ranks_per_node": 2, "device": "cpu"},
            "space": {"activation_checkpointing": ["none", "full"]},
            "budget": {"trials": 1},
            "measure": {"rounds": rounds},
        },
        "verdict",
    )


def tally(gain: float, runs: int, rounds: int, seed: int, walk: float = WALK) -> Tally:
    num_compared = num_wins = 0
    memory = Path("/dev/shm")
    for number in range(runs):
        drift = Drift(random.Random(f"{seed}/{number}"), NOISE, walk)

        def throughput(spec: TrialSpec, drift: Drift = drift) -> float:
            assert spec.knobs is not None
            truth = 1000.0 * (1 + gain if spec.knobs.activation_checkpointing == "none" else 1.0)
            return truth * drift.factor()

        out = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
        try:
            (out / "logs").mkdir()
            result = Run(job(rounds), out, ModelledRunner(throughput), Silent()).go()
        finally:
            shutil.rmtree(out)
        num_compared += result.verdict is not None
        num_wins += result.best is not result.baseline
    return Tally(gain, walk, runs, rounds, num_compared, num_wins)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console(highlight=False)
    table = Table(title=f"{args.runs} studies a row; {NOISE:.1%} noise a run, and a drift from run to run")
    for name in ("true gain", "drift", "rounds", "came to the rounds", "wins", "target"):
        table.add_column(name, justify="right")
    found: list[Tally] = []
    for gain, walk, rounds, target in (
        (0.0, WALK, ROUNDS, MAX_FALSE_WINS),
        (0.0, HARSH_WALK, ROUNDS, MAX_FALSE_WINS),
        (TRUE_GAIN, WALK, ROUNDS, MIN_POWER),
        (TRUE_GAIN, HARSH_WALK, ROUNDS, None),
        (TRUE_GAIN, WALK, 5, None),
    ):
        one = tally(gain, args.runs, rounds, args.seed + len(found), walk)  # other luck in each row
        found.append(one)
        met = "" if target is None else f"at most {target:.0%}" if not gain else f"at least {target:.0%}"
        if target is not None:
            met += ": met" if (one.wins <= target) == (not gain) else ": MISSED"
        cells = f"{gain:.0%}", f"{walk:.1%}", str(rounds), str(one.num_compared), f"{one.num_wins} = {one.wins:.1%}"
        table.add_row(*cells, met)
    console.print(table)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(one) for one in found], indent=1))


if __name__ == "__main__":
    main()
