"""Export for DeepSpeed: a JSON config in which ZeRO stands in for FSDP. Its engine was never run with it.

Checked against the config classes of deepspeed 0.19: the batch sizes and dtypes mean what was measured; what decides
when weights are gathered, freed and reduced has other units and another implementation, so these knobs are lost, and
the keys that come nearest are written. JSON has no comments, and those who read the file for DeepSpeed (accelerate,
transformers) take none, so they are one key, which DeepSpeed passes over.
"""

from __future__ import annotations

import json
from typing import Any

from autotune.export.base import Best, Exported, Exporter, Fixed, carried_without, header, remarks
from autotune.export.lines import checkpoint_loop, scripted
from trials.record import ENGINE_KNOBS

FILE_NAME = "ds_config.json"
COMMENT = "_comment"
CHECKED = {"deepspeed": "0.19"}
MIB = 2**20
DEFAULT_LIVE = 10**9
"""Elements; DeepSpeed's own stage3_max_live_parameters."""
FOREVER = 10**13
"""Elements: more than any model has."""

USE = [
    "UNTESTED on DeepSpeed's engine: ZeRO is not FSDP, so neither speed nor memory was measured. Measure before you "
    "rely on it.",
    f"Use: deepspeed train.py --deepspeed --deepspeed_config {FILE_NAME}, or `deepspeed: {FILE_NAME}` among the "
    "TrainingArguments of transformers.",
]
TO_WRITE = ["Not in this file, or only its nearest; `layers`: the model's list of blocks:"]


def export(best: Best) -> Exported:
    """One file."""
    knobs = best.knobs
    fsdps_own = "nothing that DeepSpeed has: it is FSDP's own."
    lost = {name: fsdps_own if name in ENGINE_KNOBS else line for name, line in scripted(knobs).items()}
    lost |= _lost(best)
    if knobs.cpu_offload:
        lost["cpu_offload"] = "nothing more: offload_param and offload_optimizer stand in for it, with their own Adam."
    notes = ("The optimizer is the script's: DeepSpeed puts its own in place only where the file names one.",)
    parts = [line for part in remarks(lost, notes, TO_WRITE) for line in ("", *part)]
    head = [line for text in header(best, "Settings for DeepSpeed", CHECKED) for line in text.splitlines()]
    config: dict[str, Any] = {
        COMMENT: [*head, "", *USE, *parts],
        "train_batch_size": best.global_batch_size,
        "train_micro_batch_size_per_gpu": knobs.micro_batch_size,
        "gradient_accumulation_steps": knobs.grad_accum_steps,
        "bf16": {"enabled": best.precision == "bf16"},
        "communication_data_type": best.reduce_dtype,
        "zero_optimization": _zero(best),
    }
    return Exported({FILE_NAME: json.dumps(config, indent=2) + "\n"}, carried_without(lost), lost, notes)


def _zero(best: Best) -> dict[str, Any]:
    knobs = best.knobs
    bytes_each = 2 if best.precision == "bf16" and knobs.engine != "ddp" else 4  # DDP's are of fp32 gradients
    bucket = max(1, round(knobs.bucket_cap_mb * MIB / bytes_each))
    if knobs.engine == "ddp":
        return {"stage": 0, "reduce_bucket_size": bucket}
    zero: dict[str, Any] = {
        "stage": 3,
        "reduce_bucket_size": bucket,  # DeepSpeed counts in elements
        "stage3_prefetch_bucket_size": bucket,
        # Freed after use at once, or kept until the backward.
        "stage3_max_reuse_distance": 0 if knobs.reshard_after_forward else FOREVER,
        "stage3_max_live_parameters": DEFAULT_LIVE if knobs.reshard_after_forward else FOREVER,
        "overlap_comm": True,
    }
    if knobs.cpu_offload:
        device = {"device": "cpu", "pin_memory": True}
        zero |= {"offload_param": device, "offload_optimizer": device}
    return zero


def _lost(best: Best) -> dict[str, str]:
    knobs = best.knobs
    stage = 0 if knobs.engine == "ddp" else 3
    lost = {
        "engine": f"nothing that DeepSpeed has: measured with torch's {knobs.engine}; ZeRO stage {stage} stands in.",
        "bucket_cap_mb": "nothing more: reduce_bucket_size and stage3_prefetch_bucket_size, in elements, come nearest.",
        "num_workers": f"`DataLoader(..., num_workers={knobs.num_workers}, "
        f"persistent_workers={knobs.num_workers > 0})`.",
        "prefetch_factor": f"`DataLoader(..., prefetch_factor={knobs.prefetch_factor})`.",
    }
    if knobs.engine != "ddp":
        lost["reshard_after_forward"] = (
            "nothing more: stage3_max_reuse_distance and stage3_max_live_parameters come nearest."
        )
        lost["blocks_per_unit"] = "nothing more: DeepSpeed gathers parameter by parameter, see bucket_cap_mb."
    if knobs.engine == "fsdp1":
        for name in ("limit_all_gathers", "backward_prefetch", "forward_prefetch"):
            lost[name] = "nothing that DeepSpeed has: it prefetches by stage3_prefetch_bucket_size."
    if knobs.grad_accum_steps > 1 and knobs.sync_each_micro_batch is (knobs.engine == "ddp"):
        lost["sync_each_micro_batch"] = (
            "nothing that DeepSpeed has: ZeRO 3 reduces gradients after every micro-step, stage 0 after the last."
        )
    if knobs.activation_checkpointing != "none":
        lost["activation_checkpointing"] = (
            f"`{checkpoint_loop(knobs.activation_checkpointing)}`, before deepspeed.initialize; DeepSpeed's own "
            "activation_checkpointing section is for its own function."
        )
    return lost


EVERY: Fixed = {"sync_each_micro_batch": (True,)}
LAST: Fixed = {"sync_each_micro_batch": (False,)}
EXPORTER = Exporter(export, CHECKED, {"fsdp2": EVERY, "fsdp1": EVERY, "ddp": LAST})
