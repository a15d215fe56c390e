"""Every knob, on two real gloo ranks, trains the same model as no FSDP at all, and is what it says it is."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from trials import wrap
from trials.models import DecoderWorkload
from trials.record import FSDP1_KNOBS, Knobs, unit_cap_mb

from .harness import HERE, OPTIMIZER, SEQ_LEN, TINY, run_script
from .pairwise import pairs_of, pairwise, possible_pairs

BATCH_PER_RANK = 4
NUM_STEPS = 3
NUM_LAYERS = TINY["num_layers"]
MODELS = {"untied": TINY, "tied": {**TINY, "tie_embeddings": True}}
VALUES = {
    "micro_batch_size": [2, 1, 4],
    "sync_each_micro_batch": [True, False],
    "reshard_after_forward": [True, False],
    "blocks_per_unit": [1, 2, 4],
    "activation_checkpointing": ["none", "full", "every_2", "selective_op"],
    "num_workers": [0, 1],
}
FSDP1_VALUES = VALUES | {
    "limit_all_gathers": [True, False],
    "backward_prefetch": ["pre", "post", "none"],
    "forward_prefetch": [False, True],
}
BASE = {name: values[0] for name, values in VALUES.items()}
"""Two micro-batches of two."""
FSDP1_BASE = {name: values[0] for name, values in FSDP1_VALUES.items()}


def has_meaning(point):
    """Without accumulation there is no sync to hold back."""
    return not (point.get("micro_batch_size") == BATCH_PER_RANK and point.get("sync_each_micro_batch") is False)


def name_of(point):
    parts = [
        f"micro{point['micro_batch_size']}",
        "sync" if point["sync_each_micro_batch"] else "nosync",
        "reshard" if point["reshard_after_forward"] else "keep",
        f"blocks{point['blocks_per_unit']}",
        f"{point['activation_checkpointing']}",
        f"workers{point['num_workers']}",
    ]
    if "limit_all_gathers" in point:
        parts += [
            "fsdp1",
            "limit" if point["limit_all_gathers"] else "nolimit",
            f"back_{point['backward_prefetch']}",
            "forward" if point["forward_prefetch"] else "noforward",
        ]
    return "-".join(parts)


def each_alone(values):
    base = {name: those[0] for name, those in values.items()}
    return [{**base, name: value} for name, those in values.items() for value in those]


PLAIN = {"model": "untied", "precision": "fp32", "reduce_dtype": "fp32"}
POINTS = {
    name_of(point): {**point, **PLAIN}
    for values in (VALUES, FSDP1_VALUES)
    for point in [*each_alone(values), *pairwise(values, has_meaning)]
}
for prefix, base in (("", BASE), ("fsdp1-", FSDP1_BASE)):
    first = POINTS[name_of(base)]
    POINTS |= {
        f"{prefix}uneven-units": {**first, "blocks_per_unit": 3},
        f"{prefix}two-workers": {**first, "num_workers": 2},
        f"{prefix}tied-embeddings": {**first, "model": "tied"},
        f"{prefix}bf16": {**first, "precision": "bf16", "blocks_per_unit": 2},
        f"{prefix}bf16-reduced-in-bf16": {**first, "precision": "bf16", "reduce_dtype": "bf16"},
        f"{prefix}bf16-nosync": {**first, "precision": "bf16", "sync_each_micro_batch": False},
    }
# fp32 differs from the reference only in the order of sums; bf16 keeps 8 bits of each activation.
GRADIENT_TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2}
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 5e-4}


def knobs_of(point):
    workload = DecoderWorkload(SEQ_LEN, config=MODELS[point["model"]])
    with torch.device("meta"):
        sizes_mib = wrap.block_mib(workload.blocks(workload.build_model()), point["precision"])
    size = point["blocks_per_unit"]
    units = [size] * (NUM_LAYERS // size) + ([NUM_LAYERS % size] if NUM_LAYERS % size else [])
    return Knobs(
        micro_batch_size=point["micro_batch_size"],
        grad_accum_steps=BATCH_PER_RANK // point["micro_batch_size"],
        sync_each_micro_batch=point["sync_each_micro_batch"],
        reshard_after_forward=point["reshard_after_forward"],
        bucket_cap_mb=unit_cap_mb(sizes_mib, units),
        blocks_per_unit=size,
        activation_checkpointing=point["activation_checkpointing"],
        num_workers=point["num_workers"],
        prefetch_factor=2 if point["num_workers"] else None,
        engine="fsdp1" if is_fsdp1(point) else "fsdp2",
        **{name: point.get(name) for name in FSDP1_KNOBS},
    )


def is_fsdp1(point):
    return "limit_all_gathers" in point


@pytest.fixture(scope="module")
def both_ranks(tmp_path_factory, text_folder):
    """All configs in one pair of rank processes; what each rank saw."""
    order = {
        "seq_len": SEQ_LEN,
        "source": str(text_folder),
        "optimizer": OPTIMIZER,
        "seed": 3,
        "num_steps": NUM_STEPS,
        "global_batch_size": 2 * BATCH_PER_RANK,
        "models": MODELS,
        "configs": {
            key: {
                "model": point["model"],
                "precision": point["precision"],
                "reduce_dtype": point["reduce_dtype"],
                "knobs": dataclasses.asdict(knobs_of(point)),
            }
            for key, point in POINTS.items()
        },
    }
    return run_script(HERE / "conformance_rank.py", order, 2, tmp_path_factory.mktemp("conformance"))


@pytest.fixture
def seen(both_ranks, key):
    return [result["configs"][key] for result in both_ranks]


every_config = pytest.mark.parametrize("key", POINTS)


@pytest.mark.parametrize("values", [VALUES, FSDP1_VALUES], ids=["fsdp2", "fsdp1"])
def test_every_knob_value_and_every_two_of_them_are_in_the_suite(values):
    axes = list(values)
    points = [{axis: point[axis] for axis in axes} for point in POINTS.values() if set(axes) == set(point) - set(PLAIN)]
    for point in each_alone(values):
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
    assert [rank["different_weights"] for rank in seen] == [[], []]


def test_first_weights_on_one_rank_are_those_on_two(both_ranks):
    assert [result["different_weights_on_one_rank"] for result in both_ranks] == [[], []]


@every_config
def test_every_knob_reads_back_as_asked(seen, key):
    asked = dataclasses.asdict(knobs_of(POINTS[key]))
    assert [rank["applied"] for rank in seen] == [asked, asked]


@every_config
def test_collectives_are_as_many_as_the_knobs_say(seen, key):
    point = POINTS[key]
    num_units = -(-NUM_LAYERS // point["blocks_per_unit"])
    num_micro_steps = BATCH_PER_RANK // point["micro_batch_size"]
    num_syncs = num_micro_steps if point["sync_each_micro_batch"] else 1
    per_unit = 2 if point["reshard_after_forward"] else 1  # the root's weights stay until its backward
    num_gathers = num_micro_steps * (1 + per_unit * num_units)
    if is_fsdp1(point) and num_syncs < num_micro_steps and not point["reshard_after_forward"]:
        num_gathers = 1 + num_units  # SHARD_GRAD_OP inside no_sync keeps all weights for the next micro-step too
    for rank in seen:
        assert gathers(rank) == num_gathers
        assert scatters(rank) == num_syncs * (1 + num_units)


def gathers(rank):
    """FSDP1 on CPU asks for the list form."""
    return rank["collectives"].get("_allgather_base_", 0) + rank["collectives"].get("allgather_", 0)


def scatters(rank):
    return rank["collectives"]["_reduce_scatter_base_"]


@pytest.fixture
def counts(both_ranks):
    """(all-gathers, reduce-scatters) of one optimizer step on rank 0."""

    def of(base=BASE, **changes):
        rank = both_ranks[0]["configs"][name_of({**base, **changes})]
        return gathers(rank), scatters(rank)

    return of


def test_more_blocks_per_unit_means_fewer_and_larger_collectives(counts):
    per_micro_step = [(9, 5), (5, 3), (3, 2)]
    for blocks, (num_gathers, num_scatters) in zip((1, 2, 4), per_micro_step, strict=True):
        assert counts(blocks_per_unit=blocks) == (2 * num_gathers, 2 * num_scatters)


def test_keeping_weights_after_forward_saves_one_gather_of_every_block(counts):
    assert counts(reshard_after_forward=True) == (2 * 9, 2 * 5)
    assert counts(reshard_after_forward=False) == (2 * 5, 2 * 5)


def test_syncing_only_the_last_of_two_micro_batches_halves_the_scatters(counts):
    assert counts(sync_each_micro_batch=True) == (2 * 9, 2 * 5)
    assert counts(sync_each_micro_batch=False) == (2 * 9, 5)


def test_the_limit_of_all_gathers_and_the_prefetches_change_no_count(counts):
    usual = counts(FSDP1_BASE)
    for name in FSDP1_KNOBS:
        for value in FSDP1_VALUES[name]:
            assert counts(FSDP1_BASE, **{name: value}) == usual
