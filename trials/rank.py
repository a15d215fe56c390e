"""One rank of one trial, from the order to the report: set-up, warm-up, timed blocks, and what is found out beside."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import os
import platform
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from trials import (
    attention,
    composed,
    data,
    doctor,
    facts,
    flops,
    machine,
    matmul_rate,
    memory,
    profiled,
    survey,
    timing,
    wrap,
)
from trials.clock import clock_of
from trials.engines import ShardedModel
from trials.outcome import Outcome, TrialError
from trials.record import COMPOSED, SHORT_MICRO_STEPS, TRAINER, Knobs, RankReport, TrialSpec
from trials.step import Stepper, make_optimizer
from trials.workload import Workload, load_workload

if TYPE_CHECKING:
    from trials.endurance import Endurance


class Rank:
    """One rank of one trial, from the order to the report."""

    def __init__(self, spec: TrialSpec, rank: int, local_rank: int, folder: Path | None = None) -> None:
        self.spec, self.rank, self.local_rank, self.folder = spec, rank, local_rank, folder
        self.report = RankReport(
            rank=rank,
            started_at=time.time(),
            host=socket.gethostname(),
            torch_version=torch.__version__,
            device_name=platform.machine(),
        )
        self.clock = clock_of(spec.device)
        self.limit: memory.CpuLimit | None = None
        self.endurance: Endurance | None = None
        self._phase_started = time.perf_counter()

    def enter(self, phase: str) -> None:
        """Closes the present phase's clock and opens the next one's."""
        now = time.perf_counter()
        spent = self.report.phase_s
        spent[self.report.phase] = spent.get(self.report.phase, 0.0) + now - self._phase_started
        self.report.phase, self._phase_started = phase, now

    def run(self) -> None:
        """Fills the report; failures are raised.

        Raises:
            TrialError: a failure whose outcome is known.
        """
        if self.spec.stage == facts.STAGE:
            self.enter("node")
            self.report.survey = doctor.node_facts()
        if self.spec.device == "cuda":
            torch.cuda.set_device(self.local_rank)
        else:
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        for name, value in survey.device_facts(self.spec.device).items():
            setattr(self.report, name, value)
        # A user's own trainer builds its model itself; here it is only counted, if the job declares it.
        workload = self._load_workload() if self.spec.workload != TRAINER else None
        if self.spec.knobs is None:
            self._survey(workload)
            if self.spec.stage == facts.STAGE:
                self._measure_bandwidth()
        else:
            assert workload is not None
            self._measure(workload, self.spec.knobs)
        self.enter("done")
        self.report.outcome = Outcome.OK.value

    def _load_workload(self) -> Workload:
        arguments = {"seq_len": self.spec.seq_len, **self.spec.model}
        return load_workload(self.spec.workload, arguments, self.spec.import_paths)

    def _survey(self, workload: Workload | None) -> None:
        self.enter("survey")
        found: dict[str, Any] = survey.NOT_DECLARED
        if workload is not None:
            found = survey.survey_model(workload, self.spec.seq_len, self.spec.precision)
        if workload is None or self.spec.data["source"] == TRAINER:
            found |= {"data": "your trainer's own"}
        else:
            dataset = data.make_dataset(self.spec.data, self.spec.seq_len, workload.vocab_size, self.spec.world_size)
            found |= {"num_sequences": len(dataset), "data": dataset.description}
        found["cpus_allowed"] = machine.cpus_allowed()
        if self.spec.device == "cuda":
            found |= survey.cuda_facts() | {"gpu_used_gib": memory.gpu_used_gib()}
        else:
            found |= survey.cpu_peak(self.spec.precision)
        self.report.survey = (self.report.survey or {}) | found
        if self.spec.matmul_micro_batch_size is not None and workload is not None:
            self.enter("matmul_rate")
            self.report.survey["matmul_rate"] = self._matmul_rate(workload, self.spec.matmul_micro_batch_size)

    def _matmul_rate(self, workload: Workload, micro_batch_size: int) -> dict[str, Any] | None:
        spec, found = self.spec, None
        with self._beside_the_measurement("the achievable matmul rate is not known: measuring it"):
            shapes = matmul_rate.model_matmuls(workload, spec.seq_len, micro_batch_size)
            found = matmul_rate.measure(shapes, micro_batch_size * spec.seq_len, spec.precision, spec.device)
        return dataclasses.asdict(found) if found is not None else None

    def _measure_bandwidth(self) -> None:
        assert self.report.survey is not None
        self.enter("bandwidth")
        copy_gb_per_s = doctor.copy_gb_per_s(self.spec.device)
        self.enter("process_group")
        self._init_process_group()
        self.enter("bandwidth")
        unit_mib = max(self.report.survey["block_mib"]) if self.spec.workload != TRAINER else doctor.USUAL_UNIT_MIB
        gathered = doctor.all_gather(unit_mib, self.spec.device, self._slowest)
        self.report.survey["bandwidth"] = dataclasses.asdict(facts.Bandwidth(copy_gb_per_s, *gathered))

    def _init_process_group(self) -> None:
        dist.init_process_group(
            "nccl" if self.spec.device == "cuda" else "gloo",
            timeout=datetime.timedelta(seconds=self.spec.process_group_timeout_s),
        )

    def _measure(self, workload: Workload, knobs: Knobs) -> None:
        spec = self.spec
        self.enter("data")
        dataset = data.make_dataset(spec.data, spec.seq_len, workload.vocab_size, spec.world_size)
        loader = data.make_loader(dataset, knobs, self.rank, spec.world_size, spec.seed, spec.device)
        batches = iter(loader)
        self._prepare_endurance(batches)
        self.enter("process_group")
        self._init_process_group()
        self._set_limit()
        self.enter("build")
        model = self._build(workload, knobs)
        optimizer = make_optimizer(model.module, spec.optimizer, knobs.fused_optimizer)
        stepper = Stepper(model, optimizer, batches, workload.loss, knobs, spec.device)
        attention_backend = self._first_step(stepper)
        if spec.device == "cuda":
            # A run's peak is its steps', not initialising's or compiling's; nor what the allocator still keeps of them.
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.enter("warmup")
        expected_step_s = self._warm_up(stepper)
        self._read_back(model, stepper, loader, optimizer, attention_backend)
        queued = knobs.num_workers * (knobs.prefetch_factor or 0)
        self._time(stepper, knobs, expected_step_s, queued)
        if self.endurance:
            self.endurance.finish(stepper, self.enter)
            self.report.endurance = self.endurance.to_dict()
        self.enter("memory")
        if spec.device == "cuda":
            report = self.report
            report.allocated_bytes, report.reserved_bytes, _ = memory.cuda_peaks()
            if self.endurance:
                report.allocated_bytes, report.reserved_bytes = self.endurance.cuda_peaks()
        else:
            self._track_memory(model.module, optimizer, stepper, knobs)
            if self.endurance:
                self.report.reserved_bytes = max(self.report.reserved_bytes or 0, self.endurance.reserved_bytes())
        is_short = not spec.composed or knobs.grad_accum_steps <= timing.MOST_PROFILED_MICRO_STEPS
        if spec.profile and is_short and self._is_fast_enough(knobs) and self._is_time_to_profile():
            self.enter("profile")
            self._profile(stepper, queued)
        self.enter("flops")
        self._count_flops(workload, knobs)

    def _time(self, stepper: Stepper, knobs: Knobs, expected_step_s: float, queued: int) -> None:
        """The timed blocks, from a loader whose queue holds nothing that was made ahead."""
        spec, report = self.spec, self.report
        step = self.endurance.watched(stepper.step) if self.endurance else stepper.step
        run = timing.whole_steps(step, self.clock)
        batches_per_step = knobs.grad_accum_steps
        short = composed.ShortSteps(stepper, self.clock) if spec.composed else None
        if short is not None:
            run, batches_per_step = short.run, SHORT_MICRO_STEPS
            expected_step_s = self._warm_up_short(short)
        self.enter("drain")
        left_s = self._left_s()
        drained = stepper.drain(queued, timing.DRAIN_SHARE * left_s)
        self.enter("timed")
        if spec.device == "cuda":
            retries_before = memory.cuda_peaks()[2]
        before_s = stepper.data_wait_s
        sustained_steps = math.ceil(timing.QUEUES_TIMED * queued / batches_per_step)
        with self.endurance.phase("train") if self.endurance else contextlib.nullcontext():
            measured = timing.run_blocks(
                run,
                self._slowest_of,
                spec.measure,
                expected_step_s,
                max(spec.measure.min_steps, sustained_steps),
                budget_s=self._left_s(),
            )
        report.data_wait_s = stepper.data_wait_s - before_s
        if short is not None:
            report.timing, report.step_parts_s = COMPOSED, short.whole_step()
            report.data_wait_s = report.step_parts_s["data"] * measured.num_steps
        report.loader_sustained = drained and measured.num_steps >= sustained_steps
        if not report.loader_sustained:
            report.warnings.append(timing.NOT_SUSTAINED)
        if spec.device == "cuda":
            report.alloc_retries = memory.cuda_peaks()[2] - retries_before
        self._record(measured, stepper, knobs)

    def _warm_up_short(self, short: composed.ShortSteps) -> float:
        """Seconds that a short step really takes, slowest rank; shows `short` at what pace to take batches."""
        for _ in range(2):
            started = time.perf_counter()
            short.run(1)
            took_s = time.perf_counter() - started
        short.forget()
        return self._slowest(took_s)

    def _left_s(self, share: float = timing.TIMED_SHARE) -> float:
        """Until this share of the trial's time is over, the same on all ranks; compiling has a time of its own."""
        spent_s = time.time() - self.report.started_at - self.report.phase_s.get("compile", 0.0)
        return max(0.0, share * self.spec.timeout_s - self._slowest(spent_s))

    def _is_time_to_profile(self) -> bool:
        """Whether there is time left to drain the queue once more, and to run a short and a whole step."""
        report = self.report
        step_s = timing.mean_step_s(report.block_times_s, report.block_steps)
        needed_s = self._slowest(report.phase_s["drain"]) + timing.PROFILED_STEPS * step_s
        if needed_s <= self._left_s(1.0):
            return True
        report.warnings.append(
            "no breakdown of the step: too little of measure.trial_timeout_s was left to profile one"
        )
        return False

    def _is_fast_enough(self, knobs: Knobs) -> bool:
        """The same on every rank, since a block's time is the slowest rank's: to profile is collective."""
        report = self.report
        step_s = timing.mean_step_s(report.block_times_s, report.block_steps)
        rate = report.micro_batch_tokens * knobs.grad_accum_steps / step_s
        return self.spec.profile_above is None or rate > self.spec.profile_above

    def _read_back(
        self,
        model: ShardedModel,
        stepper: Stepper,
        loader: DataLoader[Tensor],
        optimizer: torch.optim.Optimizer,
        attention_backend: str,
    ) -> None:
        """What was really applied.

        Raises:
            TrialError: outcome `misapplied`; it is not what was asked for.
        """
        self.report.applied = {
            **wrap.read_back(model),
            **stepper.observed(),
            **data.read_loader(loader, stepper.batches),
            "attention_backend": attention_backend,
            "fused_optimizer": bool(optimizer.defaults["fused"]),
        }
        wrap.compare(stepper.knobs, self.report.applied)

    def _prepare_endurance(self, batches: Iterator[Tensor]) -> None:
        if self.spec.checkpoint_dir is not None:
            from trials.endurance import Endurance  # takes a while to import, and few trials need it

            workers = [worker.pid for worker in getattr(batches, "_workers", [])]
            self.endurance = Endurance(Path(self.spec.checkpoint_dir), self.spec.device, workers)

    def _profile(self, stepper: Stepper, num_queued: int) -> None:
        """After the memory's peak has been taken: the profiler's own is not the config's."""
        trace: Path | None = None
        if self.spec.profile == "trace":
            if self.folder is None:
                self.report.warnings.append("no trace is kept of ranks on a node that does not see the run's folder")
            else:
                trace = self.folder / f"trace-rank-{self.rank}.json.gz"
        if self.limit is not None:
            self.limit.lift()
        with self._beside_the_measurement("no breakdown of the step: the profiled step"):
            found = profiled.profile_step(stepper, num_queued, self.clock.synchronize, self._meet, trace)
            self.report.breakdown = found.to_dict()

    def _count_flops(self, workload: Workload, knobs: Knobs) -> None:
        self.report.hardware_flops_per_token = self.spec.hardware_flops_per_token
        if self.rank == 0 and self.spec.hardware_flops_per_token is None:
            with self._beside_the_measurement("HFU is not known: the FLOP count on meta"):
                self.report.hardware_flops_per_token = flops.counted_flops_per_token(
                    workload, self.spec.seq_len, knobs.activation_checkpointing
                )

    @contextlib.contextmanager
    def _beside_the_measurement(self, what: str) -> Iterator[None]:
        """For what comes after the clock: its failure is told, and the measurement stands."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (a user's model may do anything)
            traceback.print_exc()
            self.report.warnings.append(f"{what} failed: {type(error).__name__}: {error}")

    def _set_limit(self) -> None:
        gib = self.spec.memory_limit_gib
        limit_bytes = None if gib is None else round(gib * memory.GIB)
        if self.spec.device == "cuda":
            memory.refuse_a_busy_gpu()
            memory.limit_cuda(limit_bytes)
        else:
            self.limit = memory.CpuLimit(limit_bytes)
            if self.endurance:
                self.endurance.base_bytes = self.limit.base_bytes

    def _build(self, workload: Workload, knobs: Knobs) -> ShardedModel:
        spec = self.spec
        mesh = init_device_mesh(spec.device, (spec.world_size,))
        device = torch.device("cuda", self.local_rank) if spec.device == "cuda" else torch.device("cpu")
        return wrap.build(workload, knobs, spec.precision, mesh, device, spec.seed)

    def _first_step(self, stepper: Stepper) -> str:
        """Compiles, if asked; else shows which attention kernel runs. The knob's value, as far as it was seen.

        Raises:
            TrialError: outcome `timeout`; compiling took longer than its own limit.
        """
        asked = stepper.knobs.attention_backend
        if stepper.knobs.compile:
            self.enter("compile")
            started = time.perf_counter()
            stepper.step()
            self.clock.synchronize()
            took_s, limit_s = self._slowest(time.perf_counter() - started), self.spec.compile_timeout_s
            if took_s > limit_s:
                raise TrialError(
                    Outcome.TIMEOUT, f"compiling took {took_s:.0f} s; measure.compile_timeout_s = {limit_s:.0f}"
                )
            return asked
        self.enter("first_step")
        with attention.Watch(self.spec.seq_len) as watch:
            self._watched(stepper.step)
        self.report.attention_backend = watch.used
        if watch.used == "math" and asked == "auto":
            self.report.warnings.append(
                f"attention writes out {self.spec.seq_len} x {self.spec.seq_len} scores: before any other setting, "
                "call torch's scaled_dot_product_attention, in a form that its fused kernels take"
            )
        return asked if asked == "auto" else watch.used

    def _watched(self, steps: Callable[[], None]) -> None:
        """Runs untimed steps, under the memory sampler on a CPU."""
        if self.limit is not None:
            self.limit.watch(steps)
        else:
            steps()

    def _warm_up(self, stepper: Stepper) -> float:
        """Seconds of the last warm-up step, slowest rank; the first steps also show the memory peak."""
        last_s = 0.0

        def steps() -> None:
            nonlocal last_s
            for _ in range(self.spec.num_warmup_steps):
                started = time.perf_counter()
                stepper.step()
                self.clock.synchronize()
                last_s = time.perf_counter() - started

        self._watched(steps)
        return self._slowest(last_s)

    def _record(self, measured: timing.Timing, stepper: Stepper, knobs: Knobs) -> None:
        report = self.report
        report.micro_batch_tokens = knobs.micro_batch_size * self.spec.seq_len
        report.num_steps = measured.num_steps
        report.block_times_s, report.block_steps = measured.block_times_s, measured.block_steps
        report.own_step_times_s = measured.own_step_times_s
        report.drift = timing.drift(measured.block_times_s)
        report.losses = stepper.mean_losses(self._mean)
        if not all(math.isfinite(loss) for loss in report.losses):
            step = next(i for i, loss in enumerate(report.losses) if not math.isfinite(loss))
            which = f"of step {step}" if step else "of the first step (no update yet: initial values or data)"
            raise TrialError(Outcome.WRONG_NUMERICS, f"the loss {which} is {report.losses[step]}")

    def _track_memory(self, model: nn.Module, optimizer: torch.optim.Optimizer, stepper: Stepper, knobs: Knobs) -> None:
        assert self.limit is not None
        report = self.report
        if self.spec.tracked_bytes is not None:
            report.allocated_bytes = self.spec.tracked_bytes
        elif knobs.engine == "fsdp1":
            report.warnings.append(
                "fsdp1 on a CPU: the peak of live tensors is not known (MemTracker cannot follow it)"
            )
        else:
            self.limit.lift()  # the tracker's own bookkeeping is not the config's
            # Two micro-steps show what any number would: gradients absent, then gradients held.
            micro_steps = min(knobs.grad_accum_steps, 2)
            with self._beside_the_measurement("the peak of live tensors is not known: MemTracker"):
                report.allocated_bytes = memory.tracked_peak_bytes(
                    model, optimizer, lambda reset: stepper.step(micro_steps, reset)
                )
        # A small model may live in what the process had free before: it takes its tensors all the same.
        report.reserved_bytes = max(self.limit.peak_growth_bytes, report.allocated_bytes or 0)

    def _meet(self) -> None:
        self._slowest(0.0)

    def _slowest(self, seconds: float) -> float:
        return self._slowest_of([seconds])[0]

    def _slowest_of(self, seconds: list[float]) -> list[float]:
        if self.limit is not None:
            self.limit.note()  # between blocks: a heap that creeps up shows here
        values = torch.tensor(seconds, dtype=torch.float64, device=self.spec.device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        found: list[float] = values.tolist()
        return found

    def _mean(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values / self.spec.world_size
