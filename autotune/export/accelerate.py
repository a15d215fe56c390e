"""Export for Hugging Face Accelerate: a file for `accelerate launch --config_file`.

Checked against accelerate 1.15. Its launcher drops much without a word: keys of `fsdp_config` that it does
not know, and of a file's other keys `same_network`, `rdzv_backend` and `enable_cpu_affinity`. So only keys
that were seen to arrive in its FSDP plugin are written, and what it has no key for is a comment.
"""

from __future__ import annotations

from typing import Any

import yaml

from autotune.export.base import Best, Exported, Exporter, Fixed, carried_without, comment, header, remarks_text
from autotune.export.lines import (
    JOIN_GROUPS,
    checkpoint_loop,
    mixed_precision,
    partial_checkpointing,
    scripted,
    shard_groups,
)
from trials.record import Knobs

FILE_NAME = "accelerate_config.yaml"
CHECKED = {"accelerate": "1.15"}

LAUNCH = [
    f"Use: accelerate launch --config_file {FILE_NAME} train.py",
    "On N machines add --num_machines N --machine_rank R --main_process_ip HOST on each. num_processes",
    "is the total; it must divide by N, since accelerate rounds the processes per machine down.",
]

# Ends the file's `fsdp_config`. The class is the user's, so it cannot be filled in.
WRAP_CLASS = """\
  # Write the class of your blocks here (several: comma-separated). Models of transformers name theirs
  # themselves; of any other model accelerate would, without a word, make one unit and checkpoint nothing.
  # fsdp_transformer_layer_cls_to_wrap: YourBlock
"""

PLUGIN = "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(mixed_precision_policy={}))"
BACKWARD_PREFETCH = {"pre": "BACKWARD_PRE", "post": "BACKWARD_POST", "none": "NO_PREFETCH"}


def export(best: Best) -> Exported:
    """One file. What the script sets, or accelerate cannot do, is lost."""
    lost = _lost(best) | scripted(best.knobs)
    notes = _notes(best)
    is_ddp = best.knobs.engine == "ddp"
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if is_ddp else "FSDP",
        "mixed_precision": "bf16" if best.precision == "bf16" else "no",
        "num_machines": 1,
        "num_processes": best.world_size,
    }
    if not is_ddp:
        settings["fsdp_config"] = {
            **_engine_keys(best.knobs),
            "fsdp_activation_checkpointing": best.knobs.activation_checkpointing == "full",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        }
    text = (
        comment([*header(best, "Tuned settings for accelerate", CHECKED), "", *LAUNCH])
        + yaml.safe_dump(settings, sort_keys=False)
        + ("" if is_ddp else WRAP_CLASS)
        + "\n"
        + remarks_text(lost, notes)
    )
    return Exported({FILE_NAME: text}, carried_without(lost), lost, notes)


def _engine_keys(knobs: Knobs) -> dict[str, Any]:
    if knobs.engine == "fsdp2":
        # Never left out: the launcher's default, FULL_SHARD, is an error with version 2.
        return {"fsdp_version": 2, "fsdp_reshard_after_forward": knobs.reshard_after_forward}
    assert knobs.backward_prefetch is not None
    return {
        "fsdp_version": 1,
        # With version 1 fsdp_reshard_after_forward does nothing: the launcher always sets a strategy, which wins.
        "fsdp_sharding_strategy": "FULL_SHARD" if knobs.reshard_after_forward else "SHARD_GRAD_OP",
        "fsdp_backward_prefetch": BACKWARD_PREFETCH[knobs.backward_prefetch],
        "fsdp_forward_prefetch": knobs.forward_prefetch,
        "fsdp_use_orig_params": True,
    }


def _lost(best: Best) -> dict[str, str]:
    knobs = best.knobs
    lost = {
        "micro_batch_size": f"`DataLoader(..., batch_size={knobs.micro_batch_size})`, which is per rank "
        "unless accelerate is given split_batches=True.",
        "grad_accum_steps": f"`{_accelerator(knobs)}`, and `with accelerator.accumulate(model):` around each "
        "micro-step.",
        "num_workers": f"`DataLoader(..., num_workers={knobs.num_workers}, "
        f"persistent_workers={knobs.num_workers > 0})`.",
        "prefetch_factor": f"`DataLoader(..., prefetch_factor={knobs.prefetch_factor})`.",
    }
    if _syncs_early(knobs):
        lost["sync_each_micro_batch"] = (
            f"`{_accelerator(knobs)}`, or gradients are reduced after the last micro-step only."
        )
    lost |= lost_reduction(best, PLUGIN)
    mode = knobs.activation_checkpointing
    if mode not in (("none",) if knobs.engine == "ddp" else ("none", "full")):
        does = "checkpoints nothing under DDP" if knobs.engine == "ddp" else "checkpoints all blocks or none"
        lost["activation_checkpointing"] = (
            f"{partial_checkpointing(mode)}, before accelerator.prepare; accelerate itself {does}."
        )
    if (knobs.blocks_per_unit or 1) > 1:
        lost |= _lost_grouping(best)
    if knobs.engine == "ddp":
        lost["bucket_cap_mb"] = (
            f"`Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb={knobs.bucket_cap_mb}, "
            "gradient_as_bucket_view=True)])`; measured: the latter too, or each gradient is held twice."
        )
    if knobs.limit_all_gathers is False:  # True is accelerate's default
        lost["limit_all_gathers"] = (
            "`Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(limit_all_gathers=False))`; of a key "
            "fsdp_limit_all_gathers nothing arrives."
        )
    return lost


def lost_reduction(best: Best, set_policy: str) -> dict[str, str]:
    """Accelerate's bf16 reduces gradients in bf16, whatever was measured; also for those who build on it.

    Args:
        set_policy: the line that sets the mixed precision policy; `{}` is the policy.
    """
    if best.precision == "fp32" or best.knobs.reduce_dtype in ("bf16", None):
        return {}
    return {"reduce_dtype": f"`{set_policy.format(mixed_precision(best))}`; accelerate's bf16 reduces in bf16."}


def _syncs_early(knobs: Knobs) -> bool:
    """With one micro-step there is nothing to hold back, whatever the knob says."""
    return knobs.sync_each_micro_batch and knobs.grad_accum_steps > 1


def _accelerator(knobs: Knobs) -> str:
    """The one call that sets both accumulation knobs: accelerate refuses its two arguments together."""
    steps = knobs.grad_accum_steps
    if _syncs_early(knobs):
        plugin = f"GradientAccumulationPlugin(num_steps={steps}, sync_each_batch=True)"
        return f"Accelerator(gradient_accumulation_plugin={plugin})"
    return f"Accelerator(gradient_accumulation_steps={steps})"


def _lost_grouping(best: Best) -> dict[str, str]:
    knobs = best.knobs
    first = ""
    if knobs.activation_checkpointing == "full":
        first = f"; checkpoint first, by fsdp_activation_checkpointing: false and `{checkpoint_loop('full')}`"
    elif knobs.activation_checkpointing != "none":
        first = "; checkpoint first"
    if knobs.engine == "fsdp2":
        # Accelerate leaves modules alone that are sharded already. But it looks for the block class by name, and
        # sharding changes it, hence NO_WRAP; with NO_WRAP its own checkpointing raises; and it cannot spread
        # weights from rank 0 that are sharded already.
        need = (
            f"`{shard_groups(best)}` between Accelerator() and accelerator.prepare, and in this file "
            f"fsdp_auto_wrap_policy: NO_WRAP and fsdp_cpu_ram_efficient_loading: false{first}."
        )
    else:
        # Its own checkpointing would take the whole group for a block.
        need = (
            f"`{JOIN_GROUPS}`, with autotune_best.py of the plain export, before accelerator.prepare, and in this file "
            f"fsdp_transformer_layer_cls_to_wrap: BlockGroup{first}. It renames parameters, as said there."
        )
    return {
        "bucket_cap_mb": f"{knobs.bucket_cap_mb} MiB is blocks_per_unit = {knobs.blocks_per_unit}, see there.",
        "blocks_per_unit": need,
    }


def _notes(best: Best) -> tuple[str, ...]:
    return (
        *(() if best.knobs.engine == "ddp" else ("On CPU accelerate does not shard at all, without a word.",)),
        "Measured on GPUs with `DataLoader(..., pin_memory=True)` and copies that do not wait, as by "
        "`DataLoaderConfiguration(non_blocking=True)`.",
        "An IterableDataset is read by rank 0 for all ranks; measured: each rank reads, as by "
        "`DataLoaderConfiguration(dispatch_batches=False)`.",
        *wrapping_notes(best, PLUGIN),
    )


def wrapping_notes(best: Best, set_policy: str) -> list[str]:
    """What accelerate does to any model that it shards, also for the Trainer of transformers.

    Args:
        set_policy: the line that sets the mixed precision policy; `{}` is the policy.
    """
    notes = []
    bf16, engine = best.precision == "bf16", best.knobs.engine
    if engine == "fsdp2":
        notes.append(
            "Accelerate makes units of the last norm and, in models of transformers, of the embedding and the "
            "head; measured: they are in the root's unit."
        )
    if bf16 and engine == "fsdp1":
        notes += [
            "Accelerate's bf16 casts buffers to bf16; measured: buffers left alone, as by "
            f"`{set_policy.format(mixed_precision(best))}`.",
            "With FSDP1 accelerate's bf16 also runs the model under autocast; measured: without.",
        ]
    if best.knobs.activation_checkpointing == "full" and engine == "fsdp2":
        notes.append(
            "Accelerate's checkpointing does not restore the random state when it computes a block again: "
            "blocks with dropout get wrong gradients."
        )
    return notes


# By default it reduces on the last micro-batch only, checkpoints all blocks or none, and makes one unit a block.
FIXED: Fixed = {
    "sync_each_micro_batch": (False,),
    "activation_checkpointing": ("none", "full"),
    "blocks_per_unit": (1,),
}
EXPORTER = Exporter(
    export,
    CHECKED,
    {"fsdp2": FIXED, "fsdp1": FIXED, "ddp": {"sync_each_micro_batch": (False,)}},
    bf16_reduces_in="bf16",
)
