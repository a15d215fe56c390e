"""Export for the Trainer of Hugging Face transformers: a YAML file of TrainingArguments.

Checked against transformers 5.24 with accelerate 1.15. HfArgumentParser refuses top-level keys that it does not
know, but of `fsdp_config` it drops them without a word: with version 2 also limit_all_gathers and the prefetches,
and with version 1 reshard_after_forward. So only keys that were seen to arrive in the FSDP plugin are written.
"""

from __future__ import annotations

from typing import Any

import yaml

from autotune.export.accelerate import BACKWARD_PREFETCH, FIXED, WRAP_CLASS, lost_reduction, wrapping_notes
from autotune.export.base import Best, Exported, Exporter, carried_without, comment, header, remarks_text
from autotune.export.lines import JOIN_GROUPS, checkpoint_loop, partial_checkpointing, scripted, shard_groups
from trials.record import Knobs, checkpoint_stride

FILE_NAME = "training_args.yaml"
CHECKED = {"transformers": "5.24", "accelerate": "1.15"}

USE = [
    "Use, with your other arguments (output_dir, learning_rate, ...) added to this file:",
    f'    (args,) = HfArgumentParser(TrainingArguments).parse_yaml_file("{FILE_NAME}")',
    "    Trainer(model, args, ...).train()",
    "and start it by torchrun. The FSDP file of an `accelerate launch` would set what is left out here.",
]

TO_WRITE = [
    "Not in this file; write it in the training script between TrainingArguments and Trainer",
    "(`layers`: the model's list of blocks):",
]
PLUGIN_ARGS = 'args.fsdp_plugin_args["{}"] = {}'
"""Arguments of accelerate's FSDP plugin, which the Trainer makes; for what fsdp_config has no key."""
SET_POLICY = PLUGIN_ARGS.format("mixed_precision_policy", "{}")


def export(best: Best) -> Exported:
    """One file. What the Trainer cannot be told by its arguments is lost."""
    lost = _lost(best) | scripted(best.knobs, but=("fused_optimizer",))
    notes = _notes(best)
    wrap_class = WRAP_CLASS.replace("fsdp_transformer", "transformer").replace("accelerate", "the Trainer")
    text = (
        comment([*header(best, "Tuned settings for the Trainer of transformers", CHECKED), "", *USE])
        + yaml.safe_dump(_arguments(best), sort_keys=False)
        + ("" if best.knobs.engine == "ddp" else wrap_class)
        + "\n"
        + remarks_text(lost, notes, TO_WRITE)
    )
    return Exported({FILE_NAME: text}, carried_without(lost), lost, notes)


def _arguments(best: Best) -> dict[str, Any]:
    knobs = best.knobs
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": knobs.micro_batch_size,
        "gradient_accumulation_steps": knobs.grad_accum_steps,
        "bf16": best.precision == "bf16",
        "dataloader_num_workers": knobs.num_workers,
        "dataloader_persistent_workers": knobs.num_workers > 0,
        "dataloader_pin_memory": True,
    }
    if knobs.num_workers:
        arguments["dataloader_prefetch_factor"] = knobs.prefetch_factor  # refused without workers
    arguments["accelerator_config"] = {"non_blocking": True}
    if knobs.sync_each_micro_batch and knobs.grad_accum_steps > 1:
        arguments["accelerator_config"]["gradient_accumulation_kwargs"] = {"sync_each_batch": True}
    # The Trainer's own default is the fused one.
    arguments["optim"] = "adamw_torch_fused" if knobs.fused_optimizer else "adamw_torch"
    return arguments | (_ddp_keys(knobs) if knobs.engine == "ddp" else _fsdp_keys(knobs))


def _ddp_keys(knobs: Knobs) -> dict[str, Any]:
    keys: dict[str, Any] = {"ddp_bucket_cap_mb": knobs.bucket_cap_mb, "ddp_find_unused_parameters": False}
    mode = knobs.activation_checkpointing
    if mode == "full" or checkpoint_stride(mode):
        keys["activation_checkpointing"] = True
        keys["activation_checkpointing_kwargs"] = {
            "use_reentrant": False,
            "every_n_layers": checkpoint_stride(mode) or 1,
        }
    return keys


def _fsdp_keys(knobs: Knobs) -> dict[str, Any]:
    return {
        "fsdp": True,
        "fsdp_config": {
            **_engine_keys(knobs),
            "activation_checkpointing": knobs.activation_checkpointing == "full",
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        },
    }


def _engine_keys(knobs: Knobs) -> dict[str, Any]:
    if knobs.engine == "fsdp2":
        return {"version": 2, "reshard_after_forward": knobs.reshard_after_forward}
    assert knobs.backward_prefetch is not None
    return {
        "version": 1,
        "limit_all_gathers": knobs.limit_all_gathers,
        "backward_prefetch": BACKWARD_PREFETCH[knobs.backward_prefetch],
        "forward_prefetch": knobs.forward_prefetch,
        "use_orig_params": True,
    }


def _lost(best: Best) -> dict[str, str]:
    knobs = best.knobs
    lost = lost_reduction(best, SET_POLICY)
    if knobs.engine == "fsdp1" and not knobs.reshard_after_forward:
        # The plugin takes fsdp_config's reshard_after_forward, but FULL_SHARD, its default strategy, comes first.
        line = PLUGIN_ARGS.format("sharding_strategy", '"SHARD_GRAD_OP"')
        lost["reshard_after_forward"] = f"`{line}`; no key of fsdp_config does it with version 1."
    mode = knobs.activation_checkpointing
    if knobs.engine == "ddp" and mode == "selective_op":
        lost["activation_checkpointing"] = f"{partial_checkpointing(mode)}; the Trainer has no such mode."
    if knobs.engine != "ddp" and mode not in ("none", "full"):
        lost["activation_checkpointing"] = (
            f"{partial_checkpointing(mode)}; fsdp_config checkpoints all blocks or none. (every_n_layers is of "
            "transformers' own checkpointing, which with FSDP may gather weights once more.)"
        )
    if (knobs.blocks_per_unit or 1) > 1:
        lost |= _lost_grouping(best)
    return lost


def _lost_grouping(best: Best) -> dict[str, str]:
    knobs = best.knobs
    first = ""
    if knobs.activation_checkpointing == "full":
        first = f"; checkpoint first, by activation_checkpointing: false and `{checkpoint_loop('full')}`"
    elif knobs.activation_checkpointing != "none":
        first = "; checkpoint first"
    if knobs.engine == "fsdp2":
        need = f"`{shard_groups(best)}`, and in this file auto_wrap_policy: NO_WRAP{first}."
    else:
        need = (
            f"`{JOIN_GROUPS}`, with autotune_best.py of the plain export, and in this file "
            f"transformer_layer_cls_to_wrap: BlockGroup{first}. It renames parameters, as said there."
        )
    return {
        "bucket_cap_mb": f"{knobs.bucket_cap_mb} MiB is blocks_per_unit = {knobs.blocks_per_unit}, see there.",
        "blocks_per_unit": need,
    }


def _notes(best: Best) -> tuple[str, ...]:
    is_ddp = best.knobs.engine == "ddp"
    notes = [
        *([] if is_ddp else ["On CPU the Trainer does not shard, without a word."]),
        "The Trainer clips gradients, which takes a reduction over all ranks; measured: no clipping, as by "
        "max_grad_norm: 0.",
        "An IterableDataset is read by rank 0 for all ranks; measured: each rank reads, as by dispatch_batches: false "
        "in accelerator_config.",
        *wrapping_notes(best, SET_POLICY),
    ]
    if best.precision == "fp32":
        notes.append("from_pretrained keeps the dtype of the checkpoint; measured: fp32, as by dtype=torch.float32.")
    if best.knobs.engine == "fsdp1":
        notes.append("transformers warns that it will drop FSDP1.")
    if is_ddp:
        notes.append(
            "The Trainer's DDP holds each gradient twice, in the bucket and beside it; measured: once "
            "(gradient_as_bucket_view), so it takes 4 bytes a parameter more than was measured."
        )
    return tuple(notes)


EXPORTER = Exporter(
    export,
    CHECKED,
    {
        "fsdp2": FIXED,
        "fsdp1": FIXED,
        "ddp": {"sync_each_micro_batch": (False,)},
    },
    bf16_reduces_in="bf16",
)
