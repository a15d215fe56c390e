"""Configs that need no trial: measured already, or taking no less memory than one that did not fit."""

from __future__ import annotations

from trials.record import Knobs, checkpoint_stride


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
    return stride is not None and other_stride is not None and stride >= other_stride


def takes_no_less_memory(knobs: Knobs, other: Knobs) -> bool:
    """Whether `knobs` takes at least the memory of `other` in every coordinate that decides memory.

    False means not known. Loader knobs are left out: a loader's memory is the host's, not the device's. So is the
    accumulation count, which only matters through gradients held whole.
    """
    return (
        knobs.engine == other.engine
        and knobs.micro_batch_size >= other.micro_batch_size
        and _keeps_no_less(knobs.activation_checkpointing, other.activation_checkpointing)
        and (not knobs.reshard_after_forward or other.reshard_after_forward)
        and knobs.bucket_cap_mb >= other.bucket_cap_mb
        and (holds_unsharded_gradients(knobs) or not holds_unsharded_gradients(other))
        and (knobs.grad_accum_steps > 1 or other.grad_accum_steps == 1)
        and _gathers_no_less_ahead(knobs, other)
    )


def _gathers_no_less_ahead(knobs: Knobs, other: Knobs) -> bool:
    """Of FSDP1: weights that are gathered before they are needed lie in memory all the longer."""
    if knobs.backward_prefetch is None or other.backward_prefetch is None:
        return True
    early = ("none", "post", "pre")
    return (
        early.index(knobs.backward_prefetch) >= early.index(other.backward_prefetch)
        and (knobs.forward_prefetch or not other.forward_prefetch) is True
        and (not knobs.limit_all_gathers or other.limit_all_gathers) is True
    )


def dominating_oom(knobs: Knobs, out_of_memory: list[Knobs]) -> Knobs | None:
    """A config that ran out of memory and takes no more than `knobs`; None if there is none."""
    return next((other for other in out_of_memory if takes_no_less_memory(knobs, other)), None)
