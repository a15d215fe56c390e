"""One GPU, its node and its network as numbers in SI units; and the model to train as counts."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.errors import UserError
from autotune.hardware import device_table, peak_for
from autotune.job import Job
from autotune.simulate.cluster import MEMORY, SimulatedCluster
from trials.shapes import PRESETS, DecoderConfig

GIB = 2**30
UNKNOWN_ACHIEVABLE = 0.75
UNKNOWN_SM_COUNT = 108


@dataclass(frozen=True)
class Machine:
    """What the mechanisms need to know of the hardware."""

    flops_per_s: float
    """Dense peak in the training dtype."""
    achievable: float
    sm_count: int
    is_hopper: bool
    """Or newer: torch's flash kernel is FlashAttention-2, which leaves more unused there."""
    memory_bytes: float
    """All of a GPU's."""
    memory_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    """Of one GPU's share of its node's cards."""
    gpus_per_node: int
    """That a trial uses."""
    cpus_per_rank: float


def machine_of(cluster: SimulatedCluster, job: Job) -> Machine:
    """The cluster's hardware, as the job's ranks see it.

    Raises:
        UserError: the device has no peak in the job's precision.
    """
    peak = peak_for(cluster.device, job.training.precision, given_tflops_per_s=job.cluster.peak_tflops_per_s)
    if peak.tflops_per_s is None:
        raise UserError(f"--simulate device: {peak.source}", "give another device, or set cluster.peak_tflops_per_s")
    row = next(device for device in device_table() if device.match.search(cluster.device))
    known = MEMORY.get(cluster.row or "")
    memory_gib = cluster.memory_gib or (known and known.total_gib)
    memory = cluster.memory_gb_per_s or (known and known.gb_per_s)
    link = cluster.link_gb_per_s or (known and known.link_gb_per_s)
    assert memory_gib
    assert memory
    assert link
    return Machine(
        flops_per_s=peak.tflops_per_s * 1e12,
        achievable=known.achievable if known else UNKNOWN_ACHIEVABLE,
        sm_count=row.sm_count or UNKNOWN_SM_COUNT,
        is_hopper=row.name.startswith(("H100", "H200", "B200")),
        memory_bytes=memory_gib * GIB,
        memory_bytes_per_s=memory * 1e9,
        link_bytes_per_s=link * 1e9,
        network_bytes_per_s=cluster.network_gb_per_s * 1e9,
        gpus_per_node=job.cluster.ranks_per_node,
        cpus_per_rank=cluster.cpus_per_node / job.cluster.ranks_per_node,
    )


@dataclass(frozen=True)
class Shape:
    """The built-in decoder as counts."""

    hidden: int
    ffn: int
    num_layers: int
    q_size: int
    kv_size: int
    num_heads: int
    vocab: int
    seq_len: int
    bytes_each: int
    """Of a weight or activation in compute: 2 for bf16."""
    block_params: int
    root_params: int
    """Embedding, last norm and head, which are the outermost unit."""
    num_tensors: int
    """Parameters as tensors."""

    @property
    def num_params(self) -> int:
        return self.num_layers * self.block_params + self.root_params

    @property
    def block_matmul_params(self) -> int:
        return self.hidden * (2 * self.q_size + 2 * self.kv_size) + 3 * self.hidden * self.ffn

    @property
    def num_matmul_params(self) -> int:
        return self.num_layers * self.block_matmul_params + self.vocab * self.hidden

    @property
    def block_bytes(self) -> int:
        """Unsharded, in the dtype that is gathered."""
        return self.block_params * self.bytes_each

    @property
    def root_bytes(self) -> int:
        return self.root_params * self.bytes_each


def shape_of(job: Job) -> Shape:
    """The job's model.

    Raises:
        UserError: it is not the built-in decoder.
    """
    model, _ = job.built_in
    if model.workload != "decoder":
        raise UserError(
            f"model.workload = {model.workload}: the simulated cluster knows only the built-in decoder",
            "give the shape of your model by model.workload = decoder and model.config",
        )
    config = PRESETS[model.preset] if model.preset else DecoderConfig(**(model.config or {}))
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    table = config.vocab_size * config.hidden_size
    return Shape(
        hidden=config.hidden_size,
        ffn=config.ffn_size,
        num_layers=config.num_layers,
        q_size=q_size,
        kv_size=kv_size,
        num_heads=config.num_heads,
        vocab=config.vocab_size,
        seq_len=model.seq_len,
        bytes_each=2 if job.training.precision == "bf16" else 4,
        block_params=block_params(config),
        root_params=table * (1 if config.tie_embeddings else 2) + config.hidden_size,
        num_tensors=config.num_layers * (9 + 3 * config.qkv_bias + 2 * config.qk_norm) + 3 - config.tie_embeddings,
    )


def block_params(config: DecoderConfig) -> int:
    """Parameters of one block: seven matrices, two norms, and what Qwen adds."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    weights = config.hidden_size * (2 * q_size + 2 * kv_size) + 3 * config.hidden_size * config.ffn_size
    biases = (q_size + 2 * kv_size) if config.qkv_bias else 0
    head_norms = 2 * config.head_dim if config.qk_norm else 0
    return weights + 2 * config.hidden_size + biases + head_norms
