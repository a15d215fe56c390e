"""Configs that need no trial: measured already, or taking no less memory than one that did not fit."""

from __future__ import annotations

from trials.record import KNOB_NAMES, Knobs, checkpoint_stride


def holds_unsharded_gradients(knobs: Knobs) -> bool:
    """Accumulating without sync keeps every gradient whole on every rank."""
    return knobs.grad_accum_steps > 1 and not knobs.sync_each_micro_batch


def _keeps_no_less(mode: str, other: str) -> bool:
    """Whether checkpointing `mode` surely keeps no less activation memory than `other`.

    none keeps all, full least. selective_op and every_K lie between, in no order that holds for all models.
    """
    if mode in {other, "none"} or other == "full":
        return True
    stride, other_stride = checkpoint_stride(mode), checkpoint_stride(other)
    # Only so does it checkpoint a part of the same blocks, whatever their sizes.
    return stride is not None and other_stride is not None and stride % other_stride == 0


COMPARED = frozenset(
    {
        "micro_batch_size",
        "grad_accum_steps",
        "sync_each_micro_batch",
        "reshard_after_forward",
        "bucket_cap_mb",
        "blocks_per_unit",
        "activation_checkpointing",
        "keep_last_units",
        "forward_prefetch_units",
        "backward_prefetch_units",
        "limit_all_gathers",
        "backward_prefetch",
        "forward_prefetch",
    }
)
"""Knobs whose effect on a rank's memory has a known direction."""
HOST_ONLY = frozenset({"num_workers", "prefetch_factor"})
"""A loader's memory is the host's, not the device's."""
EARLY = {None: 0, "none": 0, "post": 1, "pre": 2}


def takes_no_less_memory(knobs: Knobs, other: Knobs) -> bool:
    """Whether `knobs` takes at least the memory of `other` in every coordinate that decides memory.

    False means not known: so too where a knob differs whose effect has no known direction. The accumulation count
    only matters through gradients held whole.
    """
    return (
        all(getattr(knobs, name) == getattr(other, name) for name in KNOB_NAMES if name not in COMPARED | HOST_ONLY)
        and knobs.micro_batch_size >= other.micro_batch_size
        and _keeps_no_less(knobs.activation_checkpointing, other.activation_checkpointing)
        and _keeps_no_less_gathered(knobs, other)
        and _has_no_smaller_units(knobs, other)
        # Without workers, a CPU's rank loads and tokenises itself, in the memory that its limit counts.
        and (other.num_workers > 0 or knobs.num_workers == 0)
        and (holds_unsharded_gradients(knobs) or not holds_unsharded_gradients(other))
        and (knobs.grad_accum_steps > 1 or other.grad_accum_steps == 1)
    )


def _has_no_smaller_units(knobs: Knobs, other: Knobs) -> bool:
    """Units that are made of whole units of the other's; what DDP's buckets do to memory is not known."""
    if knobs.bucket_cap_mb == other.bucket_cap_mb:
        return True
    if knobs.blocks_per_unit is None or other.blocks_per_unit is None:
        return False
    return knobs.bucket_cap_mb > other.bucket_cap_mb and knobs.blocks_per_unit % other.blocks_per_unit == 0


def _keeps_no_less_gathered(knobs: Knobs, other: Knobs) -> bool:
    """Weights that are not freed after forward, or are gathered early, lie in memory all the longer."""
    kept = not knobs.reshard_after_forward or (
        bool(other.reshard_after_forward) and (knobs.keep_last_units or 0) >= (other.keep_last_units or 0)
    )
    return (
        kept
        and EARLY[knobs.backward_prefetch] >= EARLY[other.backward_prefetch]
        and bool(knobs.forward_prefetch) >= bool(other.forward_prefetch)
        and (not knobs.limit_all_gathers) >= (not other.limit_all_gathers)
        and (knobs.forward_prefetch_units or 0) >= (other.forward_prefetch_units or 0)
        # torch's own, 0, prefetches one.
        and (knobs.backward_prefetch_units or 1) >= (other.backward_prefetch_units or 1)
    )


def dominating_oom(knobs: Knobs, out_of_memory: list[Knobs]) -> Knobs | None:
    """A config that ran out of memory and takes no more than `knobs`; None if there is none."""
    return next((other for other in out_of_memory if takes_no_less_memory(knobs, other)), None)
