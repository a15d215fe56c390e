"""Export for Axolotl: the part of its YAML that tuning decides, to be merged into the user's own.

Checked against axolotl 0.19, which hands these keys to the Trainer of transformers. Its schema of fsdp_config drops
unknown keys without a word and has none of FSDP1's, so FSDP1 is not exported.
"""

from __future__ import annotations

from typing import Any

import yaml

from autotune.export.accelerate import FIXED, lost_reduction, wrapping_notes
from autotune.export.base import Best, Exported, Exporter, carried_without, comment, header, remarks_text
from autotune.export.lines import partial_checkpointing, scripted, shard_groups

FILE_NAME = "axolotl_fragment.yaml"
CHECKED = {"axolotl": "0.19"}

USE = [
    "A fragment: merge it into your own YAML (base_model, datasets, ...) and remove there what it sets.",
    "It was measured without sample_packing; with it, micro_batch_size counts packs.",
]
WRAP_CLASS = """\
  # Write the class of your blocks here, if the model does not name it itself:
  # transformer_layer_cls_to_wrap: YourBlock
"""
TO_WRITE = ["Not in this fragment; it needs an axolotl plugin of yours (`layers`: the model's list of blocks):"]
SET_POLICY = 'trainer.args.fsdp_plugin_args["mixed_precision_policy"] = {}'
CARRIED_FIELDS = ("replicate_degree", "cpu_offload", "fused_optimizer")
"""Of the knobs that other trainers have no key for."""


def export(best: Best) -> Exported:
    """One file, which is no whole config."""
    lost = _lost(best) | scripted(best.knobs, but=CARRIED_FIELDS)
    notes = _notes(best)
    text = (
        comment([*header(best, "Tuned settings for axolotl", CHECKED), "", *USE])
        + yaml.safe_dump(_settings(best), sort_keys=False)
        + (WRAP_CLASS if best.knobs.engine == "fsdp2" else "")
        + "\n"
        + remarks_text(lost, notes, TO_WRITE)
    )
    return Exported({FILE_NAME: text}, carried_without(lost), lost, notes)


def _settings(best: Best) -> dict[str, Any]:
    knobs = best.knobs
    settings: dict[str, Any] = {
        "micro_batch_size": knobs.micro_batch_size,
        "gradient_accumulation_steps": knobs.grad_accum_steps,
        **({"sequence_len": best.seq_len} if best.seq_len else {}),
        "bf16": best.precision == "bf16",
        "tf32": False,
        "optimizer": "adamw_torch_fused" if knobs.fused_optimizer else "adamw_torch",
        "dataloader_num_workers": knobs.num_workers,
        "dataloader_pin_memory": True,
        **({"dataloader_prefetch_factor": knobs.prefetch_factor} if knobs.num_workers else {}),
    }
    if knobs.engine == "ddp":
        return settings | {
            "gradient_checkpointing": knobs.activation_checkpointing == "full",
            **({"ddp_bucket_cap_mb": round(knobs.bucket_cap_mb)} if _is_whole(knobs.bucket_cap_mb) else {}),
            "ddp_find_unused_parameters": False,
        }
    copies = knobs.replicate_degree or 1
    if copies > 1:
        settings |= {"dp_replicate_size": copies, "dp_shard_size": best.world_size // copies}
    return settings | {
        "gradient_checkpointing": False,  # fsdp_config's own gathers no weights twice
        "fsdp_version": 2,
        "fsdp_config": {
            "reshard_after_forward": knobs.reshard_after_forward,
            "activation_checkpointing": knobs.activation_checkpointing == "full",
            "offload_params": bool(knobs.cpu_offload),
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        },
    }


def _is_whole(number: float) -> bool:
    return number == round(number)


def _lost(best: Best) -> dict[str, str]:
    knobs = best.knobs
    lost = lost_reduction(best, SET_POLICY)
    if knobs.grad_accum_steps > 1 and knobs.sync_each_micro_batch:
        lost["sync_each_micro_batch"] = (
            "`trainer.args.accelerator_config.gradient_accumulation_kwargs = {'sync_each_batch': True}`; of itself "
            "axolotl reduces gradients after the last micro-step only."
        )
    mode = knobs.activation_checkpointing
    if mode not in ("none", "full"):
        lost["activation_checkpointing"] = f"{partial_checkpointing(mode)}; axolotl checkpoints all blocks or none."
    if (knobs.blocks_per_unit or 1) > 1:
        lost["bucket_cap_mb"] = f"{knobs.bucket_cap_mb} MiB is blocks_per_unit = {knobs.blocks_per_unit}, see there."
        lost["blocks_per_unit"] = f"`{shard_groups(best)}`."
    if knobs.engine == "ddp" and not _is_whole(knobs.bucket_cap_mb):
        lost["bucket_cap_mb"] = f"a whole number of MiB: ddp_bucket_cap_mb takes no {knobs.bucket_cap_mb}."
    return lost


def _notes(best: Best) -> tuple[str, ...]:
    notes = ["axolotl clips gradients, which takes a reduction over all ranks; measured: no clipping."]
    if best.knobs.num_workers:
        notes.append("axolotl starts its loader's workers anew each epoch; measured: persistent workers.")
    return (*notes, *wrapping_notes(best, SET_POLICY))


EXPORTER = Exporter(
    export,
    CHECKED,
    {"fsdp2": FIXED, "ddp": {"sync_each_micro_batch": (False,), "activation_checkpointing": ("none", "full")}},
    bf16_reduces_in="bf16",
)
