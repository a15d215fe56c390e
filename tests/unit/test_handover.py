"""How a confirmed config reaches the command: its words, its environment, its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.confirm.handover import Handover, check_command, check_exports, start, uses_config, write_export
from autotune.errors import InfrastructureError, UserError
from autotune.export import Best, Exported
from autotune.probing import given_knobs
from tests.unit.conftest import make_space
from trials.record import KNOB_NAMES, Knobs


@pytest.fixture
def handover(baseline: Knobs) -> Handover:
    return Handover(Path("/run/export/a b.yaml"), "fallback", baseline, 16)


def test_placeholders_are_replaced_inside_words_and_nothing_else_is(handover: Handover) -> None:
    words = ["torchrun", "--nproc={world_size}", "train.py", "{config}", "{micro_batch_size}x{grad_accum_steps}"]
    words += ["${HOME}/{held}", '{"a": {}}', "{A}", "${held}", "reshard={reshard_after_forward}", "{limit_all_gathers}"]
    assert handover.command(words) == [
        *("torchrun", "--nproc=16", "train.py", "/run/export/a b.yaml", "1x8"),
        *("${HOME}/fallback", '{"a": {}}', "{A}", "${held}", "reshard=true", "none"),
    ]


def test_every_knob_is_a_placeholder(handover: Handover) -> None:
    assert set(KNOB_NAMES) < set(handover.values())
    check_command([sys.executable, *(f"{{{name}}}" for name in handover.values())])


def test_the_environment_names_the_file_and_keeps_the_rest(handover: Handover) -> None:
    found = handover.environment({"A": "1", "AUTOTUNE_CONFIG": "of another run"})
    assert given_knobs(found) == handover.knobs.to_dict(), "for probe.knob"
    del found["AUTOTUNE_PROBE"]
    assert found == {"A": "1", "AUTOTUNE_CONFIG": "/run/export/a b.yaml", "AUTOTUNE_HELD": "fallback"}


@pytest.mark.parametrize(
    ("words", "complaint", "hint"),
    [
        ([], "no COMMAND", "after --"),
        (["no-such-command-anywhere"], "command not found", "PATH"),
        (["/etc/passwd"], "command not found", "executable"),
        (["python", "{micro_batch}"], "{micro_batch}: no such placeholder", "micro_batch_size"),
        (["python", "{configuration}"], "{configuration}: no such placeholder", "config"),
    ],
)
def test_a_command_that_cannot_work_is_refused_before_anything_is_measured(
    words: list[str], complaint: str, hint: str
) -> None:
    with pytest.raises(UserError) as raised:
        check_command(words)
    assert complaint in raised.value.message
    assert hint in raised.value.hint


def test_a_config_that_cannot_be_exported_is_refused_where_the_command_takes_a_file(baseline: Knobs) -> None:
    ddp = Best(make_space(training={"engines": ["ddp"]}, space={}).baseline, "fp32", 2, 32, [])
    fsdp = Best(baseline, "fp32", 2, 32, [])
    check_exports("torchtitan", {"best": fsdp, "baseline": ddp}, ["train", "{micro_batch_size}"])
    with pytest.raises(UserError, match=r"the baseline is of ddp") as raised:
        check_exports("torchtitan", {"best": fsdp, "baseline": ddp}, ["train", "{config}"])
    assert "{engine}" in raised.value.hint
    with pytest.raises(UserError, match="no such trainer") as raised:
        check_exports("acelerate", {"best": fsdp}, ["train"])
    assert "accelerate" in raised.value.hint
    assert uses_config(["a", "--x={config}"])


def test_a_run_folder_that_cannot_be_written_does_not_keep_the_config(tmp_path: Path) -> None:
    (tmp_path / "export").write_text("a file where the folder should be")
    exported = Exported({"a.yaml": "x"}, KNOB_NAMES, {})
    path, problem = write_export(exported, tmp_path / "export" / "confirmed-plain")
    assert path.read_text() == "x"
    assert "on this machine" in problem
    path, problem = write_export(exported, tmp_path / "other")
    assert (path, problem) == (tmp_path / "other" / "a.yaml", "")


STARTS = """
import os, sys
from autotune.confirm.handover import start
from autotune.signals import interrupt_in_order
interrupt_in_order()
start(["/bin/sh", "-c", 'echo $$ $A "$0"; grep -E "Sig(Blk|Ign)" /proc/self/status; exit 7', "{}"], {"A": "given"})
"""


def test_what_a_shell_ignores_in_the_background_stays_ignored() -> None:
    background = ["/bin/sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", STARTS]
    output = subprocess.run(background, stdout=subprocess.PIPE, text=True, timeout=60, check=False).stdout
    _, _blocked, ignored = output.splitlines()
    assert int(ignored.split()[1], 16) & 1 << signal.SIGINT - 1


def test_the_command_takes_the_place_of_this_process_with_no_signal_blocked_or_ignored() -> None:
    process = subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate(timeout=60)
    first, blocked, ignored = output.splitlines()
    assert process.returncode == 7
    assert first == f"{process.pid} given {{}}"
    ours = sum(1 << number - 1 for number in (signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ))
    for line in (blocked, ignored):
        assert int(line.split()[1], 16) & ours == 0, line


def test_what_the_system_does_not_start_is_said(tmp_path: Path) -> None:
    script = tmp_path / "no-interpreter"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    check_command([str(script)])
    with pytest.raises(InfrastructureError, match="No such file"):
        start([str(script)], os.environ)
