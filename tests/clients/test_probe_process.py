"""The probe in a script's process: what it leaves alone, what it reports, and how it ends it. One rank."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from trials.outcome import EXIT_FAILED, EXIT_OOM, Outcome
from trials.probe_log import rank_outcome, read_rank, throughput

from .harness import Run, environment, run

SCRIPT = """
import json, os, sys
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, tokens, attention_mask=None):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return x

torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

def rows(step):
    return torch.zeros(2, 8, dtype=torch.long)

def train(steps, each=lambda step: None, after=lambda step: None, make=rows):
    for step in range(1, steps + 1):
        each(step)
        model(make(step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        after(step)
    print("all", steps, "steps", flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Any:
    """Runs SCRIPT and what follows it."""

    def run_script(body: str, *command: str, **options: Any) -> Run:
        path = tmp_path / "train.py"
        path.write_text(SCRIPT + body)
        return run(tmp_path, [*(command or ("{probe}",)), str(path), "--flag", "value"], ranks=1, **options)

    return run_script


def test_without_a_request_nothing_happens(script: Any) -> None:
    body = """
import probe
probe.watch(model)
print("knob", probe.knob("lr", 0.5))
train(10, after=lambda step: probe.step())
probe.watch(model)
"""
    for command in ("-u", "{probe}"):
        ran = script(body, command, requested=False, env={"PYTHONPATH": "."})
        assert ran.codes == [0], ran.output
        assert "knob 0.5" in ran.output and "all 10 steps" in ran.output
        assert list((ran.folder / "out").iterdir()) == []


def test_the_script_finds_itself_as_python_would_run_it(script: Any) -> None:
    told = """
import __main__
print("TELL", json.dumps([sys.argv[1:], sys.path[0] == os.path.dirname(__file__), __name__, __main__.Model is Model]))
train(20)
"""
    ran = script(told)
    assert ran.codes == [0], ran.output
    assert ran.printed() == [[["--flag", "value"], True, "__main__", True]]
    assert "all 20 steps" not in ran.output  # it was ended after the steps that are timed
    (log,) = ran.logs
    assert rank_outcome(log).outcome is Outcome.OK
    assert [step["n"] for step in log.timed] == [3, 4, 5, 6]
    assert {step["tokens"] for step in log.timed} == {16}
    found = throughput(ran.logs)
    assert found.tokens_per_s_per_rank == pytest.approx(4 * 16 / sum(found.step_times_s))
    assert log.applied is not None
    assert log.applied["num_parameters"] == 16 * 4 + 2 * (4 * 4 + 4)
    assert log.applied["knobs"]["engine"] == "none"
    assert log.applied["blocks"] == {"class": "Linear", "count": 2}


def test_a_module_runs_with_m(script: Any, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text(SCRIPT + "train(20)\n")
    ran = run(tmp_path, ["{probe}", "-m", "package.train"], ranks=1, env={"PYTHONPATH": str(tmp_path)})
    assert ran.codes == [0], ran.output
    assert rank_outcome(ran.logs[0]).outcome is Outcome.OK


def test_two_lines_and_tokens_of_the_scripts_own(script: Any) -> None:
    ran = script(
        """
import probe
probe.watch(model)
print("TELL", json.dumps([probe.knob("lr", 1), probe.knob("width", 7)]))
train(20, after=lambda step: probe.step(tokens=step))
""",
        "-u",
        attach="explicit",
        knobs={"lr": 3},
        env={"PYTHONPATH": "."},
    )
    assert ran.codes == [0], ran.output
    assert ran.printed() == [[3, 7]]
    (log,) = ran.logs
    assert [step["tokens"] for step in log.steps] == [1, 2, 3, 4, 5, 6]
    assert [step["samples"] for step in log.steps] == [2] * 6
    assert log.applied is not None and log.applied["knobs_read"] == ["lr", "width"]


@pytest.mark.parametrize(
    ("attach", "body"),
    [
        ("auto", "import probe; train(1); probe.watch(model); train(9)"),
        ("explicit", "import probe; probe.watch(model); probe.watch(model); train(9)"),
    ],
)
def test_attached_twice(script: Any, attach: str, body: str) -> None:
    ran = script(body, "{probe}" if attach == "auto" else "-u", attach=attach, env={"PYTHONPATH": "."})
    assert ran.codes == [EXIT_FAILED]
    said = rank_outcome(ran.logs[0])
    assert said.outcome is Outcome.INVALID
    assert f"a probe is attached already ({attach}), and the script attaches another (explicit)" in said.reason
    assert "all 9 steps" not in ran.output


def test_two_processes_of_one_rank(script: Any) -> None:
    again = """
if os.fork() == 0:
    import probe
    probe.watch(model)
os.wait()
import probe
probe.watch(model)
"""
    ran = script(again, "-u", attach="explicit", env={"PYTHONPATH": "."})
    assert ran.codes == [EXIT_FAILED]
    assert "two processes attach a probe as the same rank" in rank_outcome(ran.logs[0]).reason


def test_another_way_than_the_job_says(script: Any) -> None:
    ran = script("import probe; probe.watch(model); train(9)", "-u", env={"PYTHONPATH": "."})
    assert ran.codes == [EXIT_FAILED]
    assert rank_outcome(ran.logs[0]).reason == (
        "the script attaches the probe itself (explicit), and the job says `attach: auto`"
    )


def test_no_optimizer_step_ever(script: Any) -> None:
    ran = script("model(torch.zeros(2, 8, dtype=torch.long))")
    assert ran.codes == [0]
    said = rank_outcome(ran.logs[0])
    assert said.outcome is Outcome.INVALID and "no optimizer step was seen" in said.reason


def test_it_ends_early(script: Any) -> None:
    ran = script("train(4)\nsys.exit(3)")
    assert ran.codes == [3]
    said = rank_outcome(ran.logs[0])
    assert said.outcome is Outcome.TOO_SHORT and "after 4 optimizer steps" in said.reason
    assert len(ran.logs[0].timed) == 2


def test_a_nan(script: Any) -> None:
    ran = script("train(20, after=lambda step: step == 4 and model.layers[1].weight.data.fill_(float('nan')))")
    assert ran.codes == [0]
    said = rank_outcome(ran.logs[0])
    assert said.outcome is Outcome.WRONG_NUMERICS
    assert "after 6 optimizer steps there are NaN or inf in " in said.reason
    assert ran.logs[0].end is not None and "layers.1.weight" in ran.logs[0].end["not_finite"]


@pytest.mark.parametrize("attach", ["auto", "explicit"])
def test_an_exception(script: Any, attach: str) -> None:
    body = """
def fails(step):
    if step == 5:
        raise KeyError("a column that the data has not")
"""
    train = "import probe; probe.watch(model); train(9, fails, lambda step: probe.step())"
    body += train if attach == "explicit" else "train(9, fails)"
    ran = script(body, "{probe}" if attach == "auto" else "-u", attach=attach, env={"PYTHONPATH": "."})
    assert ran.codes == [EXIT_FAILED]
    (log,) = ran.logs
    assert log.error is not None
    assert (log.error["type"], log.error["phase"], log.error["out_of_memory"]) == ("KeyError", "timed", None)
    assert "in fails" in log.error["traceback"] and 'File "' in ran.output
    assert rank_outcome(log).outcome is Outcome.CRASHED


@pytest.mark.parametrize(
    "allocate",
    ["torch.empty(2**50)", "bytearray(2**50)", "held.append(torch.ones(2**22))"],
)
def test_out_of_memory(script: Any, allocate: str) -> None:
    limit = {"memory_limit_gib": 0.25} if "held" in allocate else {}
    ran = script(f"held = []\ntrain(10**6, lambda step: step > 1 and {allocate})", timed_steps=10**6, **limit)
    assert ran.codes == [EXIT_OOM]
    (log,) = ran.logs
    assert log.error is not None
    assert log.error["type"] == ("MemoryError" if "bytearray" in allocate else "RuntimeError")
    assert rank_outcome(log).outcome is Outcome.OOM_DEVICE


def test_killed_it_leaves_what_it_has_done(script: Any) -> None:
    ran = script("import signal\ntrain(9, after=lambda step: step == 5 and os.kill(os.getpid(), signal.SIGKILL))")
    assert ran.codes == [-signal.SIGKILL]
    (log,) = ran.logs
    assert [step["n"] for step in log.steps] == [1, 2, 3, 4, 5]
    assert log.applied is not None and log.window is not None
    assert rank_outcome(log).outcome is None


@pytest.mark.parametrize(("body", "code"), [("", 0), ("sys.exit(5)", 5), ("raise KeyError('x')", 1)])
def test_watched_only_it_runs_as_it_would(script: Any, body: str, code: int) -> None:
    ran = script(f"train(30)\n{body}", timed_steps=None)
    assert ran.codes == [code], ran.output
    assert "all 30 steps" in ran.output
    (log,) = ran.logs
    assert len(log.timed) == 28
    assert (log.error or {}).get("type") == ("KeyError" if code == 1 else None)


def test_no_more_steps_than_time(script: Any) -> None:
    ran = script("import time\ntrain(9, lambda step: time.sleep(0.2))", timed_steps=10**6, max_s=30.0)
    (log,) = ran.logs
    assert log.window is not None and 1 <= log.window["num_steps"] < 150
    ran = script("import time\ntrain(9, lambda step: time.sleep(0.2))", max_s=0.5)
    assert ran.codes == [0]
    said = rank_outcome(ran.logs[0])
    assert said.outcome is Outcome.TOO_SHORT and "took the time that the trial has" in said.reason


def test_a_batch_without_tokens(script: Any) -> None:
    body = """
def images(step):
    return torch.zeros(3, 5, 4)
model.embedding.forward = lambda x: x
train(20, make=images)
"""
    ran = script(body)
    said = rank_outcome(ran.logs[0])
    assert said.outcome is Outcome.INVALID and "Say `tokens: N`" in said.reason and "[3, 5, 4]" in said.reason
    ran = script(body, tokens=10)
    assert ran.codes == [0], ran.output
    assert {step["tokens"] for step in ran.logs[0].timed} == {30}


def test_a_model_that_is_not_called(script: Any) -> None:
    ran = script("nn.Module.__call__ = lambda self, x: self.forward(x)\ntrain(20)")
    said = rank_outcome(ran.logs[0])
    assert said.outcome is Outcome.INVALID and "no forward of Model seen" in said.reason


def test_samples_of_any_length_and_padding_are_told(script: Any) -> None:
    ran = script("""
def make(step):
    return torch.zeros(2, 8 + step, dtype=torch.long)
forward = model.forward
def train_masked(steps):
    for step in range(1, steps + 1):
        tokens = make(step)
        mask = torch.ones_like(tokens)
        mask[0, 5:] = 0
        model(tokens, attention_mask=mask).sum().backward()
        optimizer.step()
train_masked(20)
""")
    assert ran.codes == [0], ran.output
    found = throughput(ran.logs)
    assert found.sample_tokens == [11.0, 12.5, 14.0]
    assert found.padding_fraction == pytest.approx(5 / 20)
    padded, uneven = found.notes
    assert "25% of the tokens are padding" in padded and "11 to 14 tokens" in uneven


def test_the_loaders_queue_goes_by_and_is_timed_three_times(script: Any) -> None:
    ran = script("""
from torch.utils.data import DataLoader
dataset = [torch.zeros(8, dtype=torch.long)] * 400
batches = iter(DataLoader(dataset, batch_size=2, num_workers=2, prefetch_factor=3))
train(200, make=lambda step: next(batches))
""")
    assert ran.codes == [0], ran.output
    (log,) = ran.logs
    assert log.window is not None and log.applied is not None
    assert (log.applied["knobs"]["num_workers"], log.applied["knobs"]["prefetch_factor"]) == (2, 3)
    assert log.window["queued_batches"] == 6
    assert log.window["num_untimed_steps"] == 1 + 1 + 6
    assert log.window["num_steps"] == 3 * 6
    assert all(step["wait_s"] > 0 for step in log.timed)


def test_a_line_that_is_torn_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    whole = json.dumps({"event": "start", "rank": 0})
    path.write_text(whole + '\n{"event": "st')
    log = read_rank(path)
    assert log.start == {"event": "start", "rank": 0} and log.steps == []
    path.write_text('{"event"\n' + whole + "\n")
    with pytest.raises(ValueError, match=r"rank-0\.jsonl, line 1: not written by a probe"):
        read_rank(path)


def test_the_harness_hands_down_no_launchers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.setitem(os.environ, name, "1")
    assert not {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"} & environment().keys()
