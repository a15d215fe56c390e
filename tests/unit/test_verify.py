"""What is said of a real run: over files as its probes write them, and promises as runs leave them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.best import note_confirmed, read_best
from autotune.errors import UserError
from autotune.folder import prepare_folder
from autotune.history import History
from autotune.run import Run
from autotune.verdict import Spread, spread
from autotune.verify.attach import PROBE, request, with_probe
from autotune.verify.follow import Follower, HostSamples
from autotune.verify.lines import HostMemory, stretch_line
from autotune.verify.promise import Promise
from autotune.verify.promised import read_promise
from autotune.verify.watched import Watched
from tests.modelled import ModelledRunner, Silent
from tests.unit.conftest import make_job, make_space

SETTINGS = make_space().baseline.to_dict()
PROMISE = Promise(Spread(1000.0, 950.0, 1050.0, 5), "confirmed", 2, SETTINGS, 3_000_000, 0.01, None)
MARKS = (50, 200, 1000)
TOKENS = 100
"""Of a rank and a step."""


class Probes:
    """Files in a folder, as `trials.probe` writes them while it only watches."""

    def __init__(self, folder: Path, num_ranks: int = 2, suffix: str = "") -> None:
        self.paths = [folder / f"rank-{rank}{suffix}.jsonl" for rank in range(num_ranks)]
        for rank, path in enumerate(self.paths):
            path.touch()
            self.write(rank, event="start", rank=rank, pid=2**22 - 1, host="h", t=0.0)
            applied = {"knobs": SETTINGS, "world_size": num_ranks, "num_parameters": 3_000_000}
            self.write(rank, event="applied", shard_mesh_size=num_ranks, **applied)
            self.write(rank, event="window", t=10.0, num_steps=None, num_untimed_steps=2, loader_sustained=True)

    def write(self, number: int, /, **event: Any) -> None:
        with self.paths[number].open("a") as file:
            file.write(json.dumps(event) + "\n")

    def step(self, rank: int, n: int, t: float, tokens: float | None = TOKENS, wait_s: float | None = 0.001) -> None:
        self.write(rank, event="step", n=n, t=t, tokens=tokens, samples=1, micro_batches=1, wait_s=wait_s, timed=True)

    def steps(self, until: int, step_s: float = 0.1, first: int = 3, **values: Any) -> None:
        """Of all ranks alike."""
        for n in range(first, until + 1):
            for rank in range(len(self.paths)):
                self.step(rank, n, 10.0 + (n - 2) * step_s, **values)


BEGAN_S = 1000.0
"""Whole seconds: of a clock as it is, an hour more less that clock is now and then a little under an hour."""


def follow(folder: Path, every_s: float = 3600.0, promise: Promise = PROMISE) -> tuple[Follower, list[str]]:
    said: list[str] = []
    follower = Follower(Watched(folder, MARKS), promise, said.append, every_s)
    follower._began_s = follower._said_s = BEGAN_S
    return follower, said


# --- where the probe goes -----------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "other.py").touch()
    return "train.py"


@pytest.mark.parametrize(
    "words",
    [
        "python | train.py --lr 3",
        "python -u | train.py other.py",
        "torchrun --standalone --nproc-per-node 2 | train.py -m x",
        "python -m torch.distributed.run --nproc-per-node 2 | train.py",
        "accelerate launch --config_file missing.py | train.py",
        "python | -m package.train --lr 3",
        "torchrun --nproc-per-node 2 | -m package.train",
        "python -m torch.distributed.run --nproc-per-node 2 | -m package.train",
        "srun --ntasks 2 torchrun | train.py",
    ],
)
def test_the_probe_goes_before_the_script(script: str, words: str) -> None:
    before, after = (part.split() for part in words.split("|"))
    assert with_probe([*before, *after]) == [*before, str(PROBE), *after]
    assert PROBE.is_file()


def test_the_probe_goes_where_it_is_asked_for(script: str) -> None:
    assert with_probe(["bash", "-c", "torchrun {probe} train.py", "x.py"])[2] == f"torchrun {PROBE} train.py"


@pytest.mark.parametrize("words", [["bash", "run.sh"], ["./train.py"], ["python", "missing.py"], ["python", "-m"]])
def test_a_command_without_a_place_for_it_is_refused(script: str, words: list[str]) -> None:
    with pytest.raises(UserError, match="no place for the probe") as raised:
        with_probe(words)
    assert "{probe}" in raised.value.hint
    assert "--attach script" in raised.value.hint


def test_the_probe_is_asked_to_watch_only() -> None:
    asked = json.loads(request(Path("/x"), "script", 128.0, {"tp": 2}))
    assert asked["timed_steps"] is None
    assert (asked["attach"], asked["tokens"], asked["out"]) == ("explicit", 128.0, "/x")
    assert asked["knobs"] == {"tp": 2}, "as a confirmation before it handed them over"


# --- the promise --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tuned") / "run"
    rates = {"full": 100.0, "none": 130.0}
    job = make_job(space={"activation_checkpointing": list(rates)}, measure={"rounds": 3})
    prepare_folder(out, job)
    runner = ModelledRunner(
        lambda spec: rates[spec.knobs.activation_checkpointing] + (spec.round or 0) if spec.knobs else 1.0
    )
    Run(job, out, runner, Silent()).go()
    return out


def test_the_best_is_promised_what_its_rounds_reached(finished: Path) -> None:
    promise = read_promise(finished)
    assert promise.settings["activation_checkpointing"] == "none"
    assert promise.rates == spread([130.0, 131.0, 132.0])
    assert (promise.world_size, promise.num_parameters) == (2, 3_000_000)
    assert promise.data_wait_share == 0.0
    assert promise.where.startswith("tuned on")


def test_what_was_confirmed_goes_before(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "history").mkdir(parents=True)
    for name in ("best.yaml", "study.yaml"):
        (run / name).write_bytes((finished / name).read_bytes())
    figures = {"tokens_per_s_per_rank": 90.0, "tokens_per_s_per_rank_low": 85.0, "tokens_per_s_per_rank_high": 95.0}
    section = {"held": "baseline", "why": "w", "at": "2026-11-30", "world_size": 8}
    section["settings"] = read_best(run)["baseline"]["settings"]
    note_confirmed(run, section | figures)
    promise = read_promise(run)
    assert (promise.rates.mean, promise.rates.low, promise.rates.high) == (90.0, 85.0, 95.0)
    assert promise.settings["activation_checkpointing"] == "full"
    assert promise.world_size == 8
    # Nothing was measured there: what is promised is what tuning saw of it.
    note_confirmed(run, section | dict.fromkeys(figures))
    assert read_promise(run).rates.mean == pytest.approx(101.0, rel=0.01)


def test_a_history_that_is_gone_leaves_the_figure_without_an_interval(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "best.yaml").write_bytes((finished / "best.yaml").read_bytes())
    promise = read_promise(tmp_path)
    assert promise.rates.mean == pytest.approx(131.0, rel=0.01)
    assert promise.rates.low is None
    assert promise.num_parameters is None
    rows, _ = History(tmp_path / "history").rows()
    assert rows == []


def test_a_simulated_run_promises_nothing(finished: Path, tmp_path: Path) -> None:
    best = yaml.safe_load((finished / "best.yaml").read_text())
    best["fingerprint"]["simulated"] = True
    (tmp_path / "best.yaml").write_text(yaml.safe_dump(best))
    with pytest.raises(UserError, match="was simulated"):
        read_promise(tmp_path)


def test_the_interval_is_one_of_a_further_run() -> None:
    known = spread([100.0, 110.0])
    assert known.low is not None
    assert known.high is not None
    assert known.low < 100.0 < 110.0 < known.high
    assert known.low * known.high == pytest.approx(known.mean**2)
    assert spread([5.0]) == Spread(pytest.approx(5.0), None, None, 1)
    for rates in ([], [0.0, 1.0]):
        with pytest.raises(ValueError, match="throughputs"):
            spread(rates)


# --- what is said -------------------------------------------------------------------------------------------------


def test_a_line_at_each_mark_is_of_the_steps_since_the_one_before(tmp_path: Path) -> None:
    probes = Probes(tmp_path)
    follower, said = follow(tmp_path)
    probes.steps(49)
    follower.look(0.0)
    assert said == []
    probes.steps(199, first=50)
    follower.look(1.0)
    assert said == [
        "step 50: 1,000 tokens/s per rank, +0.0 % of the 1,000 promised (95 % of runs 950 to 1,050): as promised; "
        "data wait 1.0 % of the step (was 1.0 %)"
    ]
    for rank in range(2):  # slower from here on
        for n in range(200, 1001):
            probes.step(rank, n, 10.0 + 197 * 0.1 + (n - 199) * 0.2)
    follower.look(2.0)
    follower.look(3.0)
    assert [line.partition(":")[0] for line in said] == ["step 50", "step 200", "step 1,000"]
    assert "500 tokens/s per rank, -50.0 % of the 1,000 promised" in said[2]
    assert "below the promise" in said[2]


def test_a_line_waits_for_all_ranks(tmp_path: Path) -> None:
    probes = Probes(tmp_path)
    follower, said = follow(tmp_path)
    for n in range(3, 60):
        probes.step(0, n, 10.0 + n * 0.1)
    follower.look(0.0)
    assert said == []


def test_after_the_marks_a_line_comes_each_hour(tmp_path: Path) -> None:
    probes = Probes(tmp_path)
    follower, said = follow(tmp_path)
    now_s = BEGAN_S
    probes.steps(1000)
    follower.look(now_s)
    # Steps share lines by now: one of a hundred steps.
    for rank in range(2):
        probes.step(rank, 1100, 10.0 + 1098 * 0.1, tokens=100 * TOKENS, wait_s=5.0)
    follower.look(now_s + 3599)
    assert len(said) == 3
    follower.look(now_s + 3600)
    assert said[3].startswith("after 1 h 00 min, step 1,100: 1,000 tokens/s per rank")
    assert "data wait 50.0 % of the step (was 1.0 %)" in said[3]
    follower.look(now_s + 7200)
    assert said[4] == "after 2 h 00 min, step 1,100: no step since the last line"


def test_at_the_end_a_line_says_what_came_since(tmp_path: Path) -> None:
    probes = Probes(tmp_path)
    follower, said = follow(tmp_path)
    probes.steps(30)
    follower.end()
    assert said[0].startswith("the run ended after step 30: 1,000 tokens/s per rank")


def test_a_run_without_a_step_says_so(tmp_path: Path) -> None:
    follower, said = follow(tmp_path)
    follower.look(BEGAN_S + 601)
    follower.look(BEGAN_S + 602)
    follower.end()
    assert said == ["no optimizer step was seen in 10 min 00 s", "the run ended, and no optimizer step was seen"]


def test_ranks_that_are_started_again_are_counted_anew(tmp_path: Path) -> None:
    Probes(tmp_path).steps(60)
    follower, said = follow(tmp_path)
    follower.look(0.0)
    Probes(tmp_path, suffix=".1").steps(60, step_s=0.05)
    follower.look(1.0)
    assert said[1] == "the ranks were started again: counting anew"
    assert said[2].startswith("step 50: 2,000 tokens/s per rank")


def test_a_line_that_is_half_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    probes = Probes(tmp_path, num_ranks=1)
    watched = Watched(tmp_path, MARKS)
    with probes.paths[0].open("a") as file:
        file.write('{"event": "step", "n": 3, "t": 11.0, "tokens": 5, "sam')
        file.flush()
        watched.read()
        assert watched.ranks[0].last == watched.ranks[0].begin
        file.write('ples": 1, "micro_batches": 1, "wait_s": null, "timed": true}\n')
    watched.read()
    (last,) = watched.points(None).values()
    assert (last.n, last.tokens, last.wait_s) == (3, 5.0, None)


def test_what_a_probe_says_of_its_end_is_passed_on_once(tmp_path: Path) -> None:
    probes = Probes(tmp_path)
    probes.write(1, event="error", by="probe", type="ProbeError", message="tokens\nand more", phase="observe")
    follower, said = follow(tmp_path)
    follower.look(0.0)
    follower.look(1.0)
    assert said == ["rank 1: the probe let go of it, and it goes on: ProbeError: tokens"]


def test_settings_that_are_not_the_promised_ones_are_said_first(tmp_path: Path) -> None:
    probes = Probes(tmp_path)
    other = {"knobs": SETTINGS | {"micro_batch_size": 7}, "world_size": 2, "num_parameters": 5, "shard_mesh_size": 1}
    probes.write(0, event="applied", **other)
    probes.steps(50)
    follower, said = follow(tmp_path)
    follower.look(0.0)
    assert said[0].startswith("not as promised: micro_batch_size: asked 1, applied 7 on rank 0")
    assert any("num_parameters: asked 3000000, applied 5" in line for line in said)
    assert any("shard_mesh_size: asked 2, applied 1" in line for line in said)
    assert said[-1].startswith("step 50")


def test_on_other_ranks_the_accumulation_may_be_another(tmp_path: Path) -> None:
    probes = Probes(tmp_path, num_ranks=4)
    for rank in range(4):
        knobs = {"knobs": SETTINGS | {"grad_accum_steps": 2}, "shard_mesh_size": 4}
        probes.write(rank, event="applied", world_size=4, num_parameters=3_000_000, **knobs)
    probes.steps(50)
    follower, said = follow(tmp_path)
    follower.look(0.0)
    assert said[0] == "4 ranks; the promise was measured on 2"
    assert said[1].startswith("step 50")


# --- what is otherwise --------------------------------------------------------------------------------------------


def line(folder: Path, promise: Promise = PROMISE, host: HostMemory | None = None) -> str:
    watched = Watched(folder, MARKS)
    watched.read()
    begin = {rank.number: rank.begin for rank in watched.counting if rank.begin is not None}
    stretch = watched.stretch(begin, watched.points(None))
    assert stretch is not None
    return stretch_line("now", stretch, promise, watched.counting, host)


def test_a_rank_that_waits_for_its_loader_is_named(tmp_path: Path) -> None:
    probes = Probes(tmp_path, num_ranks=4)
    for n in range(3, 60):
        for rank in range(4):
            probes.step(rank, n, 10.0 + (n - 2) * 0.1, wait_s=0.04 if rank == 2 else 0.002)
    said = line(tmp_path)
    assert "data wait 40.0 % of the step (was 1.0 %)" in said
    assert "straggler: rank 2 waits for its loader, the middle one 2.0 %" in said


def test_a_rank_that_ends_its_steps_last_is_named_and_chance_is_not(tmp_path: Path) -> None:
    probes = Probes(tmp_path, num_ranks=4)
    for n in range(3, 60):
        for rank in range(4):
            probes.step(rank, n, 10.0 + (n - 2) * 0.1 + (0.01 if rank == 3 else 0.0001 * rank))
    assert "straggler: rank 3 ends last in 100 % of the steps, by 9.9 % of one" in line(tmp_path)
    for path in probes.paths:
        path.unlink()
    probes = Probes(tmp_path, num_ranks=4)
    for n in range(3, 60):
        for rank in range(4):
            probes.step(rank, n, 10.0 + (n - 2) * 0.1 + (0.01 if rank == n % 4 else 0.0))
    assert "straggler" not in line(tmp_path)


def test_memory_of_the_device_and_its_retries(tmp_path: Path) -> None:
    probes = Probes(tmp_path)
    probes.steps(10)
    probes.write(0, event="memory", device_reserved=3 * 2**30, alloc_retries=0)
    probes.write(1, event="memory", device_reserved=4 * 2**30, alloc_retries=2)
    promise = Promise(**{**vars(PROMISE), "reserved_gib": 3.5})
    assert "memory 4.00 GiB reserved (was 3.50 GiB); the allocator had to begin anew 2 times" in line(tmp_path, promise)


@pytest.mark.parametrize(
    ("growth", "said"),
    [
        (None, "host memory 2.00 GiB"),
        (0.0, "host memory 2.00 GiB, not growing"),
        (2**30 / 3600, "host memory 2.00 GiB, growing by 1.00 GiB an hour: full in 10.0 hours"),
    ],
)
def test_growth_of_the_hosts_memory(tmp_path: Path, growth: float | None, said: str) -> None:
    Probes(tmp_path).steps(10)
    assert line(tmp_path, host=HostMemory(2 * 2**30, growth, 10 * 2**30)).endswith(said)


def test_tokens_that_cannot_be_counted_leave_the_time_of_a_step(tmp_path: Path) -> None:
    Probes(tmp_path).steps(10, tokens=None, wait_s=None)
    assert line(tmp_path) == "now: 0.1 s a step; tokens could not be counted"


@pytest.mark.parametrize(
    ("rates", "verdict"),
    [
        (Spread(1000.0, None, None, 1), "(one run, no interval): as promised"),
        (Spread(1030.0, None, None, 1), "(one run, no interval): below the promise"),
        (Spread(900.0, 880.0, 920.0, 5), "(95 % of runs 880 to 920): above the promise"),
    ],
)
def test_the_verdict_goes_by_the_interval(tmp_path: Path, rates: Spread, verdict: str) -> None:
    Probes(tmp_path).steps(10)
    assert verdict in line(tmp_path, Promise(**{**vars(PROMISE), "rates": rates}))


def test_the_hosts_memory_is_sampled_less_often_as_a_run_goes_on() -> None:
    samples = HostSamples()
    for second in range(3000):
        samples.take(float(second), [os.getpid()])
    assert len(samples._samples) < 1200
    host = samples.read()
    assert host is not None
    assert host.growth_bytes_per_s is not None
    assert host.resident_bytes > 2**20
