"""Every knob, on two real gloo ranks, trains the same model as no FSDP at all, and is what it says it is."""

from __future__ import annotations

import functools

import pytest
import torch

from trials import wrap
from trials.models import DecoderWorkload
from trials.record import Knobs, unit_cap_mb

from .harness import HERE, OPTIMIZER, SEQ_LEN, TINY, run_script
from .pairwise import pairs_of, pairwise, possible_pairs

BATCH_PER_RANK = 4
NUM_STEPS = 3
NUM_LAYERS = TINY["num_layers"]
MODELS = {"untied": TINY, "tied": {**TINY, "tie_embeddings": True}}
EVERYWHERE = {
    "micro_batch_size": [2, 1, 4],
    "sync_each_micro_batch": [True, False],
    "activation_checkpointing": ["none", "full", "every_2", "selective_op"],
    "num_workers": [0, 1],
    "attention_backend": ["auto", "flash", "math"],
    "fused_optimizer": [False, True],
}
SHARDED = EVERYWHERE | {"reshard_after_forward": [True, False], "blocks_per_unit": [1, 2, 4]}
ON_FOUR = ("micro_batch_size", "sync_each_micro_batch", "reshard_after_forward")
SUITES = {
    "fsdp2": SHARDED | {"keep_last_units": [0, 1], "forward_prefetch_units": [0, 2], "backward_prefetch_units": [0, 2]},
    "fsdp1": SHARDED
    | {
        "limit_all_gathers": [True, False],
        "backward_prefetch": ["pre", "post", "none"],
        "forward_prefetch": [False, True],
    },
    "ddp": EVERYWHERE | {"bucket_cap_mb": [25.0, 0.05]},
    # On four ranks, two copies of the model are still sharded.
    "fsdp2-on-4": {
        name: SHARDED[name] for name in ("micro_batch_size", "sync_each_micro_batch", "reshard_after_forward")
    }
    | {"replicate_degree": [1, 2], "reshard_group_size": [0, 2], "activation_checkpointing": ["none", "full"]},
    "fsdp1-on-4": {
        name: SHARDED[name] for name in ("micro_batch_size", "sync_each_micro_batch", "reshard_after_forward")
    }
    | {"replicate_degree": [1, 2], "activation_checkpointing": ["none", "full"]},
}
FIXED = {"suite", "model", "precision", "reduce_dtype"}


def base_of(suite):
    """Two micro-batches of two, and the first value of all else."""
    return {name: values[0] for name, values in SUITES[suite].items()}


def has_meaning(point):
    """Without accumulation there is no sync to hold back; what is kept after forward is not spread, nor kept twice."""
    kept = point.get("reshard_after_forward") is False
    return not (
        (point.get("micro_batch_size") == BATCH_PER_RANK and point.get("sync_each_micro_batch") is False)
        or (kept and (point.get("keep_last_units") or point.get("reshard_group_size")))
        or (point.get("replicate_degree") == 2 and point.get("reshard_group_size"))
        or (point.get("blocks_per_unit") == NUM_LAYERS and point.get("keep_last_units"))
        # No more units ahead than there are.
        or (point.get("blocks_per_unit") == NUM_LAYERS and point.get("forward_prefetch_units"))
        or (point.get("blocks_per_unit", 1) > 1 and point.get("backward_prefetch_units"))
    )


def name_of(suite, point):
    """What differs from the suite's base."""
    base = base_of(suite)
    changed = [f"{name}={value}" for name, value in point.items() if value != base[name]]
    return "-".join([suite, *(changed or ["base"])])


def each_alone(suite):
    return [{**base_of(suite), name: value} for name, values in SUITES[suite].items() for value in values]


POINTS = {
    name_of(suite, point): {"suite": suite, "model": "untied", "precision": "fp32", "reduce_dtype": "fp32", **point}
    for suite, values in SUITES.items()
    for point in [*each_alone(suite), *pairwise(values, has_meaning)]
}
for suite in ("fsdp2", "fsdp1"):
    first = POINTS[f"{suite}-base"]
    POINTS |= {
        f"{suite}-uneven-units": {**first, "blocks_per_unit": 3},
        f"{suite}-two-workers": {**first, "num_workers": 2},
        f"{suite}-tied-embeddings": {**first, "model": "tied"},
        f"{suite}-bf16": {**first, "precision": "bf16", "blocks_per_unit": 2},
        f"{suite}-bf16-reduced-in-bf16": {**first, "precision": "bf16", "reduce_dtype": "bf16"},
        f"{suite}-bf16-nosync": {**first, "precision": "bf16", "sync_each_micro_batch": False},
    }
POINTS |= {
    "ddp-tied-embeddings": {**POINTS["ddp-base"], "model": "tied"},
    "ddp-bf16": {**POINTS["ddp-base"], "precision": "bf16"},
}


def world_size_of(point):
    return 4 if point["suite"].endswith("on-4") else 2


def engine_of(point):
    return point["suite"].partition("-")[0]


# fp32 differs from the reference only in the order of sums; bf16 keeps 8 bits of each activation.
GRADIENT_TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2}
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 5e-4}


def knobs_of(point):
    values = {name: value for name, value in point.items() if name not in FIXED}
    workload = DecoderWorkload(SEQ_LEN, config=MODELS[point["model"]])
    with torch.device("meta"):
        sizes_mib = wrap.block_mib(workload.blocks(workload.build_model()), point["precision"])
    engine = engine_of(point)
    size = point.get("blocks_per_unit", 1)
    units = [size] * (NUM_LAYERS // size) + ([NUM_LAYERS % size] if NUM_LAYERS % size else [])
    return Knobs.from_dict(
        {
            "reshard_after_forward": None if engine == "ddp" else True,
            "bucket_cap_mb": unit_cap_mb(sizes_mib, units),
            "num_workers": 0,
            "prefetch_factor": 2 if point.get("num_workers") else None,
            "blocks_per_unit": None if engine == "ddp" else size,
            "engine": engine,
            "grad_accum_steps": BATCH_PER_RANK // point["micro_batch_size"],
            **({} if engine == "ddp" else {"reduce_dtype": point["reduce_dtype"]}),
            **values,
        }
    )


def run_suite(world_size, folder, texts):
    """All configs for so many ranks in one set of rank processes; what each rank saw."""
    order = {
        "seq_len": SEQ_LEN,
        "source": str(texts),
        "optimizer": OPTIMIZER,
        "seed": 3,
        "num_steps": NUM_STEPS,
        "global_batch_size": world_size * BATCH_PER_RANK,
        "models": MODELS,
        "configs": {
            key: {"model": point["model"], "precision": point["precision"], "knobs": knobs_of(point).to_dict()}
            for key, point in POINTS.items()
            if world_size_of(point) == world_size
        },
    }
    return run_script(HERE / "conformance_rank.py", order, world_size, folder)


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory, text_folder):
    return functools.cache(lambda size: run_suite(size, tmp_path_factory.mktemp("conformance"), text_folder))


@pytest.fixture
def seen(ranks_of, key):
    return [result["configs"][key] for result in ranks_of(world_size_of(POINTS[key]))]


every_config = pytest.mark.parametrize("key", POINTS)


@pytest.mark.parametrize("suite", SUITES)
def test_every_knob_value_and_every_two_of_them_are_in_the_suite(suite):
    values = SUITES[suite]
    axes = list(values)
    points = [{axis: point[axis] for axis in axes} for point in POINTS.values() if point["suite"] == suite]
    for point in each_alone(suite):
        assert point in points
    covered = {pair for point in points for pair in pairs_of(point, axes)}
    assert covered >= set(possible_pairs(values, has_meaning))
    assert all(has_meaning(point) for point in points)


@every_config
def test_gradients_before_the_first_update_equal_the_unsharded_models(seen, key):
    tolerance = GRADIENT_TOLERANCE[POINTS[key]["precision"]]
    for rank in seen:
        wrong = {name: error for name, error in rank["gradient_errors"].items() if not error <= tolerance}
        assert not wrong


@every_config
def test_losses_over_several_updates_equal_the_unsharded_models(seen, key):
    tolerance = LOSS_TOLERANCE[POINTS[key]["precision"]]
    for rank in seen:
        assert len(rank["losses"]) == NUM_STEPS
        assert rank["losses"] == pytest.approx(rank["reference_losses"], rel=tolerance)


@every_config
def test_first_weights_are_bit_for_bit_the_unsharded_models(seen):
    assert all(rank["different_weights"] == [] for rank in seen)


@pytest.mark.parametrize("world_size", [2, 4])
def test_first_weights_on_one_rank_are_those_on_several(ranks_of, world_size):
    assert all(result["different_weights_on_one_rank"] == [] for result in ranks_of(world_size))


@every_config
def test_every_knob_reads_back_as_asked(seen, key):
    asked = knobs_of(POINTS[key]).to_dict()
    for rank in seen:
        assert rank["applied"] == asked


@pytest.mark.parametrize("key", [key for key, point in POINTS.items() if engine_of(point) != "ddp"])
def test_collectives_are_as_many_as_the_knobs_say(seen, key):
    point = POINTS[key]
    num_units = -(-NUM_LAYERS // point.get("blocks_per_unit", 1))
    num_micro_steps = BATCH_PER_RANK // point["micro_batch_size"]
    num_syncs = num_micro_steps if point["sync_each_micro_batch"] else 1
    num_freed = (num_units - point.get("keep_last_units", 0)) if point["reshard_after_forward"] else 0
    num_gathers = num_micro_steps * (1 + num_units + num_freed)  # the root's weights stay until its backward
    if engine_of(point) == "fsdp1" and num_syncs < num_micro_steps and not point["reshard_after_forward"]:
        num_gathers = 1 + num_units  # SHARD_GRAD_OP inside no_sync keeps all weights for the next micro-step too
    num_copies = point.get("replicate_degree", 1)
    for rank in seen:
        assert gathers(rank) == num_gathers
        assert scatters(rank) == num_syncs * (1 + num_units)
        assert rank["collectives"].get("allreduce_", 0) == (num_syncs * (1 + num_units) if num_copies > 1 else 0)


def gathers(rank):
    """FSDP1 on CPU asks for the list form."""
    return rank["collectives"].get("_allgather_base_", 0) + rank["collectives"].get("allgather_", 0)


def scatters(rank):
    return rank["collectives"].get("_reduce_scatter_base_", 0)


@pytest.fixture
def counts(ranks_of):
    """(all-gathers, reduce-scatters) of one optimizer step on rank 0."""

    def of(suite="fsdp2", **changes):
        key = name_of(suite, {**base_of(suite), **changes})
        rank = ranks_of(world_size_of(POINTS[key]))[0]["configs"][key]
        return gathers(rank), scatters(rank)

    return of


def test_more_blocks_per_unit_means_fewer_and_larger_collectives(counts):
    per_micro_step = [(9, 5), (5, 3), (3, 2)]
    for blocks, (num_gathers, num_scatters) in zip((1, 2, 4), per_micro_step, strict=True):
        assert counts(blocks_per_unit=blocks) == (2 * num_gathers, 2 * num_scatters)


def test_keeping_weights_after_forward_saves_one_gather_of_every_block_that_is_kept(counts):
    assert counts(reshard_after_forward=True) == (2 * 9, 2 * 5)
    assert counts(keep_last_units=1) == (2 * 8, 2 * 5)
    assert counts(reshard_after_forward=False) == (2 * 5, 2 * 5)


def test_syncing_only_the_last_of_two_micro_batches_halves_the_scatters(counts):
    assert counts(sync_each_micro_batch=True) == (2 * 9, 2 * 5)
    assert counts(sync_each_micro_batch=False) == (2 * 9, 5)


@pytest.mark.parametrize(
    ("suite", "names"),
    [
        ("fsdp1", ["limit_all_gathers", "backward_prefetch", "forward_prefetch"]),
        ("fsdp2", ["forward_prefetch_units", "backward_prefetch_units"]),
    ],
)
def test_the_limit_of_all_gathers_and_prefetching_change_no_count(counts, suite, names):
    usual = counts(suite)
    for name in names:
        for value in SUITES[suite][name]:
            assert counts(suite, **{name: value}) == usual


def test_ddp_reduces_in_more_and_smaller_buckets_under_a_smaller_cap_and_only_when_it_syncs(ranks_of):
    def reductions(**changes):
        key = name_of("ddp", {**base_of("ddp"), **changes})
        return ranks_of(2)[0]["configs"][key]["collectives"].get("allreduce_", 0)

    assert reductions() == 2
    assert reductions(sync_each_micro_batch=False) == 1
    assert reductions(bucket_cap_mb=0.05) > 2
