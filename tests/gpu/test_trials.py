"""One rank over NCCL: each engine and checkpointing mode, memory limits, and what the figures must satisfy."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch

from autotune.hardware import peak_for
from tests.gpu.conftest import ENGINES, SMALL, gpu_spec
from trials.breakdown import Breakdown
from trials.conventions import utilisation
from trials.models import DecoderWorkload
from trials.outcome import Outcome
from trials.survey import survey_model
from trials.timing import mean_step_s

GIB = 2**30


MODES = ("none", "selective_op", "every_2", "full")
each_engine_and_mode = pytest.mark.parametrize(("engine", "mode"), list(itertools.product(ENGINES, MODES)))


@pytest.fixture(scope="module")
def spec_of(texts):
    def of(engine, mode):
        return gpu_spec(texts, micro_batch_size=8, activation_checkpointing=mode, **ENGINES[engine])

    return of


@pytest.fixture(scope="module")
def gang_of(run_gpu, spec_of):
    """Each config's ranks, run once."""
    return functools.cache(lambda engine, mode: run_gpu(spec_of(engine, mode)))


@each_engine_and_mode
def test_each_engine_and_mode_runs_and_reads_back_as_asked(gang_of, spec_of, engine, mode):
    gang = gang_of(engine, mode)
    assert gang.outcome is Outcome.OK, str(gang)
    (report,) = gang.reports
    assert report.applied == spec_of(engine, mode).knobs.to_dict()
    assert 0 < report.allocated_bytes <= report.reserved_bytes
    assert report.nccl_version
    print(f"{engine} {mode}: {report.allocated_bytes / 2**20:.0f} MiB live, phases {report.phase_s}")


@each_engine_and_mode
def test_engines_and_modes_train_alike(gang_of, engine, mode):
    first = gang_of("fsdp2", "none").reports[0].losses[:3]
    gang = gang_of(engine, mode)
    assert gang.outcome is Outcome.OK, str(gang)
    assert gang.reports[0].losses[:3] == pytest.approx(first, rel=2e-3)


@pytest.mark.parametrize("engine", ENGINES)
def test_checkpointing_saves_memory_and_never_shows_as_useful_work(gang_of, engine):
    found = {mode: gang_of(engine, mode).reports[0] for mode in MODES}
    assert found["full"].allocated_bytes < found["every_2"].allocated_bytes < found["none"].allocated_bytes
    assert found["selective_op"].allocated_bytes <= found["none"].allocated_bytes
    flops = survey_model(DecoderWorkload(256, config=SMALL), 256, "bf16")["flops_per_token"]
    assert found["none"].hardware_flops_per_token == pytest.approx(flops)
    assert found["full"].hardware_flops_per_token > found["every_2"].hardware_flops_per_token > flops


@pytest.mark.parametrize("engine", ENGINES)
def test_a_limit_ends_in_the_allocator_and_the_gpu_is_clean_afterwards(run_gpu, texts, engine):
    free_before, _ = torch.cuda.mem_get_info()
    big = {"micro_batch_size": 64, "grad_accum_steps": 1, "memory_limit_gib": 0.5, **ENGINES[engine]}
    gang = run_gpu(gpu_spec(texts, **big))
    assert gang.outcome is Outcome.OOM_DEVICE, str(gang)
    assert "CUDA out of memory. Tried to allocate" in gang.reports[0].reason
    assert run_gpu(gpu_spec(texts, **ENGINES[engine])).outcome is Outcome.OK
    free_after, _ = torch.cuda.mem_get_info()
    assert free_before - free_after < 0.2 * GIB


def test_a_limit_that_suffices_is_kept(run_gpu, texts):
    gang = run_gpu(gpu_spec(texts, memory_limit_gib=2.0))
    assert gang.outcome is Outcome.OK, str(gang)
    assert gang.reports[0].reserved_bytes <= 2.0 * GIB


def test_a_model_larger_than_the_limit_dies_while_it_is_built(run_gpu, texts):
    gang = run_gpu(gpu_spec(texts, memory_limit_gib=0.03))
    assert (gang.outcome, gang.reports[0].phase) == (Outcome.OOM_DEVICE, "build"), str(gang)


def test_a_gpu_that_another_process_uses_is_refused(run_gpu, texts):
    held = torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
    try:
        gang = run_gpu(gpu_spec(texts))
    finally:
        del held
        torch.cuda.empty_cache()
    assert gang.outcome is Outcome.UNCLEAN_DEVICE, str(gang)
    assert "in use before the model is built" in gang.reports[0].reason


def test_blocks_by_the_wall_clock_agree_with_the_phase_around_them_and_with_steps(gang_of):
    (report,) = gang_of("fsdp2", "none").reports
    timed_s = sum(t * n for t, n in zip(report.block_times_s, report.block_steps, strict=True))
    assert 0 < timed_s <= report.phase_s["timed"]
    assert sum(report.own_step_times_s) <= timed_s * 1.001, "the steps of a block, one after the other in its stream"


def test_a_composed_step_is_made_of_parts_by_events_in_the_stream(run_gpu, texts):
    """Its ratio to whole steps is printed, not judged."""
    spec = gpu_spec(texts, grad_accum_steps=12, sync_each_micro_batch=False, num_workers=1, prefetch_factor=4)
    whole, short = (run_gpu(replace(spec, composed=composed)) for composed in (False, True))
    assert (whole.outcome, short.outcome) == (Outcome.OK, Outcome.OK), f"{whole}\n{short}"
    report = short.reports[0]
    assert report.timing == "composed"
    assert all(report.step_parts_s[name] > 0 for name in ("first", "middle", "last", "optimizer"))
    assert report.step_parts_s["data"] >= 0
    assert report.allocated_bytes == pytest.approx(whole.reports[0].allocated_bytes, rel=0.01)
    composed_s, whole_s = (mean_step_s(r.block_times_s, r.block_steps) for r in (report, whole.reports[0]))
    print(f"composed {composed_s:.4g} s, whole {whole_s:.4g} s: {composed_s / whole_s:.3f}; {report.step_parts_s}")


def test_a_decoder_of_1b_shape_has_an_mfu(run_gpu, texts):
    """The figure is printed, not judged: a card that is shared or throttled is no failure of ours."""
    config = {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "num_layers": 16,
        "num_heads": 16,
        "num_kv_heads": 16,
        "ffn_size": 5504,
    }
    workload = DecoderWorkload(2048, config=config)
    found = survey_model(workload, 2048, "bf16")
    spec = gpu_spec(
        texts,
        model={"config": config},
        seq_len=2048,
        micro_batch_size=4,
        grad_accum_steps=1,
        activation_checkpointing="none",
    )
    gang = run_gpu(spec)
    assert gang.outcome is Outcome.OK, str(gang)
    (report,) = gang.reports
    name, sms = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).multi_processor_count
    peak = peak_for(name, "bf16", sm_count=sms, given_tflops_per_s=None, cpu_probe_tflops_per_s=None)
    rate = report.micro_batch_tokens / mean_step_s(report.block_times_s, report.block_steps)
    assert peak.tflops_per_s is not None, f"{name} is not in the device table"
    mfu = utilisation(rate, found["flops_per_token"], peak.tflops_per_s)
    print(f"{name}: {rate:,.0f} tokens/s, MFU {mfu:.1%} of {peak.tflops_per_s} TFLOP/s ({peak.source})")
    assert 0 < mfu < 1
    assert report.hardware_flops_per_token == pytest.approx(found["flops_per_token"])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_profiled_step_is_kernels_and_the_update_has_its_own(run_gpu, texts, engine):
    gang = run_gpu(gpu_spec(texts, micro_batch_size=8, profile="trace", **ENGINES[engine]))
    assert gang.outcome is Outcome.OK, str(gang)
    found = Breakdown(**gang.reports[0].breakdown)
    print(f"{engine}: {found.fractions()}, {found}")
    assert sum(found.fractions().values()) == pytest.approx(1)
    assert found.compute_s > 0
    assert found.optimizer_s > 0, "kernels are matched with the launches inside the update"
    assert 0 < found.non_matmul_share < 1
    assert found.median_kernel_us > 0
    assert (gang.folder / "trace-rank-0.json.gz").exists()
