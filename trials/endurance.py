"""What a trial of seconds does not show of a config that is to train for days: that it evaluates, that a checkpoint
brings all of its state back, what each of these takes, and whether the host's memory fills.

After the training steps: two batches in eval mode, a sharded save (torch.distributed.checkpoint), one more step so
that the state moves, a load, and the same two batches again.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict_loader as loader
import torch.distributed.checkpoint.state_dict_saver as saver
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from trials import attention, host_memory, memory
from trials.outcome import Outcome, TrialError
from trials.step import Stepper

NUM_EVALUATION_BATCHES = 2
LOSS_TOLERANCE = 1e-4
"""Relative, of one batch in eval mode before the save and after the load: kernels on a GPU may add in another order."""
_SAMPLE_INTERVAL_S = 0.01
_MAX_NAMED = 3
"""Tensors that an error names."""


@dataclass
class Phase:
    """What a part of the run took on one rank."""

    phase: str
    seconds: float
    allocated_bytes: int | None
    """CUDA: peak of live tensors."""
    reserved_bytes: int
    """CUDA: peak reserved; CPU: the data segment's largest growth, which is what the limit sees."""
    host_bytes: int
    """Peak resident memory of the rank and its loader's workers."""


class Endurance:
    """One rank's part in the endurance run of a config.

    Make it before the memory limit is set: a thread takes memory, and so do imports.

    Args:
        folder: of the checkpoint; the same for all ranks, and gone after the run.
        worker_pids: the loader's.
    """

    def __init__(self, folder: Path, device: str, worker_pids: Sequence[int]) -> None:
        self.folder, self.device = folder, device
        self.base_bytes = 0
        """The data segment when the limit was set."""
        self.phases: list[Phase] = []
        self._pids = [os.getpid(), *worker_pids]
        self._host_samples: list[int] = []
        self._peak_host_bytes = self._peak_data_bytes = 0
        self._sampling = threading.Event()
        threading.Thread(target=self._sample, daemon=True).start()

    # --- gauges -----------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        while self._sampling.wait():
            self._note()
            time.sleep(_SAMPLE_INTERVAL_S)

    def _note(self) -> int:
        host_bytes = host_memory.resident_bytes(self._pids)
        self._peak_host_bytes = max(self._peak_host_bytes, host_bytes)
        self._peak_data_bytes = max(self._peak_data_bytes, memory.data_segment_bytes())
        return host_bytes

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Records what the code inside takes."""
        self._peak_host_bytes = self._peak_data_bytes = 0
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._sampling.set()
        started = time.perf_counter()
        try:
            yield
            if self.device == "cuda":
                torch.cuda.synchronize()
        finally:
            self._sampling.clear()
        self._note()
        allocated, reserved = None, self._peak_data_bytes - self.base_bytes
        if self.device == "cuda":
            allocated, reserved, _ = memory.cuda_peaks()
        self.phases.append(
            Phase(name, time.perf_counter() - started, allocated, max(0, reserved), self._peak_host_bytes)
        )

    def watched(self, step: Callable[[], None]) -> Callable[[], None]:
        """`step`, after which the host's memory is looked at."""

        def watched_step() -> None:
            step()
            self._host_samples.append(self._note())

        return watched_step

    # --- the phases -------------------------------------------------------------------------------------------

    def finish(self, stepper: Stepper, enter: Callable[[str], None]) -> None:
        """Evaluation, save and load.

        Args:
            enter: is told of each phase as it begins.

        Raises:
            TrialError: outcome `wrong_numerics`; what was loaded is not what was saved, or computes something else.
                Or `storage_failed`: the checkpoint cannot be written or read, which is not the config's fault.
        """
        batches = [next(stepper.batches) for _ in range(NUM_EVALUATION_BATCHES)]
        saved = checksums(stepper)
        needed_bytes = self._checkpoint_bytes(stepper)  # a forward may leave weights gathered
        enter("evaluate")
        with self.phase("evaluate"):
            losses = evaluate(stepper, batches)
        try:
            self._refuse_a_small_disk(needed_bytes)
            enter("save")
            with self.phase("save"), _storage_errors("saved to", self.folder):
                saver.save(_state(stepper), checkpoint_id=self.folder)
            enter("step_after_save")
            stepper.step()
            enter("load")
            with self.phase("load"), _storage_errors("loaded from", self.folder):
                load(stepper, self.folder)
        finally:
            self._remove()
        changed = [name for name, checksum in checksums(stepper).items() if saved.get(name) != checksum]
        if changed:
            raise TrialError(
                Outcome.WRONG_NUMERICS,
                f"{len(changed)} of {len(saved)} tensors are not, after the load, what they were at the save: "
                f"{', '.join(changed[:_MAX_NAMED])}",
            )
        again = evaluate(stepper, batches)
        if any(abs(now - then) > LOSS_TOLERANCE * abs(then) for then, now in zip(losses, again, strict=True)):
            raise TrialError(
                Outcome.WRONG_NUMERICS,
                f"after the load the evaluation's losses are {again}, before the save they were {losses}",
            )
        enter("step_after_load")
        stepper.step()

    def reserved_bytes(self) -> int:
        """Of the phase that took most."""
        return max(phase.reserved_bytes for phase in self.phases)

    def cuda_peaks(self) -> tuple[int, int]:
        """Allocated and reserved bytes over all phases: each has reset the allocator's own."""
        return (
            max(phase.allocated_bytes or 0 for phase in self.phases),
            max(phase.reserved_bytes for phase in self.phases),
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "phases": [asdict(phase) for phase in self.phases],
            "host_growth_bytes_per_step": host_memory.growth_bytes_per_step(self._host_samples),
            "host_available_bytes": host_memory.available_bytes(),
        }

    def _checkpoint_bytes(self, stepper: Stepper) -> int:
        knobs, world_size = stepper.knobs, dist.get_world_size()
        num_copies = world_size if knobs.engine == "ddp" else knobs.replicate_degree or 1
        own = torch.tensor([sum(tensor.nbytes for _, tensor in tensors(stepper))], device=self.device)
        dist.all_reduce(own)
        return int(own.item()) // num_copies  # of copies, one is saved

    def _refuse_a_small_disk(self, needed: int) -> None:
        """A disk that fills may do harm beyond this run, and torch names it only in passing."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            raise _storage_failed(self.folder, str(error)) from error
        if free < needed:
            raise _storage_failed(
                self.folder,
                f"{os.strerror(errno.ENOSPC)}: it takes {needed / 2**20:,.1f} MiB of {free / 2**20:,.1f} that are free",
            )

    def _remove(self) -> None:
        """Where nodes share no file system, each removes its own; the driver removes the rest."""
        if os.environ.get("LOCAL_RANK", "0") == "0":
            shutil.rmtree(self.folder, ignore_errors=True)


def evaluate(stepper: Stepper, batches: Sequence[Tensor]) -> list[float]:
    """This rank's loss of each batch, in eval mode and without gradients, as between epochs.

    Raises:
        TrialError: outcome `wrong_numerics`; a loss is not finite.
    """
    module = stepper.model.module
    module.eval()
    with torch.no_grad(), attention.only(stepper.knobs.attention_backend):
        losses = [float(stepper.loss(module, tokens.to(stepper.device))) for tokens in batches]
    module.train()
    if not all(math.isfinite(loss) for loss in losses):
        raise TrialError(Outcome.WRONG_NUMERICS, f"the losses in eval mode are {losses}")
    return losses


def _state(stepper: Stepper) -> dict[str, Any]:
    model, optimizer = get_state_dict(stepper.model.module, stepper.optimizer)
    return {"model": model, "optimizer": optimizer}


def load(stepper: Stepper, folder: Path) -> None:
    """Puts the checkpoint in `folder` in place of what the model and the optimizer hold."""
    state = _state(stepper)
    loader.load(state, checkpoint_id=folder)
    set_state_dict(
        stepper.model.module,
        stepper.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


def checksums(stepper: Stepper) -> dict[str, int]:
    """Of this rank's part of each parameter, buffer and optimizer state. Between steps, when all are sharded."""
    found = {}
    for name, tensor in tensors(stepper):
        whole = tensor.detach().cpu().contiguous().reshape(-1)
        found[name] = zlib.crc32(whole.view(torch.uint8).numpy().data) if whole.numel() else 0
    return found


def tensors(stepper: Stepper) -> Iterator[tuple[str, Tensor]]:
    """This rank's part of each parameter, buffer and optimizer state, by name."""
    module: nn.Module = stepper.model.module
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield name, _local(tensor)
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    for parameter, state in stepper.optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                yield f"{names.get(parameter, '?')} {key}", _local(value)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def _storage_errors(what: str, folder: Path) -> Iterator[None]:
    """Tells the storage's errors from the config's; torch wraps both."""
    try:
        yield
    except CheckpointException as error:
        causes = [cause for _, (cause, _) in sorted(error.failures.items())]
        for cause in causes:
            seen: BaseException | None = cause
            while seen is not None:
                if isinstance(seen, OSError) and seen.errno != errno.ENOMEM:
                    raise _storage_failed(folder, f"it could not be {what} there: {seen}") from error
                seen = seen.__cause__ or seen.__context__
        raise causes[0] from error


def _storage_failed(folder: Path, why: str) -> TrialError:
    return TrialError(
        Outcome.STORAGE_FAILED,
        f"the checkpoint in {folder}: {why}. Give another folder by measure.checkpoint_dir; all nodes must share it",
    )
