"""Which kernel computes attention: chosen for a trial, and seen in a step that is not timed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from trials.outcome import Outcome, TrialError

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


@contextmanager
def only(backend: str) -> Iterator[None]:
    """Inside, scaled_dot_product_attention uses this backend or fails; `auto` leaves the choice to torch.

    Raises:
        TrialError: outcome `invalid`; the backend cannot run this model on this device.
    """
    if backend == "auto":
        yield
        return
    try:
        with sdpa_kernel([BACKENDS[backend]]):
            yield
    except RuntimeError as error:
        if "No available kernel" in str(error) or "no viable backend" in str(error):
            raise TrialError(
                Outcome.INVALID, f"attention_backend = {backend}: not to be had for this model on this device: {error}"
            ) from error
        raise


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees which attention kernels run, and whether anything makes a softmax over seq_len x seq_len scores."""

    supports_higher_order_operators = True  # of models that use flex_attention

    def __init__(self, seq_len: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seq_len = seq_len
        self._kernels: set[str] = set()
        self._scores = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "_opname", "")
        if name.startswith("_scaled_dot_product_"):
            self._kernels |= {backend for backend in BACKENDS if backend in name and "backward" not in name}
        elif "softmax" in name and isinstance(out, Tensor):
            self._scores |= out.ndim >= 3 and out.shape[-1] == out.shape[-2] >= self._seq_len
        return out

    @property
    def used(self) -> str:
        """A backend; `math` for scores that are written out, by torch's math kernel or by the model; else `none`."""
        if self._kernels:
            return "+".join(sorted(self._kernels))
        return "math" if self._scores else "none"
