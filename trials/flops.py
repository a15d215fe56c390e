"""FLOPs per token of a model: what it needs, and what the hardware executes under checkpointing."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
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
    attention_recompute: float = 0.0
    """Per token, what attention computes again in its backward where a fused kernel runs it, which keeps no scores:
    no useful work, and in no count above. 0 also where it could not be counted."""


UNKNOWN = ModelFlops(None, None, "not known")


def model_flops(workload: Workload, model: nn.Module, seq_len: int) -> ModelFlops:
    """Useful FLOPs per token of `model` (unsharded, may be on `meta`): by the formula where a count agrees with it.

    The formula is for a dense model that trains all of its matmuls. A frozen weight has no gradient of its own, and
    below the first trainable one there is no backward at all; of a mixture's experts a token uses a few. A count knows
    both. Where there is none, and the model may not be what the formula is for, nothing is known.

    Raises:
        TrialError: outcome `invalid`; the loss is none.
    """
    found = _count_or_none(workload, seq_len)
    counted, again = (found.executed, found.attention_recompute) if found else (None, 0.0)
    shapes, frozen = workload.attention_shapes(), _trains_partly(model)
    if counted is None and (shapes is None or frozen or not _is_dense(model, workload.blocks(model))):
        return UNKNOWN
    if shapes is None or frozen:
        return ModelFlops(counted, None, COUNTED, again)
    full, causal = (_by_formula(model, shapes, seq_len, key) for key in ("6N+12Lds", "6N+6Lds"))
    if counted is not None and abs(full / counted - 1) > FORMULA_TOLERANCE:
        return ModelFlops(counted, counted - (full - causal), COUNTED, again)
    return ModelFlops(full, causal, PALM_MATMUL.name, again)


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


def _count_or_none(workload: Workload, seq_len: int) -> _Count | None:
    try:
        return _count(workload, seq_len, "none")
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
    equals MFU; what a fused kernel adds is `ModelFlops.attention_recompute`. Takes no memory and no accelerator.
    Weights that are frozen are counted as they run: without gradient.

    Raises:
        TrialError: outcome `invalid`; the loss is none.
    """
    return _count(workload, seq_len, activation_checkpointing).executed


class _Count(NamedTuple):
    """FLOPs per token."""

    executed: float
    """Where attention writes out its scores and keeps them."""
    attention_recompute: float


def _count(workload: Workload, seq_len: int, activation_checkpointing: str) -> _Count:
    with torch.device("meta"):
        model = workload.build_model()
        tokens = torch.zeros(1, seq_len + 1, dtype=torch.int64)
    apply_checkpointing(model, block_names(model, workload.blocks(model)), activation_checkpointing)
    mapping: dict[Any, Any] = {aten._grouped_mm: _grouped_mm_flops} if hasattr(aten, "_grouped_mm") else {}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter, _AttentionRecompute() as attention:
        checked_loss(workload.loss, model, tokens).backward()  # type: ignore[no-untyped-call]
    return _Count(counter.get_total_flops() / seq_len, attention.flops / seq_len)


class _AttentionRecompute(TorchFunctionMode):
    """Adds up the matmul that a fused backward has more than one that finds its scores kept: queries by keys, of each
    head, once more (5 matmuls against 4; FlashAttention, arXiv 2205.14135, and torch's `sdpa_backward_flop_count`)."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention and out.requires_grad:
            query, key = (args[i] if i < len(args) else kwargs[name] for i, name in enumerate(("query", "key")))
            # By the gradient: a forward that is only run again by checkpointing gets none.
            out.register_hook(functools.partial(self._add, 2 * query.numel() * key.shape[-2]))
        return out

    def _add(self, flops: int, _gradient: Tensor) -> None:
        self.flops += flops


def _grouped_mm_flops(a: Sequence[int], b: Sequence[int], *_args: Any, **_kwargs: Any) -> int:
    """Of experts' matmuls in one call, which torch 2.13's counter does not know: each row meets one expert's matrix."""
    groups = a[0] if len(a) == len(b) == 3 else 1
    return 2 * groups * a[-2] * a[-1] * b[-1]
