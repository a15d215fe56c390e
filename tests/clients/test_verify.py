"""`autotune verify` around real scripts: it says how fast they are, and changes nothing of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from autotune.folder import prepare_folder
from autotune.run import Run
from tests.modelled import ModelledRunner, Silent
from tests.unit.conftest import make_job

from .harness import SCRIPTS, environment

AUTOTUNE = str(Path(sys.executable).with_name("autotune"))
TRAIN = """
import os, sys, time, torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)

    def forward(self, x):
        return self.head(self.embedding(x) if x.dtype == torch.long else x)

model = Model()
optimizer = torch.optim.AdamW(model.parameters())
steps, trouble = int(sys.argv[1]), sys.argv[2]
for step in range(steps):
    batch = torch.randint(64, (4, 33))
    inputs = torch.randn(4, 32, 32) if trouble == "floats" else batch[:, :-1]
    nn.functional.cross_entropy(model(inputs).flatten(0, 1), batch[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", step + 1)
print("a warning of its own", file=sys.stderr)
if trouble == "raises":
    raise ValueError("its own trouble")
if trouble == "exits":
    sys.exit(7)
if trouble == "waits":
    open("waiting", "w").close()
    time.sleep(300)
"""


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a tuning run leaves; the scripts here train something else, which is what they are told."""
    out = tmp_path_factory.mktemp("tuned") / "run"
    job = make_job(space={"activation_checkpointing": ["full", "none"]}, measure={"rounds": 3})
    prepare_folder(out, job)
    runner = ModelledRunner(
        lambda spec: 130.0 if spec.knobs and spec.knobs.activation_checkpointing == "none" else 100.0
    )
    Run(job, out, runner, Silent()).go()
    return out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    return tmp_path


def start(folder: Path, words: list[str], **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        cwd=folder,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_hears_sigint,  # noqa: PLW1509 (nothing here has threads)
    )


def _hears_sigint() -> None:
    """Also where these tests run in a shell's background, which ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def verified(tuned: Path, *words: str, options: tuple[str, ...] = ()) -> list[str]:
    return [AUTOTUNE, "verify", str(tuned), *options, "--", *words]


def lines(said: str) -> list[str]:
    """Ours among what is on standard error, without the mark."""
    mark = "autotune verify: "
    return [line.removeprefix(mark) for line in said.splitlines() if line.startswith(mark)]


def without_ours(said: str) -> str:
    return "".join(line for line in said.splitlines(keepends=True) if not line.startswith("autotune verify: "))


@pytest.mark.parametrize(("trouble", "code"), [("none", 0), ("exits", 7), ("raises", 1)])
def test_exit_code_and_output_are_the_scripts_own(tuned: Path, folder: Path, trouble: str, code: int) -> None:
    words = [sys.executable, "train.py", "60", trouble]
    alone = start(folder, words)
    output, said = alone.communicate(timeout=200)
    process = start(folder, verified(tuned, *words))
    our_output, all_said = process.communicate(timeout=200)
    assert (process.returncode, alone.returncode) == (code, code)
    assert our_output == output == "trained 60\n"
    assert without_ours(all_said) == said, "tracebacks too are as Python prints them"
    told = lines(all_said)
    assert any(line.startswith("step 50: ") and "tokens/s per rank" in line for line in told)
    assert told[-1].startswith("the run ended after step 60: ")
    assert "not as promised: engine: asked 'fsdp2', applied 'none' on rank 0" in "\n".join(told)
    assert sum("its script failed: ValueError: its own trouble" in line for line in told) == (trouble == "raises")


def test_two_ranks_under_torchrun_are_followed_and_the_lines_are_kept(tuned: Path, tmp_path: Path) -> None:
    logs = set((tuned / "logs").glob("verify-*"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    script = [str(SCRIPTS / "plain.py"), "--steps", "60"]
    process = start(tmp_path, verified(tuned, *launcher, *script))
    output, said = process.communicate(timeout=250)
    print(output, said)
    assert process.returncode == 0
    told = lines(said)
    assert any(line.startswith("step 50: ") and "data wait" in line for line in told)
    assert not any("let go" in line for line in told)
    assert not any("engine" in line or "shard_mesh_size" in line for line in told), "it is FSDP2 over both, as promised"
    (log,) = set((tuned / "logs").glob("verify-*")) - logs
    assert [line.partition("  ")[2] for line in (log / "verify.log").read_text().splitlines()] == told


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signals_are_the_scripts_own(tuned: Path, folder: Path, number: signal.Signals) -> None:
    process = start(folder, verified(tuned, sys.executable, "train.py", "5", "waits"))
    deadline = time.monotonic() + 240
    while not (folder / "waiting").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == -number
    assert lines(said)[-1].startswith("the run ended after step 5")


def test_if_the_probe_cannot_see_the_tokens_the_run_goes_on(tuned: Path, folder: Path) -> None:
    process = start(folder, verified(tuned, sys.executable, "train.py", "60", "floats"))
    output, said = process.communicate(timeout=200)
    assert (process.returncode, output) == (0, "trained 60\n")
    assert without_ours(said) == "a warning of its own\n"
    assert lines(said)[0].startswith("rank 0: the probe let go of it, and it goes on: ProbeError: the forward of Model")
    again = verified(tuned, sys.executable, "train.py", "60", "floats", options=("--tokens", "32"))
    _, said = start(folder, again).communicate(timeout=200)
    assert any(line.startswith("step 50: ") and "tokens/s per rank" in line for line in lines(said))


def test_on_a_node_without_the_folder_the_run_goes_on(folder: Path) -> None:
    from autotune.probing import PROBE_VARIABLE
    from autotune.verify.attach import PROBE, request

    asked = request(folder / "not" / "there", "auto", None, {})
    process = start(folder, [sys.executable, str(PROBE), "train.py", "5", "none"], **{PROBE_VARIABLE: asked})
    assert process.communicate(timeout=100) == ("trained 5\n", "a warning of its own\n")
    assert process.returncode == 0


def test_a_rank_that_is_started_again_has_a_file_of_its_own(folder: Path) -> None:
    from autotune.probing import PROBE_VARIABLE
    from autotune.verify.attach import PROBE, request

    (folder / "out").mkdir()
    env = {PROBE_VARIABLE: request(folder / "out", "auto", None, {})}
    for _ in range(2):
        process = start(folder, [sys.executable, str(PROBE), "train.py", "5", "none"], **env)
        process.communicate(timeout=100)
        assert process.returncode == 0
    assert {path.name for path in (folder / "out").iterdir()} == {"rank-0.jsonl", "rank-0.1.jsonl"}


SCRIPT_WITH_LINES = """
import sys, torch
from trials import probe
from torch import nn

model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))
probe.watch(model)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(60):
    batch = torch.randint(64, (4, 33))
    nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
    probe.step(tokens=1000)
"""


@pytest.mark.parametrize("attach", ["script", "auto"])
def test_a_script_with_the_probes_lines_is_followed_either_way(tuned: Path, folder: Path, attach: str) -> None:
    (folder / "train.py").write_text(SCRIPT_WITH_LINES)
    process = start(folder, verified(tuned, sys.executable, "train.py", options=("--attach", attach)))
    output, said = process.communicate(timeout=200)
    assert (process.returncode, output, without_ours(said)) == (0, "", "")
    told = lines(said)
    assert any(line.startswith("step 50: ") for line in told), told
    assert told[-1].startswith("the run ended after step 60"), "each step counts once"


def test_if_what_follows_it_dies_the_run_does_not_notice(tuned: Path, folder: Path) -> None:
    before = followers()
    process = start(folder, verified(tuned, sys.executable, "train.py", "5", "waits"))
    deadline = time.monotonic() + 240
    while not (folder / "waiting").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (follower,) = followers() - before
    assert os.getsid(follower) != os.getsid(process.pid), "a terminal's Ctrl-C is not for it"
    assert process.pid not in {parent.pid for parent in psutil.Process(follower).parents()}
    os.kill(follower, signal.SIGKILL)
    time.sleep(0.2)
    assert process.poll() is None
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert lines(said) == []


def followers() -> set[int]:
    return {
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if "autotune.verify.detached" in (process.info["cmdline"] or [])
    }


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere", "--", sys.executable, "train.py"], "no best.yaml there"),
        (["{run}", "--", "no-such-command"], "command not found"),
        (["{run}"], "no COMMAND is given"),
        (["{run}", "--", "true"], "no place for the probe"),
        (["{run}", "--every", "0", "--", "true"], "expected a time"),
    ],
)
def test_bad_input_starts_nothing(tuned: Path, folder: Path, arguments: list[str], complaint: str) -> None:
    words = [word.replace("{run}", str(tuned)) for word in arguments]
    process = start(folder, [AUTOTUNE, "verify", *words])
    output, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert complaint in said
    assert output == ""
