"""A step's samples depend on the seed and the step, not on the ranks, micro-batches or workers."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trials import data
from trials.record import Knobs

from .sources import FORMATS, VOCAB_SIZE

GLOBAL_BATCH = 24


def knobs(micro_batch_size, grad_accum_steps, num_workers=0):
    return Knobs(
        micro_batch_size=micro_batch_size,
        grad_accum_steps=grad_accum_steps,
        sync_each_micro_batch=True,
        reshard_after_forward=True,
        bucket_cap_mb=1.0,
        blocks_per_unit=1,
        activation_checkpointing="none",
        num_workers=num_workers,
        prefetch_factor=2 if num_workers else None,
    )


@st.composite
def splits(draw):
    """(ranks, micro-batch, accumulation) whose product is the global batch."""
    world_size = draw(st.sampled_from([n for n in range(1, GLOBAL_BATCH + 1) if GLOBAL_BATCH % n == 0]))
    per_rank = GLOBAL_BATCH // world_size
    micro = draw(st.sampled_from([n for n in range(1, per_rank + 1) if per_rank % n == 0]))
    return world_size, micro, per_rank // micro


def samples_of_steps(num_samples, split, seed, num_steps):
    """Sample indices of each step, rank after rank, micro-batch after micro-batch."""
    world_size, micro, accumulation = split
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed))
    samplers = [
        iter(data.MicroBatchSampler(order, knobs(micro, accumulation), rank, world_size)) for rank in range(world_size)
    ]
    steps = []
    for _ in range(num_steps):
        micro_batches = [next(sampler) for sampler in samplers for _ in range(accumulation)]
        assert all(len(indices) == micro for indices in micro_batches)
        steps.append(list(itertools.chain(*micro_batches)))
    return steps


@settings(deadline=None)
@given(st.integers(1, 200), splits(), splits(), st.integers(0, 2**31), st.integers(1, 5))
def test_steps_train_on_the_same_samples_however_they_are_split(num_samples, one, other, seed, num_steps):
    assert samples_of_steps(num_samples, one, seed, num_steps) == samples_of_steps(num_samples, other, seed, num_steps)


@settings(deadline=None)
@given(st.integers(GLOBAL_BATCH, 200), splits(), st.integers(0, 2**31))
def test_no_sample_comes_twice_before_all_have_come(num_samples, split, seed):
    num_steps = num_samples // GLOBAL_BATCH
    seen = list(itertools.chain(*samples_of_steps(num_samples, split, seed, num_steps)))
    assert len(set(seen)) == len(seen) == num_steps * GLOBAL_BATCH
    assert set(seen) <= set(range(num_samples))


@given(st.integers(30, 200), splits())
def test_another_seed_is_another_order(num_samples, split):
    assert samples_of_steps(num_samples, split, 0, 1) != samples_of_steps(num_samples, split, 1, 1)


@settings(deadline=None)
@given(st.integers(1, 60), splits(), st.integers(0, 2**31))
def test_a_source_that_runs_dry_starts_again_in_the_same_order(num_samples, split, seed):
    num_steps = 3 * num_samples // GLOBAL_BATCH + 1
    seen = list(itertools.chain(*samples_of_steps(num_samples, split, seed, num_steps)))
    assert seen == [seen[position % num_samples] for position in range(len(seen))]
    assert sorted(seen[:num_samples]) == list(range(min(num_samples, len(seen))))


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("kind", FORMATS)
def test_workers_do_not_change_the_batches_or_their_order(sources, kind, num_workers):
    dataset = data.make_dataset(sources[kind], 32, VOCAB_SIZE)

    def first_batches(workers):
        loader = data.make_loader(dataset, knobs(2, 3, workers), rank=1, world_size=2, seed=5, device="cpu")
        return torch.stack(list(itertools.islice(loader, 9)))

    assert torch.equal(first_batches(num_workers), first_batches(0))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_are_pinned_for_a_gpu_alone_and_workers_persist(sources, num_workers):
    dataset = data.make_dataset(sources["text"], 32, VOCAB_SIZE)
    for device in ("cuda", "cpu"):
        loader = data.make_loader(dataset, knobs(2, 3, num_workers), rank=0, world_size=2, seed=5, device=device)
        assert loader.pin_memory is (device == "cuda")
        assert loader.persistent_workers is (num_workers > 0)


@pytest.mark.parametrize("kind", FORMATS)
def test_ranks_and_micro_batches_do_not_change_a_steps_sequences(sources, kind):
    def sequences(world_size, micro, accumulation):
        """Of two steps, by their place in the global batch."""
        steps = []
        for rank in range(world_size):
            dataset = data.make_dataset(sources[kind], 32, VOCAB_SIZE)
            loader = data.make_loader(dataset, knobs(micro, accumulation), rank, world_size, seed=5, device="cpu")
            batches = list(itertools.islice(loader, 2 * accumulation))
            steps.append(torch.cat(batches).reshape(2, micro * accumulation, -1))
        return torch.cat(steps, dim=1)

    assert torch.equal(sequences(1, 8, 1), sequences(4, 1, 2))
    assert torch.equal(sequences(1, 8, 1), sequences(2, 2, 2))


@pytest.mark.parametrize("kind", FORMATS)
def test_every_sequence_comes_once_an_epoch(sources, kind):
    dataset = data.make_dataset(sources[kind], 32, VOCAB_SIZE)
    for seed in (0, 1):
        assert sorted(dataset.order(seed).tolist()) == list(range(len(dataset)))
