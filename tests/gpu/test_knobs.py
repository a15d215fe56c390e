"""Knobs that only a GPU has, or that mean more on one."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import SMALL, gpu_spec
from trials.outcome import Outcome

# As many key heads as query heads: the memory-efficient kernel takes no grouped queries.
UNGROUPED = {"config": {**SMALL, "num_kv_heads": SMALL["num_heads"]}}


@pytest.mark.parametrize("backend", ["flash", "efficient", "cudnn", "math"])
def test_the_attention_backend_that_is_asked_for_is_the_one_that_runs(run_gpu, texts, backend):
    gang = run_gpu(gpu_spec(texts, model=UNGROUPED, attention_backend=backend))
    assert gang.outcome is Outcome.OK, str(gang)
    assert gang.reports[0].attention_backend == backend


def test_left_to_torch_attention_is_a_fused_kernel_and_no_warning_is_given(run_gpu, texts):
    (report,) = run_gpu(gpu_spec(texts)).reports
    print(f"torch chose {report.attention_backend}")
    assert report.attention_backend in {"flash", "cudnn", "efficient"}
    assert report.warnings == []


def test_compiled_blocks_train_as_eager_ones_do_and_compile_outside_the_clock(run_gpu, texts):
    eager, compiled = (run_gpu(gpu_spec(texts, compile=compile)) for compile in (False, True))
    assert compiled.outcome is Outcome.OK, str(compiled)
    assert compiled.reports[0].losses[:3] == pytest.approx(eager.reports[0].losses[:3], rel=2e-3)
    print(f"compiling took {compiled.reports[0].phase_s['compile']:.1f} s")


def test_offloaded_states_leave_the_gpu(run_gpu, texts):
    offloaded, kept = (run_gpu(gpu_spec(texts, cpu_offload=offload)) for offload in (True, False))
    assert offloaded.outcome is Outcome.OK, str(offloaded)
    assert offloaded.reports[0].applied["cpu_offload"] is True
    assert offloaded.reports[0].allocated_bytes < kept.reports[0].allocated_bytes
    assert offloaded.reports[0].losses[:3] == pytest.approx(kept.reports[0].losses[:3], rel=2e-3)


def test_the_fused_optimizer_trains_alike(run_gpu, texts):
    fused, looped = (run_gpu(gpu_spec(texts, fused_optimizer=fused)) for fused in (True, False))
    assert fused.outcome is Outcome.OK, str(fused)
    assert fused.reports[0].losses[:3] == pytest.approx(looped.reports[0].losses[:3], rel=2e-3)
