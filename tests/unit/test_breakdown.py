"""Interval arithmetic and kineto's records, on constructed lists whose answer is known."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trials.breakdown import FRACTIONS, Breakdown, Event, Kind, break_down, pacing_rank, subtract, union
from trials.profiled import MATMUL_KERNELS, Record, break_down_records, gpu_kind

WINDOW = (0.0, 10.0)


def seconds(breakdown):
    """The parts that are not zero."""
    found = {name: getattr(breakdown, f"{name}_s") for name in FRACTIONS}
    return {name: pytest.approx(value) for name, value in found.items() if value}


def events(*spans):
    return [Event(start, end, Kind(kind), stream) for stream, (kind, start, end) in enumerate(spans)]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], {"idle": 10}),
        ([("compute", 0, 10)], {"compute": 10}),
        ([("compute", 1, 4), ("compute", 3, 6)], {"compute": 5, "idle": 5}),
        ([("compute", 0, 8), ("matmul", 2, 4)], {"compute": 8, "idle": 2}),  # nested
        ([("comm", 2, 7)], {"exposed_comm": 5, "idle": 5}),
        ([("matmul", 0, 5), ("comm", 3, 7)], {"compute": 5, "exposed_comm": 2, "idle": 3}),  # partly hidden
        ([("compute", 0, 10), ("comm", 3, 7)], {"compute": 10}),  # all hidden
        ([("comm", 0, 10), ("compute", 2, 3), ("compute", 5, 7)], {"compute": 3, "exposed_comm": 7}),
        ([("comm", 0, 4), ("comm", 2, 6), ("comm", 5, 5)], {"exposed_comm": 6, "idle": 4}),
        ([("copy", 0, 6), ("comm", 2, 3), ("compute", 5, 8)], {"compute": 3, "exposed_comm": 1, "exposed_copy": 4}),
        ([("data_wait", 0, 6), ("compute", 0, 2), ("comm", 3, 4)], {"compute": 2, "exposed_comm": 1, "data_wait": 3}),
        ([("optimizer", 7, 9), ("compute", 0, 7), ("comm", 6, 10)], {"compute": 7, "optimizer": 2, "exposed_comm": 1}),
        ([("compute", -5, 2), ("comm", 9, 20), ("copy", 30, 40)], {"compute": 2, "exposed_comm": 1, "idle": 7}),
    ],
)
def test_each_instant_goes_to_the_first_that_holds(spans, expected):
    expected = {"idle": 10 - sum(expected.values()), **expected}
    assert seconds(break_down(events(*spans), WINDOW)) == {name: value for name, value in expected.items() if value}


def test_what_is_not_summed():
    found = break_down(events(("matmul", 0, 3), ("compute", 2, 4), ("comm", 1, 6), ("optimizer", 8, 9)), WINDOW)
    assert found.comm_s == pytest.approx(5)
    assert found.non_matmul_share == pytest.approx(0.25)  # the optimizer is not in it
    assert found.own_s == pytest.approx(8)
    assert break_down([], WINDOW).non_matmul_share is None


spans = st.lists(
    st.builds(
        Event,
        start_s=st.floats(-1e3, 1e3),
        end_s=st.floats(-1e3, 1e3),
        kind=st.sampled_from(Kind),
        stream=st.integers(0, 3),
    ),
    max_size=30,
)


@given(spans, st.floats(-100, 100), st.floats(0, 200))
def test_fractions_are_fractions_and_sum_to_one(events, start, length):
    found = break_down(events, (start, start + length))
    fractions = found.fractions()
    assert tuple(fractions) == FRACTIONS
    assert all(0 <= value <= 1 for value in fractions.values())
    assert sum(fractions.values()) == pytest.approx(1, abs=1e-12)
    assert found.non_matmul_share is None or 0 <= found.non_matmul_share <= 1


grid = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=12)


@given(grid, grid)
def test_union_and_subtract_are_what_they_are_for_sets(left, right):
    def instants(intervals):
        return {instant for start, end in intervals for instant in range(start, end)}

    merged = union(left)
    assert instants(merged) == instants(left)
    assert all(first[1] < second[0] for first, second in itertools.pairwise(merged))
    assert instants(subtract(merged, union(right))) == instants(left) - instants(right)


@given(spans)
def test_the_order_of_events_does_not_matter(events):
    assert break_down(events, WINDOW) == break_down(events[::-1], WINDOW)


def test_the_rank_that_waits_least_sets_the_pace():
    def rank(compute_s):
        return break_down(events(("compute", 0, compute_s), ("comm", compute_s, 10)), WINDOW)

    assert pacing_rank([rank(3), rank(9), rank(4)]) == 1


# --- as kineto tells it ---------------------------------------------------------------------------------------------

MAIN, GLOO, STREAM, NCCL_STREAM, COPY_STREAM = 1, 2, 7, 20, 24
NCCL = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "nvjet_tst_192x192_64x4_2x1_v_bz_TNT"
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)"
FOREACH = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor>"


class Gpu:
    """Writes down what a host launches and what its GPU runs; seconds."""

    def __init__(self):
        self.records = []

    def mark(self, name, start, end):
        self.records.append(Record(f"autotune::{name}", "user_annotation", start, end, MAIN))
        # Kineto mirrors marks on the GPU: they are no work.
        self.records.append(Record(f"autotune::{name}", "gpu_user_annotation", start, end, STREAM))

    def run(self, name, launched, start, end, stream=STREAM, activity="kernel"):
        number = len(self.records)
        self.records.append(Record("cudaLaunchKernel", "cuda_runtime", launched, launched + 0.01, MAIN, number))
        self.records.append(Record(name, activity, start, end, stream, number))

    def parts(self):
        return break_down_records(self.records)


def two_steps():
    """Step one runs on the GPU until 10; the second is launched from 4 on."""
    gpu = Gpu()
    gpu.mark("step", 0, 4)
    gpu.run(GEMM, 1, 2, 10)
    gpu.mark("step", 4, 8)
    return gpu


def test_gpu_work_is_what_streams_run_and_the_window_is_theirs():
    gpu = two_steps()
    gpu.mark("data", 4, 9)  # the GPU was busy with the step before: no loss
    gpu.run(NCCL, 5, 10, 13, NCCL_STREAM)
    gpu.run(GEMM, 5.1, 12, 16)
    gpu.run(ELEMENTWISE, 5.2, 16, 17)
    gpu.run("Memcpy HtoD (Pinned -> Device)", 5.3, 16, 18, COPY_STREAM, "gpu_memcpy")
    gpu.mark("optimizer", 6, 7)
    gpu.run(FOREACH, 6.5, 19, 20)
    found = gpu.parts()
    assert found.window_s == pytest.approx(10)
    assert seconds(found) == {"compute": 5, "exposed_comm": 2, "exposed_copy": 1, "optimizer": 1, "idle": 1}
    assert found.comm_s == pytest.approx(3)
    assert found.non_matmul_share == pytest.approx(0.2)
    assert found.median_kernel_us == pytest.approx(2.5e6)


def test_nccl_partly_hidden_by_two_streams():
    gpu = two_steps()
    gpu.run(NCCL, 5, 10, 20, NCCL_STREAM)
    gpu.run(GEMM, 5.1, 11, 14)
    gpu.run("flash_fwd_kernel", 5.2, 13, 15, stream=9)
    gpu.run(ELEMENTWISE, 5.3, 18, 19)
    found = gpu.parts()
    assert seconds(found) == {"compute": 5, "exposed_comm": 5}
    assert found.comm_s == pytest.approx(10)


def test_the_gpu_idles_while_the_host_waits_for_the_loader():
    gpu = two_steps()
    gpu.mark("data", 4, 14)
    gpu.run(GEMM, 15, 16, 18)
    assert seconds(gpu.parts()) == {"data_wait": 4, "idle": 2, "compute": 2}


def test_a_step_of_small_kernels_is_gaps():
    gpu = two_steps()
    for number in range(10):
        gpu.run(ELEMENTWISE, 10 + number, 10 + number, 10.1 + number)
    found = gpu.parts()
    assert found.fractions()["idle"] == pytest.approx(8.1 / 9.1)
    assert found.median_kernel_us == pytest.approx(1e5)


@pytest.mark.parametrize(
    ("name", "activity", "kind"),
    [
        (NCCL, "kernel", Kind.COMM),
        ("ncclKernel_ReduceScatter_RING_LL_Sum_float", "kernel", Kind.COMM),
        (GEMM, "kernel", Kind.MATMUL),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "kernel", Kind.MATMUL),
        ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn", "kernel", Kind.MATMUL),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", "kernel", Kind.MATMUL),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<>", "kernel", Kind.MATMUL),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", "kernel", Kind.MATMUL),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "kernel", Kind.MATMUL),
        ("Cijk_Alik_Bljk_BBS_BH_MT128x128x32", "kernel", Kind.MATMUL),
        (ELEMENTWISE, "kernel", Kind.COMPUTE),
        (FOREACH, "kernel", Kind.COMPUTE),
        ("triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_0", "kernel", Kind.COMPUTE),
        ("Memcpy DtoD (Device -> Device)", "gpu_memcpy", Kind.COPY),
        ("Memset (Device)", "gpu_memset", Kind.COPY),
        ("nccl:_all_gather_base", "gpu_user_annotation", None),
        ("cudaLaunchKernel", "cuda_runtime", None),
        ("aten::mm", "cpu_op", None),
    ],
)
def test_kernels_are_told_apart_by_name(name, activity, kind):
    assert gpu_kind(Record(name, activity, 0, 1)) is kind
    assert all(part == part.lower() for part in MATMUL_KERNELS)


def cpu(*records):
    """A marked step of 10 s on the main thread, and what is in it."""
    step = Record("autotune::step", "user_annotation", 0, 10, MAIN)
    return break_down_records([step, *(Record(*record) for record in records)])


def test_gloo_carries_collectives_while_the_training_thread_waits():
    found = cpu(
        ("autotune::data", "user_annotation", 0, 1, MAIN),
        ("c10d::_allgather_base_", "cpu_op", 1, 2, MAIN),
        ("aten::copy_", "cpu_op", 1.2, 1.8, MAIN),  # inside of the call: the collective's
        ("gloo:all_gather", "user_annotation", 2.5, 4, GLOO),  # its thread took it at 2.5
        ("aten::add", "cpu_op", 2, 4, GLOO),  # gloo's own work is no compute
        ("aten::linear", "cpu_op", 3.5, 6, MAIN),
        ("aten::mm", "cpu_op", 4, 5.5, MAIN),
        ("RegisterPostBackwardFunctionBackward", "cpu_op", 6, 8, MAIN),  # a hook that waits: no compute
        ("autograd::engine::evaluate_function: MmBackward0", "cpu_op", 6, 8, MAIN),
        ("fsdp::chunk_cat", "cpu_op", 6, 6.5, MAIN),
        ("autotune::optimizer", "user_annotation", 8, 10, MAIN),
        ("aten::_foreach_add_", "cpu_op", 8.5, 9.5, MAIN),
    )
    assert seconds(found) == {"data_wait": 1, "exposed_comm": 2.5, "compute": 3, "optimizer": 1, "idle": 2.5}
    assert found.comm_s == pytest.approx(3)
    assert found.non_matmul_share == pytest.approx(0.5)


def test_waiting_for_the_loader_is_not_the_fault_of_a_collective_under_way():
    found = cpu(
        ("autotune::data", "user_annotation", 2, 6, MAIN),
        ("gloo:all_reduce", "user_annotation", 1, 7, GLOO),
    )
    assert seconds(found) == {"exposed_comm": 2, "data_wait": 4, "idle": 4}


def test_without_a_marked_step_there_is_no_breakdown():
    with pytest.raises(ValueError, match="has not seen the step"):
        break_down_records([Record("aten::mm", "cpu_op", 0, 1, MAIN)])


def test_a_breakdown_survives_the_report():
    found = break_down(events(("matmul", 0, 3)), WINDOW)
    assert Breakdown(**found.to_dict()) == found
