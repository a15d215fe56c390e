"""What the compute stream of one GPU takes: kernels by tiles and bytes, and the CPU's time to launch them."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from autotune.simulate.machine import Machine, Shape

TILE_M, TILE_N = 128, 256
KERNEL_TAIL_S = 2.5e-6
"""Between the end of one kernel and the start of the next."""
SUSTAINED = 0.85
"""Of the matmul rate of a short benchmark: over a whole step a GPU meets its power limit, and lowers its clock."""
STREAM_SHARE = 0.86
"""Of the memory's bandwidth that a pointwise kernel reaches."""
FLASH_FORWARD = {False: 0.62, True: 0.38}
FLASH_BACKWARD = {False: 0.52, True: 0.33}
"""FlashAttention-2, share of the peak, by whether the GPU is a Hopper (arXiv 2307.08691, 2407.08608)."""
BACKEND_SPEED = {
    # Of the other kernels beside torch's flash; cuDNN's is FlashAttention-3's kind on Hopper.
    False: {"auto": 1.0, "flash": 1.0, "cudnn": 0.96, "efficient": 0.70},
    True: {"auto": 1.0, "flash": 1.0, "cudnn": 1.45, "efficient": 0.68},
}
LAUNCH_S = 5.5e-6
"""Of the CPU, for one operator in eager mode, dispatch and autograd included."""
COMPILED_LAUNCH_S = 3.0e-6
MODE_S = 11e-6
"""More, under the dispatch mode of selective checkpointing."""
CHECKPOINT_S = 90e-6
"""Of a checkpointed block, for saving and restoring the states of random numbers and autograd."""
NUM_MATMULS = 7
NUM_OTHERS = {False: 25, True: 6}
"""Kernels of a block's forward beside the matmuls and attention, by whether it is compiled."""


@dataclass(frozen=True)
class BlockCost:
    """Of one block and micro-batch, seconds."""

    forward_s: float
    backward_s: float
    """Without what is computed again before it."""
    pointwise_s: float
    """The part of forward that is neither matmul nor attention: what selective checkpointing computes again."""
    matmul_share: float
    forward_host_s: float
    backward_host_s: float


class Kernels:
    """Of one model on one machine."""

    def __init__(self, machine: Machine, shape: Shape) -> None:
        self.machine, self.shape = machine, shape
        self._sm_flops_per_s = machine.flops_per_s * machine.achievable * SUSTAINED / machine.sm_count
        self._stream_bytes_per_s = machine.memory_bytes_per_s * STREAM_SHARE

    def matmul_s(self, m: int, n: int, k: int) -> float:
        """(m, k) x (k, n): whole waves of tiles, or the memory's bandwidth."""
        tiles = math.ceil(m / TILE_M) * math.ceil(n / TILE_N)
        waves = math.ceil(tiles / self.machine.sm_count)
        computed_s = waves * 2 * TILE_M * TILE_N * k / self._sm_flops_per_s
        moved_s = self.shape.bytes_each * (m * k + k * n + m * n) / self._stream_bytes_per_s
        return max(computed_s, moved_s) + KERNEL_TAIL_S

    @property
    def _matmul_sizes(self) -> tuple[tuple[int, int], ...]:
        """Of a block: outputs and inputs of each matrix."""
        shape = self.shape
        return (
            (shape.q_size, shape.hidden),
            (shape.kv_size, shape.hidden),
            (shape.kv_size, shape.hidden),
            (shape.hidden, shape.q_size),
            (shape.ffn, shape.hidden),
            (shape.ffn, shape.hidden),
            (shape.hidden, shape.ffn),
        )

    def matmul_flops_per_s(self, micro: int) -> float:
        """That the matmuls of a block reach."""
        rows = micro * self.shape.seq_len
        return 2 * rows * self.shape.block_matmul_params / sum(self.matmul_s(rows, n, k) for n, k in self._matmul_sizes)

    def stream_s(self, num_bytes: float, num_kernels: int = 1) -> float:
        """A pointwise pass."""
        return num_bytes / self._stream_bytes_per_s + num_kernels * KERNEL_TAIL_S

    @functools.cache  # noqa: B019 (as long as a study)
    def block(self, micro: int, compiled: bool, backend: str) -> BlockCost:
        shape = self.shape
        rows, sizes = micro * shape.seq_len, self._matmul_sizes
        matmuls_s = sum(self.matmul_s(rows, n, k) for n, k in sizes)
        # The gradient of the input, and that of the weight.
        matmuls_back_s = sum(self.matmul_s(rows, k, n) + self.matmul_s(n, k, rows) for n, k in sizes)
        attention_s, attention_back_s = self._attention_s(micro, backend)
        pointwise_s = self._pointwise_s(rows, compiled)
        others, launch_s = NUM_OTHERS[compiled], COMPILED_LAUNCH_S if compiled else LAUNCH_S
        host_s = (NUM_MATMULS + 1 + others) * launch_s
        forward_s = matmuls_s + attention_s + pointwise_s
        return BlockCost(
            forward_s=forward_s,
            backward_s=matmuls_back_s + attention_back_s + 1.9 * pointwise_s,
            pointwise_s=pointwise_s,
            matmul_share=(matmuls_s + attention_s) / forward_s,
            forward_host_s=host_s,
            backward_host_s=1.8 * host_s,
        )

    def _attention_s(self, micro: int, backend: str) -> tuple[float, float]:
        """Forward, and backward: the causal half where a fused kernel runs."""
        shape, machine = self.shape, self.machine
        scores = micro * shape.seq_len**2
        if backend == "math":
            flops = 4 * scores * shape.q_size
            written = scores * shape.num_heads
            forward_s = flops / (machine.flops_per_s * 0.5) + self.stream_s(14 * written, 5)
            return forward_s, 2 * flops / (machine.flops_per_s * 0.5) + self.stream_s(18 * written, 6)
        flops = 2 * scores * shape.q_size
        speed = BACKEND_SPEED[machine.is_hopper][backend]
        forward_s = flops / (machine.flops_per_s * FLASH_FORWARD[machine.is_hopper] * speed)
        backward_s = 2.5 * flops / (machine.flops_per_s * FLASH_BACKWARD[machine.is_hopper] * speed)
        return forward_s + KERNEL_TAIL_S, backward_s + 3 * KERNEL_TAIL_S

    def _pointwise_s(self, rows: int, compiled: bool) -> float:
        """Norms, RoPE, activation and residuals, by the tensors that they read and write."""
        shape = self.shape
        heads = shape.q_size + shape.kv_size
        if compiled:
            passes = 6 * shape.hidden + 2 * heads + 3 * shape.ffn
        else:
            passes = (2 + 3 + 2 + 3) * shape.hidden + 10 * heads + 2 * shape.q_size + 5 * shape.ffn
        return self.stream_s(shape.bytes_each * rows * passes, NUM_OTHERS[compiled])

    @functools.cache  # noqa: B019
    def head(self, micro: int) -> tuple[float, float]:
        """The last norm, the head and the loss: forward, and backward with the embedding's."""
        shape = self.shape
        rows = micro * shape.seq_len
        logits = rows * shape.vocab
        forward_s = self.matmul_s(rows, shape.vocab, shape.hidden) + self.stream_s((2 + 4 + 4 + 4) * logits, 4)
        backward_s = (
            self.matmul_s(rows, shape.hidden, shape.vocab)
            + self.matmul_s(shape.vocab, shape.hidden, rows)
            + self.stream_s((4 + 4 + 4 + 2) * logits, 3)
            + self.stream_s(4 * shape.vocab * shape.hidden)
        )
        return forward_s, backward_s

    def optimizer_s(self, num_params: float, fused: bool) -> float:
        """AdamW over a rank's own fp32 weights, gradients and moments."""
        passes = 7 if fused else 17
        launches = self.shape.num_tensors * (0.3e-6 if fused else 9e-6)
        return max(self.stream_s(4 * passes * num_params), launches) + 4e-4
