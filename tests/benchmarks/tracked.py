"""Twenty real configs whose peak of live tensors a trial on two gloo ranks tracks, beside the closed form's."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

from autotune.preflight.activations import Setting
from autotune.preflight.memory import peak
from autotune.preflight.shape import of_decoder
from tests.ranks.harness import RankServer, make_spec, write_text
from trials.outcome import Outcome
from trials.record import Knobs
from trials.shapes import PRESETS, DecoderConfig

MIB = 2**20
SHAPES: dict[str, tuple[DecoderConfig, int]] = {
    "tiny": (PRESETS["tiny"], 256),
    "biased": (DecoderConfig(2048, 160, 5, 5, 5, 448, qkv_bias=True), 192),
    "wide-vocab": (DecoderConfig(12_000, 96, 3, 4, 2, 256), 128),
    "qk-norm": (DecoderConfig(512, 256, 6, 8, 2, 640, head_size=32, qk_norm=True, tie_embeddings=True), 128),
}
PLAIN: dict[str, Any] = {
    "micro_batch_size": 2,
    "grad_accum_steps": 1,
    "sync_each_micro_batch": True,
    "reshard_after_forward": True,
    "bucket_cap_mb": 0.0,
    "blocks_per_unit": 1,
    "activation_checkpointing": "none",
    "num_workers": 0,
    "prefetch_factor": None,
}
HELD_BACK = {"grad_accum_steps": 4, "sync_each_micro_batch": False}
CONFIGS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("tiny", "fp32", {"micro_batch_size": 4, "activation_checkpointing": "selective_op", "blocks_per_unit": 2}),
    ("tiny", "fp32", {"micro_batch_size": 1, "activation_checkpointing": "full", "grad_accum_steps": 8}),
    ("tiny", "fp32", {"micro_batch_size": 4, "activation_checkpointing": "every_2", **HELD_BACK}),
    ("tiny", "bf16", {"micro_batch_size": 4, "blocks_per_unit": 4, "activation_checkpointing": "full"}),
    ("tiny", "fp32", {"reshard_after_forward": False, "blocks_per_unit": 2, "grad_accum_steps": 2}),
    ("biased", "fp32", {}),
    ("biased", "fp32", {"activation_checkpointing": "full", "blocks_per_unit": 2, **HELD_BACK}),
    ("biased", "bf16", {"activation_checkpointing": "every_3", "micro_batch_size": 6}),
    ("biased", "fp32", {"activation_checkpointing": "selective_op", "reshard_after_forward": False}),
    ("biased", "fp32", {"engine": "ddp", "bucket_cap_mb": 10.0, "activation_checkpointing": "every_2"}),
    ("wide-vocab", "fp32", {"activation_checkpointing": "full"}),
    ("wide-vocab", "bf16", {"micro_batch_size": 4, "grad_accum_steps": 2}),
    ("wide-vocab", "fp32", {"micro_batch_size": 1, "blocks_per_unit": 3, **HELD_BACK}),
    ("wide-vocab", "bf16", {"micro_batch_size": 1, "reduce_dtype": "bf16", **HELD_BACK}),
    ("qk-norm", "fp32", {"micro_batch_size": 3}),
    ("qk-norm", "fp32", {"activation_checkpointing": "full", "keep_last_units": 3, "blocks_per_unit": 2}),
    ("qk-norm", "bf16", {"activation_checkpointing": "selective_op", "backward_prefetch_units": 2}),
    ("qk-norm", "fp32", {"activation_checkpointing": "full", "forward_prefetch_units": 3, "micro_batch_size": 1}),
    ("qk-norm", "bf16", {"blocks_per_unit": 6, "activation_checkpointing": "full", "grad_accum_steps": 2}),
    ("qk-norm", "fp32", {"engine": "ddp", "bucket_cap_mb": 25.0, **HELD_BACK}),
)
"""Shape, precision, and what differs from PLAIN. The formulas were written beside other shapes and knobs."""


def compare(server: RankServer, config: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
    """Runs the config; the tracked peak of the fuller rank, and the closed form's."""
    name, precision, changed = config
    decoder, seq_len = SHAPES[name]
    shape = of_decoder(decoder, seq_len)
    values = PLAIN | changed
    if values.get("engine") != "ddp":
        values["bucket_cap_mb"] = math.ceil(sum(shape.block_mib(precision)[: values["blocks_per_unit"]]) * 100) / 100
    knobs = Knobs(**values)
    model = {field: value for field, value in vars(decoder).items() if value is not None}
    with tempfile.TemporaryDirectory() as folder:
        source = write_text(Path(folder) / "text")
        spec = make_spec(source, knobs, model={"config": model}, seq_len=seq_len, precision=precision)
        for _ in range(3):  # a port that was free may be taken by the time it is used
            gang = server.run(spec)
            if gang.outcome is Outcome.OK:
                break
    reports = [report for report in gang.reports if report is not None]
    assert len(reports) == 2, str(gang)
    assert all(report.allocated_bytes for report in reports), str(gang)
    tracked = max(report.allocated_bytes or 0 for report in reports)
    predicted = peak(shape, Setting(2, precision, "cpu"), knobs)
    told = ", ".join(f"{knob} {value}" for knob, value in changed.items())
    return {
        "config": f"{name}, {precision}{': ' if told else ''}{told}",
        "tracked_mib": tracked / MIB,
        "predicted_mib": predicted.allocated / MIB,
        "error": predicted.allocated / tracked - 1,
        "moment": predicted.moment,
    }
