"""torchtitan's debug model by both exported files, on two ranks: unmodified on two GPUs, else on gloo by a shim.

Not run by default: it needs triton and more, which are gigabytes (`make test-torchtitan`).
"""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path

import pytest
import torch

from autotune.export import Best, export
from autotune.export.torchtitan import MODULE_NAME, OVERRIDES_NAME
from trials.record import Knobs

from .exported import check
from .harness import ROOT, SCRIPTS, run

NEEDED = ("torchtitan", "triton", "datasets", "tensorboard")
pytestmark = [
    pytest.mark.torchtitan,
    pytest.mark.skipif(not all(map(importlib.util.find_spec, NEEDED)), reason=f"needs {', '.join(NEEDED)}"),
]

WORLD_SIZE = 2
SEQ_LEN = 64
VOCAB, WIDTH, FFN, NUM_LAYERS = 2048, 256, 768, 6
"""Of torchtitan's debug model."""
NUM_PARAMETERS = 2 * VOCAB * WIDTH + WIDTH + NUM_LAYERS * (2 * WIDTH + 4 * WIDTH**2 + 3 * WIDTH * FFN)
ON_GPUS = torch.cuda.device_count() >= WORLD_SIZE

TUNED = {
    "overrides": Best(Knobs(3, 2, True, False, 3.26, 1, "full", 1, 3), "fp32", WORLD_SIZE, SEQ_LEN, evidence=[]),
    "module": Best(Knobs(2, 1, True, True, 1.63, 1, "none", 0, None), "bf16", WORLD_SIZE, SEQ_LEN, evidence=[]),
}


def write_assets(folder: Path) -> list[str]:
    """A tokenizer of bytes, and text; the options that name them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    text, tokenizer = folder / "text", folder / "tokenizer"
    text.mkdir()
    tokenizer.mkdir()
    with (text / "train.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": path.read_text()}) + "\n" for path in sorted(ROOT.glob("trials/*.py")))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.save(str(tokenizer / "tokenizer.json"))
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    return [
        f"--hf-assets-path={tokenizer}",
        f"--dataloader.dataset-path={text}",
        f"--dump-folder={folder / 'dump'}",
    ]


def handed_over(case: str, folder: Path, files: dict[str, str]) -> tuple[list[str], list[str]]:
    """The options that name the config, and those that come last."""
    if case == "module":
        code = files[MODULE_NAME].replace(
            "from torchtitan.models.llama3.config_registry import llama3_8b as base",
            "from torchtitan_base import debug as base",
        )
        (folder / MODULE_NAME).write_text(code)
        return ["--module", Path(MODULE_NAME).stem, "--config", "tuned"], []
    overrides = shlex.split(files[OVERRIDES_NAME], comments=True)
    return ["--module", "torchtitan_base", "--config", "debug"], overrides


@pytest.mark.parametrize("case", TUNED)
def test_by_exported_files(case: str, tmp_path: Path) -> None:
    if ON_GPUS and not hasattr(torch.distributed, "set_timeout"):
        pytest.skip("torchtitan 0.3 calls torch.distributed.set_timeout after its first step, which this torch has not")
    tuned = TUNED[case]
    found = export("torchtitan", tuned)
    config, last = handed_over(case, tmp_path, found.files)
    script = ["-m", "torchtitan.train"] if ON_GPUS else ["{scripts}/torchtitan_shim.py"]
    own = write_assets(tmp_path)
    if not ON_GPUS:
        own.append("--parallelism.spmd-backend=partial_dtensor")
    env = {"PYTHONPATH": f"{tmp_path}:{SCRIPTS}", "HF_HOME": str(tmp_path / "hf")}
    ran = run(tmp_path, ["{probe}", *script, *config, *own, *last], env=env)
    check(ran, tuned, found.lost, NUM_PARAMETERS, SEQ_LEN)
    # What its `tps` counts is tokens of this rank, as ours; `n_tokens_seen` is of all ranks.
    for log in ran.logs:
        theirs = {said["step"]: said for said in ran.printed() if said["rank"] == log.start["rank"]}
        ours = {step["n"]: step["tokens"] for step in log.steps if step["n"] in theirs and step["tokens"] is not None}
        assert len(ours) >= 4
        assert all(theirs[step]["tokens"] == tokens for step, tokens in ours.items())
        assert all(theirs[step]["seen"] == WORLD_SIZE * step * tokens for step, tokens in ours.items())
