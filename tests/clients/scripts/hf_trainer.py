"""The Trainer of transformers with its arguments in a file, as its documentation has it."""

from __future__ import annotations

import argparse

import shim
import torch
from torch.utils.data import Dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("arguments")
parser.add_argument("--as-shipped", action="store_true")
parser.add_argument("--callback", action="store_true")
parser.add_argument("--ragged", action="store_true")
options = parser.parse_args()
if not options.as_shipped:
    shim.allow_cpu()

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2}
SEQ_LEN = 16


class Rows(Dataset):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(64, (SEQ_LEN,), generator=torch.Generator().manual_seed(index))
        mask = torch.ones(SEQ_LEN, dtype=torch.long)
        if options.ragged:
            mask[SEQ_LEN // 4 :] = 0
        return {"input_ids": tokens, "labels": tokens, "attention_mask": mask}


def main() -> None:
    from toy import tell

    (args,) = HfArgumentParser(TrainingArguments).parse_yaml_file(options.arguments)
    if not options.as_shipped and args.fsdp_plugin_args["fsdp_version"] == 1:
        args.fsdp_plugin_args["sync_module_states"] = False  # needs a GPU
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=1, tie_word_embeddings=False, **SHAPE))
    callbacks = []
    if options.callback:
        import probe

        callbacks.append(probe.transformers_callback())
    trainer = Trainer(model, args, train_dataset=Rows(), callbacks=callbacks)
    trainer.train()
    tell(steps=trainer.state.global_step, seen=trainer.state.num_input_tokens_seen, log=trainer.state.log_history[-1])


if __name__ == "__main__":
    main()
