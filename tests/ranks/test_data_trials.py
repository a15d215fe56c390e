"""Real trials on two ranks with every kind of data, and what a loader's worker finds wrong in the middle of one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from trials import data
from trials.outcome import Outcome
from trials.record import Measure

from .harness import TINY, make_spec
from .sources import FORMATS, VOCAB_SIZE
from .test_misapplied import ASKED, NO_WORKERS

MODEL = {"config": TINY | {"vocab_size": VOCAB_SIZE}}


def trial(section, knobs, **changes):
    return make_spec("", knobs, data=section, model=MODEL, **changes)


def run(ranks, section, **changes):
    """One trial that must end well; the losses of its steps."""
    asked = {"sync_each_micro_batch": True, "activation_checkpointing": "none"} | changes
    spec = trial(section, dataclasses.replace(ASKED, **asked))
    gang = ranks.run(spec)
    assert gang.outcome is Outcome.OK, str(gang)
    assert gang.reports[0].applied == spec.knobs.to_dict()
    return gang.reports[0].losses


@pytest.mark.parametrize("kind", FORMATS)
def test_two_ranks_with_workers_train_on_it(ranks, sources, kind):
    workers = NO_WORKERS if kind == "synthetic" else {}
    assert run(ranks, sources[kind], **workers)[0] > 0


def test_without_workers_and_in_other_micro_batches_the_loss_is_the_same(ranks, sources):
    other = run(ranks, sources["parquet-bpe"], **NO_WORKERS, micro_batch_size=4, grad_accum_steps=1)
    assert other[0] == pytest.approx(run(ranks, sources["parquet-bpe"])[0], rel=1e-4)


@pytest.mark.parametrize("kind", ["jsonl-bpe", "synthetic"])
def test_the_survey_says_what_is_trained_on(ranks, sources, kind):
    gang = ranks.run(dataclasses.replace(trial(sources[kind], ASKED, stage="survey"), knobs=None))
    assert gang.outcome is Outcome.OK, str(gang)
    said = gang.reports[0].survey["data"]
    assert ("the data loader was not measured" in said) == (kind == "synthetic")
    assert ("3 jsonl files" in said) == (kind == "jsonl-bpe")


@pytest.mark.parametrize("stage", ["survey", "explore"])
def test_bad_data_is_invalid_in_a_rank(ranks, sources, stage):
    section = sources["jsonl"] | {"text_field": "body"}
    spec = trial(section, dataclasses.replace(ASKED, **NO_WORKERS), stage=stage)
    gang = ranks.run(dataclasses.replace(spec, knobs=None) if stage == "survey" else spec)
    assert gang.outcome is Outcome.INVALID, str(gang)
    assert "no key 'body'; its keys: 'id', 'text'. Say data.text_field" in gang.reports[0].reason


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_token_outside_of_the_vocabulary_that_only_a_worker_meets_is_invalid(ranks, tmp_path, num_workers):
    ids = np.full(2**21, 7, np.uint16)
    path = tmp_path / "a.bin"
    ids.tofile(path)
    # One where the first step reads, far from what is probed when the file is opened.
    order = data.make_dataset({"source": str(path)}, 2**12, VOCAB_SIZE).order(0).tolist()
    probed = np.linspace(0, len(ids) - 2**14, 64).astype(np.int64)
    place = next(p for i in order[:8] for p in range(i * 2**12, (i + 1) * 2**12) if not _within(p, probed, 2**14))
    ids[place] = VOCAB_SIZE
    ids.tofile(path)
    prefetch = 2 if num_workers else None
    knobs = dataclasses.replace(ASKED, num_workers=num_workers, prefetch_factor=prefetch)
    spec = trial({"source": str(path)}, knobs, seq_len=2**12, measure=Measure(1, 1, 1, block_s=0.01))
    gang = ranks.run(spec)
    assert gang.outcome is Outcome.INVALID, str(gang)
    reason = next(report.reason for report in gang.reports if report and report.outcome == "invalid")
    assert reason.startswith(f"{path}: token id {VOCAB_SIZE}; the model's vocabulary is 0 to {VOCAB_SIZE - 1}")


def _within(place, starts, length):
    return bool(((starts <= place) & (place < starts + length)).any())
