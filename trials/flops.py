"""FLOPs per token of a model: what it needs, and what the hardware executes under checkpointing."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from trials.conventions import COUNTED, PALM_MATMUL, flops_per_token
from trials.outcome import TrialError
from trials.workload import AttentionShape, Workload, checked_loss
from trials.wrap import apply_checkpointing, block_names

aten = torch.ops.aten


def matmul_params(model: nn.Module) -> int:
    """Weights used in matmuls: every nn.Linear's (a tied head once); no embedding table, norm or bias."""
    weights = {module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    return sum(weight.numel() for weight in weights)


FORMULA_TOLERANCE = 0.01
"""A formula further than this from the count has missed a matmul (a head by F.linear, a Conv1D): the count stands."""


@dataclass(frozen=True)
class ModelFlops:
    per_token: float | None
    """None: neither a formula nor a count is to be had, and then there is no MFU."""
    per_token_causal: float | None
    """The same with half the attention; None when the attention is not known."""
    convention: str


UNKNOWN = ModelFlops(None, None, "not known")


def model_flops(workload: Workload, model: nn.Module, seq_len: int) -> ModelFlops:
    """Useful FLOPs per token of `model` (unsharded, may be on `meta`): by the formula where a count agrees with it.

    The formula is for a dense model that trains all of its matmuls. A frozen weight has no gradient of its own, and
    below the first trainable one there is no backward at all; of a mixture's experts a token uses a few. A count knows
    both. Where there is none, and the model may not be what the formula is for, nothing is known.

    Raises:
        TrialError: outcome `invalid`; the loss is none.
    """
    counted = _count_or_none(workload, seq_len)
    shapes, frozen = workload.attention_shapes(), _trains_partly(model)
    if counted is None and (shapes is None or frozen or not _is_dense(model, workload.blocks(model))):
        return UNKNOWN
    if shapes is None or frozen:
        return ModelFlops(counted, None, COUNTED)
    full, causal = (_by_formula(model, shapes, seq_len, key) for key in ("6N+12Lds", "6N+6Lds"))
    if counted is not None and abs(full / counted - 1) > FORMULA_TOLERANCE:
        return ModelFlops(counted, counted - (full - causal), COUNTED)
    return ModelFlops(full, causal, PALM_MATMUL.name)


def _trains_partly(model: nn.Module) -> bool:
    """Whether a matrix is frozen, other than a look-up table, which costs nothing either way."""
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    heads = {module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    return any(p.dim() > 1 and not p.requires_grad and (p in heads or p not in tables) for p in model.parameters())


def _is_dense(model: nn.Module, blocks: Sequence[nn.Module]) -> bool:
    """Whether `matmul_params` surely sees each matrix, and each token uses it: no stacked weights, no list of layers
    in a block, which may be experts."""
    seen = {module.weight for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)}
    inside = (module for block in blocks for module in block.modules() if module is not block)
    return all(p in seen for p in model.parameters() if p.dim() > 1) and not any(
        isinstance(module, nn.ModuleList | nn.ModuleDict) and any(isinstance(m, nn.Linear) for m in module.modules())
        for module in inside
    )


def _count_or_none(workload: Workload, seq_len: int) -> float | None:
    try:
        return counted_flops_per_token(workload, seq_len, "none")
    except TrialError:
        raise
    except Exception:  # noqa: BLE001 (a user's loss may do what `meta` cannot: .item(), a custom kernel)
        traceback.print_exc()
        return None


def _by_formula(model: nn.Module, shapes: Sequence[AttentionShape], seq_len: int, convention: str) -> float:
    d_attn = sum(shape.num_heads * shape.head_dim for shape in shapes)  # over all layers, so num_layers is 1
    return flops_per_token(matmul_params(model), 1, d_attn, seq_len, convention)


def counted_flops_per_token(workload: Workload, seq_len: int, activation_checkpointing: str) -> float:
    """FLOPs per token that a forward and a backward execute, counted on `meta` with the real checkpoint wrappers.

    On `meta` SDPA decomposes into bmm, so attention counts 12 there on every device, and HFU without checkpointing
    equals MFU. Takes no memory and no accelerator. Weights that are frozen are counted as they run: without gradient.

    Raises:
        TrialError: outcome `invalid`; the loss is none.
    """
    with torch.device("meta"):
        model = workload.build_model()
        tokens = torch.zeros(1, seq_len + 1, dtype=torch.int64)
    apply_checkpointing(model, block_names(model, workload.blocks(model)), activation_checkpointing)
    with FlopCounterMode(display=False, custom_mapping={aten._grouped_mm: _grouped_mm_flops}) as counter:
        checked_loss(workload.loss, model, tokens).backward()  # type: ignore[no-untyped-call]
    return float(counter.get_total_flops()) / seq_len


def _grouped_mm_flops(a: Sequence[int], b: Sequence[int], *_args: Any, **_kwargs: Any) -> int:
    """Of experts' matmuls in one call, which torch 2.13's counter does not know: each row meets one expert's matrix."""
    groups = a[0] if len(a) == len(b) == 3 else 1
    return 2 * groups * a[-2] * a[-1] * b[-1]
