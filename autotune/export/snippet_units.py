"""The part of the exported file that makes FSDP units of several blocks."""

from collections.abc import Sequence

from torch import nn

from autotune.export.snippet_common import PRECISION

BUCKET_CAP_MB: float = 0.0
BLOCKS_PER_UNIT: int = 1


def group_blocks(blocks: Sequence[nn.Module]) -> list[int]:
    """Blocks in each FSDP unit: consecutive ones, as many as BUCKET_CAP_MB holds. Call before sharding."""
    bytes_each = 2 if PRECISION == "bf16" else 4
    units: list[int] = []
    filled = 0.0
    for block in blocks:
        size_mib = sum(p.numel() for p in block.parameters()) * bytes_each / 2**20
        if units and filled + size_mib <= BUCKET_CAP_MB:
            units[-1] += 1
            filled += size_mib
        else:
            units.append(1)
            filled = size_mib
    if max(units) != BLOCKS_PER_UNIT:
        raise ValueError(
            f"BUCKET_CAP_MB = {BUCKET_CAP_MB} puts {max(units)} of these blocks in a unit, not "
            f"{BLOCKS_PER_UNIT}: the model is not the one that was tuned. Tune it, or change both."
        )
    return units
