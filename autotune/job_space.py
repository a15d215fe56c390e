"""The sections `space` and `baseline` of a job: candidates per knob, and the user's present settings."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from autotune.section import NotNegative, Positive, Section
from trials.record import checkpoint_stride

Engine = Literal["fsdp2", "fsdp1", "ddp"]
BackwardPrefetch = Literal["pre", "post", "none"]
AttentionBackend = Literal["auto", "flash", "efficient", "cudnn", "math"]

ABSENT_KNOBS = {
    "limit_all_gathers": "it is FSDP1's rate limiter of in-flight all-gathers",
    "persistent_workers": "always on: a trial's loader never ends",
    "grad_accum_steps": "accumulation is derived, so that the global batch stays exact: search micro_batch_size",
    "pin_memory": "always on for CUDA, absent on CPU",
}
"""Knobs that people ask for and that cannot be searched, with the reason."""


class Space(Section):
    """Candidates per knob; a knob that is absent keeps the baseline's value. `auto` derives them (README, "Knobs")."""

    micro_batch_size: tuple[Positive, ...] | Literal["auto"] | None = None
    sync_each_micro_batch: tuple[bool, ...] | None = None
    reshard_after_forward: tuple[bool, ...] | None = None
    bucket_cap_mb: tuple[Annotated[float, Field(gt=0)], ...] | Literal["auto"] | None = None
    activation_checkpointing: tuple[str, ...] | None = None
    num_workers: tuple[Annotated[int, Field(ge=0)], ...] | Literal["auto"] | None = None
    prefetch_factor: tuple[Positive, ...] | None = None
    keep_last_units: tuple[NotNegative, ...] | None = None
    """FSDP2: units at the end that are not freed after forward, e.g. [0, 1]."""
    reshard_group_size: tuple[NotNegative, ...] | None = None
    """FSDP2: ranks that weights are spread over between forward and backward; 0 for all, else a divisor."""
    forward_prefetch_units: tuple[NotNegative, ...] | None = None
    """FSDP2: units gathered ahead in forward; 0 for torch's own order."""
    backward_prefetch_units: tuple[NotNegative, ...] | None = None
    """FSDP2: units gathered ahead in backward; 0 for torch's own, which is one."""
    replicate_degree: tuple[Positive, ...] | None = None
    """FSDP2 and FSDP1: copies of the sharded model (HSDP), over the ranks of a trial; 1 for plain FSDP."""
    reduce_dtype: tuple[Literal["fp32", "bf16"], ...] | None = None
    """FSDP2 and FSDP1: of the gradient reduction under bf16 precision."""
    cpu_offload: tuple[bool, ...] | None = None
    """FSDP2 on CUDA: weights, gradients and optimizer in host memory."""
    limit_all_gathers: tuple[bool, ...] | None = None
    """FSDP1: a rate limiter of in-flight all-gathers."""
    backward_prefetch: tuple[BackwardPrefetch, ...] | None = None
    """FSDP1: pre, post or none."""
    forward_prefetch: tuple[bool, ...] | None = None
    """FSDP1: queue the next unit's all-gather before a forward."""
    compile: tuple[bool, ...] | None = None
    """torch.compile of each block; its time is outside the clock."""
    attention_backend: tuple[AttentionBackend, ...] | None = None
    """Of scaled_dot_product_attention: auto, flash, efficient, cudnn, math."""
    fused_optimizer: tuple[bool, ...] | None = None
    """One kernel for the whole AdamW update."""

    @model_validator(mode="after")
    def _modes_and_duplicates(self) -> Self:
        for mode in self.activation_checkpointing or ():
            checkpoint_stride(mode)
        for name, values in self:
            if isinstance(values, tuple) and not values:
                raise ValueError(f"{name} = []: give at least one candidate, or leave the knob out")
            if isinstance(values, tuple) and len(set(values)) != len(values):
                raise ValueError(f"{name} = {list(values)}: the same candidate twice")
        return self


class Baseline(Section):
    """Your present settings. What you leave out is what a careful person would start with."""

    micro_batch_size: Positive = 1
    sync_each_micro_batch: bool | None = None
    """None: as export_for's trainer does it, else true."""
    reshard_after_forward: bool = True
    bucket_cap_mb: Annotated[float, Field(gt=0)] | None = None
    """None: the size of the largest block, which is one block a unit where blocks are alike."""
    activation_checkpointing: str = "full"
    num_workers: Annotated[int, Field(ge=0)] | None = None
    """None: the CPUs this process may use / ranks per node, one of them kept for the rank itself."""
    prefetch_factor: Positive = 2
    engine: Engine | None = None
    """None: the first of training.engines. It need not be one of them."""
    keep_last_units: NotNegative | None = None
    """FSDP2; None, here and below: torch's default."""
    reshard_group_size: NotNegative | None = None
    """FSDP2: 0 for all ranks."""
    forward_prefetch_units: NotNegative | None = None
    """FSDP2."""
    backward_prefetch_units: NotNegative | None = None
    """FSDP2."""
    replicate_degree: Positive | None = None
    """FSDP2 and FSDP1: copies of the sharded model (HSDP)."""
    cpu_offload: bool | None = None
    """FSDP2 on CUDA."""
    limit_all_gathers: bool | None = None
    """FSDP1."""
    backward_prefetch: BackwardPrefetch | None = None
    """FSDP1: pre, post or none."""
    forward_prefetch: bool | None = None
    """FSDP1."""
    compile: bool = False
    attention_backend: AttentionBackend = "auto"
    fused_optimizer: bool = False

    @model_validator(mode="after")
    def _mode(self) -> Self:
        checkpoint_stride(self.activation_checkpointing)
        return self
