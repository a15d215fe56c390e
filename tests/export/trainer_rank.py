"""One rank of test_transformers_run: the exported arguments in a real Trainer of transformers, on gloo.

On CPU the Trainer does not shard, so accelerate is told that it may (`allow_cpu`); nothing else of it is changed.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tests.clients.scripts.shim import allow_cpu

SEQ_LEN = 16


def build() -> nn.Module:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=1, tie_word_embeddings=False, **shape))


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(64, (SEQ_LEN,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def read(model: nn.Module) -> dict[str, Any]:
    """What the trained model really is."""
    blocks = [module for module in model.modules() if type(module).__name__.endswith("LlamaDecoderLayer")]
    wrappers = [module for module in model.modules() if isinstance(module, CheckpointWrapper)]
    wrapper_of = {id(block): w for w in wrappers for block in w.modules() if block in blocks}
    found: dict[str, Any] = {"engine": "none", "checkpointed": [id(block) in wrapper_of for block in blocks]}
    if isinstance(model, DistributedDataParallel):
        return found | {
            "engine": "ddp",
            "checkpointed": [
                block.gradient_checkpointing for block in blocks
            ],  # transformers' own, which wraps nothing
            "bucket_cap_mb": model.bucket_bytes_cap / 2**20,
            "synced": model.require_backward_grad_sync,
        }
    units = [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]
    if units:
        unit = units[-1]
        return found | {
            "engine": "fsdp1",
            "blocks": [sum(module in blocks for module in unit.modules()) for unit in units[1:]],
            "strategy": unit.sharding_strategy.name,
            "limit_all_gathers": unit.limit_all_gathers,
            "backward_prefetch": unit.backward_prefetch.name if unit.backward_prefetch else None,
            "forward_prefetch": unit.forward_prefetch,
            "reduce_dtype": str(unit.mixed_precision.reduce_dtype),
            "synced": all(unit._sync_gradients for unit in units),
        }
    holders = [block if isinstance(block, FSDPModule) else wrapper_of.get(id(block), block) for block in blocks]
    groups = [holder._get_fsdp_state()._fsdp_param_groups[0] for holder in holders if isinstance(holder, FSDPModule)]
    if not groups:
        return found
    return found | {
        "engine": "fsdp2",
        "blocks": [groups.count(group) for group in dict.fromkeys(groups)],
        "reshard_after_forward": [group._reshard_after_forward for group in groups],
        "reduce_dtype": str(groups[0].mp_policy.reduce_dtype),
        "synced": groups[0].reduce_grads,
    }


def train(path: Path) -> dict[str, Any]:
    """Trains by the arguments in `path`, after the lines of the script beside it."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    (args,) = HfArgumentParser(TrainingArguments).parse_yaml_file(str(path))
    if args.fsdp_plugin_args and args.fsdp_plugin_args["fsdp_version"] == 1:
        args.fsdp_plugin_args["sync_module_states"] = False  # needs a GPU
    model = build()
    names = {
        "args": args,
        "model": model,
        "layers": model.model.layers,
        "torch": torch,
        "checkpoint_wrapper": checkpoint_wrapper,
        "fully_shard": fully_shard,
        "MixedPrecision": MixedPrecision,
        "MixedPrecisionPolicy": MixedPrecisionPolicy,
    }
    if (path.parent / "autotune_best.py").exists():
        names["autotune_best"] = importlib.import_module("autotune_best")
    exec(path.with_suffix(".lines").read_text(), names)
    trainer = Trainer(model, args, train_dataset=Rows())
    micro_batches: list[int] = []
    synced: list[bool] = []

    def observe(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        micro_batches.append(len(kwargs["input_ids"]))
        synced.append(read(trainer.model_wrapped).get("synced", True))

    model.register_forward_pre_hook(observe, with_kwargs=True)
    trainer.train()
    loader = trainer.callback_handler.train_dataloader
    return read(trainer.model_wrapped) | {
        "micro_batches": micro_batches,
        "synced": synced,
        "steps": trainer.state.global_step,
        "num_workers": loader.num_workers,
        "prefetch_factor": loader.prefetch_factor,
        "loss": trainer.state.log_history[-1]["train_loss"],
    }


def main(folder: Path) -> None:
    allow_cpu()
    sys.path.append(str(folder))
    found = {path.stem: train(path) for path in sorted(folder.glob("*.yaml"))}
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    os._exit(0)  # FSDP1 has been seen to abort in the interpreter's own exit


if __name__ == "__main__":
    main(Path(sys.argv[1]))
