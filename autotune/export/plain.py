"""Export for people who write their own loop: all knobs as YAML, and the PyTorch code that applies them."""

from __future__ import annotations

import textwrap

import yaml

from autotune.export import snippet
from autotune.export.base import Best, Exported, Exporter, carried_without, comment, header, remarks
from autotune.export.lines import scripted

YAML_NAME = "autotune-best.yaml"
SNIPPET_NAME = snippet.NAME

APPLY = {
    "fsdp2": (
        'mesh = init_device_mesh("cuda", (world_size,))',
        "autotune_best.apply(model, list(model.layers), mesh)",
    ),
    "fsdp1": ('model = autotune_best.apply(model, list(model.layers), torch.device("cuda", local_rank))',),
}
APPLY["ddp"] = APPLY["fsdp1"]
TRAIN = (
    "optimizer = torch.optim.AdamW(model.parameters())",
    "batches = autotune_best.micro_batches(autotune_best.make_loader(dataset))",
    "for step in range(num_steps):",
    "    autotune_best.train_step(model, optimizer, batches, loss_fn)",
)
TO_WRITE = ("Not in this file; write it in the training script (`layers`: the blocks, `units`: the FSDP units):",)
RENAMED = (
    "FSDP1 makes a unit of one module, so blocks that share a unit are moved into a BlockGroup: parameters, and so the",
    "keys of checkpoints, get other names (layers.3.x -> layers.1.blocks.1.x).",
)


def export(best: Best) -> Exported:
    """Both files. What only few change is a line to write beside them."""
    lost = scripted(best.knobs)
    renamed = RENAMED if best.knobs.engine == "fsdp1" and (best.knobs.blocks_per_unit or 1) > 1 else ()
    parts = [renamed, *remarks(lost, to_write=TO_WRITE), [*APPLY[best.knobs.engine], *TRAIN]]
    use = [line for part in parts if part for line in ("", *part)][1:]
    return Exported(
        files={
            YAML_NAME: _yaml(best),
            SNIPPET_NAME: snippet.text(best, f"Tuned {_kind(best)} settings in plain PyTorch", use),
        },
        carried=carried_without(lost),
        lost=lost,
    )


def _yaml(best: Best) -> str:
    context = {
        "precision": best.precision,
        "reduce_dtype": best.reduce_dtype,
        "world_size": best.world_size,
        **({"seq_len": best.seq_len} if best.seq_len else {}),
    }
    values = best.knobs.to_dict()
    knobs = "".join(
        comment([meaning]) + yaml.safe_dump({name: values[name]}) for name, meaning in snippet.meaning_of(best)
    )
    return (
        comment(header(best, f"Tuned {_kind(best)} settings", snippet.CHECKED))
        + yaml.safe_dump(context, sort_keys=False)
        + "knobs:\n"
        + textwrap.indent(knobs, "  ")
    )


def _kind(best: Best) -> str:
    return "DDP" if best.knobs.engine == "ddp" else "FSDP"


EXPORTER = Exporter(export, snippet.CHECKED, {engine: {} for engine in APPLY})
"""The code decides nothing itself."""
