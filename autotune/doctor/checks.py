"""The checks of `autotune doctor`, in the order of the screen: each a function, each on the list by its decorator."""

from __future__ import annotations

import importlib.metadata
import statistics
from collections import Counter

from packaging.requirements import Requirement

from autotune.cluster.interpreter import interpreter_of
from autotune.cluster.nodes import describe
from autotune.doctor.findings import Examination, Finding, NodeFacts, check, node_check
from autotune.hardware import Peak, peak_for
from autotune.refusals import STATE_BYTES
from autotune.report.text import gib, percent
from trials.facts import FOREIGN_USE_GIB, GIB, MIB

GET_TORCH = "install the build for its driver: https://pytorch.org/get-started/locally"
NCCL_SHM_MIB = 1024
"""What NVIDIA starts its own containers with (--shm-size=1g): ranks of a node talk to each other through it."""
BUSY_BELOW = 0.9
"""CPU time / wall time of a rank that does nothing but multiply: under this, others use its CPU."""
SLOW_RANK = 0.95
"""Of the median rank's matmul rate; healthy GPUs of a node lie within this (github.com/stas00/ml-engineering)."""
LEAST_OF_PEAK = 0.5
"""MI300X's share of its peak, the least of what is published; NVIDIA's reach 0.73 and more."""
FILES_PER_PROCESS, FILES_PER_WORKER, FILES_PER_PEER = 256, 16, 8
"""File descriptors: Python and torch; a loader worker's pipes and semaphores; gloo's pair with another rank."""
MAPPED_GIB = 8.0
"""That a CPU rank maps beside what it uses: torch's libraries and threads. CUDA maps more than there is memory."""
TASKS_OF_RAY, TASKS_PER_RANK, TASKS_PER_WORKER = 400, 64, 8
"""Processes and threads; Ray's own grow with the CPUs."""


# --- what there is ---------------------------------------------------------------------------------------------


@check
def job(exam: Examination) -> Finding | None:
    """What is examined."""
    cluster = exam.job.cluster
    nodes = f"{cluster.nodes_per_trial} nodes x " if cluster.nodes_per_trial > 1 else ""
    ranks = f"{nodes}{_count(cluster.ranks_per_node, 'rank')} on {exam.device}, {exam.job.training.precision}"
    if exam.is_default:
        return Finding("note", "job", f"none given: the model shapes of the shipped {exam.job_name}, {ranks}")
    return Finding("ok", "job", f"{exam.job_name}: {ranks}")


@check
def model(exam: Examination) -> Finding | None:
    if exam.survey is None:
        return None
    facts = exam.survey.study.model
    if exam.job.model is None:
        return Finding("ok", "model", "your trainer's own: parameters and FLOPs are counted in its trials")
    flops = f"{facts.flops_per_token / 1e6:,.1f} MFLOP per token" if facts.flops_per_token else "FLOPs not known"
    size = f"{facts.num_params / 1e6:,.1f} M parameters, {exam.survey.num_blocks} blocks, {flops}"
    return Finding("ok", "model", f"{size}; data: {exam.survey.data}")


@check
def ray_cluster(exam: Examination) -> Finding | None:
    """What Ray has, where it is another's: one that is started here has what the machine has."""
    if exam.job.cluster.address == "local" or not exam.cluster:
        return None
    nodes = list(exam.cluster)
    return Finding("ok", "Ray", f"{len(nodes)} nodes at {exam.job.cluster.address}: {describe(nodes)}")


@node_check
def devices(exam: Examination, node: NodeFacts) -> Finding | None:
    wanted, gpus = exam.job.cluster.ranks_per_node, node.torch.gpus
    if exam.device == "cpu":
        return Finding("ok", "devices", f"{node.torch.cpu_name}, {node.machine.cpus_allowed} CPUs allowed")
    if not gpus:
        return Finding("problem", "devices", f"no GPU that torch {node.torch.version} can use", _no_gpu_because(node))
    kinds = Counter((gpu.name, gpu.sm_count, gpu.memory_gib, gpu.capability) for gpu in gpus)
    listed = "; ".join(
        f"{count} x {name} ({memory_gib:.1f} GiB, {sm_count} multiprocessors, compute capability {capability})"
        for (name, sm_count, memory_gib, capability), count in kinds.items()
    )
    if len(gpus) < wanted:
        is_mig = any(" MIG " in gpu.name for gpu in gpus)
        seen = " (of MIG slices, most drivers show a process one)" if is_mig else ""
        return Finding(
            "problem",
            "devices",
            f"cluster.ranks_per_node = {wanted}, and a process sees {len(gpus)} GPU(s){seen}: {listed}",
            f"set cluster.ranks_per_node to {len(gpus)}, or check CUDA_VISIBLE_DEVICES and the container's --gpus",
        )
    if len(kinds) > 1:
        return Finding("note", "devices", listed, "GPUs differ: a step takes as long as on the slowest of them")
    return Finding("ok", "devices", listed)


def _no_gpu_because(node: NodeFacts) -> str:
    facts = node.torch
    if not node.machine.has_gpu:
        return "run it on a node with a GPU (a container needs --gpus all), or set cluster.device: cpu"
    if not facts.gpu_build:
        return f"a GPU is here, but torch {facts.version} is a CPU build: {GET_TORCH}"
    return f"{facts.problem or 'no device'}: update the driver to one for {facts.gpu_build}, or torch: {GET_TORCH}"


@check
def gpus_are_free(exam: Examination) -> Finding | None:
    """A trial refuses a GPU that others use: their memory would be taken for its config's."""
    used = [(rank, rank.gpu_used_gib) for rank in exam.ranks if rank.gpu_used_gib is not None]
    if not used:
        return None
    busy = [f"rank {rank.rank} on {rank.host} {gib(used_gib)}" for rank, used_gib in used if used_gib > FOREIGN_USE_GIB]
    if busy:
        value = f"in use by others: {', '.join(busy)}"
        return Finding("problem", "GPU memory", value, "end what `nvidia-smi` lists, or choose other GPUs")
    return Finding("ok", "GPU memory", f"free but for {gib(max(used_gib for _, used_gib in used))} of the ranks' own")


@node_check
def without_a_gpu(exam: Examination, node: NodeFacts) -> Finding | None:
    """What it means to tune on a CPU."""
    if exam.device == "cuda":
        return None
    means = (
        "ranks are CPU processes, collectives go over gloo, and MFU is against a matmul rate probed on this CPU: "
        "figures compare configs on this machine, and do not transfer to GPUs"
    )
    if node.torch.gpus:
        return Finding("note", "no GPU used", f"the job says cpu: {means}", "set cluster.device: cuda to use the GPUs")
    if node.machine.has_gpu:
        return Finding("note", "no GPU used", means, _no_gpu_because(node))
    return Finding("note", "no GPU", means, "tune on the kind of node that will train")


@node_check
def dtype(exam: Examination, node: NodeFacts) -> Finding | None:
    precision = exam.job.training.precision
    if precision == "fp32":
        return Finding("ok", "dtype", "fp32: everywhere")
    if exam.device == "cpu":
        if node.torch.cpu_has_bf16:
            return Finding("ok", "dtype", "bf16: this CPU multiplies it in hardware")
        value = "bf16 is emulated by this CPU (no AVX512-BF16, no AMX): slower than fp32"
        return Finding("note", "dtype", value, "set training.precision: fp32")
    lacking = sorted({gpu.name for gpu in node.torch.gpus if not gpu.has_bf16})
    if lacking:
        return Finding(
            "problem",
            "dtype",
            f"training.precision = bf16, which {', '.join(lacking)} has not in hardware: torch would emulate it",
            "set training.precision: fp32, or use GPUs of compute capability 8.0 (A100) or later",
        )
    return Finding("ok", "dtype", "bf16 in hardware") if node.torch.gpus else None


# --- how fast it is --------------------------------------------------------------------------------------------


@node_check
def peak(exam: Examination, node: NodeFacts) -> Finding | None:
    known = _peak(exam, node)
    if known is None:
        return None
    if known.tflops_per_s is None:
        how = f"set cluster.peak_tflops_per_s, the dense {known.dtype} peak of a rank; tokens/s decides as always"
        return Finding("note", "peak", known.source, how)
    return Finding("ok", "peak", f"{known.tflops_per_s:.4g} TFLOP/s per rank in {known.dtype}: {known.source}")


def _peak(exam: Examination, node: NodeFacts) -> Peak | None:
    if exam.survey is not None:
        return exam.survey.study.peak
    given, precision = exam.job.cluster.peak_tflops_per_s, exam.job.training.precision
    if exam.device == "cuda" and node.torch.gpus:
        gpu = node.torch.gpus[0]
        return peak_for(gpu.name, precision, sm_count=gpu.sm_count, given_tflops_per_s=given)
    return None  # a CPU's is probed by ranks


@check
def achievable(exam: Examination) -> Finding | None:
    """The matmul rate on the model's own shapes, beside the peak."""
    ranks = [rank.matmul for rank in exam.ranks if rank.matmul is not None]
    if not ranks:
        return None
    middle = sorted(ranks, key=lambda rate: rate.model_tflops_per_s)[len(ranks) // 2]
    best = max(ranks, key=lambda rate: rate.best_tflops_per_s)
    known = exam.survey.study.peak.tflops_per_s if exam.survey is not None else None
    of_peak = f" = {percent(middle.model_tflops_per_s / known)} of the peak" if known else ""
    value = (
        f"{middle.model_tflops_per_s:.4g} TFLOP/s per rank{of_peak} in the matmuls of {middle.tokens:,} tokens"
        f"{', cut to sizes that a CPU multiplies in reasonable time' if middle.is_cut else ''}; "
        f"best {best.best_tflops_per_s:.4g} at {_shape(best.best_shape)}, "
        f"worst of the model's {middle.worst_tflops_per_s:.4g} at {_shape(middle.worst_shape)}"
    )
    if exam.device == "cuda" and known and best.best_tflops_per_s > 1.02 * known:
        how = "the peak is too low: MFU could pass 1. Set cluster.peak_tflops_per_s from the device's data sheet"
        return Finding("note", "achievable", value, how)
    if exam.device == "cuda" and known and best.best_tflops_per_s < LEAST_OF_PEAK * known:
        how = "see `nvidia-smi -q -d CLOCK,POWER,PERFORMANCE`: clocks, power cap, heat; and what else uses the device"
        return Finding("note", "achievable", value, how)
    return Finding("ok", "achievable", value)


def _shape(shape: tuple[int, int, int]) -> str:
    return " x ".join(str(side) for side in shape)


@check
def even_ranks(exam: Examination) -> Finding | None:
    """Whether one rank is slower than the others: each step would wait for it."""
    rates = [(rank, rank.matmul.model_tflops_per_s) for rank in exam.ranks if rank.matmul is not None]
    if exam.device == "cpu" or len(rates) < 2:
        return None  # CPU ranks are probed by CPU time, which does not see who is kept waiting
    middle = statistics.median(rate for _, rate in rates)
    slow = [(rank, rate / middle) for rank, rate in rates if rate < SLOW_RANK * middle]
    if slow:
        named = ", ".join(f"rank {rank.rank} on {rank.host} at {percent(share)}" for rank, share in slow)
        how = "look at its clocks, heat and power cap before you train on it: each step waits for it"
        return Finding("note", "slow rank", f"{named} of the median rank's matmul rate", how)
    return Finding("ok", "even ranks", f"all {len(rates)} within {percent(1 - SLOW_RANK)} of the median")


@check
def quiet(exam: Examination) -> Finding | None:
    """Whether the CPUs were the ranks' own while they measured."""
    shares = [rank.matmul.busy_share for rank in exam.ranks if rank.matmul and rank.matmul.busy_share is not None]
    if not shares:
        return None
    value = f"ranks that only multiplied had the CPU {percent(min(shares))} of the time"
    if min(shares) < BUSY_BELOW:
        how = "others use these CPUs, and times will scatter: end them, or give the run CPUs of its own (taskset)"
        return Finding("note", "quiet", value, how)
    return Finding("ok", "quiet", value)


@check
def copy_bandwidth(exam: Examination) -> Finding | None:
    rates = [rank.bandwidth.copy_gb_per_s for rank in exam.ranks if rank.bandwidth is not None]
    if not rates:
        return None
    where = "the GPU's memory" if exam.device == "cuda" else "host memory, all ranks at once"
    return Finding("ok", "copy", f"{min(rates):,.4g} GB/s per rank, read + written, in {where} (slowest rank)")


@check
def all_gather_bandwidth(exam: Examination) -> Finding | None:
    found = [rank.bandwidth for rank in exam.ranks if rank.bandwidth is not None]
    if not found:
        return None
    first, backend = found[0], "NCCL" if exam.device == "cuda" else "gloo"
    if first.all_gather_gb_per_s is None:
        return Finding("note", "all-gather", "one rank: nothing to gather, and nothing is learnt about communication")
    num_ranks = exam.job.cluster.world_size
    value = f"{first.all_gather_gb_per_s:.4g} GB/s bus bandwidth, {num_ranks} ranks over {backend}"
    return Finding("ok", "all-gather", f"{value}, {first.all_gather_mib:.3g} MiB: the largest block, one FSDP unit")


# --- what is allowed -------------------------------------------------------------------------------------------


@node_check
def cpus(exam: Examination, node: NodeFacts) -> Finding | None:
    machine, ranks = node.machine, exam.job.cluster.ranks_per_node
    quota = f"{machine.cpu_quota:g}" if machine.cpu_quota is not None else "none"
    by = f"affinity {machine.cpus_affinity}, cgroup quota {quota}"
    value = f"{machine.cpus_allowed} of {machine.cpus_online} allowed ({by})"
    if machine.cpus_allowed < ranks:
        how = f"allow at least {ranks} CPUs (taskset, --cpus), or set cluster.ranks_per_node to {machine.cpus_allowed}"
        if exam.device == "cpu":
            return Finding("problem", "CPUs", f"{value}: fewer than the {ranks} ranks", how)
        return Finding("note", "CPUs", f"{value}: fewer than the {ranks} ranks, which would wait for each other", how)
    if machine.cpu_quota is not None and machine.cpu_quota < machine.cpus_affinity:
        how = "a quota throttles in bursts, which steps feel: CPUs of one's own (--cpuset-cpus, taskset) are steadier"
        return Finding("note", "CPUs", value, how)
    if machine.cpus_allowed < 2 * ranks and _most(exam, "num_workers"):
        how = "allow more CPUs, or expect num_workers: 0 to win"
        return Finding("note", "CPUs", f"{value}: loader workers share them with {ranks} ranks", how)
    return Finding("ok", "CPUs", value)


@node_check
def memory(exam: Examination, node: NodeFacts) -> Finding | None:
    """Host memory, which is the device's on a CPU."""
    machine, ranks, limit_gib = node.machine, exam.job.cluster.ranks_per_node, exam.job.cluster.memory_limit_gib
    cgroup = gib(machine.cgroup_memory_gib) if machine.cgroup_memory_gib is not None else "none"
    value = f"{gib(machine.memory_gib)}, {gib(machine.memory_available_gib)} available, cgroup limit {cgroup}"
    if exam.device == "cuda":
        return Finding("ok", "host memory", value)
    if limit_gib is None:
        how = (
            "set cluster.memory_limit_gib: without it, what ends a config that is too large is the kernel's OOM killer"
        )
        return Finding("note", "host memory", value, how)
    if limit_gib * ranks > machine.usable_memory_gib:
        most_gib = machine.usable_memory_gib / ranks
        return Finding(
            "problem",
            "host memory",
            f"{value}: {ranks} ranks of cluster.memory_limit_gib = {limit_gib} do not fit; the kernel would end them "
            "before they reach it",
            f"set cluster.memory_limit_gib below {most_gib:.2f}, or allow more memory (--memory)",
        )
    return Finding("ok", "host memory", f"{value}; {ranks} ranks of {gib(limit_gib)} fit")


@node_check
def states_fit(exam: Examination, node: NodeFacts) -> Finding | None:
    """Whether weights, gradients and the optimizer's states alone leave room for anything else."""
    if exam.survey is None or exam.job.model is None:
        return None
    study, engines = exam.survey.study, exam.job.training.engines
    num_shards = 1 if engines == ("ddp",) else study.world_size
    states_gib = STATE_BYTES * study.model.num_params / num_shards / GIB
    limit_gib = study.limits.limit_gib or node.machine.usable_memory_gib / exam.job.cluster.ranks_per_node
    over = "" if num_shards == 1 else f", sharded over {num_shards} ranks"
    value = f"weights, gradients and AdamW take about {gib(states_gib)} per rank{over}, of {gib(limit_gib)}"
    offloaded = bool(exam.job.baseline.cpu_offload or True in (exam.job.space.cpu_offload or ()))
    if states_gib > limit_gib and not offloaded:
        how = "use more ranks or nodes for each trial, or a smaller model; nothing else can make it fit"
        return Finding("problem", "states", value, how)
    return Finding("ok", "states", value)


@node_check
def shared_memory(exam: Examination, node: NodeFacts) -> Finding | None:
    """/dev/shm: loader workers hand batches over in it, and NCCL's ranks of one node talk through it."""
    how = "start the container with --shm-size=1g or more (Kubernetes: an emptyDir with medium: Memory at /dev/shm)"
    workers, free_mib = _most(exam, "num_workers"), node.machine.shm_free_mib
    if free_mib is None:
        return Finding("problem", "/dev/shm", "missing, or not writable: loader workers need it", how)
    batch_mib = _most(exam, "micro_batch_size") * ((exam.job.seq_len or 0) + 1) * 8 / MIB
    needed_mib = exam.job.cluster.ranks_per_node * workers * (_most(exam, "prefetch_factor") + 1) * batch_mib
    value = f"{gib(free_mib / 1024)} free; loaders may hold {needed_mib:.3g} MiB of batches"
    if needed_mib > free_mib:
        return Finding("problem", "/dev/shm", value, f"{how}, or search fewer workers (space.num_workers)")
    if exam.device == "cuda" and exam.job.cluster.ranks_per_node > 1 and free_mib < NCCL_SHM_MIB:
        return Finding("note", "/dev/shm", f"{value}, and NCCL's ranks share it", how)
    return Finding("ok", "/dev/shm", value)


@node_check
def open_files(exam: Examination, node: NodeFacts) -> Finding | None:
    of_workers = _most(exam, "num_workers") * (FILES_PER_WORKER + _most(exam, "prefetch_factor"))
    needed = FILES_PER_PROCESS + of_workers + FILES_PER_PEER * exam.job.cluster.world_size
    return _limit(node, "nofile", "open files", needed, "ulimit -n 65536 (docker: --ulimit nofile=65536)")


@node_check
def tasks(exam: Examination, node: NodeFacts) -> Finding | None:
    """Processes and threads, by the user's limit and the cgroups'."""
    machine, ranks = node.machine, exam.job.cluster.ranks_per_node
    needed = TASKS_OF_RAY + ranks * (TASKS_PER_RANK + TASKS_PER_WORKER * _most(exam, "num_workers"))
    if machine.max_tasks is not None and machine.max_tasks < needed:
        value = f"the cgroup's pids.max is {machine.max_tasks}, and a trial with Ray takes up to {needed}"
        return Finding("problem", "processes", value, "raise it (docker: --pids-limit; systemd: TasksMax)")
    if machine.is_root:
        return Finding("ok", "processes", f"cgroup limit {machine.max_tasks or 'none'}; root has no other")
    return _limit(node, "nproc", "processes", needed, "ulimit -u unlimited, or LimitNPROC of the service")


def _limit(node: NodeFacts, name: str, shown: str, needed: int, how: str) -> Finding:
    limit = node.machine.limits[name]
    if limit is not None and limit < needed:
        return Finding("problem", shown, f"RLIMIT_{name.upper()} is {limit}, and a rank may need {needed}", how)
    return Finding("ok", shown, f"RLIMIT_{name.upper()} {'none' if limit is None else limit}")


@node_check
def address_space(exam: Examination, node: NodeFacts) -> Finding | None:
    """RLIMIT_AS counts what is mapped, RLIMIT_DATA is how a CPU rank is limited: neither may be in the way."""
    limits, told = node.machine.limits, "RLIMIT_{} is {}, by which configs would die instead of by the job's limit"
    needs_gib = 0.0
    if exam.device == "cpu":
        needs_gib = exam.job.cluster.memory_limit_gib or node.machine.usable_memory_gib
    for name, also_gib in (("as", MAPPED_GIB), ("data", 0.0)):
        limit = limits[name]
        if limit is not None and (exam.device == "cuda" or limit / GIB < needs_gib + also_gib):
            option = {"as": "-v", "data": "-d"}[name]
            how = f"ulimit {option} unlimited (Slurm: PropagateResourceLimitsExcept={name.upper()})"
            return Finding("problem", "address space", told.format(name.upper(), gib(limit / GIB)), how)
    shown = ", ".join(f"RLIMIT_{name.upper()} {_amount(limits[name])}" for name in ("as", "data"))
    return Finding("ok", "address space", shown)


@node_check
def locked_memory(exam: Examination, node: NodeFacts) -> Finding | None:
    """NCCL registers its buffers with an InfiniBand card, which locks them."""
    limit = node.machine.limits["memlock"]
    if exam.device == "cpu" or exam.job.cluster.nodes_per_trial == 1:
        return None
    if limit is not None:
        how = "ulimit -l unlimited (docker: --ulimit memlock=-1), where nodes are connected by InfiniBand or RoCE"
        return Finding("note", "locked memory", f"RLIMIT_MEMLOCK {_amount(limit)}", how)
    return Finding("ok", "locked memory", "RLIMIT_MEMLOCK none")


def _amount(limit_bytes: int | None) -> str:
    return "none" if limit_bytes is None else gib(limit_bytes / GIB)


# --- what is installed -----------------------------------------------------------------------------------------


@node_check
def compiler(exam: Examination, node: NodeFacts) -> Finding | None:
    """torch.compile calls a C++ compiler: on a CPU for the kernels, on a GPU for what launches them."""
    if not (exam.job.baseline.compile or True in (exam.job.space.compile or ())):
        return None
    if node.machine.compiler is None:
        how = "install g++ (apt install g++, or conda's gxx), or take compile out of the job"
        return Finding("problem", "compiler", "compile is searched, and there is no C++ compiler on PATH", how)
    return Finding("ok", "compiler", node.machine.compiler)


@node_check
def versions(exam: Examination, node: NodeFacts) -> Finding | None:
    machine, torch = node.machine, node.torch
    shown = {"python": machine.python} | machine.versions
    shown |= {"CUDA or ROCm": torch.gpu_build or "none in this torch"}
    shown |= {"NCCL": torch.nccl_version, "driver": torch.driver_version}
    value = ", ".join(f"{name} {version}" for name, version in shown.items() if version)
    interpreter = interpreter_of(exam.job.cluster)
    if interpreter.is_foreign:
        # The user's own, of which nothing is asked but what the ranks have just done in it.
        return Finding("ok", "versions", f"{' '.join([*interpreter.prefix, interpreter.python or 'python'])}: {value}")
    wrong = _out_of_range(machine.versions)
    if wrong:
        how = "install fsdp-autotune anew there, with the versions that it asks for"
        return Finding("problem", "versions", f"{'; '.join(wrong)} (all: {value})", how)
    return Finding("ok", "versions", value)


def _out_of_range(installed: dict[str, str]) -> list[str]:
    """Of the packages that fsdp-autotune itself asks for in any case."""
    wrong = []
    for text in importlib.metadata.requires("fsdp-autotune") or []:
        wanted = Requirement(text)
        version = installed.get(wanted.name)
        if version is not None and wanted.marker is None and not wanted.specifier.contains(version, prereleases=True):
            wrong.append(f"{wanted.name} {version} is not {wanted.specifier}")
    return wrong


def _most(exam: Examination, knob: str) -> int:
    """The largest value that a trial may have of a knob."""
    if exam.survey is not None:
        space = exam.survey.space
        values = [*space.candidates.get(knob, ()), getattr(space.baseline, knob)]
    else:
        asked = getattr(exam.job.space, knob)
        values = [*(asked if isinstance(asked, tuple) else ()), getattr(exam.job.baseline, knob)]
    return max((value for value in values if value is not None), default=0)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
