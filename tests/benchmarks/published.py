"""Published runs as configs of ours: which rows can be used for what, and what their words mean in our knobs."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.hardware import find_device
from autotune.preflight.activations import Activations, Setting, activations
from autotune.preflight.shape import ModelShape
from autotune.preflight.step_time import NETWORK_GB_PER_S, Rates
from trials.record import Knobs

ROWS = Path(__file__).parents[1] / "data" / "published_runs.csv"
DEVICES = {
    "a100_40gb": "NVIDIA A100-SXM4-40GB",
    "a100_80gb": "NVIDIA A100-SXM4-80GB",
    "h100_80gb": "NVIDIA H100 80GB HBM3",
    "h100_96gb_hbm2e_500W": "NVIDIA H100 80GB HBM3",  # the same chip at 500 W, and slower memory
    "h200": "NVIDIA H200",
    "h200_141gb": "NVIDIA H200",
}
CHECKPOINTING = {
    "none": "none",
    "full": "full",
    "selective_op": "selective_op",
    "selective_layer": "every_2",
    "selective_block": "every_2",
}
UNUSABLE = ("tensor parallel", "LoRA")
NO_RATE = ("GQA rows", "published tokens/s", "fp8")
RESERVED = ("torchtitan",)
"""Sources whose memory is what the allocator has taken; the others' is live tensors."""


@dataclass(frozen=True)
class Run:
    source: str
    model: str
    shape: ModelShape
    setting: Setting
    knobs: Knobs
    rates: Rates
    acts: Activations
    memory_gib: float | None
    """Published peak."""
    step_s: float | None
    """By the published tokens/s, where the precision is bf16."""
    ran_in_gib: float | None
    """It ran, so it fits in this."""
    is_reserved: bool

    @property
    def tokens(self) -> int:
        return self.knobs.micro_batch_size * self.knobs.grad_accum_steps * self.shape.seq_len

    @property
    def group(self) -> tuple[str, str]:
        """Rows that can be put in order: one model on one device."""
        return self.model, str(self.rates.tflops_per_s)


def load() -> tuple[list[Run], dict[str, int]]:
    """Every usable row, and how many rows were left out for what."""
    runs: list[Run] = []
    left_out: dict[str, int] = {}
    with ROWS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            reason = _unusable(row)
            if reason:
                left_out[reason] = left_out.get(reason, 0) + 1
            else:
                runs.append(_run(row))
    return runs, left_out


def _unusable(row: dict[str, str]) -> str:
    for caveat in UNUSABLE:
        if caveat in row["caveat"]:
            return row["caveat"]
    if "act_cpu_offload" in row["note"]:
        return "activations offloaded to the host"
    if "CP" in row["sharding_strategy"] or "Megatron" in row["sharding_strategy"]:
        return "context parallel, or Megatron's own FSDP"
    if not row["seq_len"] or not row["micro_batch"]:
        return "sequence length or micro-batch not stated"
    if row["act_ckpt"] not in CHECKPOINTING:
        return "checkpointing not stated"
    return ""


def _shape(row: dict[str, str]) -> ModelShape:
    hidden, layers, vocab, ffn = (int(row[name]) for name in ("d_model", "n_layers", "vocab", "d_ff"))
    heads, kv_heads, seq_len = int(row["n_heads"]), int(row["n_kv_heads"]), int(row["seq_len"])
    kv = hidden // heads * kv_heads
    is_mpt = row["model_name"].startswith("mpt")
    matrices = 2 * hidden * (hidden + kv) + (2 if is_mpt else 3) * hidden * ffn
    table = vocab * hidden
    positions = seq_len * hidden if is_mpt else 0
    return ModelShape(
        num_blocks=layers,
        block_params=matrices + 2 * hidden,
        embedding_params=table + positions,
        head_params=0 if is_mpt else table,
        matmul_params=layers * matrices + table,
        hidden_size=hidden,
        vocab_size=vocab,
        seq_len=seq_len,
        num_heads=heads,
        q_size=hidden,
        kv_size=kv,
        ffn_size=ffn,
        gated=not is_mpt,
        has_rope=False,
        norm_is_eager_on_cpu=False,
        final_norm_params=hidden,
    )


def _run(row: dict[str, str]) -> Run:
    shape = _shape(row)
    is_mpt = row["model_name"].startswith("mpt")
    pure = "PURE" in row["precision"]  # llm-foundry: reduces in bf16
    knobs = Knobs(
        micro_batch_size=int(float(row["micro_batch"])),
        grad_accum_steps=int(float(row["grad_accum"] or 1)),
        sync_each_micro_batch=True,
        reshard_after_forward=row["sharding_strategy"] != "SHARD_GRAD_OP",
        bucket_cap_mb=0.0,
        blocks_per_unit=1,
        activation_checkpointing=CHECKPOINTING[row["act_ckpt"]],
        num_workers=8,
        prefetch_factor=2,
        engine="fsdp1" if is_mpt or row["source_id"] == "ibm_fms_fsdp" else "fsdp2",
        reduce_dtype="bf16" if pure else "fp32",
        compile=row["compile"] == "Y",
    )
    world_size = int(row["n_gpus"])
    setting = Setting(world_size, "bf16", "cuda")
    device = find_device(DEVICES[row["gpu"]])
    assert device is not None
    rates = Rates(
        tflops_per_s=device.tflops_per_s["bf16"],
        memory_gb_per_s=device.memory_gb_per_s or 0.0,
        link_gb_per_s=device.link_gb_per_s or 0.0,
        network_gb_per_s=50.0 if row["gpu"].startswith("h") else NETWORK_GB_PER_S,
        ranks_per_node=4 if row["source_id"] == "kempnerforge" else 8,
    )
    rate = float(row["tokens_per_s_per_gpu"]) if row["tokens_per_s_per_gpu"] else None
    is_bf16 = "fp8" not in row["precision"] and "float8" not in row["precision"]
    usable = rate is not None and is_bf16 and not any(caveat in row["caveat"] for caveat in NO_RATE)
    tokens = knobs.micro_batch_size * knobs.grad_accum_steps * shape.seq_len
    states_are_known = row["source_id"] != "kempnerforge"  # fp32 states alone would be more than its peak
    memory_gib = float(row["peak_mem_gib"]) if row["peak_mem_gib"] and states_are_known else None
    capacity = device.memory_gib(DEVICES[row["gpu"]]) or 0.0
    if "96gb" in row["gpu"]:
        capacity *= 96 / 80
    return Run(
        source=row["source_id"],
        model=row["model_name"],
        shape=shape,
        setting=setting,
        knobs=knobs,
        rates=rates,
        acts=_activations(shape, setting, knobs, row),
        memory_gib=memory_gib,
        step_s=tokens / rate if usable and rate is not None else None,
        # How many blocks "selective" checkpoints, IBM does not say; so what it needed is not known.
        ran_in_gib=capacity if states_are_known and row["act_ckpt"] != "selective_block" else None,
        is_reserved=row["source_id"] in RESERVED,
    )


def _activations(shape: ModelShape, setting: Setting, knobs: Knobs, row: dict[str, str]) -> Activations:
    """Where another stack keeps other things than ours."""
    acts = activations(shape, setting, knobs)
    tokens, size = knobs.micro_batch_size * shape.seq_len, setting.compute_bytes
    if row["model_name"].startswith("mpt"):  # llm-foundry's fused cross-entropy: logits, their gradient in their place
        acts = replace(acts, loss=4.0 * shape.vocab_size * tokens)
    if "202506" in row["source_url"]:  # torchtitan by then compiled the loss with the model (inferred)
        acts = replace(acts, loss=6.0 * shape.vocab_size * tokens)
    if row["source_id"] == "torchtitan" and knobs.activation_checkpointing == "selective_op":
        # Every second matmul is kept, not all of them.
        outs = 2 * shape.hidden_size + 2 * shape.q_size + shape.kv_size + shape.ffn_size
        kept = tokens * (size * outs + 4.0 * shape.num_heads)
        acts = replace(acts, kept_ops=kept, kept_ops_again=acts.whole - kept + size * shape.hidden_size * tokens)
    return acts
