"""A step's samples depend on the seed and the step, not on the ranks, micro-batches or workers."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trials import data
from trials.outcome import Outcome, TrialError
from trials.record import Knobs

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
    samplers = [
        iter(data.MicroBatchSampler(num_samples, knobs(micro, accumulation), rank, world_size, seed))
        for rank in range(world_size)
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


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_do_not_change_the_batches_or_their_order(text_folder, num_workers):
    dataset = data.ByteTextDataset(str(text_folder), 32)

    def first_batches(workers):
        loader = data.make_loader(dataset, knobs(2, 3, workers), rank=1, world_size=2, seed=5, device="cpu")
        return torch.stack(list(itertools.islice(loader, 9)))

    assert torch.equal(first_batches(num_workers), first_batches(0))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.binary(max_size=60), min_size=1, max_size=5), st.integers(1, 16))
def test_samples_are_the_files_bytes_end_to_end_and_overlap_by_one(tmp_path_factory, files, seq_len):
    folder = tmp_path_factory.mktemp("files")
    for number, content in enumerate(files):
        (folder / f"{number}.txt").write_bytes(content)
    text = b"".join(files)
    if len(text) < seq_len + 1:
        with pytest.raises(TrialError, match=f"{len(text)} bytes") as caught:
            data.ByteTextDataset(str(folder), seq_len)
        assert caught.value.outcome is Outcome.INVALID
        return
    dataset = data.ByteTextDataset(str(folder), seq_len)
    assert len(dataset) == (len(text) - 1) // seq_len
    for index in range(len(dataset)):
        assert bytes(dataset[index].tolist()) == text[index * seq_len : index * seq_len + seq_len + 1]
