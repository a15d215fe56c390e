"""The memory of one rank through a step: live bytes on the pools of three streams, event by event."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.simulate.machine import Shape
from trials.record import Knobs, checkpoint_stride

FP32 = 4


@dataclass(frozen=True)
class Peaks:
    """Bytes of one rank."""

    allocated: float
    """Most that lived at once."""
    pools: float
    """Sum of what each stream's pool grew to."""
    static: float
    """Before the first forward."""
    phase: str
    """Where the most lived: forward, loss, backward or optimizer."""


class _Pools:
    """Live bytes by stream. What one pool has freed, another cannot use."""

    def __init__(self) -> None:
        self.live = {"compute": 0.0, "gather": 0.0, "reduce": 0.0}
        self.top = dict(self.live)
        self.peak, self.phase, self.now = 0.0, "forward", "forward"

    def take(self, num_bytes: float, stream: str = "compute") -> None:
        live = self.live[stream] + num_bytes
        self.live[stream] = live
        self.top[stream] = max(self.top[stream], live)
        total = self.live["compute"] + self.live["gather"] + self.live["reduce"]
        if total > self.peak:
            self.peak, self.phase = total, self.now

    def free(self, num_bytes: float, stream: str = "compute") -> None:
        self.live[stream] -= num_bytes


def block_activations(shape: Shape, micro: int, knobs: Knobs) -> dict[str, float]:
    """Bytes that a block's forward leaves for its backward: all of it, under selective checkpointing, and its input."""
    rows, each = micro * shape.seq_len, shape.bytes_each
    heads = 2 * shape.q_size + 2 * shape.kv_size
    log_sums = float(FP32 * rows * shape.num_heads)
    # Queries, keys, values and what comes of them; both sums of the residual stream and the block's input; gate and up.
    matmul_outputs = each * rows * (heads + 3 * shape.hidden + 2 * shape.ffn) + log_sums
    # Inputs of the norms and what they give the matmuls; gate, up, the activation and its product.
    all_of_it = each * rows * (heads + 4 * shape.hidden + 4 * shape.ffn) + log_sums
    if knobs.attention_backend == "math":
        scores = micro * shape.seq_len**2 * shape.num_heads
        all_of_it += (each + FP32) * scores
        matmul_outputs += each * scores
    if knobs.compile:
        # The compiler recomputes what is cheap: activation and its product, normed inputs.
        all_of_it -= each * rows * (shape.ffn + 1.5 * shape.hidden)
    return {
        "none": all_of_it,
        "selective_op": min(matmul_outputs, all_of_it),
        "full": each * rows * shape.hidden,
    }


def walk(shape: Shape, knobs: Knobs, world_size: int) -> Peaks:
    """A step's peak, by following what is taken and freed."""
    pools = _Pools()
    num_shards = 1 if knobs.engine == "ddp" else world_size // (knobs.replicate_degree or 1)
    own = shape.num_params / num_shards
    static = _static(shape, knobs, own)
    pools.take(static)
    units = _units(shape, knobs)
    modes = _modes(shape, knobs)
    kept = block_activations(shape, knobs.micro_batch_size, knobs)
    held = knobs.grad_accum_steps > 1 and not knobs.sync_each_micro_batch
    reduce_bytes = 2 if knobs.reduce_dtype == "bf16" else FP32
    grad_bytes = _held_grad_bytes(shape, knobs, reduce_bytes)
    _enter(pools, shape, knobs, own, held, grad_bytes)
    _forward(pools, shape, knobs, units, modes, kept)
    _loss(pools, shape, knobs)
    pools.now = "backward"
    _backward(pools, shape, knobs, units, modes, kept, num_shards, held, grad_bytes, reduce_bytes)
    pools.now = "optimizer"
    _optimizer(pools, shape, knobs, own)
    return Peaks(pools.peak, sum(pools.top.values()), static, pools.phase)


def _static(shape: Shape, knobs: Knobs, own: float) -> float:
    if knobs.cpu_offload:
        return 0.0
    tokens_and_rope = knobs.micro_batch_size * shape.seq_len * 16
    # DDP's buckets are its gradients, and autocast keeps a copy of the weights in the compute dtype.
    ddp = (FP32 + shape.bytes_each) * shape.num_params if knobs.engine == "ddp" else 0.0
    return 3 * FP32 * own + ddp + tokens_and_rope


def _units(shape: Shape, knobs: Knobs) -> list[range]:
    size = knobs.blocks_per_unit or 1
    return [range(start, min(start + size, shape.num_layers)) for start in range(0, shape.num_layers, size)]


def _modes(shape: Shape, knobs: Knobs) -> list[str]:
    """Of each block: none, selective_op or full."""
    mode = knobs.activation_checkpointing
    stride = checkpoint_stride(mode)
    if stride is None:
        return [mode] * shape.num_layers
    return ["none" if index % stride else "full" for index in range(shape.num_layers)]


def _held_grad_bytes(shape: Shape, knobs: Knobs, reduce_bytes: int) -> int:
    """Of a gradient that is held back whole: FSDP1 holds it in the compute dtype, FSDP2 in the reduction's."""
    return shape.bytes_each if knobs.engine == "fsdp1" else reduce_bytes


def _enter(pools: _Pools, shape: Shape, knobs: Knobs, own: float, held: bool, grad_bytes: int) -> None:
    """What lives from an earlier micro-step when the last one's forward begins."""
    if knobs.engine == "ddp" or knobs.grad_accum_steps == 1:
        return
    pools.take(grad_bytes * shape.num_params if held else FP32 * own, "compute" if held else "reduce")


def _forward(
    pools: _Pools, shape: Shape, knobs: Knobs, units: list[range], modes: list[str], kept: dict[str, float]
) -> None:
    shards = knobs.engine != "ddp"
    largest = max(len(unit) for unit in units) * shape.block_bytes
    if shards:
        pools.take(shape.root_bytes)
        pools.take(shape.root_bytes, "gather")
        pools.free(shape.root_bytes, "gather")
        pools.take(_ahead_forward(knobs) * largest, "gather")
    workspace = _workspace(shape, knobs)
    for index, unit in enumerate(units):
        size = len(unit) * shape.block_bytes
        if shards:
            pools.take(size)
        for block in unit:
            pools.take(workspace)
            pools.free(workspace)
            pools.take(kept[modes[block]])
        if shards and _frees_after_forward(knobs, index, len(units)):
            pools.free(size - _spread(knobs, size))
    if shards:
        pools.free(_ahead_forward(knobs) * largest, "gather")


def _frees_after_forward(knobs: Knobs, index: int, num_units: int) -> bool:
    return bool(knobs.reshard_after_forward) and index < num_units - (knobs.keep_last_units or 0)


def _spread(knobs: Knobs, size: float) -> float:
    """What stays of a unit that is spread over a group of ranks instead of all."""
    return size / knobs.reshard_group_size if knobs.reshard_group_size else 0.0


def _ahead_forward(knobs: Knobs) -> float:
    if knobs.engine == "fsdp1":
        return (1.0 if knobs.limit_all_gathers else 3.0) + bool(knobs.forward_prefetch)
    return float(max(knobs.forward_prefetch_units or 0, 1))


def _ahead_backward(knobs: Knobs) -> float:
    if knobs.engine == "fsdp1":
        return {"pre": 1.0, "post": 0.5, "none": 0.0}[knobs.backward_prefetch or "none"] + (
            0.0 if knobs.limit_all_gathers else 1.0
        )
    return float(max(knobs.backward_prefetch_units or 0, 1))


def _workspace(shape: Shape, knobs: Knobs) -> float:
    """Of the widest operator: what the feed-forward computes and drops at once."""
    return shape.bytes_each * knobs.micro_batch_size * shape.seq_len * shape.ffn * (0.6 if knobs.compile else 1.2)


def _loss(pools: _Pools, shape: Shape, knobs: Knobs) -> None:
    """Logits, their fp32 copy, the log-softmax; then two gradients beside the latter."""
    pools.now = "loss"
    each = knobs.micro_batch_size * shape.seq_len * shape.vocab
    pools.take(shape.bytes_each * each)
    pools.take(FP32 * each)
    pools.take(FP32 * each)
    pools.free((shape.bytes_each + FP32) * each)
    pools.take(2 * FP32 * each)
    pools.free(2 * FP32 * each)
    pools.take(shape.bytes_each * each)
    pools.free((FP32 + shape.bytes_each) * each)


def _backward(
    pools: _Pools,
    shape: Shape,
    knobs: Knobs,
    units: list[range],
    modes: list[str],
    kept: dict[str, float],
    num_shards: int,
    held: bool,
    grad_bytes: int,
    reduce_bytes: int,
) -> None:
    shards = knobs.engine != "ddp"
    largest = max(len(unit) for unit in units) * shape.block_bytes
    workspace = 1.5 * _workspace(shape, knobs)
    if shards and knobs.reshard_after_forward:
        pools.take(_ahead_backward(knobs) * largest, "gather")
    buffer = 0.0
    for index in range(len(units) - 1, -1, -1):
        unit = units[index]
        size = len(unit) * shape.block_bytes
        if shards and _frees_after_forward(knobs, index, len(units)):
            pools.take(size - _spread(knobs, size))
        for block in reversed(unit):
            again = kept["none"] - kept[modes[block]]
            pools.take(again + workspace)
            pools.free(again + workspace)
            pools.free(kept[modes[block]])
            if shards:
                pools.take(shape.block_bytes)  # this block's gradients, whole
        if not shards:
            continue
        # The buffer of the reduction before this one is freed only now.
        pools.free(buffer)
        buffer = len(unit) * shape.block_params * (grad_bytes if held else reduce_bytes)
        pools.take(buffer)
        pools.free(2 * size)  # weights and gradients
        if num_shards > 1 and knobs.grad_accum_steps == 1 and not knobs.cpu_offload:
            pools.take(FP32 * len(unit) * shape.block_params / num_shards, "reduce")
        if held:
            pools.free(grad_bytes * len(unit) * shape.block_params)
            pools.take(FP32 * len(unit) * shape.block_params / num_shards, "reduce")
    if shards:
        pools.free(buffer)
        pools.take(shape.root_bytes + reduce_bytes * shape.root_params)
        pools.free(2 * shape.root_bytes + reduce_bytes * shape.root_params)
        if held:
            pools.free(grad_bytes * shape.root_params)
        pools.take(FP32 * shape.root_params / num_shards, "reduce")
        if knobs.reshard_after_forward:
            pools.free(_ahead_backward(knobs) * largest, "gather")


def _optimizer(pools: _Pools, shape: Shape, knobs: Knobs, own: float) -> None:
    """torch's default updates groups of tensors at once, through temporaries as large as they are."""
    if knobs.cpu_offload:
        return
    temporaries = 0.0 if knobs.fused_optimizer else 2 * FP32 * own
    pools.take(temporaries)
    pools.free(temporaries)
