"""A plain script under fully_shard, on two gloo ranks: attached both ways, started both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trials.outcome import Outcome
from trials.probe_log import differences, rank_outcome, throughput

from .harness import Run, run
from .scripts.toy import NUM_LAYERS, NUM_PARAMETERS, SEQ_LEN

WORLD_SIZE = 2
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]

CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "plain": ([], {}),
    "accumulated": (["--mbs", "3", "--accum", "3"], {"micro_batch_size": 3, "grad_accum_steps": 3}),
    "synced": (
        ["--accum", "2", "--sync-each", "--reshard", "False"],
        {"grad_accum_steps": 2, "sync_each_micro_batch": True, "reshard_after_forward": False},
    ),
    "checkpointed": (
        ["--checkpoint-every", "2", "--bf16"],
        {"activation_checkpointing": "every_2", "param_dtype": "bf16"},
    ),
    "grouped": (
        ["--checkpoint-every", "1", "--blocks-per-unit", "2", "--workers", "1", "--prefetch", "3"],
        {"activation_checkpointing": "full", "blocks_per_unit": 2, "num_workers": 1, "prefetch_factor": 3},
    ),
}


def asked(case: str) -> dict[str, Any]:
    return {
        "engine": "fsdp2",
        "micro_batch_size": 2,
        "grad_accum_steps": 1,
        "sync_each_micro_batch": False,
        "reshard_after_forward": True,
        "keep_last_units": 0,
        "reshard_group_size": 0,
        "blocks_per_unit": 1,
        "activation_checkpointing": "none",
        "num_workers": 0,
        "prefetch_factor": None,
        "replicate_degree": 1,
        "reduce_dtype": "fp32",
        "cpu_offload": False,
        "compile": False,
        "fused_optimizer": False,
        "param_dtype": "fp32",
        "world_size": WORLD_SIZE,
        "num_parameters": NUM_PARAMETERS,
    } | CASES[case][1]


def check(ran: Run, wanted: dict[str, Any]) -> None:
    """All ranks did what was asked, and said so in the same steps."""
    assert set(ran.codes) == {0}, ran.output
    assert [rank_outcome(log).outcome for log in ran.logs] == [Outcome.OK] * WORLD_SIZE
    different, unread = differences(ran.logs, wanted)
    assert ([str(each) for each in different], unread) == ([], [])
    assert len({tuple(step["n"] for step in log.timed) for log in ran.logs}) == 1
    found = throughput(ran.logs)
    rows = wanted["micro_batch_size"] * wanted["grad_accum_steps"]
    assert found.tokens_per_step == WORLD_SIZE * rows * SEQ_LEN
    assert found.sample_tokens == [SEQ_LEN] * 3


@pytest.mark.parametrize("case", CASES)
def test_started_once_a_rank(case: str, tmp_path: Path) -> None:
    ran = run(tmp_path, ["{probe}", "{scripts}/plain.py", *CASES[case][0]])
    check(ran, asked(case))
    applied = ran.logs[1].applied
    assert applied is not None
    assert applied["rank"] == 1 and applied["backend"] == "gloo" and applied["shard_mesh_size"] == 2
    assert applied["blocks"] == {"class": "Block", "count": NUM_LAYERS}
    assert applied["units"] == {"Model": 1, "Block": NUM_LAYERS}
    stride = {"every_2": 2, "full": 1}.get(asked(case)["activation_checkpointing"])
    checkpointed = NUM_LAYERS // stride if stride else 0
    assert applied["recomputed"] == sum(applied["checkpointed"].values()) == checkpointed


def test_by_torchrun(tmp_path: Path) -> None:
    ran = run(tmp_path, [*TORCHRUN, "{probe}", "{scripts}/plain.py", "--accum", "2"], by_rank=False)
    check(ran, asked("plain") | {"grad_accum_steps": 2})


@pytest.mark.parametrize("by_rank", [True, False])
def test_by_two_lines(by_rank: bool, tmp_path: Path) -> None:
    launcher = [] if by_rank else TORCHRUN
    script = ["{scripts}/plain.py", "--explicit", *CASES["accumulated"][0]]
    ran = run(tmp_path, [*launcher, *script], by_rank=by_rank, attach="explicit", env={"PYTHONPATH": "."})
    check(ran, asked("accumulated"))


def test_its_own_figure_is_ours(tmp_path: Path) -> None:
    ran = run(tmp_path, ["{probe}", "{scripts}/plain.py", "--accum", "2", "--steps", "12"], timed_steps=None)
    assert ran.codes == [0, 0], ran.output
    for rank, log in enumerate(ran.logs):
        theirs = {said["step"]: said for said in ran.printed() if said["rank"] == rank}
        assert len(theirs) == 12
        assert [step["tokens"] for step in log.timed] == [theirs[step["n"]]["tokens"] for step in log.timed]


def test_what_differs_is_told(tmp_path: Path) -> None:
    ran = run(tmp_path, ["{probe}", "{scripts}/plain.py", "--accum", "3", "--checkpoint-every", "2"])
    wanted = asked("plain") | {"activation_checkpointing": "full", "attention_backend": "flash", "num_parameters": 7}
    different, unread = differences(ran.logs, wanted)
    assert {each.name: each.applied for each in different} == {
        "grad_accum_steps": 3,
        "activation_checkpointing": "every_2",
        "num_parameters": NUM_PARAMETERS,
    }
    assert unread == ["attention_backend"]
    assert "it trains another model than the job declares" in " ".join(map(str, different))
