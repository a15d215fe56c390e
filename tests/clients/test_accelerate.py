"""accelerate and transformers' Trainer, by exported files, on two gloo ranks.

On a CPU both leave FSDP out without a word: scripts/shim.py has them do it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.export import Best, export
from tests.ports import free_port
from trials.probe_log import differences
from trials.record import Knobs

from .exported import check
from .harness import Run, run
from .scripts.toy import NUM_PARAMETERS, SEQ_LEN

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

WORLD_SIZE = 2
HF_PARAMETERS = 2 * 64 * 32 + 32 + 4 * (2 * 32 + 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
TUNED = {
    "fsdp2": Knobs(4, 2, False, False, 0.06, 1, "full", 0, None),
    "fsdp2_reshard": Knobs(2, 1, False, True, 0.06, 1, "none", 1, 2),
    "fsdp1": Knobs(
        2, 3, False, False, 0.06, 1, "none", 0, None, "fsdp1", backward_prefetch="post", forward_prefetch=True
    ),
}
NEEDS_A_GPU = "  fsdp_sync_module_states: false\n  fsdp_cpu_ram_efficient_loading: false\n"
Exported = tuple[Run, Best, dict[str, str]]
"""A run, what was exported for it, and what the exporter cannot carry."""


def best(case: str, **changes: Any) -> Best:
    return Best(replace(TUNED[case], **changes), "fp32", WORLD_SIZE, SEQ_LEN, evidence=[])


def accelerate_launch(tmp_path: Path, case: str, *options: str, **request: Any) -> Exported:
    tuned = best(case)
    exported = export("accelerate", tuned)
    (text,) = exported.files.values()
    text = text.replace("# fsdp_transformer_layer_cls_to_wrap: YourBlock", "fsdp_transformer_layer_cls_to_wrap: Block")
    if "fsdp1" in case:
        text = text.replace("fsdp_config:\n", f"fsdp_config:\n{NEEDS_A_GPU}")
    path = tmp_path / "best.yaml"
    path.write_text(text)
    knobs = tuned.knobs
    script = ["{scripts}/accelerated.py", "--mbs", str(knobs.micro_batch_size), "--accum", str(knobs.grad_accum_steps)]
    loader = ["--workers", str(knobs.num_workers), "--prefetch", str(knobs.prefetch_factor or 2)]
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(path), "--main_process_port", str(free_port())]
    command = [*launcher, "{probe}", *script, *loader, *options]
    return run(tmp_path, command, by_rank=False, **request), tuned, exported.lost


@pytest.mark.parametrize("case", TUNED)
def test_accelerate(case: str, tmp_path: Path) -> None:
    ran, tuned, lost = accelerate_launch(tmp_path, case)
    check(ran, tuned, lost, NUM_PARAMETERS, SEQ_LEN)


def test_accelerate_as_shipped_does_not_shard_on_a_cpu_and_that_is_told(tmp_path: Path) -> None:
    ran, tuned, _ = accelerate_launch(tmp_path, "fsdp2", "--as-shipped")
    different, _ = differences(ran.logs, {"engine": tuned.knobs.engine, "world_size": WORLD_SIZE})
    assert [each.name for each in different] == ["engine", "shard_mesh_size"]
    assert "leave FSDP out without a word where they find no GPU" in str(different[0])


def trainer(
    tmp_path: Path, case: str, *options: str, steps: int = 100, **request: Any
) -> tuple[Run, Best, dict[str, str]]:
    # No key of the Trainer's makes SHARD_GRAD_OP under FSDP1.
    tuned = best(case, reshard_after_forward=True) if "fsdp1" in case else best(case)
    exported = export("transformers", tuned)
    own = {
        "output_dir": str(tmp_path / "out"),
        "use_cpu": True,
        "ddp_backend": "gloo",
        "max_steps": steps,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "include_num_input_tokens_seen": "all",
        "dataloader_pin_memory": False,  # only warns on a CPU
    }
    (text,) = exported.files.values()
    path = tmp_path / "arguments.yaml"
    path.write_text(yaml.safe_dump({"optim": "adamw_torch", **yaml.safe_load(text), **own}))
    launcher = [] if request.get("attach") == "callback" else ["{probe}"]
    ran = run(tmp_path, [*launcher, "{scripts}/hf_trainer.py", str(path), *options], env={"PYTHONPATH": "."}, **request)
    return ran, tuned, exported.lost


@pytest.mark.parametrize("case", TUNED)
def test_transformers(case: str, tmp_path: Path) -> None:
    ran, tuned, lost = trainer(tmp_path, case)
    check(ran, tuned, lost, HF_PARAMETERS, 16)


def test_transformers_by_callback(tmp_path: Path) -> None:
    ran, tuned, lost = trainer(tmp_path, "fsdp2", "--callback", attach="callback")
    check(ran, tuned, lost, HF_PARAMETERS, 16)


def test_transformers_own_figure_against_ours(tmp_path: Path) -> None:
    """Its tokens are of all ranks, and count padding."""
    ran, _, _ = trainer(tmp_path, "fsdp2", "--ragged", steps=8, timed_steps=None)
    assert ran.codes == [0, 0], ran.output
    said = ran.printed()[0]
    steps = [step["tokens"] for step in ran.logs[0].steps if step["tokens"] is not None]
    assert said["seen"] == said["steps"] * WORLD_SIZE * steps[0] == 8 * WORLD_SIZE * 4 * 2 * 16
    applied = ran.logs[0].applied
    assert applied is not None and applied["padding_fraction"] == pytest.approx(0.75)
