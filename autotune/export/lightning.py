"""Export for the Trainer of Lightning: its arguments as YAML for LightningCLI, and the Python file that shards.

Checked against lightning 2.6. ModelParallelStrategy (FSDP2) leaves sharding to the module's configure_model, and its
default sizes shard over nothing, without a word; FSDPStrategy (FSDP1) leaves alone what is wrapped already. So both
are handed the code that was measured, and every FSDP knob holds as it is. Lightning runs the accumulation: it holds
gradients back only where the whole module can (`no_sync`), which DDP's can and these cannot.
"""

from __future__ import annotations

from typing import Any

import yaml

from autotune.export import snippet
from autotune.export.base import Best, Exported, Exporter, Fixed, carried_without, comment, header, remarks_text
from autotune.export.lines import scripted
from trials.record import Knobs

FILE_NAME = "lightning_trainer.yaml"
CHECKED = {"lightning": "2.6", "torch": "2.13"}
STRATEGY = {"fsdp2": "ModelParallelStrategy", "fsdp1": "FSDPStrategy", "ddp": "DDPStrategy"}

USE = [
    f"Use: python train.py fit --config {FILE_NAME}, where train.py makes a LightningCLI, or the same arguments in",
    "Trainer(...). On N machines add --trainer.num_nodes N; devices x machines must be the ranks above.",
    f"{snippet.NAME} beside it shards the module and makes the loader; its head says how.",
]
CONFIGURE = {
    "fsdp2": """\
    def configure_model(self):  # called more than once
        if not isinstance(self.model, FSDPModule):
            mesh = self.device_mesh["data_parallel"]
            autotune_best.apply(self.model, list(self.model.layers), mesh)""",
    "fsdp1": """\
    def configure_model(self):  # called more than once
        if not isinstance(self.model, FullyShardedDataParallel):
            device = self.trainer.strategy.root_device
            self.model = autotune_best.apply(self.model, list(self.model.layers), device)""",
    "ddp": """\
    def __init__(self, model):  # DDPStrategy does the rest
        super().__init__()
        self.model = model
        autotune_best.checkpoint_blocks(model, list(model.layers))""",
}
MODULE = """\
In the LightningModule, whose `self.model` is the model (train_step and micro_batches below are the Trainer's part):

{}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters())

    def train_dataloader(self):
        return autotune_best.make_loader(dataset)"""


def export(best: Best) -> Exported:
    """Both files. What Lightning's loop decides is lost."""
    lost = _lost(best.knobs) | scripted(best.knobs)
    head = comment([*header(best, "Tuned settings for the Trainer of Lightning", CHECKED), "", *USE])
    text = head + yaml.safe_dump({"trainer": _trainer(best)}, sort_keys=False)
    if lost:
        text += "\n" + remarks_text(lost, to_write=TO_WRITE)
    use = MODULE.format(CONFIGURE[best.knobs.engine]).splitlines()
    code = snippet.text(best, "Tuned settings for a LightningModule", use, CHECKED)
    return Exported({FILE_NAME: text, snippet.NAME: code}, carried_without(lost), lost)


TO_WRITE = ("Not in these files; write it in the LightningModule (`layers`: the blocks, `units`: the FSDP units):",)


def _trainer(best: Best) -> dict[str, Any]:
    knobs = best.knobs
    strategy: dict[str, Any] = {"class_path": f"lightning.pytorch.strategies.{STRATEGY[knobs.engine]}"}
    if knobs.engine == "fsdp2":
        # Left at auto they would be the number of nodes and of processes: FSDP over one rank.
        strategy["init_args"] = {"data_parallel_size": best.world_size, "tensor_parallel_size": 1}
    if knobs.engine == "ddp":
        strategy["init_args"] = {"bucket_cap_mb": knobs.bucket_cap_mb, "gradient_as_bucket_view": True}
    return {
        "strategy": strategy,
        "devices": "auto",
        "num_nodes": 1,
        # bf16-mixed is autocast, as it was measured under DDP; the units of FSDP have a policy of their own.
        "precision": "bf16-mixed" if knobs.engine == "ddp" and best.precision == "bf16" else "32-true",
        "accumulate_grad_batches": knobs.grad_accum_steps,
    }


def _lost(knobs: Knobs) -> dict[str, str]:
    steps = knobs.grad_accum_steps
    if steps == 1 or knobs.sync_each_micro_batch is not (knobs.engine == "ddp"):
        return {}
    need = {
        "fsdp2": "`def on_train_batch_start(self, batch, batch_idx): last = (batch_idx + 1) % "
        f"{steps} == 0; self.model.set_requires_gradient_sync(last); self.model.set_is_last_backward(last)`; of "
        "itself Lightning reduces gradients after every micro-step.",
        "fsdp1": "manual optimization, with `with self.model.no_sync():` around all micro-steps but the last; of "
        "itself Lightning reduces gradients after every micro-step.",
        "ddp": "manual optimization; of itself Lightning reduces gradients after the last micro-step only.",
    }
    return {"sync_each_micro_batch": need[knobs.engine]}


EVERY: Fixed = {"sync_each_micro_batch": (True,)}
LAST: Fixed = {"sync_each_micro_batch": (False,)}
EXPORTER = Exporter(export, CHECKED, {"fsdp2": EVERY, "fsdp1": EVERY, "ddp": LAST})
