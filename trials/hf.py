"""`workload: hf`: causal language models of Hugging Face's transformers, from a config alone.

Weights are random: what a step costs does not depend on them. Nothing is downloaded, and no code of a model
repository runs: a config has to name an architecture that transformers itself has.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trials.outcome import Outcome, TrialError
from trials.workload import AttentionShape

MORE_KEYS = frozenset({"rope_theta", "rope_scaling", "torch_dtype", "dtype", "head_dim"})
"""Keys that transformers takes though not each config that does declares them."""


class HfWorkload:
    """A causal language model of transformers, trained to predict the next token.

    Args:
        seq_len: tokens per sequence.
        config: what a model's config.json holds; `model_type` names the architecture.

    Raises:
        TrialError: outcome `invalid`; transformers is not installed, or makes no model of this config.
    """

    def __init__(self, seq_len: int, config: dict[str, Any]) -> None:
        self.config = make_config(config)
        self.text_config = self.config.get_text_config()
        self.vocab_size: int = self.text_config.vocab_size
        self.seq_len = seq_len
        longest = getattr(self.text_config, "max_position_embeddings", None)
        if longest is not None and seq_len > longest:
            raise TrialError(
                Outcome.INVALID,
                f"model.seq_len = {seq_len}: the config has {longest} positions (max_position_embeddings, or its own "
                "name for it); shorten the one or raise the other",
            )
        with torch.device("meta"):
            self.build_model()  # a bad config shows here; and the modules it imports are no part of a trial's memory

    @property
    def blocks_take_the_same(self) -> bool:
        """Whether each block is called with the same arguments but the first; FSDP1 groups no others."""
        return len(set(getattr(self.text_config, "layer_types", None) or ())) <= 1

    def build_model(self) -> nn.Module:
        from transformers import AutoModelForCausalLM

        try:
            # fp32, whatever the config says: these are the master weights. Attention is SDPA where the model has it.
            model: nn.Module = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32)
        except (ValueError, TypeError, AttributeError, ZeroDivisionError, RuntimeError) as error:
            raise TrialError(
                Outcome.INVALID, f"model.config: transformers makes no model of it: {type(error).__name__}: {error}"
            ) from error
        return model

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """By `_no_split_modules`, the classes that must stay on one device; in the order in which they run."""
        classes = set(getattr(model, "_no_split_modules", None) or ())
        found = {name: module for name, module in model.named_modules() if type(module).__name__ in classes}
        outermost = [
            module for name, module in found.items() if not any(name.startswith(f"{other}.") for other in found)
        ]
        if not outermost:
            raise TrialError(
                Outcome.INVALID,
                f"{type(model).__name__} has no blocks to shard or checkpoint: its _no_split_modules names "
                f"{sorted(classes) or 'none'}; give blocks() by a factory of your own",
            )
        return outermost

    def attention_shapes(self) -> Sequence[AttentionShape] | None:
        """None where a layer is more, or less, than full attention of one head size: its FLOPs are counted."""
        text = self.text_config
        heads, layers = getattr(text, "num_attention_heads", None), getattr(text, "num_hidden_layers", None)
        if not isinstance(heads, int) or not isinstance(layers, int) or hasattr(text, "kv_lora_rank"):
            return None
        kinds = set(getattr(text, "layer_types", None) or ["sliding_attention"])
        window = getattr(text, "sliding_window", None)
        if window is None or self.seq_len <= window:
            kinds.discard("sliding_attention")  # it slides over nothing
        if kinds - {"full_attention"}:
            return None
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        return [AttentionShape(heads, head_dim)] * layers

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """From the logits, in fp32, and the same for every architecture: auxiliary losses (routers') are left out."""
        arguments = {}
        if tokens.is_meta:
            arguments = self._for_counting(model, tokens)
        logits = model(input_ids=tokens[:, :-1], **arguments).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def _for_counting(self, model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
        """On `meta` nothing may depend on values: a mask that is ready is not looked into, and experts are multiplied
        token by token, which is the same work as in groups."""
        model.config._experts_implementation = "batched_mm"  # type: ignore[union-attr]
        length = tokens.shape[1] - 1
        return {"attention_mask": torch.ones(1, 1, length, length, dtype=torch.bool, device="meta")}

    def init_parameter(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        if name.endswith("bias"):
            return torch.zeros(shape)
        if len(shape) <= 1:
            return torch.ones(shape)
        std = getattr(self.text_config, "initializer_range", None) or 0.02
        return torch.normal(0.0, std, tuple(shape), generator=generator)

    def init_buffers(self, model: nn.Module) -> None:
        """By the model's own `_init_weights`, asked for buffers alone, and seen to fill each.

        Raises:
            TrialError: outcome `invalid`; it leaves a buffer as it was.
        """
        for name, module in model.named_modules():
            buffers = {leaf: buffer for leaf, buffer in module._buffers.items() if buffer is not None}
            if not buffers:
                continue
            filled: list[dict[str, Tensor]] = []
            for value in (0, 1):  # what is still 0 the first time and 1 the second was not filled
                for buffer in buffers.values():
                    buffer.fill_(value)
                with _parameters_on_meta(module):
                    model._init_weights(module)  # type: ignore[operator]
                filled.append({leaf: buffer.clone() for leaf, buffer in buffers.items()})
            wrong = [leaf for leaf in buffers if not torch.equal(filled[0][leaf], filled[1][leaf])]
            if wrong:
                raise TrialError(
                    Outcome.INVALID,
                    f"{type(module).__name__} {name}: transformers does not say how to fill its buffers {wrong} "
                    "without a checkpoint; fill them by a factory of your own",
                )


@contextmanager
def _parameters_on_meta(module: nn.Module) -> Iterator[None]:
    """Takes a module's own parameters out of reach: they have their values, and may be sharded."""
    own = dict(module._parameters)
    for leaf, parameter in own.items():
        if parameter is not None:
            module._parameters[leaf] = nn.Parameter(torch.empty(parameter.shape, device="meta"), requires_grad=False)
    try:
        yield
    finally:
        module._parameters.update(own)


def make_config(values: dict[str, Any]) -> Any:
    """The config object of transformers.

    Raises:
        TrialError: outcome `invalid`; not installed, no such architecture, an unknown key, a bad value.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # read at import: whatever is asked below, nothing is fetched
    try:
        from transformers import CONFIG_MAPPING, AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError as error:
        raise TrialError(
            Outcome.INVALID,
            f"model.workload = hf needs transformers ({error}): pip install 'fsdp-autotune[hf]', on every node",
        ) from error
    arguments = dict(values)
    model_type = arguments.pop("model_type", None)
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise TrialError(
            Outcome.INVALID,
            f"model.config.model_type = {model_type!r}: transformers has no causal language model of that name"
            + _nearest(str(model_type), list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)),
        )
    if "transformers_version" not in arguments:  # one that transformers wrote may carry other tools' keys
        kind = CONFIG_MAPPING[model_type]
        known = {*kind().to_dict(), *kind.attribute_map, *MORE_KEYS}
        wrong = [
            f"model.config.{key}: unknown key{_nearest(key, list(known))}" for key in arguments if key not in known
        ]
        if wrong:
            raise TrialError(Outcome.INVALID, "; ".join(wrong))
    try:
        config = AutoConfig.for_model(model_type, **arguments)
    except Exception as error:
        raise TrialError(Outcome.INVALID, f"model.config: {' '.join(str(error).split())}") from error
    config.get_text_config().use_cache = False  # a cache of keys and values is for generation
    return config


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known)
    return f"; did you mean {' or '.join(close)}?" if close else ""
