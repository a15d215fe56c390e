"""The first job of a run, which measures no config: model sizes, device, peak. Kept in study.yaml for a resumed run."""

from __future__ import annotations

import statistics
import uuid
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter

from autotune.canonical import Facts
from autotune.cluster.gang import GangResult
from autotune.cluster.runner import SingleRunner
from autotune.errors import InfrastructureError, UserError
from autotune.hardware import Peak, peak_for
from autotune.job import Job
from autotune.job_file import UNPARSABLE
from autotune.measuring import MAX_RETRIES, make_spec
from autotune.preflight.shape import ModelShape, of_surveyed
from autotune.report.text import SIMULATED, gib
from autotune.rows import Limits, ModelFacts, Study
from autotune.space import SearchSpace
from trials.files import write_whole
from trials.outcome import INFRASTRUCTURE, Outcome

FILE_NAME = "study.yaml"
T = TypeVar("T")
ABOUT_THE_MACHINE = ("machine", "torch", "gpu_used_gib", "bandwidth")
"""What `autotune doctor` asks of a survey; no part of a study."""
_SURVEYED = ("num_blocks", "block_mib", "cpus_allowed")


@dataclass(frozen=True)
class Survey:
    """What a run knows before its first trial."""

    study: Study
    space: SearchSpace
    device_name: str
    num_blocks: int
    data: str
    """What is trained on, for people."""
    shape: ModelShape | None
    """For the closed forms; None: they do not know a model of its kind."""
    cpu_share: float = 1.0
    """Of a rank's time, that it had its CPUs for itself when they were probed; ranks wait for each other, so the least
    of them. 1 on a GPU."""

    def describe(self) -> str:
        """For the screen: model, batch, device, peak and limit, with units."""
        job, peak, limits, model = self.study.job, self.study.peak, self.study.limits, self.study.model
        known = f"{peak.tflops_per_s:.3g} TFLOP/s per rank ({peak.source})" if peak.tflops_per_s else peak.source
        if self.study.achievable_tflops_per_s:
            known += f"; achievable in the model's matmuls: {self.study.achievable_tflops_per_s:.3g} TFLOP/s"
        limit = "none"
        if limits.limit_gib:
            usable = gib(limits.limit_gib * (1 - limits.headroom))
            limit = f"{gib(limits.limit_gib)} per rank, {usable} usable ({limits.headroom:.0%} headroom)"
        target = job.batch.target_world_size
        return (
            (f"  SIMULATED, nothing is measured: {self.study.simulated}\n" if self.study.simulated else "")
            + f"  model: {self._describe_model()}\n"
            f"  global batch: {job.batch_text}\n"
            f"  data: {self.data}\n"
            f"  device: {self.device_name}, {_ranks(job)}; peak: {known}\n"
            f"  memory limit: {limit}"
            + (
                f"\n  trials run on {self.study.world_size} ranks, the real run on {target}: sharded states take "
                "another share of a rank's memory there"
                if target != self.study.world_size
                else ""
            )
            + ("\n  losses are not compared with the baseline's: the model has dropout" if model.is_random else "")
            + "".join(f"\n  {note}" for note in self.space.notes)
        )

    def _describe_model(self) -> str:
        model = self.study.model
        if self.study.job.model is None:
            return "your trainer's own: parameters and FLOPs are counted in its trials"
        flops = f"{model.flops_per_token / 1e6:.1f} MFLOP per token" if model.flops_per_token else "FLOPs not known"
        return (
            f"{model.num_params / 1e6:.1f} M parameters, {self.num_blocks} blocks, {flops} [{model.flops_convention}]"
        )


def _ranks(job: Job) -> str:
    cluster = job.cluster
    nodes = f" on {cluster.nodes_per_trial} nodes" if cluster.nodes_per_trial > 1 else ""
    at_once = f", {cluster.parallel_trials} trials at once while exploring" if cluster.parallel_trials > 1 else ""
    return f"{cluster.world_size} ranks{nodes}{at_once}"


def take_survey(job: Job, runner: SingleRunner, out: Path) -> Survey:
    """Runs the survey and writes study.yaml.

    Raises:
        UserError: the workload or its data are wrong.
        InfrastructureError: it failed for another reason.
    """
    content = ask_ranks(job, runner, out / "logs" / "survey", job.measure.trial_timeout_s)
    survey = survey_from_content(job, runner, content)
    content["space_hash"] = survey.space.hash
    content["candidates"] = {name: list(values) for name, values in survey.space.candidates.items()}
    content["baseline"] = survey.space.baseline.to_dict()
    write_whole(out / FILE_NAME, yaml.safe_dump(content, sort_keys=False))
    return survey


def ask_ranks(job: Job, runner: SingleRunner, folder: Path, timeout_s: float) -> dict[str, Any]:
    """Runs the survey, with its ranks' output in `folder`; what study.yaml keeps of it.

    Raises:
        UserError: the workload or its data are wrong.
        InfrastructureError: it failed for another reason.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for _ in range(MAX_RETRIES + 1):
        result = runner.run(make_spec(job, runner, None, "survey", -1), folder, timeout_s)
        if result.outcome not in INFRASTRUCTURE:
            break
    if result.outcome is Outcome.INVALID:
        raise UserError(result.reason, f"the traceback is in {folder}/rank-{result.failed_rank}.log")
    if result.outcome is not Outcome.OK:
        raise InfrastructureError(
            f"the survey of model and machine failed ({result.outcome}): {result.reason}", f"see {folder}"
        )
    return survey_content(job, runner, result)


def load_survey(job: Job, runner: SingleRunner, out: Path) -> Survey:
    """The survey of a run that is resumed: its peak is that of its earlier trials.

    Raises:
        UserError: study.yaml is not ours, or the job now makes another space, or the ranks are others.
    """
    path = out / FILE_NAME
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        survey = survey_from_content(job, runner, content)
        space_hash, world_size = content["space_hash"], content["world_size"]
        candidates = dict(content["candidates"])
    except UserError:
        raise  # the job's own
    except (*UNPARSABLE, KeyError, TypeError, OSError) as error:
        raise UserError(f"{path}: not a study.yaml of fsdp-autotune: {error}", "start anew without --resume") from error
    if survey.space.hash != space_hash:
        now, then = survey.space.candidates, candidates
        different = [
            f"{name}: {then.get(name)} -> {list(now[name])}" for name in now if list(now[name]) != then.get(name)
        ]
        why = "; ".join(different) or "the batch, the baseline or fsdp-autotune itself changed"
        raise UserError(
            f"{path}: the search space is another one now: {why}",
            "an index into changed candidates would mean another value: start anew without --resume",
        )
    if world_size != runner.world_size:
        raise UserError(
            f"{path}: measured on {world_size} ranks, now {runner.world_size}", "start anew without --resume"
        )
    return survey


def survey_content(job: Job, runner: SingleRunner, result: GangResult) -> dict[str, Any]:
    """What study.yaml keeps of a survey that ended well."""
    found = result.reports[0].survey
    assert found is not None
    device_name = result.reports[0].device_name
    probes = [report.survey.get("cpu_peak_tflops_per_s") for report in result.reports.values() if report.survey]
    known = [probe for probe in probes if probe]
    peak = peak_for(
        device_name,
        job.training.precision,
        sm_count=found.get("sm_count"),
        given_tflops_per_s=job.cluster.peak_tflops_per_s,
        cpu_probe_tflops_per_s=sum(known) / len(known) if known else None,
    )
    if runner.simulated:
        peak = replace(peak, source=f"{SIMULATED}: {peak.source}")
    rates = [report.survey.get("matmul_rate") for report in result.reports.values() if report.survey]
    reached = [rate["model_tflops_per_s"] for rate in rates if rate]
    shares = [report.survey.get("cpu_share", 1.0) for report in result.reports.values() if report.survey]
    said_elsewhere = {"cpu_peak_tflops_per_s", "cpu_share", "matmul_rate", *ABOUT_THE_MACHINE}
    found = {name: value for name, value in found.items() if name not in said_elsewhere}
    return {
        "study_id": uuid.uuid4().hex[:12],
        "started_at": datetime.fromtimestamp(runner.clock.time(), UTC).isoformat(timespec="seconds"),
        SIMULATED: runner.simulated,
        "device_name": device_name,
        "world_size": len(result.reports),
        "peak": asdict(peak),
        # One GPU may be slower than its neighbours, which the figure is not about.
        "achievable_tflops_per_s": statistics.median(reached) if reached else None,
        "cpu_share": min(shares),
        "model": found,
    }


def survey_from_content(job: Job, runner: SingleRunner, content: dict[str, Any]) -> Survey:
    """A survey out of what `survey_content` has made.

    Raises:
        UserError: the job and what was found do not go together.
        ValueError, KeyError, TypeError: `survey_content` has not made it.
    """
    found = content["model"]
    measured_on = {"device": runner.device, "world_size": runner.world_size}
    facts = _typed(Facts, measured_on | {name: found[name] for name in _SURVEYED})
    space = SearchSpace(job, facts)
    device_memory_gib = _typed(float | None, found.get("device_memory_gib"))  # type: ignore[arg-type]
    study = Study(
        study_id=_typed(str, content["study_id"]),
        job=job,
        model=_typed(ModelFacts, {name: found[name] for name in ModelFacts.__dataclass_fields__ if name in found}),
        peak=_typed(Peak, content["peak"]),
        limits=Limits(runner.device, job.cluster.limit_gib(device_memory_gib), job.cluster.memory_headroom),
        space_hash=space.hash,
        world_size=runner.world_size,
        achievable_tflops_per_s=_typed(float | None, content.get("achievable_tflops_per_s")),  # type: ignore[arg-type]
        simulated=runner.simulated,
    )
    data = _describe_data(job, found, runner.world_size)
    shape = of_surveyed(job.model, found, job.training.precision) if job.model is not None else None
    cpu_share = _typed(float, content.get("cpu_share", 1.0))
    return Survey(study, space, _typed(str, content["device_name"]), facts.num_blocks, data, shape, cpu_share)


def _typed(kind: type[T], value: object) -> T:
    checked: T = TypeAdapter(kind).validate_python(value)
    return checked


def _describe_data(job: Job, found: dict[str, Any], world_size: int) -> str:
    if job.data is None or job.data.is_synthetic or "num_sequences" not in found:  # nobody has read it
        return str(found["data"])
    batch = job.global_batch_size // job.batch.target_world_size * world_size
    return (
        f"{found['data']}; {_typed(int, found['num_sequences']):,} sequences, the first comes again after "
        f"{found['num_sequences'] / batch:,.1f} steps of a trial"
    )


def note_stop(out: Path, reason: str) -> None:
    """Adds to study.yaml why the search ended."""
    path = out / FILE_NAME
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    content["search_ended"] = reason
    write_whole(path, yaml.safe_dump(content, sort_keys=False))
