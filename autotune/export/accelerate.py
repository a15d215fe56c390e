"""Export for Hugging Face Accelerate: a file for `accelerate launch --config_file`, with FSDP2.

Checked against accelerate 1.15. Its launcher drops much without a word: keys of `fsdp_config` that it does
not know, and of a file's other keys `same_network`, `rdzv_backend` and `enable_cpu_affinity`. So only keys
that were seen to arrive in its FSDP plugin are written, and what it has no key for is a comment.
"""

from __future__ import annotations

from typing import Any

import yaml

from autotune.export.base import Best, Exported, carried_without, comment, header
from trials.record import Knobs, checkpoint_stride

FILE_NAME = "accelerate_config.yaml"
VERSION = "1.15"

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

TO_WRITE = "Not in this file; write it in the training script (`layers`: the model's list of blocks):"
FP32_REDUCTION = "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
BF16_REDUCTION = FP32_REDUCTION.replace("float32", "bfloat16")


def export(best: Best) -> Exported:
    """One file. What the script sets, or accelerate cannot do, is lost."""
    lost = _lost(best)
    notes = _notes(best)
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": "bf16" if best.precision == "bf16" else "no",
        "num_machines": 1,
        "num_processes": best.world_size,
        "fsdp_config": {
            "fsdp_version": 2,
            # Never left out: the launcher's default, FULL_SHARD, is an error with version 2.
            "fsdp_reshard_after_forward": best.knobs.reshard_after_forward,
            "fsdp_activation_checkpointing": best.knobs.activation_checkpointing == "full",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        },
    }
    text = (
        comment([*header(best, f"Tuned FSDP settings for accelerate {VERSION}"), "", *LAUNCH])
        + yaml.safe_dump(settings, sort_keys=False)
        + WRAP_CLASS
        + "\n"
        + comment([TO_WRITE, *(f"- {name}: {need}" for name, need in lost.items())])
        + "\n"
        + comment(["Other than measured, though no knob:", *(f"- {note}" for note in notes)])
    )
    return Exported({FILE_NAME: text}, carried_without(lost), lost, notes)


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
    mode = knobs.activation_checkpointing
    if mode not in ("none", "full"):
        source = ", with selective_contexts from the plain export" if mode == "selective_op" else ""
        lost["activation_checkpointing"] = (
            f"`{_checkpoint_loop(mode)}`{source}, before accelerator.prepare; accelerate itself checkpoints "
            "all blocks or none."
        )
    if knobs.blocks_per_unit > 1:
        lost |= _lost_grouping(best)
    return lost


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
    size = knobs.blocks_per_unit
    reduction = BF16_REDUCTION if best.reduce_dtype == "bf16" else FP32_REDUCTION
    policy = f", mp_policy={reduction}" if best.precision == "bf16" else ""
    options = f"reshard_after_forward={knobs.reshard_after_forward}{policy}"
    loop = f"for i in range(0, len(layers), {size}): fully_shard(list(layers[i : i + {size}]), {options})"
    # Accelerate leaves modules alone that are sharded already. But it looks for the block class by name, and
    # sharding changes it, hence NO_WRAP; with NO_WRAP its own checkpointing raises; and it cannot spread
    # weights from rank 0 that are sharded already.
    first = ""
    if knobs.activation_checkpointing == "full":
        first = f"; checkpoint first, by fsdp_activation_checkpointing: false and `{_checkpoint_loop('full')}`"
    elif knobs.activation_checkpointing != "none":
        first = "; checkpoint first"
    return {
        "bucket_cap_mb": f"{knobs.bucket_cap_mb} MiB is blocks_per_unit = {size}, see there.",
        "blocks_per_unit": f"`{loop}` between Accelerator() and accelerator.prepare, and in this file "
        f"fsdp_auto_wrap_policy: NO_WRAP and fsdp_cpu_ram_efficient_loading: false{first}.",
    }


def _checkpoint_loop(mode: str) -> str:
    stride = checkpoint_stride(mode)
    blocks = f"range(0, len(layers), {stride})" if stride else "range(len(layers))"
    context = ", context_fn=selective_contexts" if mode == "selective_op" else ""
    return f"for i in {blocks}: layers[i] = checkpoint_wrapper(layers[i]{context})"


def _notes(best: Best) -> tuple[str, ...]:
    notes = [
        "On CPU accelerate does not shard at all, without a word.",
        "Accelerate makes units of the last norm and, in models of transformers, of the embedding and the "
        "head; measured: they are in the root's unit.",
        "Measured on GPUs with `DataLoader(..., pin_memory=True)` and copies that do not wait, as by "
        "`DataLoaderConfiguration(non_blocking=True)`.",
        "An IterableDataset is read by rank 0 for all ranks; measured: each rank reads, as by "
        "`DataLoaderConfiguration(dispatch_batches=False)`.",
    ]
    if best.precision == "bf16" and best.reduce_dtype == "fp32":
        notes.append(
            "Accelerate's bf16 reduces gradients in bf16; measured: in fp32, as by `Accelerator("
            f"fsdp_plugin=FullyShardedDataParallelPlugin(mixed_precision_policy={FP32_REDUCTION}))`."
        )
    if best.knobs.activation_checkpointing == "full":
        notes.append(
            "fsdp_activation_checkpointing does not restore the random state when it computes a block again: "
            "blocks with dropout get wrong gradients."
        )
    return tuple(notes)
