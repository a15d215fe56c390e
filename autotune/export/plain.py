"""Export for people who write their own loop: all knobs as YAML, and the PyTorch code that applies them."""

from __future__ import annotations

import ast
import functools
import json
import re
import textwrap
from importlib import resources

import yaml

from autotune.export.base import Best, Exported, carried_without, comment, header
from autotune.export.lines import scripted
from trials.record import FSDP1_KNOBS

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
    "engine": "fsdp2: torch.distributed.fsdp.fully_shard; fsdp1: FullyShardedDataParallel",
    "limit_all_gathers": "whether the CPU thread waits before it queues a third all-gather",
    "backward_prefetch": "when backward gathers the next unit: pre or post this one's gradients, or none",
    "forward_prefetch": "whether the next unit's all-gather is queued before this one's forward",
}

APPLY = {
    "fsdp2": """\
mesh = init_device_mesh("cuda", (world_size,))
autotune_best.apply(model, list(model.layers), mesh)""",
    "fsdp1": """\
model = autotune_best.apply(model, list(model.layers), torch.device("cuda", local_rank))""",
}
TRAIN = """\
optimizer = torch.optim.AdamW(model.parameters())
batches = autotune_best.micro_batches(autotune_best.make_loader(dataset))
for step in range(num_steps):
    autotune_best.train_step(model, optimizer, batches, loss_fn)"""
TO_WRITE = "Not in this file; write it in the training script (`layers`: the blocks, `units`: the FSDP units):"
RENAMED = """\
FSDP1 makes a unit of one module, so blocks that share a unit are moved into a BlockGroup: parameters, and so the
keys of checkpoints, get other names (layers.3.x -> layers.1.blocks.1.x)."""


def export(best: Best) -> Exported:
    """Both files. What only few change is a line to write beside them."""
    lost = scripted(best.knobs)
    to_write = ["", TO_WRITE, *(f"- {name}: {need}" for name, need in lost.items())] if lost else []
    return Exported(
        files={YAML_NAME: _yaml(best), SNIPPET_NAME: _snippet(best, to_write)},
        carried=carried_without(lost),
        lost=lost,
    )


def _yaml(best: Best) -> str:
    context = {
        "precision": best.precision,
        "reduce_dtype": best.reduce_dtype,
        "world_size": best.world_size,
        "seq_len": best.seq_len,
    }
    values = best.knobs.to_dict()
    knobs = "".join(comment([MEANING[name]]) + yaml.safe_dump({name: values[name]}) for name in _names(best))
    return (
        comment(header(best, "Tuned FSDP settings"))
        + yaml.safe_dump(context, sort_keys=False)
        + "knobs:\n"
        + textwrap.indent(knobs, "  ")
    )


def _names(best: Best) -> list[str]:
    """The knobs that the files carry, of those that the engine has."""
    return [name for name in MEANING if best.knobs.engine == "fsdp1" or name not in FSDP1_KNOBS]


def _snippet(best: Best, to_write: list[str]) -> str:
    knobs = best.knobs
    # The parts are ordinary, checked code; only the values of their constants change.
    code = re.sub(r"  # type: ignore.*", "", _joined_code(knobs.engine))
    code = _set_constant(code, "PRECISION", best.precision, "bf16 or fp32")
    code = _set_constant(code, "REDUCE_DTYPE", best.reduce_dtype, "of the gradient reduction")
    present = _names(best)
    for name, meaning in MEANING.items():
        if name in present:
            code = _set_constant(code, name.upper(), getattr(knobs, name), meaning)
        else:
            code = _replace_constant(code, name.upper(), "")
    renamed = ["", *RENAMED.splitlines()] if knobs.engine == "fsdp1" and (knobs.blocks_per_unit or 1) > 1 else []
    use = [*APPLY[knobs.engine].splitlines(), *TRAIN.splitlines()]
    return comment([*header(best, "Tuned FSDP settings in plain PyTorch"), *renamed, *to_write, "", *use]) + "\n" + code


@functools.cache
def _joined_code(engine: str) -> str:
    """One module of two: the engine's docstring, the imports of both, then the code, the common one first."""
    folder = resources.files("autotune.export")
    common, own = (folder.joinpath(f"snippet_{part}.py").read_text(encoding="utf-8") for part in ("common", engine))
    docstring = own[: own.index("\n") + 1]
    return docstring + _imports(common, own) + _after_imports(common) + _after_imports(own)


def _imports(*texts: str) -> str:
    """The imports of all `texts` but those of our own modules, in the order that formatters want."""
    nodes = [node for text in texts for node in ast.parse(text).body]
    plain = {f"import {alias.name}\n" for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names: dict[str, set[str]] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("autotune."):
            names.setdefault(node.module, set()).update(alias.name for alias in node.names)
    lines = [*sorted(plain), *(f"from {module} import {_in_order(names[module])}\n" for module in sorted(names))]
    stdlib = [line for line in lines if " torch" not in line]
    return "\n" + "".join(stdlib) + "\n" + "".join(line for line in lines if line not in stdlib)


def _in_order(names: set[str]) -> str:
    return ", ".join(sorted(names, key=lambda name: (name.islower(), name)))  # classes first


def _after_imports(text: str) -> str:
    last = max(node.end_lineno or 0 for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom))
    return "".join(text.splitlines(keepends=True)[last:])


def _set_constant(code: str, name: str, value: object, meaning: str) -> str:
    return _replace_constant(code, name, comment([meaning]) + f"{name} = {_literal(value)}\n")


def _replace_constant(code: str, name: str, text: str) -> str:
    code, num_found = re.subn(rf"^{name}: .* = .*\n", lambda _: text, code, flags=re.MULTILINE)
    assert num_found == 1, f"the snippet must have one constant {name}"
    return code


def _literal(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)  # double quotes, as the snippet has
