"""Every knob trains the same model as no FSDP at all, and is what it says it is: each value alone on two real gloo
ranks, and every two values together on four."""

from __future__ import annotations

import pytest
import torch

from trials import wrap
from trials.models import DecoderWorkload
from trials.record import ENGINE_KNOBS, Knobs, unit_cap_mb

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
    "prefetch_factor": [2, 4],
    "attention_backend": ["auto", "flash", "math"],
    "fused_optimizer": [False, True],
    "precision": ["fp32", "bf16"],
}
SHARDED = EVERYWHERE | {
    "reshard_after_forward": [True, False],
    "blocks_per_unit": [1, 2, 4],
    "reduce_dtype": ["fp32", "bf16"],
}
ENGINES = {
    "fsdp2": SHARDED | {"keep_last_units": [0, 1], "forward_prefetch_units": [0, 2], "backward_prefetch_units": [0, 2]},
    "fsdp1": SHARDED
    | {
        "limit_all_gathers": [True, False],
        "backward_prefetch": ["pre", "post", "none"],
        "forward_prefetch": [False, True],
    },
    "ddp": EVERYWHERE | {"bucket_cap_mb": [25.0, 0.05]},
}
COMPILED = {"compile": [False, True]}
"""Alone only: a compilation of each mixture, on each rank, takes minutes."""
OF_FOUR_RANKS = {
    "fsdp2": {"replicate_degree": [1, 2], "reshard_group_size": [0, 2]},
    "fsdp1": {"replicate_degree": [1, 2]},
    "ddp": {},
}
"""What two ranks cannot have: of copies of the model, each is still sharded."""
ALONE = {engine: values | COMPILED for engine, values in ENGINES.items()}
TOGETHER = {engine: values | OF_FOUR_RANKS[engine] for engine, values in ENGINES.items()}
NEEDS = {
    ("reduce_dtype", "bf16"): {"precision": "bf16"},
    ("prefetch_factor", 4): {"num_workers": 1},
}
OF_THE_RUN = {"engine", "world_size", "model", "precision"}


def base_of(engine):
    """Two micro-batches of two, and the first value of all else."""
    return {name: values[0] for name, values in ALONE[engine].items()}


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
        or any(
            point.get(name) == value and point.get(other, needed) != needed
            for (name, value), needs in NEEDS.items()
            for other, needed in needs.items()
        )
    )


def name_of(engine, changes):
    """What differs from the engine's base."""
    return "-".join([engine, *(f"{name}={value}" for name, value in changes.items())])


def alone(engine, name, value):
    """The base with one value changed, and what that value needs."""
    base = base_of(engine)
    changes = {name: value, **NEEDS.get((name, value), {})}
    return name_of(engine, {k: v for k, v in changes.items() if v != base.get(k)}), base | changes


POINTS = {}
for engine, values in ALONE.items():
    of_two = {"engine": engine, "world_size": 2, "model": "untied"}
    for name in values:
        for value in values[name]:
            key, point = alone(engine, name, value)
            POINTS[key] = of_two | point
    base = POINTS[engine]
    POINTS |= {
        f"{engine}-two-workers": {**base, "num_workers": 2},
        f"{engine}-tied-embeddings": {**base, "model": "tied"},
        f"{engine}-bf16-nosync": {**base, "precision": "bf16", "sync_each_micro_batch": False},
    }
    if engine != "ddp":
        POINTS[f"{engine}-uneven-units"] = {**base, "blocks_per_unit": 3}
    of_four = {"engine": engine, "world_size": 4, "model": "untied"}
    POINTS[f"{engine}-on-4"] = of_four | base_of(engine)
    for name, (_, value) in OF_FOUR_RANKS[engine].items():
        key, point = alone(engine, name, value)
        POINTS[key] = of_four | point
    for number, point in enumerate(pairwise(TOGETHER[engine], has_meaning)):
        POINTS[f"{engine}-on-4-{number:02}"] = of_four | point


# fp32 differs from the reference only in the order of sums; bf16 keeps 8 bits of each activation.
GRADIENT_TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2}
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 5e-4}


def knobs_of(point):
    values = {name: value for name, value in point.items() if name not in OF_THE_RUN}
    workload = DecoderWorkload(SEQ_LEN, config=MODELS[point["model"]])
    with torch.device("meta"):
        sizes_mib = wrap.block_mib(workload.blocks(workload.build_model()), point["precision"])
    size = point.get("blocks_per_unit", 1)
    units = [size] * (NUM_LAYERS // size) + ([NUM_LAYERS % size] if NUM_LAYERS % size else [])
    return Knobs.from_dict(
        {
            "engine": point["engine"],
            "grad_accum_steps": BATCH_PER_RANK // point["micro_batch_size"],
            "reshard_after_forward": None,
            "blocks_per_unit": None,
            "bucket_cap_mb": unit_cap_mb(sizes_mib, units),
            **values,
            "prefetch_factor": point["prefetch_factor"] if point["num_workers"] else None,
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
            if point["world_size"] == world_size
        },
    }
    return run_script(HERE / "conformance_rank.py", order, world_size, folder, wait_s=280)


@pytest.fixture(scope="module")
def on_two(tmp_path_factory, text_folder):
    return run_suite(2, tmp_path_factory.mktemp("on-two"), text_folder)


@pytest.fixture(scope="module")
def on_four(tmp_path_factory, text_folder):
    return run_suite(4, tmp_path_factory.mktemp("on-four"), text_folder)


@pytest.fixture
def ranks_of(request):
    """What so many ranks saw; if they failed, they fail once and not for each test."""
    return lambda size: request.getfixturevalue({2: "on_two", 4: "on_four"}[size])


@pytest.fixture
def seen(ranks_of, key):
    return [result["configs"][key] for result in ranks_of(POINTS[key]["world_size"])]


every_config = pytest.mark.parametrize("key", POINTS)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_knob_that_an_engine_has_on_a_cpu_is_in_the_suite(engine):
    """A new knob fails here until the suite has it."""
    exist = {name for name, value in knobs_of(POINTS[engine]).to_dict().items() if value is not None}
    exist -= {name for name, knob in ENGINE_KNOBS.items() if "cpu" not in knob.devices}
    derived = {"engine", "grad_accum_steps"} | ({"bucket_cap_mb"} if engine != "ddp" else set())  # by blocks_per_unit
    suite = ALONE[engine].keys() | OF_FOUR_RANKS[engine].keys() | {"prefetch_factor"}
    assert suite - {"precision"} == exist - derived | {"prefetch_factor"}
    for name, values in (ALONE[engine] | OF_FOUR_RANKS[engine]).items():
        known = ENGINE_KNOBS[name].values if name in ENGINE_KNOBS else None
        assert known is None or set(values) == set(known)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_value_is_run_on_two_ranks_and_every_two_of_them_on_four(engine):
    axes = TOGETHER[engine]
    of = {size: [p for p in POINTS.values() if p["engine"] == engine and p["world_size"] == size] for size in (2, 4)}
    for name, values in ALONE[engine].items():
        assert {point[name] for point in of[2]} >= set(values)
    paired = [point for point in of[4] if point.keys() >= axes.keys()]
    covered = {pair for point in paired for pair in pairs_of(point, list(axes))}
    assert covered >= set(possible_pairs(axes, has_meaning))
    assert all(has_meaning(point) for points in of.values() for point in points)


@every_config
def test_gradients_before_the_first_update_equal_the_unsharded_models(seen, key):
    tolerance = GRADIENT_TOLERANCE[POINTS[key]["precision"]]
    for rank in seen:
        wrong = {name: error for name, error in rank["gradient_errors"].items() if not error <= tolerance}
        assert not wrong, POINTS[key]


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


@pytest.mark.parametrize("key", [key for key, point in POINTS.items() if point["engine"] != "ddp"])
def test_collectives_are_as_many_as_the_knobs_say(seen, key):
    point = POINTS[key]
    num_units = -(-NUM_LAYERS // point.get("blocks_per_unit", 1))
    num_micro_steps = BATCH_PER_RANK // point["micro_batch_size"]
    num_syncs = num_micro_steps if point["sync_each_micro_batch"] else 1
    num_freed = (num_units - point.get("keep_last_units", 0)) if point["reshard_after_forward"] else 0
    num_gathers = num_micro_steps * (1 + num_units + num_freed)  # the root's weights stay until its backward
    if point["engine"] == "fsdp1" and num_syncs < num_micro_steps and not point["reshard_after_forward"]:
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

    def of(engine="fsdp2", **change):
        ((name, value),) = change.items() or [("micro_batch_size", 2)]
        rank = ranks_of(2)[0]["configs"][alone(engine, name, value)[0]]
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
    ("engine", "names"),
    [
        ("fsdp1", ["limit_all_gathers", "backward_prefetch", "forward_prefetch"]),
        ("fsdp2", ["forward_prefetch_units", "backward_prefetch_units"]),
    ],
)
def test_the_limit_of_all_gathers_and_prefetching_change_no_count(counts, engine, names):
    usual = counts(engine)
    for name in names:
        for value in ALONE[engine][name]:
            assert counts(engine, **{name: value}) == usual


def test_ddp_reduces_in_more_and_smaller_buckets_under_a_smaller_cap_and_only_when_it_syncs(ranks_of):
    def reductions(name, value):
        return ranks_of(2)[0]["configs"][alone("ddp", name, value)[0]]["collectives"].get("allreduce_", 0)

    assert reductions("sync_each_micro_batch", True) == 2
    assert reductions("sync_each_micro_batch", False) == 1
    assert reductions("bucket_cap_mb", 0.05) > 2
