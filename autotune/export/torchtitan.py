"""Export for torchtitan: a config module (`--module`, `--config`), and the same as overrides for its command line.

Checked against torchtitan 0.3, whose TOML files are gone; later versions count batches in tokens, so the module refuses
them. torchtitan has FSDP2 only: its replication without sharding is FSDP2 over one rank, not DDP. It reduces gradients
in fp32 after every micro-step. What its config has no field for goes into a parallelize_fn, which a config can name.
"""

from __future__ import annotations

from dataclasses import dataclass

from autotune.export.base import Best, Exported, Exporter, carried_without, comment, header, remarks, remarks_text
from autotune.export.lines import partial_checkpointing, scripted, shard_groups
from trials.record import Knobs

MODULE_NAME = "autotune_torchtitan.py"
OVERRIDES_NAME = "torchtitan_overrides.txt"
CHECKED = {"torchtitan": "0.3"}
DTYPE = {"fp32": "float32", "bf16": "bfloat16"}

USE = [
    "Use, with this file's folder on PYTHONPATH and `base` below changed to your own config:",
    "    torchrun ... -m torchtitan.train --module autotune_torchtitan --config tuned",
]
USE_OVERRIDES = [
    "Use: torchrun ... -m torchtitan.train --module llama3 --config llama3_8b \\",
    f"    $(grep -v '^#' {OVERRIDES_NAME})",
    "with your own module and config; the last line is a subcommand of torchtitan's, so add options before it.",
]
TO_WRITE = [
    "Not in these files; torchtitan needs code of yours for it, in a function around the model's own parallelize_fn",
    "(config.model_spec.parallelize_fn; `layers`: its blocks, `units`: its FSDP units):",
]
CODE = '''\

from importlib.metadata import version

from torchtitan.distributed.activation_checkpoint import {policy}
from torchtitan.models.llama3.config_registry import llama3_8b as base
from torchtitan.trainer import Trainer

if not version("torchtitan").startswith("0.3."):
    raise RuntimeError("this file is for torchtitan 0.3; later versions give these fields another meaning")


def tuned() -> Trainer.Config:
    """The config of `base` with the tuned settings."""
    config = base()
{settings}
    return config
'''
CARRIED_FIELDS = ("replicate_degree", "cpu_offload", "compile", "fused_optimizer")
"""Of the knobs that other trainers have no key for."""


@dataclass(frozen=True)
class Setting:
    """One field of torchtitan's config."""

    field: str
    value: object

    @property
    def override(self) -> str:
        """As on the command line."""
        name = self.field.replace("_", "-")
        if isinstance(self.value, bool):
            section, _, leaf = name.rpartition(".")
            return f"--{section}.{'' if self.value else 'no-'}{leaf}"
        return f"--{name} {','.join(self.value) if isinstance(self.value, list) else self.value}"

    @property
    def assignment(self) -> str:
        """As in Python."""
        value = f'"{self.value}"' if isinstance(self.value, str) else repr(self.value).replace("'", '"')
        return f"config.{self.field} = {value}"


def export(best: Best) -> Exported:
    """Both files say the same, one as Python, one as options."""
    knobs = best.knobs
    lost = _lost(best) | scripted(knobs, but=CARRIED_FIELDS)
    notes = _notes(best)
    head = header(best, "Tuned settings for torchtitan", CHECKED)
    settings = _settings(best)
    is_full = knobs.activation_checkpointing == "full"
    policy = "FullAC.Config()" if is_full else "None"
    lines = [setting.assignment for setting in settings] + [f"config.activation_checkpoint = {policy}"]
    code = CODE.format(policy="FullAC", settings="\n".join(f"    {line}" for line in lines))
    if not is_full:
        code = code.replace("from torchtitan.distributed.activation_checkpoint import FullAC\n", "")
    parts = [line for part in remarks(lost, notes, TO_WRITE) for line in ("", *part)]
    overrides = [*(setting.override for setting in settings), f"activation-checkpoint:{'full' if is_full else 'none'}"]
    files = {
        MODULE_NAME: comment([*head, "", *USE, *parts]) + code,
        OVERRIDES_NAME: comment([*head, "", *USE_OVERRIDES])
        + "\n".join(["", *overrides, "", ""])
        + remarks_text(lost, notes, TO_WRITE),
    }
    return Exported(files, carried_without(lost), lost, notes)


def _settings(best: Best) -> list[Setting]:
    knobs = best.knobs
    copies = knobs.replicate_degree or 1
    found = {
        "training.local_batch_size": knobs.micro_batch_size,
        # Accumulation follows: torchtitan divides it by the line above and the ranks.
        "training.global_batch_size": best.global_batch_size,
        **({"training.seq_len": best.seq_len} if best.seq_len else {}),
        "training.dtype": "float32",
        "training.mixed_precision_param": DTYPE[best.precision],
        "training.mixed_precision_reduce": "float32",
        "training.enable_cpu_offload": bool(knobs.cpu_offload),
        "training.disable_cuda_graphs": True,  # 0.3 captures them unless told; measured: without
        "parallelism.data_parallel_replicate_degree": copies,
        "parallelism.data_parallel_shard_degree": best.world_size // copies,
        # `always` would also free the head after forward, which was measured in the root's unit.
        "parallelism.fsdp_reshard_after_forward": "default" if knobs.reshard_after_forward else "never",
        "optimizer.implementation": "fused" if knobs.fused_optimizer else "foreach",
        "compile.enable": knobs.compile,
        **({"compile.components": ["model"]} if knobs.compile else {}),
        "dataloader.num_workers": knobs.num_workers,
        "dataloader.pin_memory": True,
        "dataloader.persistent_workers": knobs.num_workers > 0,
        **({"dataloader.prefetch_factor": knobs.prefetch_factor} if knobs.num_workers else {}),
    }
    return [Setting(field, value) for field, value in found.items()]


def _lost(best: Best) -> dict[str, str]:
    knobs = best.knobs
    lost = {}
    if knobs.grad_accum_steps > 1 and not knobs.sync_each_micro_batch:
        lost["sync_each_micro_batch"] = (
            "a Trainer of yours, whose forward_backward_step calls `model.set_requires_gradient_sync(last)`; "
            "torchtitan's reduces gradients after every micro-step."
        )
    if best.precision == "bf16" and best.reduce_dtype == "bf16":
        lost["reduce_dtype"] = (
            "`fully_shard` with a MixedPrecisionPolicy of yours; training.mixed_precision_reduce takes float32 only."
        )
    mode = knobs.activation_checkpointing
    if mode not in ("none", "full"):
        lost["activation_checkpointing"] = (
            f"{partial_checkpointing(mode)}, before sharding; torchtitan's SelectiveAC is another mode: it computes "
            "every second matmul again."
        )
    return lost | (_lost_grouping(best) if (knobs.blocks_per_unit or 1) > 1 else {})


def _lost_grouping(best: Best) -> dict[str, str]:
    knobs: Knobs = best.knobs
    return {
        "bucket_cap_mb": f"{knobs.bucket_cap_mb} MiB is blocks_per_unit = {knobs.blocks_per_unit}, see there.",
        "blocks_per_unit": f"`{shard_groups(best)}` in place of torchtitan's sharding of the blocks.",
    }


def _notes(best: Best) -> tuple[str, ...]:
    notes = [
        "torchtitan 0.3 calls torch.distributed.set_timeout after the first step; it needs a torch that has it (2.13.0 "
        "has not).",
        "torchtitan makes units of the embedding, and of the last norm with the head; measured: they are in the root's "
        "unit.",
        "torchtitan clips gradients, which takes a reduction over all ranks; measured: no clipping.",
        "torchtitan has attention and losses of its own (model_spec, loss); measured: scaled_dot_product_attention, "
        "and the loss over all logits at once.",
    ]
    if best.knobs.activation_checkpointing == "full":
        notes.append(
            "torchtitan computes a checkpointed block again to its end; measured: until its last saved tensor is there."
        )
    return tuple(notes)


EXPORTER = Exporter(
    export,
    CHECKED,
    {
        "fsdp2": {
            "sync_each_micro_batch": (True,),
            "activation_checkpointing": ("none", "full"),
            "blocks_per_unit": (1,),
            "keep_last_units": (0,),
            "reshard_group_size": (0,),
            "forward_prefetch_units": (0,),
            "backward_prefetch_units": (0,),
        }
    },
    bf16_reduces_in="fp32",
)
