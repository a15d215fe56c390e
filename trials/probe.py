"""Measures a trainer that is not ours, from inside its ranks: times, tokens, and what was really applied.

One file, standard library and torch (2.4 or later) only, Python 3.10 or later: copy it alone wherever the trainer runs.
Nothing happens unless the environment variable AUTOTUNE_PROBE names a request: the lines may stay in a script for good.

Three ways to attach; only one of them in a process, the one that the request names:

    auto       no change in the script; it runs as if by `python train.py ARGS...` or `python -m package.module ARGS...`
                   python trials/probe.py train.py ARGS...
                   torchrun --nproc-per-node 2 trials/probe.py -m package.module ARGS...
    explicit   two lines in the script
                   probe.watch(model)          # after the model is wrapped
                   probe.step(tokens=None)     # after each optimizer.step(); tokens of this rank in that step, if the
                                               # forward's batch does not tell them
    callback   Trainer(callbacks=[probe.transformers_callback()])  or  Trainer(callbacks=[probe.lightning_callback()])

and in any of them `probe.knob("name", default)`: the value that is asked for, or the default without a request or
where the request does not say.

The request, a JSON file:

    out            folder for rank-N.jsonl, on a local disk; must exist
    warmup_steps   optimizer steps that are not timed, after the first
    timed_steps    optimizer steps that are; null: watch only, until the script ends by itself, and never end it
    max_s          null, or seconds from the start of the process until which the timed steps must be over: as many are
                   timed as will surely fit, the same on all ranks
    attach         auto | explicit | callback
    tokens         auto: the elements of the integer batch (samples, sequence) that the model's forward gets;
                   or a number: tokens of each sample of a micro-batch
    knobs          {name: value} for `probe.knob`
    expect         {knob: value} that the trial asked for; not read here, see trials/probe_log.py
    memory_limit_gib   optional. On CUDA the caching allocator's limit (device LOCAL_RANK); on a CPU RLIMIT_DATA, over
                   what the process holds when the probe attaches: what the script imports later counts too

What is written to rank-N.jsonl, one JSON object a line, each by one write to an open file: only the last can be torn,
and only by a crash of the machine. Times `t` are seconds of CLOCK_MONOTONIC, which a host's ranks share.

    start     rank, local_rank, world_size (of the environment), pid, host, python, torch, attach, t
    step      n (from 1), t (its end; on CUDA when the device got there), tokens, samples, micro_batches (of this rank
              and this optimizer step; null where they were not seen: in the first step, if attached by it), wait_s (in
              the DataLoader's __next__; null if there is none), timed
    applied   once, after the first step that was seen whole. `knobs`: all that could be read, by our names:
              engine (fsdp2, fsdp1, ddp, none), micro_batch_size, grad_accum_steps, sync_each_micro_batch (null at one
              micro-batch a step), reshard_after_forward, keep_last_units, reshard_group_size, blocks_per_unit,
              forward_prefetch_units, backward_prefetch_units, replicate_degree, reduce_dtype, cpu_offload,
              limit_all_gathers, backward_prefetch, forward_prefetch, activation_checkpointing, bucket_cap_mb (ddp),
              num_workers, prefetch_factor, pin_memory, persistent_workers, compile, fused_optimizer; a knob that is not
              there could not be read; `mixed`: not the same in all blocks.
              Beside them: rank, world_size, backend (of the process group), shard_mesh_size, param_dtype, autocast,
              num_parameters, num_trainable (unsharded), blocks (class, count, and of which units), units (classes and
              their count), checkpointed (class: count), recomputed (blocks whose forward ran again in backward),
              padding_fraction (of the tokens, by an attention_mask; null without one), batch (name and shape),
              optimizer, root (classes), device (type, name, index, uuid), knobs_read (names asked of `probe.knob`)
    window    the clock starts, on all ranks together: t, num_steps (to be timed), queued_batches (the loader's
              num_workers x prefetch_factor), loader_sustained, num_untimed_steps
    memory    of this rank, bytes: device_allocated and device_reserved (peaks), alloc_retries (in the window),
              host_peak (resident), host_data (VmData)
    end       reason: done | script_ended (before the steps were over); num_steps (timed), time_s, tokens, samples,
              micro_batches, sample_tokens and micro_batch_size ([min, mean, max] of the timed micro-batches),
              not_finite (trainable parameters, by name, that are not finite at the end)
    error     type, message, traceback, phase (start, first_step, observe, warmup, timed, end), out_of_memory (device,
              host or null)

The steps that are not timed: the first (attach, and find the root module: the largest tree of modules that holds the
optimizer's parameters), `warmup_steps`, at least one (observe), and then so many that the loader's queue has gone by
(num_workers x prefetch_factor batches): a queue that was filled while the model was compiled would hide a slow loader.
For that reason, too, at least three times as many batches are timed, even if `timed_steps` is less.

Ranks meet twice, between steps and before the clock starts, to agree on the number of steps; there is no collective
inside a step or between the timed ones. After the last one they meet again and leave by os._exit(0), which no trainer
can catch; the script's own end (a last checkpoint) is not run. An exception in the script is reported, and the rank
leaves at once (78 out of memory, 70 otherwise), since its peers notice nothing but its death.

An optimizer that steps inside backward, DeepSpeed's engine, or a compiled optimizer step need `explicit`.
"""

from __future__ import annotations

import atexit
import dataclasses
import errno
import gc
import json
import math
import multiprocessing
import os
import platform
import re
import resource
import runpy
import socket
import sys
import threading
import time
import traceback
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import dataloader

VARIABLE = "AUTOTUNE_PROBE"
GIB = 2**30
EXIT_OOM = 78
EXIT_FAILED = 70
DRAIN_SHARE = 0.25
"""Of the time that is left: the untimed steps in which the loader's queue goes by take no more."""
QUEUES_TIMED = 3
"""Times what the loader's queue holds: so many batches are timed, so that what is left in it counts little."""

_REQUESTED = VARIABLE in os.environ
# A script may import another copy of this file than the one that runs it: all share one state.
_SHARED: Any = sys.modules.setdefault("_autotune_probe_state", types.SimpleNamespace(probe=None, read=[]))  # type: ignore[arg-type]


class ProbeError(RuntimeError):
    """The probe is used wrongly, or cannot see what it needs to."""


# ---- what a script calls


def knob(name: str, default: Any) -> Any:
    """The value asked for, or `default`."""
    if not _REQUESTED:
        return default
    if name not in _SHARED.read:
        _SHARED.read.append(name)
    return _request()["knobs"].get(name, default)


def watch(model: nn.Module) -> None:
    """Attaches to `model`, wrapped as it will be trained.

    Raises:
        ProbeError: a probe is attached already, or the request names another way.
    """
    if _REQUESTED:
        _attach("explicit").watch(model)


def step(tokens: int | None = None) -> None:
    """An optimizer step has ended.

    Args:
        tokens: of this rank in this step; None: as the model's forward saw them.

    Raises:
        ProbeError: `watch` was not called.
    """
    if not _REQUESTED:
        return
    if _SHARED.probe is None:
        raise ProbeError("probe.step() without probe.watch(model): call it once, after the model is wrapped")
    _SHARED.probe.given_tokens = tokens
    _SHARED.probe.on_step(None)


def transformers_callback() -> Any:
    """For `Trainer(callbacks=[...])` of transformers; does nothing without a request."""
    from transformers import TrainerCallback

    class ProbeCallback(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if _REQUESTED:
                _attach("callback")

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if _REQUESTED:
                _SHARED.probe.on_step(kwargs["optimizer"])

    return ProbeCallback()


def lightning_callback() -> Any:
    """For `Trainer(callbacks=[...])` of Lightning (`lightning` or `pytorch_lightning`); nothing without a request."""
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        from pytorch_lightning import Callback
    else:
        from lightning.pytorch import Callback

    class ProbeCallback(Callback):  # type: ignore[misc]
        global_step = 0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if _REQUESTED:
                self.global_step = trainer.global_step
                _attach("callback")

        def on_train_batch_end(self, trainer: Any, *_args: Any) -> None:
            if _REQUESTED and trainer.global_step != self.global_step:  # called at each micro-batch
                self.global_step = trainer.global_step
                _SHARED.probe.on_step(trainer.optimizers[0])

    return ProbeCallback()


def main(arguments: list[str]) -> None:
    """Runs a script, or with -m a module, as Python itself would, with the probe attached to its optimizer."""
    as_module = arguments[:1] == ["-m"]
    target, *rest = arguments[as_module:] or [""]
    if not target:
        raise SystemExit("usage: probe.py [-m] SCRIPT_OR_MODULE [ARGUMENTS...]")
    folder = str(Path.cwd() if as_module else Path(target).resolve().parent)
    if getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder
    sys.argv = [target, *rest]
    probe: Probe | None = None
    try:
        if _REQUESTED and _request()["attach"] == "auto":
            probe = _attach("auto")
            _follow_optimizer(probe)
        if as_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            _run_script(target)
    except Exception as error:
        if probe is None:
            raise
        sys.excepthook(type(error), error, error.__traceback__)
        probe.failed(error)
        raise SystemExit(1) from None


def _run_script(path: str) -> None:
    # Not runpy.run_path: it takes the module away again, and with it the globals of threads and exit handlers.
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None, __package__=None, __spec__=None)
    sys.modules["__main__"] = module
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), module.__dict__)


# ---- attaching


def _request() -> dict[str, Any]:
    if "request" not in vars(_SHARED):
        _SHARED.request = json.loads(Path(os.environ[VARIABLE]).read_text())
    found: dict[str, Any] = _SHARED.request
    return found


def _attach(how: str) -> Probe:
    asked = _request()["attach"]
    if _SHARED.probe is not None:
        first: Probe = _SHARED.probe
        first.fail(
            ProbeError(
                f"a probe is attached already ({first.how}), and the script attaches another ({how}): run the script "
                f"without probe.py and say `attach: {how}`, or take the lines out of the script"
            )
        )
    probe = _SHARED.probe = Probe(_request(), how)
    if asked != how:
        probe.fail(ProbeError(f"the script attaches the probe itself ({how}), and the job says `attach: {asked}`"))
    if how != "auto":
        _report_exceptions(probe)
    return probe


def _report_exceptions(probe: Probe) -> None:
    """What ends the script by itself is reported after it was printed."""
    printed = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        printed(kind, error, trace)
        probe.failed(error)

    sys.excepthook = report


def _follow_optimizer(probe: Probe) -> None:
    """Takes the steps of the optimizer that is first to make one; others beside it belong to the same step."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    followed: int | None = None

    def after_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        nonlocal followed
        if followed is None:
            followed = id(optimizer)
        if id(optimizer) == followed:
            probe.on_step(optimizer)

    register_optimizer_step_post_hook(after_step)


# ---- one rank: the phases of its run


class Probe:
    """One rank of a trainer. `on_step` is called after each optimizer step; what it does changes with the phase."""

    def __init__(self, request: dict[str, Any], how: str) -> None:
        self.request, self.how = request, how
        self.watches_only = request["timed_steps"] is None
        self.on_step: Callable[[Any], None] = self._first_step
        self.phase = "first_step"
        self.given_tokens: int | None = None
        self._started = time.monotonic()
        self._pid = os.getpid()
        self._closed = False
        self._num_steps = 0
        self._forwards: Forwards | None = None
        self._observed: Observed | None = None
        self._optimizer: Any = None
        self._last_s, self._pace_s = self._started, 0.0
        """When the last untimed step ended, and what it took."""
        self._num_untimed = 0
        """So many more steps before the clock starts."""
        self._queued = 0
        self._sustained = True
        self._window: Window | None = None
        path = Path(request["out"]) / f"rank-{int(os.environ.get('RANK', '0'))}.jsonl"
        append = os.O_WRONLY | os.O_APPEND
        try:
            self._file = os.open(path, append | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            self._file = os.open(path, append)
            self.fail(ProbeError(f"{path} is there already: two processes attach a probe as the same rank"))
        self.write(
            "start",
            rank=int(os.environ.get("RANK", "0")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            pid=self._pid,
            host=socket.gethostname(),
            python=platform.python_version(),
            torch=torch.__version__,
            attach=how,
            t=self._started,
        )
        if request.get("memory_limit_gib") is not None:
            _limit_memory(round(request["memory_limit_gib"] * GIB))
        self._loader = LoaderWatch()
        atexit.register(self._script_ended)

    # -- what is written

    def write(self, event: str, **values: Any) -> None:
        self._write(json.dumps({"event": event, **values}) + "\n")

    def _write(self, line: str) -> None:
        os.write(self._file, line.encode())

    def _write_step(self, end_s: float, counts: Counts, timed: bool) -> None:
        # Not by json.dumps, which takes longer than all else.
        self._write(
            f'{{"event": "step", "n": {counts.n}, "t": {end_s:.6f}, "tokens": {_or_null(counts.tokens)}, '
            f'"samples": {_or_null(counts.samples)}, "micro_batches": {_or_null(counts.micro_batches)}, '
            f'"wait_s": {_or_null(counts.wait_s)}, "timed": {"true" if timed else "false"}}}\n'
        )

    def fail(self, error: BaseException) -> NoReturn:
        """Reports the probe's own error, and raises it if the script may go on."""
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        self.failed(error)
        raise error

    def failed(self, error: BaseException) -> None:
        """Reports what the script raised, and leaves, unless the script is only watched."""
        if self._closed or os.getpid() != self._pid:
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))  # the report itself needs a little memory
        memory = out_of_memory(error)
        self.write(
            "error",
            type=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(type(error), error, error.__traceback__)),
            phase=self.phase,
            out_of_memory=memory,
        )
        self._close()
        if not self.watches_only:
            _leave(EXIT_OOM if memory else EXIT_FAILED)

    def _script_ended(self) -> None:
        if not self._closed and os.getpid() == self._pid:
            self._end("script_ended")

    def _close(self) -> None:
        self._closed = True
        self.on_step = lambda _optimizer: None
        if self._forwards is not None:
            self._forwards.remove()
        os.fsync(self._file)

    # -- the phases of a run

    def watch(self, model: nn.Module) -> None:
        self._forwards = Forwards(model, self.request["tokens"])

    def _first_step(self, optimizer: Any) -> None:
        """Afterwards everything has its final form: compiled, sharded lazily, the optimizer's state allocated."""
        self._optimizer = optimizer
        self._end_untimed_step()
        self.phase = "observe"
        if self._forwards is None:
            self.watch(find_root(optimizer))
        assert self._forwards is not None
        self._observed = Observed(self._forwards)
        self._loader.look()
        self.on_step = self._observing

    def _observing(self, _optimizer: Any) -> None:
        assert self._forwards is not None
        assert self._observed is not None
        self._observed.remove()
        self._check_seen()
        accumulated = self._forwards.counts.micro_batches or 0
        self._end_untimed_step()
        loader = self._loader.read()
        if not self.watches_only:
            self._queued = max(self._meet((loader.get("num_workers") or 0) * (loader.get("prefetch_factor") or 0)))
        applied = self._observed.read(self._optimizer, accumulated)
        applied["knobs"] |= loader
        self.write("applied", **applied, knobs_read=_SHARED.read)
        self.phase = "warmup"
        per_step = max(accumulated, 1)
        drain = math.ceil(self._queued / per_step)
        fit = min(self._meet(self._steps_that_fit(DRAIN_SHARE)))
        self._sustained = drain <= fit
        self._num_untimed = max(0, self.request["warmup_steps"] - 1) + min(drain, fit)
        self._sustained_steps = math.ceil(QUEUES_TIMED * self._queued / per_step)
        self._last_s = time.monotonic()  # reading back took its time
        self.on_step = self._warm_up
        if self._num_untimed == 0:
            self._open_window()

    def _warm_up(self, _optimizer: Any) -> None:
        self._end_untimed_step()
        self._num_untimed -= 1
        if self._num_untimed == 0:
            self._open_window()

    def _check_seen(self) -> None:
        assert self._forwards is not None
        seen, root = self._forwards, class_name(self._forwards.root)
        if not seen.counts.micro_batches and self.given_tokens is None:
            self.fail(
                ProbeError(
                    f"an optimizer step was made, and no forward of {root} seen that it could come from: "
                    "say `attach: explicit`, and in the script probe.watch(model) and probe.step(tokens=...)"
                )
            )
        if seen.counts.tokens is None and self.given_tokens is None:
            self.fail(
                ProbeError(
                    f"the forward of {root} gets no batch of integers (samples, sequence), but {seen.batch_shape}: "
                    "its tokens cannot be counted. Say `tokens: N`, the tokens of each sample"
                )
            )

    def _end_untimed_step(self) -> None:
        now = time.monotonic()
        self._pace_s, self._last_s = max(now - self._last_s, 1e-6), now
        self._write_step(now, self._take_counts(), timed=False)

    def _take_counts(self) -> Counts:
        """What the step that has just ended took; counting begins anew."""
        self._num_steps += 1
        counts = self._forwards.take() if self._forwards is not None else Counts()
        counts.n, counts.wait_s = self._num_steps, self._loader.take()
        if self.given_tokens is not None:
            counts.tokens = self.given_tokens
        return counts

    def _steps_that_fit(self, share: float) -> int:
        """Into this share of the time that is left, at the pace of the untimed steps."""
        if self.request["max_s"] is None:
            return sys.maxsize
        left_s = self.request["max_s"] - (time.monotonic() - self._started)
        return max(0, int(share * left_s / self._pace_s))

    def _open_window(self) -> None:
        assert self._forwards is not None
        number = sys.maxsize
        if not self.watches_only:
            wanted = max(self.request["timed_steps"], self._sustained_steps)
            number = min(wanted, *self._meet(self._steps_that_fit(1.0)))
            self._sustained = self._sustained and number >= self._sustained_steps
        self.phase = "timed"
        self._forwards.observer = None
        self._forwards.start_spreads()
        self._window = Window(number, next(self._forwards.root.parameters()).device.type)
        self._meet(None)  # start together
        self._window.open()
        self.write(
            "window",
            t=self._window.opened_s,
            num_steps=None if self.watches_only else number,
            queued_batches=self._queued,
            loader_sustained=self._sustained,
            num_untimed_steps=self._num_steps,
        )
        self.on_step = self._timed
        if number == 0:
            self._finish("max_s")

    def _timed(self, _optimizer: Any) -> None:
        window = self._window
        assert window is not None
        for end_s, counts in window.add(self._take_counts()):
            self._write_step(end_s, counts, timed=True)
        if window.num_steps == window.number:
            self._finish("done")

    def _finish(self, reason: str) -> None:
        self.phase = "end"
        self._end(reason)
        if not self.watches_only:
            try:
                self._meet(None)  # nobody leaves while a peer still waits for it
            except Exception as error:  # noqa: BLE001 (gloo, NCCL and stores raise many kinds)
                sys.stderr.write(f"at the end, peers did not answer: {error}\n")
                _leave(EXIT_FAILED)
            _leave(0)

    def _end(self, reason: str) -> None:
        window, summary = self._window, {}
        if window is not None:
            for end_s, counts in window.close():
                self._write_step(end_s, counts, timed=True)
            self.write("memory", **window.memory())
            assert self._forwards is not None
            summary = window.summary() | {
                "sample_tokens": self._forwards.sample_tokens.to_list(),
                "micro_batch_size": self._forwards.micro_batch_size.to_list(),
            }
            if not self.watches_only:
                summary["not_finite"] = not_finite(self._forwards.root)
        self.write("end", reason=reason, last_step=self._num_steps, **summary)
        self._close()

    def _meet(self, value: Any) -> list[Any]:
        """What every rank says; between steps only."""
        if self.watches_only or not (dist.is_available() and dist.is_initialized()):
            return [value]
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found


def _or_null(value: float | None) -> float | str:
    return "null" if value is None else value


def _leave(code: int) -> NoReturn:
    """At once, as the peers only notice a process's death; a loader's workers with it."""
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# ---- what goes into the model


@dataclasses.dataclass
class Counts:
    """Of one optimizer step on this rank; None: not seen."""

    n: int = 0
    tokens: float | None = None
    samples: int | None = None
    micro_batches: int | None = None
    wait_s: float | None = None


class Spread:
    """Least, mean and greatest of what was added."""

    def __init__(self) -> None:
        self.least, self.greatest, self.total, self.count = math.inf, -math.inf, 0.0, 0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1
        self.least = min(self.least, value)
        self.greatest = max(self.greatest, value)

    def to_list(self) -> list[float] | None:
        return [self.least, self.total / self.count, self.greatest] if self.count else None


class Forwards:
    """Counts the micro-batches that go into the model for training.

    The module that a trainer calls need not be the root (Lightning's is never called): of the root and the chain of
    children that hold most of its parameters, the outermost that is called counts.
    """

    def __init__(self, root: nn.Module, tokens_per_sample: float | str) -> None:
        self.root = root
        self.tokens_per_sample = None if tokens_per_sample == "auto" else float(tokens_per_sample)
        self.counts = Counts(tokens=0, samples=0, micro_batches=0)
        self.sample_tokens, self.micro_batch_size = Spread(), Spread()
        self.batch_shape: Any = "nothing"
        self.observer: Callable[[nn.Module, Any, Any], None] | None = None
        """Called with each micro-batch, outside the timed steps."""
        self._depth = sys.maxsize
        self._place: tuple[Any, ...] = ()
        chain = heavy_chain(root)
        self._remove = [on_forward(module, self._at(depth)) for depth, module in enumerate(chain)]

    def remove(self) -> None:
        for remove in self._remove:
            remove()

    def take(self) -> Counts:
        taken, self.counts = self.counts, Counts(tokens=0, samples=0, micro_batches=0)
        return taken

    def start_spreads(self) -> None:
        self.sample_tokens, self.micro_batch_size = Spread(), Spread()

    def _at(self, depth: int) -> Callable[[nn.Module, Any, Any], None]:
        def before_forward(module: nn.Module, args: Any, kwargs: Any) -> None:
            if depth > self._depth or not torch.is_grad_enabled():
                return
            if depth < self._depth:
                self._depth = depth
                self.take()
                self.start_spreads()
            self._count(args, kwargs)
            if self.observer is not None:
                self.observer(module, args, kwargs)

        return before_forward

    def _count(self, args: Any, kwargs: Any) -> None:
        counts = self.counts
        counts.micro_batches += 1  # type: ignore[operator]
        batch = _at_place(self._place, args, kwargs)
        if batch is None:
            self._place = find_batch(args, kwargs)
            batch = _at_place(self._place, args, kwargs)
        if batch is None or batch.ndim == 0:
            counts.tokens = None
            return
        self.batch_shape = batch.shape
        samples = batch.shape[0]
        if self.tokens_per_sample is not None:
            tokens: float | None = samples * self.tokens_per_sample
        elif batch.ndim == 2 and not batch.is_floating_point():
            tokens = batch.numel()
        else:
            tokens = None
        counts.samples += samples  # type: ignore[operator]
        self.micro_batch_size.add(samples)
        if tokens is None:
            counts.tokens = None
        elif counts.tokens is not None:
            counts.tokens += tokens
            self.sample_tokens.add(tokens / samples if samples else 0)

    def describe_batch(self) -> dict[str, Any]:
        return {"name": ".".join(map(str, self._place)), "shape": list(self.batch_shape)}


def heavy_chain(root: nn.Module) -> list[nn.Module]:
    """The root, its child that holds most of its parameters, that one's, ...; but not what a checkpoint calls again."""
    chain = [root]
    while not isinstance(chain[-1], _class(CHECKPOINT, "CheckpointWrapper")):
        total = sum(p.numel() for p in chain[-1].parameters())
        heavy = [c for c in chain[-1].children() if 2 * sum(p.numel() for p in c.parameters()) > total]
        if not heavy:
            break
        chain.append(heavy[0])
    return chain


def on_forward(module: nn.Module, call: Callable[[nn.Module, Any, Any], None]) -> Callable[[], None]:
    """Has `call` called before each forward of `module`; returns what undoes it."""
    compiled = getattr(module, "_compiled_call_impl", None)
    if compiled is None:
        return module.register_forward_pre_hook(call, with_kwargs=True).remove

    def counted(*args: Any, **kwargs: Any) -> Any:
        call(module, args, kwargs)
        return compiled(*args, **kwargs)

    # Hooks would be compiled, too; or if that has been done, not be called.
    module._compiled_call_impl = counted
    return lambda: setattr(module, "_compiled_call_impl", compiled)


def find_batch(args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Where the batch is among a forward's arguments: `input_ids` by name, else the first integers of two dimensions,
    else the first tensor; () if there is none."""
    found: list[tuple[tuple[Any, ...], Tensor]] = []
    for key, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, Tensor):
            found.append(((key,), value))
        elif isinstance(value, Mapping):
            found += [((key, inner), v) for inner, v in value.items() if isinstance(v, Tensor)]
        elif isinstance(value, (list, tuple)):
            found += [((key, inner), v) for inner, v in enumerate(value) if isinstance(v, Tensor)]
    rows = [(place, v) for place, v in found if v.ndim == 2 and not v.is_floating_point() and v.dtype != torch.bool]
    named = [place for place, _ in rows if place[-1] == "input_ids"]
    return (*named, *(place for place, _ in rows), *(place for place, _ in found), ())[0]


def _at_place(place: tuple[Any, ...], args: Any, kwargs: Any) -> Tensor | None:
    if not place:
        return None
    try:
        value = args[place[0]] if isinstance(place[0], int) else kwargs[place[0]]
        value = value[place[1]] if len(place) > 1 else value
    except (LookupError, TypeError):
        return None
    return value if isinstance(value, Tensor) else None


class LoaderWatch:
    """Times the waits for batches in the training thread, and knows the loader that brings them."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._wait_s: float | None = None
        self._iterator: weakref.ref[Any] | None = None
        self._found: Any = None
        fetch = dataloader._BaseDataLoaderIter.__next__

        def timed_next(iterator: Any) -> Any:
            if threading.get_ident() != self._thread:
                return fetch(iterator)
            started = time.monotonic()
            batch = fetch(iterator)
            self._wait_s = (self._wait_s or 0.0) + time.monotonic() - started
            if self._iterator is None:
                self._iterator = weakref.ref(iterator)
            return batch

        dataloader._BaseDataLoaderIter.__next__ = timed_next  # type: ignore[assignment, method-assign]

    def look(self) -> None:
        """The loader that brings the next batch is the one to read."""
        self._iterator = None

    def take(self) -> float | None:
        """Seconds waited since the last call; None without a DataLoader."""
        waited = self._wait_s
        if waited is not None:
            self._wait_s = 0.0
        return waited

    def read(self) -> dict[str, Any]:
        """The loader knobs, from the iterator in use: worker processes that are alive, not a number that was passed."""
        iterator = self._iterator() if self._iterator is not None else None
        if iterator is None:
            return {}
        workers = getattr(iterator, "_workers", [])
        return {
            "num_workers": sum(worker.is_alive() for worker in workers),
            "prefetch_factor": iterator._prefetch_factor if workers else None,
            "pin_memory": iterator._pin_memory,
            "persistent_workers": getattr(iterator, "_persistent_workers", False),
        }


# ---- the timed steps


class Window:
    """Times of whole steps; on CUDA by events, so that the host never waits for the device."""

    def __init__(self, number: int, device: str) -> None:
        self.number = number
        self.opened_s = self._last_s = 0.0
        self.num_steps = 0
        self._total = Counts(tokens=0, samples=0, micro_batches=0)
        self._cuda = device == "cuda"
        self._pending: deque[tuple[Any, Counts]] = deque()
        self._retries = 0

    def open(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
            self._retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
            self._opened = self._mark()
        self.opened_s = self._last_s = time.monotonic()

    def add(self, counts: Counts) -> list[tuple[float, Counts]]:
        """A step has ended. Those whose end is known by now."""
        total = self._total
        self.num_steps += 1
        total.tokens = None if total.tokens is None or counts.tokens is None else total.tokens + counts.tokens
        total.samples += counts.samples  # type: ignore[operator]
        total.micro_batches += counts.micro_batches  # type: ignore[operator]
        if not self._cuda:
            self._last_s = time.monotonic()
            return [(self._last_s, counts)]
        self._pending.append((self._mark(), counts))
        return self._ended()

    def close(self) -> list[tuple[float, Counts]]:
        if self._cuda:
            torch.cuda.synchronize()
        return self._ended()

    def summary(self) -> dict[str, Any]:
        return {
            "num_steps": self.num_steps,
            "time_s": self._last_s - self.opened_s,
            "tokens": self._total.tokens,
            "samples": self._total.samples,
            "micro_batches": self._total.micro_batches,
        }

    def memory(self) -> dict[str, Any]:
        found = {
            "host_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "host_data": _data_bytes(),
        }
        if not self._cuda:
            return {"device_allocated": None, "device_reserved": None, "alloc_retries": 0, **found}
        return {
            "device_allocated": torch.cuda.max_memory_allocated(),
            "device_reserved": torch.cuda.max_memory_reserved(),
            "alloc_retries": torch.cuda.memory_stats().get("num_alloc_retries", 0) - self._retries,
            **found,
        }

    def _mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _ended(self) -> list[tuple[float, Counts]]:
        ended = []
        while self._pending and self._pending[0][0].query():
            event, counts = self._pending.popleft()
            self._last_s = self.opened_s + self._opened.elapsed_time(event) / 1e3
            ended.append((self._last_s, counts))
        return ended


# ---- what was applied: from the live objects, once


CHECKPOINT = ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper",)
FSDP1 = ("torch.distributed.fsdp.fully_sharded_data_parallel",)
FSDP2 = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")  # torch 2.6, and before
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def _class(modules: tuple[str, ...], name: str) -> Any:
    """For isinstance: a class, if its module was imported by whoever could have made one."""
    return next((getattr(sys.modules[m], name) for m in modules if hasattr(sys.modules.get(m), name)), ())


def class_name(module: nn.Module) -> str:
    cls = type(module)
    # fully_shard makes a class of its own from the module's.
    fsdp2 = isinstance(module, _class(FSDP2, "FSDPModule"))
    return (cls.__mro__[getattr(cls, "_orig_cls_mro_index", 2)] if fsdp2 else cls).__name__


def inside(entry: nn.Module) -> list[nn.Module]:
    """`entry`, what it wraps, and so on to the user's own module."""
    wrapped = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
    chain = [entry]
    while True:
        inner = [chain[-1]._modules[name] for name in wrapped if name in chain[-1]._modules]
        if not inner or inner[0] is None:
            return chain
        chain.append(inner[0])


def find_root(optimizer: Any) -> nn.Module:
    """The tree of modules that holds most of the optimizer's parameters; of equal ones the largest.

    Raises:
        ProbeError: there is none.
    """
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    modules = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
    children = {id(child) for module in modules if "_modules" in vars(module) for child in module.children()}
    held = []
    for module in modules:
        if id(module) not in children and "_modules" in vars(module):
            everything = list(module.modules())
            params = {id(p) for m in everything for p in m._parameters.values() if p is not None}
            held.append((len(params & trained), len(everything), module))
    best = max(held, key=lambda found: found[:2], default=(0, 0, None))
    if best[2] is None or best[0] == 0:
        raise ProbeError(
            f"no module holds the parameters that {type(optimizer).__name__} steps: say `attach: explicit`, "
            "and in the script probe.watch(model) and probe.step()"
        )
    found_root: nn.Module = best[2]
    return found_root


def find_blocks(root: nn.Module) -> list[nn.Module]:
    """The repeated layers: of all classes that occur twice in one container, the one that holds most parameters."""
    found: dict[str, tuple[list[nn.Module], int]] = {}
    for container in root.modules():
        if isinstance(container, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            by_class: dict[str, list[nn.Module]] = {}
            for entry in container.children():
                by_class.setdefault(class_name(inside(entry)[-1]), []).append(entry)
            for name, entries in by_class.items():
                size = sum(p.numel() for entry in entries for p in entry.parameters())
                if len(entries) > 1 and size:
                    before, size_before = found.get(name, ([], 0))
                    found[name] = [*before, *entries], size_before + size
    return max(found.values(), key=lambda entries: entries[1], default=([], 0))[0]


def _one_of(values: Iterable[Any]) -> Any:
    """The value that all agree on, else `mixed`; None of nothing."""
    distinct = set(values)
    return next(iter(distinct), None) if len(distinct) < 2 else "mixed"


class Observed:
    """One whole step is watched closely, then the live objects are read."""

    def __init__(self, forwards: Forwards) -> None:
        self.forwards, self.root = forwards, forwards.root
        self.blocks = find_blocks(self.root)
        self._recomputed: set[int] = set()
        self._synced: list[bool] = []
        self._autocast: set[Any] = set()
        self._real_tokens: list[Tensor] = []
        self._mask_elements = 0
        self._remove = []
        for index, block in enumerate(self.blocks):
            core = inside(block)
            if not any(_is_compiled(module) for module in core):
                self._remove.append(on_forward(core[-1], self._in_block(index)))
        forwards.observer = self._micro_batch

    def remove(self) -> None:
        for remove in self._remove:
            remove()

    def _in_block(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        def before_forward(_module: nn.Module, _args: Any, _kwargs: Any) -> None:
            if torch._C._current_graph_task_id() != -1:  # inside a backward
                self._recomputed.add(index)

        return before_forward

    def _micro_batch(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        kind = next(self.root.parameters()).device.type
        self._autocast.add(DTYPES.get(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None)
        self._synced += [reduces_gradients(self.root)]
        mask = kwargs.get("attention_mask")
        if mask is None and args and isinstance(args[0], Mapping):
            mask = args[0].get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            self._real_tokens.append((mask != 0).sum())
            self._mask_elements += mask.numel()

    def read(self, optimizer: Any, accumulated: int | None) -> dict[str, Any]:
        found = read_wrapping(self.root, self.blocks)
        device = next(self.root.parameters()).device
        if optimizer is None:
            optimizer = find_optimizer(self.root)
        found["knobs"] |= {
            "activation_checkpointing": self._checkpointing(),
            "compile": any(_is_compiled(m) for block in (self.root, *self.blocks) for m in inside(block)),
        }
        sizes = self.forwards.micro_batch_size
        if sizes.count:
            found["knobs"]["micro_batch_size"] = int(sizes.least) if sizes.least == sizes.greatest else "mixed"
        if accumulated:
            found["knobs"]["grad_accum_steps"] = accumulated
            found["knobs"]["sync_each_micro_batch"] = all(self._synced) if accumulated > 1 else None
        if optimizer is not None:
            found["knobs"]["fused_optimizer"] = bool(optimizer.param_groups[0].get("fused"))
        wrappers = [m for m in self.root.modules() if isinstance(m, _class(CHECKPOINT, "CheckpointWrapper"))]
        distributed = dist.is_available() and dist.is_initialized()
        padding = None
        if self._mask_elements:
            padding = 1 - float(sum(int(n) for n in self._real_tokens)) / self._mask_elements
        return found | {
            "rank": dist.get_rank() if distributed else 0,
            "world_size": dist.get_world_size() if distributed else 1,
            "backend": dist.get_backend() if distributed else None,
            "autocast": _one_of(self._autocast),
            "blocks": {"class": class_name(inside(self.blocks[0])[-1]) if self.blocks else None}
            | {"count": len(self.blocks)},
            "checkpointed": dict(Counter(class_name(inside(wrapper)[-1]) for wrapper in wrappers)),
            "recomputed": len(self._recomputed),
            "padding_fraction": padding,
            "batch": self.forwards.describe_batch(),
            "optimizer": type(getattr(optimizer, "optimizer", optimizer)).__name__,
            "root": class_name(self.root),
            "device": describe_device(device),
        }

    def _checkpointing(self) -> str:
        """The mode that the blocks' wrappers, and what ran again, amount to; `mixed` if none does."""
        wrapper = _class(CHECKPOINT, "CheckpointWrapper")
        around = [[m for m in inside(block) if isinstance(m, wrapper)] for block in self.blocks]
        flags = [bool(w) or index in self._recomputed for index, w in enumerate(around)]
        wrappers = [w for each in around for w in each]
        elsewhere = sum(isinstance(m, wrapper) for m in self.root.modules()) - len(wrappers)
        selective = [bool(getattr(w.checkpoint_fn, "keywords", {}).get("context_fn")) for w in wrappers]
        if not any(flags):
            return "mixed" if elsewhere else "none"
        if any(selective):
            return "selective_op" if all(selective) and len(selective) == len(flags) else "mixed"
        if all(flags):
            return "full"
        stride = flags[1:].index(True) + 1 if any(flags[1:]) else len(flags)
        return f"every_{stride}" if flags == [i % stride == 0 for i in range(len(flags))] else "mixed"


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


def find_optimizer(root: nn.Module) -> Any:
    trained = {id(parameter) for parameter in root.parameters()}
    for found in gc.get_objects():
        if issubclass(type(found), torch.optim.Optimizer) and "param_groups" in vars(found):
            params = found.param_groups[0]["params"] if found.param_groups else []
            if params and id(params[0]) in trained:
                return found
    return None


def units_by_module(root: nn.Module, kind: Any) -> dict[int, Any]:
    """For the id of each module, the innermost FSDP unit (a module of class `kind`) that it is part of."""
    units: dict[int, Any] = {}
    for unit in root.modules():  # outer ones come first
        if isinstance(unit, kind):
            units.update((id(module), unit) for module in unit.modules())
    return units


def param_groups(unit: Any) -> list[Any]:
    """FSDP2's own record of a unit."""
    state = unit._get_fsdp_state()
    groups = vars(state).get("_fsdp_param_groups")  # torch 2.12 and before: one
    return list(groups) if groups is not None else [g for g in (state._fsdp_param_group,) if g is not None]


def reduces_gradients(root: nn.Module) -> bool:
    """Whether a backward now would reduce gradients."""
    fsdp2, fsdp1 = _class(FSDP2, "FSDPModule"), _class(FSDP1, "FullyShardedDataParallel")
    for module in root.modules():
        if isinstance(module, fsdp2):
            groups = param_groups(module)
            if groups:
                return any(group.reduce_grads for group in groups)
        elif isinstance(module, fsdp1):
            return bool(module._sync_gradients)
        elif isinstance(module, nn.parallel.DistributedDataParallel):
            return bool(module.require_backward_grad_sync)
    return True


def read_wrapping(root: nn.Module, blocks: list[nn.Module]) -> dict[str, Any]:
    """How the model is wrapped, of FSDP2, FSDP1 and DDP; of the blocks, where they can differ from the rest."""
    fsdp2, fsdp1 = _class(FSDP2, "FSDPModule"), _class(FSDP1, "FullyShardedDataParallel")
    for module in root.modules():
        if isinstance(module, fsdp2):
            return read_fsdp2(root, blocks)
        if isinstance(module, fsdp1):
            return read_fsdp1(root, blocks)
        if isinstance(module, nn.parallel.DistributedDataParallel):
            return read_ddp(module)
    return {"knobs": {"engine": "none"}, "shard_mesh_size": 1, "units": {}} | count_parameters(root)


def count_parameters(root: nn.Module) -> dict[str, Any]:
    """Whole, as they were before sharding; a parameter that occurs twice counts once."""
    sizes = [(p.numel(), p.requires_grad) for p in root.parameters()]  # of a DTensor, of the whole
    dtypes = {DTYPES.get(p.dtype, str(p.dtype)) for p in root.parameters() if p.requires_grad}
    return {
        "num_parameters": sum(size for size, _ in sizes),
        "num_trainable": sum(size for size, trained in sizes if trained),
        "param_dtype": _one_of(dtypes),
    }


def read_ddp(module: Any) -> dict[str, Any]:
    return count_parameters(module) | {
        "knobs": {
            "engine": "ddp",
            "bucket_cap_mb": module.bucket_bytes_cap / 2**20,
        },
        "shard_mesh_size": 1,
        "units": {"DistributedDataParallel": 1},
    }


def read_fsdp2(root: nn.Module, blocks: list[nn.Module]) -> dict[str, Any]:
    kind = _class(FSDP2, "FSDPModule")
    units = units_by_module(root, kind)
    sharded = [m for m in root.modules() if isinstance(m, kind)]
    of_blocks = [units.get(id(inside(block)[-1])) for block in blocks]
    groups = [group for unit in of_blocks if unit is not None for group in param_groups(unit)[:1]]
    if not groups or len(groups) < len(blocks):  # blocks that are not sharded, or none
        groups = [group for unit in sharded for group in param_groups(unit)]
    if not groups:
        return {"knobs": {"engine": "none"}, "shard_mesh_size": 1, "units": {}} | count_parameters(root)
    distinct = list({id(group): group for group in groups}.values())
    states = [unit._get_fsdp_state() for unit in sharded]
    policies = [group.mp_policy for group in distinct]
    return count_parameters(root) | {
        "knobs": {
            "engine": "fsdp2",
            **_read_reshard(distinct),
            "blocks_per_unit": max(Counter(map(id, groups)).values()) if blocks else None,
            "bucket_cap_mb": _unit_mib([_fsdp2_bytes(group) for group in distinct]),
            "forward_prefetch_units": max(len(getattr(s, "_states_to_forward_prefetch", ())) for s in states),
            "backward_prefetch_units": max(len(getattr(s, "_states_to_backward_prefetch", ())) for s in states),
            "replicate_degree": _one_of(getattr(group.mesh_info, "replicate_mesh_size", 1) for group in distinct),
            "reduce_dtype": _one_of(
                _dtype(p.reduce_dtype, p.param_dtype, _stored(g)) for p, g in zip(policies, distinct, strict=True)
            ),
            "cpu_offload": _one_of(param.offload_to_cpu for group in distinct for param in group.fsdp_params),
        },
        "shard_mesh_size": _one_of(getattr(group.mesh_info, "shard_mesh_size", 1) for group in distinct),
        "param_dtype": _one_of(_dtype(p.param_dtype, _stored(g)) for p, g in zip(policies, distinct, strict=True)),
        "units": dict(Counter(class_name(inside(m)[-1]) for m in sharded if param_groups(m))),
    }


def _stored(group: Any) -> Any:
    return next((p.orig_dtype for p in group.fsdp_params), None)


def _dtype(*choices: Any) -> str:
    """The first that is given."""
    given = next((dtype for dtype in choices if dtype is not None), None)
    return DTYPES.get(given, str(given))  # type: ignore[arg-type]


def _fsdp2_bytes(group: Any) -> int:
    return sum(p._orig_size.numel() * (p.param_dtype or p.orig_dtype).itemsize for p in group.fsdp_params)


def _unit_mib(sizes: list[int]) -> float:
    """MiB of the largest unit's unsharded weights, in whole hundredths, rounded up: the least cap that makes it."""
    return math.ceil(max(sizes) / 2**20 * 100) / 100


def _read_reshard(groups: list[Any]) -> dict[str, Any]:
    """What becomes of each unit's weights after its forward: freed, or from some unit on to the last kept."""
    freed = [group.post_forward_mesh_info is not None for group in groups]
    kept_last = len(freed) - (freed.index(False) if False in freed else len(freed))
    if not any(freed):
        return {"reshard_after_forward": False, "keep_last_units": 0, "reshard_group_size": 0}
    in_order = freed == [True] * (len(freed) - kept_last) + [False] * kept_last
    over = set()
    for group in groups:
        if group.post_forward_mesh_info is not None:
            size = group.post_forward_mesh_info.shard_mesh_size
            over.add(0 if size == group.mesh_info.shard_mesh_size else size)
    return {
        "reshard_after_forward": True if in_order else "mixed",
        "keep_last_units": kept_last if in_order else "mixed",
        "reshard_group_size": _one_of(over),
    }


def read_fsdp1(root: nn.Module, blocks: list[nn.Module]) -> dict[str, Any]:
    kind = _class(FSDP1, "FullyShardedDataParallel")
    units = units_by_module(root, kind)
    everywhere = kind.fsdp_modules(root)
    per_block = [units.get(id(inside(block)[-1])) for block in blocks]
    around = [unit for unit in per_block if unit is not None and unit._handle is not None]
    if not around or len(around) < len(blocks):
        around = [unit for unit in everywhere if unit._handle is not None]
    distinct = list({id(unit): unit for unit in around}.values())
    strategies = {unit._handle._sharding_strategy.name for unit in distinct}
    freed = {"FULL_SHARD": True, "HYBRID_SHARD": True, "SHARD_GRAD_OP": False, "_HYBRID_SHARD_ZERO2": False}
    flat = [unit._handle.flat_param for unit in everywhere if unit._handle is not None]
    trained = [
        size
        for param in flat
        for size, part in zip(param._numels, param._params or [param] * len(param._numels), strict=True)
        if part is not None and part.requires_grad
    ]
    sharded = {id(p) for param in flat for p in (param, *(param._params or []))}
    others = [p for p in root.parameters() if id(p) not in sharded]
    prefetch = {"BACKWARD_PRE": "pre", "BACKWARD_POST": "post", None: "none"}
    policies = [unit.mixed_precision for unit in distinct]
    stored = [unit._handle._orig_param_dtype for unit in distinct]
    return {
        "knobs": {
            # What torch makes of any strategy on one rank: NO_SHARD.
            "engine": "fsdp1",
            "reshard_after_forward": _one_of(freed.get(name, False) for name in strategies),
            "blocks_per_unit": max(Counter(map(id, around)).values()) if blocks else None,
            "bucket_cap_mb": _unit_mib([_fsdp1_bytes(unit) for unit in distinct]),
            "replicate_degree": _one_of(
                unit._inter_node_pg.size() if "HYBRID" in unit._handle._sharding_strategy.name else 1
                for unit in distinct
            ),
            "reduce_dtype": _one_of(
                _dtype(p.reduce_dtype, p.param_dtype, s) for p, s in zip(policies, stored, strict=True)
            ),
            "limit_all_gathers": _one_of(unit.limit_all_gathers for unit in everywhere),
            "backward_prefetch": _one_of(prefetch[getattr(u.backward_prefetch, "name", None)] for u in everywhere),
            "forward_prefetch": _one_of(unit.forward_prefetch for unit in everywhere),
        },
        "shard_mesh_size": _one_of(
            1 if unit._handle._sharding_strategy.name == "NO_SHARD" else unit.process_group.size() for unit in distinct
        ),
        "param_dtype": _one_of(_dtype(p.param_dtype, s) for p, s in zip(policies, stored, strict=True)),
        "units": dict(Counter(class_name(inside(unit)[-1]) for unit in everywhere)),
        "num_parameters": sum(size for param in flat for size in param._numels) + sum(p.numel() for p in others),
        "num_trainable": sum(trained) + sum(p.numel() for p in others if p.requires_grad),
    }


def _fsdp1_bytes(unit: Any) -> int:
    handle = unit._handle
    return int(sum(handle.flat_param._numels) * handle._fwd_bwd_param_dtype.itemsize)


def describe_device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"type": device.type, "name": platform.machine(), "index": None, "uuid": None}
    found = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": found.name,
        "index": device.index,
        "uuid": str(getattr(found, "uuid", "")) or None,  # torch 2.4 has none
    }


# ---- what went wrong


def not_finite(root: nn.Module) -> list[str]:
    """Trainable parameters with a value on this rank that is not finite."""
    found = []
    for name, parameter in root.named_parameters():
        local = getattr(parameter, "_local_tensor", parameter).detach()
        # A sum, which needs no memory: it is finite only if all values are (or so great that it does not matter).
        if parameter.requires_grad and local.numel() and not math.isfinite(local.sum(dtype=torch.float64).item()):
            found.append(name)
    return found


# The allocators' own words, at the start of the message, as in trials/outcome.py.
_DEVICE_ALLOCATOR = re.compile(
    r"((CUDA|HIP) out of memory\. Tried|(CUDA|HIP)( driver)? error: out of memory"
    r"|Triton Error \[(CUDA|HIP)\]: out of memory|cuDNN error: CUDNN_STATUS_ALLOC_FAILED"
    r"|(CUDA|HIP) error: (CU|HIP)BLAS_STATUS_ALLOC_FAILED|NCCL [\s\S]*(Cuda|HIP) failure (2 )?'out of memory')"
)
_HOST_ALLOCATOR = re.compile(
    r"((\[enforce fail at [^\]]*\] [\s\S]{0,80})?DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|std::bad_alloc\s*$|could not create a memory object)"
)
_IN_A_WORKER = re.compile(r"Caught (\w+) in DataLoader worker process \d+\.\n")


def out_of_memory(error: BaseException | None) -> str | None:
    """`device` or `host`, if `error`, or what it was raised from, says that memory ran out there."""
    while error is not None:
        message = str(error)
        worker = _IN_A_WORKER.match(message)
        if worker:  # torch raises the worker's error again, with the worker's traceback for a message
            message = message.rpartition(f"\n{worker[1]}: ")[2]
        if type(error).__name__ == "OutOfMemoryError":
            return "device"
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return "host"
        if isinstance(error, RuntimeError):
            if _DEVICE_ALLOCATOR.match(message):
                return "device"
            if _HOST_ALLOCATOR.match(message):
                return "host"
        error = error.__cause__
    return None


def _data_bytes() -> int | None:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = re.search(r"VmData:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else None


def _limit_memory(limit_bytes: int) -> None:
    if torch.cuda.device_count():
        device = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()

        def limit() -> None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)

        torch.cuda._lazy_call(limit)  # type: ignore[no-untyped-call]  # when the script first uses CUDA, and not before
    else:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, ((_data_bytes() or 0) + limit_bytes, hard))


if __name__ == "__main__":
    main(sys.argv[1:])
