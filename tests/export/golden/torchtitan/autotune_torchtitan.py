# Tuned settings for torchtitan, written by fsdp-autotune.
# For 16 ranks, bf16, and 256 sequences of 2048 tokens per optimizer step over all ranks.
# measured: 1234 tokens/s per rank, MFU 0.31 (95 % interval 0.30 to 0.32), 2026-11-29
# job: "quickstart": 4 ranks
# What each key does was checked with torchtitan 0.3.
#
# Use, with this file's folder on PYTHONPATH and `base` below changed to your own config:
#     torchrun ... -m torchtitan.train --module autotune_torchtitan --config tuned
#
# Not in these files; torchtitan needs code of yours for it, in a function around the model's own parallelize_fn
# (config.model_spec.parallelize_fn; `layers`: its blocks, `units`: its FSDP units):
# - sync_each_micro_batch: a Trainer of yours, whose forward_backward_step calls `model.set_requires_gradient_sync(last)`; torchtitan's reduces gradients after every micro-step.
#
# Other than measured, though no knob:
# - torchtitan 0.3 calls torch.distributed.set_timeout after the first step; it needs a torch that has it (2.13.0 has not).
# - torchtitan makes units of the embedding, and of the last norm with the head; measured: they are in the root's unit.
# - torchtitan clips gradients, which takes a reduction over all ranks; measured: no clipping.
# - torchtitan has attention and losses of its own (model_spec, loss); measured: scaled_dot_product_attention, and the loss over all logits at once.
# - torchtitan computes a checkpointed block again to its end; measured: until its last saved tensor is there.

from importlib.metadata import version

from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.llama3.config_registry import llama3_8b as base
from torchtitan.trainer import Trainer

if not version("torchtitan").startswith("0.3."):
    raise RuntimeError("this file is for torchtitan 0.3; later versions give these fields another meaning")


def tuned() -> Trainer.Config:
    """The config of `base` with the tuned settings."""
    config = base()
    config.training.local_batch_size = 8
    config.training.global_batch_size = 256
    config.training.seq_len = 2048
    config.training.dtype = "float32"
    config.training.mixed_precision_param = "bfloat16"
    config.training.mixed_precision_reduce = "float32"
    config.training.enable_cpu_offload = False
    config.training.disable_cuda_graphs = True
    config.parallelism.data_parallel_replicate_degree = 1
    config.parallelism.data_parallel_shard_degree = 16
    config.parallelism.fsdp_reshard_after_forward = "never"
    config.optimizer.implementation = "foreach"
    config.compile.enable = False
    config.dataloader.num_workers = 2
    config.dataloader.pin_memory = True
    config.dataloader.persistent_workers = True
    config.dataloader.prefetch_factor = 4
    config.activation_checkpoint = FullAC.Config()
    return config
