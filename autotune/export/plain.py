"""Export for people who write their own loop: all knobs as YAML, and the PyTorch code that applies them."""

from __future__ import annotations

import json
import re
import textwrap
from importlib import resources

import yaml

from autotune.export.base import Best, Exported, carried_without, comment, header
from trials.record import KNOB_NAMES

YAML_NAME = "autotune-best.yaml"
SNIPPET_NAME = "autotune_best.py"

MEANING: dict[str, str] = {
    "micro_batch_size": "sequences per rank and micro-step",
    "grad_accum_steps": "micro-steps per optimizer step",
    "sync_each_micro_batch": "whether gradients are reduced after every micro-step, not just the last",
    "reshard_after_forward": "whether a unit's weights are freed after forward, gathered anew for backward",
    "bucket_cap_mb": "MiB of unsharded weights, in the gathered dtype, that one FSDP unit may hold",
    "blocks_per_unit": "blocks that bucket_cap_mb puts in one FSDP unit",
    "activation_checkpointing": "none, full, every_K (each K-th block), selective_op (keeps matmuls, SDPA)",
    "num_workers": "DataLoader worker processes per rank",
    "prefetch_factor": "batches that each worker keeps ready; none without workers",
    "engine": "fsdp2: torch.distributed.fsdp.fully_shard",
}

USE = """\
mesh = init_device_mesh("cuda", (world_size,))
autotune_best.apply(model, list(model.layers), mesh)
optimizer = torch.optim.AdamW(model.parameters())
batches = autotune_best.micro_batches(autotune_best.make_loader(dataset))
for step in range(num_steps):
    autotune_best.train_step(model, optimizer, batches, loss_fn)"""


def export(best: Best) -> Exported:
    """Both files; nothing is lost."""
    return Exported(
        files={YAML_NAME: _yaml(best), SNIPPET_NAME: _snippet(best)},
        carried=carried_without(()),
        lost={},
    )


def _yaml(best: Best) -> str:
    context = {
        "precision": best.precision,
        "reduce_dtype": best.reduce_dtype,
        "world_size": best.world_size,
        "seq_len": best.seq_len,
    }
    knobs = "".join(
        comment([MEANING[name]]) + yaml.safe_dump({name: value}) for name, value in best.knobs.to_dict().items()
    )
    return (
        comment(header(best, "Tuned FSDP settings"))
        + yaml.safe_dump(context, sort_keys=False)
        + "knobs:\n"
        + textwrap.indent(knobs, "  ")
    )


def _snippet(best: Best) -> str:
    # snippet.py is ordinary, checked code; only the values of its constants change.
    code = resources.files("autotune.export").joinpath("snippet.py").read_text(encoding="utf-8")
    code = re.sub(r"  # type: ignore.*", "", code)
    code = _set_constant(code, "PRECISION", best.precision, "bf16 or fp32")
    code = _set_constant(code, "REDUCE_DTYPE", best.reduce_dtype, "of the gradient reduction")
    for name in KNOB_NAMES:
        code = _set_constant(code, name.upper(), getattr(best.knobs, name), MEANING[name])
    return comment([*header(best, "Tuned FSDP settings in plain PyTorch"), "", *USE.splitlines()]) + "\n" + code


def _set_constant(code: str, name: str, value: object, meaning: str) -> str:
    text = comment([meaning]) + f"{name} = {_literal(value)}"
    code, num_found = re.subn(rf"^{name}: .* = .*$", lambda _: text, code, flags=re.MULTILINE)
    assert num_found == 1, f"snippet.py must have one constant {name}"
    return code


def _literal(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)  # double quotes, as the snippet has
