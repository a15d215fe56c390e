"""Configs that are the same in effect have one spelling: else they would be tried, and counted, as several."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from trials.record import Knobs, checkpoint_stride, group_blocks, unit_cap_mb


@dataclass(frozen=True)
class Facts:
    """What the survey found that the space depends on."""

    device: str
    num_blocks: int
    block_mib: tuple[float, ...]
    cpus_allowed: int
    world_size: int = 2
    """Ranks of a trial."""


class Canonical:
    """The one spelling of a config, for a model on some ranks of a device."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._groups: dict[float, tuple[float, list[int]]] = {}
        """By cap: there are few, and every config of the space asks."""

    def __call__(self, knobs: Knobs) -> Knobs:
        """The one spelling of all configs that are the same in effect."""
        engine_values = {"fsdp2": self._fsdp2, "fsdp1": self._fsdp1, "ddp": _ddp}
        return replace(
            knobs,
            activation_checkpointing=self.mode(knobs.activation_checkpointing),
            # With one micro-step there is nothing to hold back.
            sync_each_micro_batch=knobs.sync_each_micro_batch or knobs.grad_accum_steps == 1,
            prefetch_factor=knobs.prefetch_factor if knobs.num_workers else None,
            **engine_values[knobs.engine](knobs),
        )

    def _fsdp2(self, knobs: Knobs) -> dict[str, Any]:
        cap, blocks = self.cap(knobs.bucket_cap_mb)
        num_units = len(self._grouped(cap)[1])
        kept_last = min(knobs.keep_last_units or 0, num_units)
        freed = bool(knobs.reshard_after_forward) and kept_last < num_units
        return {
            "bucket_cap_mb": cap,
            "blocks_per_unit": blocks,
            "reshard_after_forward": freed,
            "keep_last_units": kept_last if freed else 0,
            "reshard_group_size": knobs.reshard_group_size if freed else 0,
            # No further ahead than there are units.
            "forward_prefetch_units": min(knobs.forward_prefetch_units or 0, num_units),
            "backward_prefetch_units": min(knobs.backward_prefetch_units or 0, num_units - 1),
        }

    def _fsdp1(self, knobs: Knobs) -> dict[str, Any]:
        cap, blocks = self.cap(knobs.bucket_cap_mb)
        return {
            "bucket_cap_mb": cap,
            "blocks_per_unit": blocks,
            "limit_all_gathers": knobs.limit_all_gathers or self.facts.device == "cpu",
            # One rank has nothing to shard: torch makes it NO_SHARD.
            "reshard_after_forward": knobs.reshard_after_forward and self.facts.world_size > 1,
        }

    def cap(self, cap_mib: float) -> tuple[float, int]:
        """The smallest cap that groups blocks as `cap_mib` does, and the blocks of its largest unit."""
        cap, units = self._grouped(cap_mib)
        return cap, max(units)

    def _grouped(self, cap_mib: float) -> tuple[float, list[int]]:
        """The smallest cap that groups blocks as `cap_mib` does, and the blocks of each unit."""
        if cap_mib not in self._groups:
            # A cap given as a multiple of the block's size must not lose to rounding.
            units = group_blocks(self.facts.block_mib, cap_mib + 1e-6)
            self._groups[cap_mib] = unit_cap_mb(self.facts.block_mib, units), units
        return self._groups[cap_mib]

    def mode(self, mode: str) -> str:
        stride = checkpoint_stride(mode)
        if stride is None:
            return mode
        return f"every_{min(stride, self.facts.num_blocks)}" if self.facts.num_blocks > 1 else "full"


def _ddp(knobs: Knobs) -> dict[str, Any]:
    return {"bucket_cap_mb": round(knobs.bucket_cap_mb, 2), "blocks_per_unit": None}
