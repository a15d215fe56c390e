"""A memory limit on a rank is a real one: the allocator fails, and the trial says so."""

from __future__ import annotations

import pytest

from trials.outcome import EXIT_OOM, Outcome
from trials.record import Knobs

from .harness import HERE, make_spec

KNOBS = Knobs(
    micro_batch_size=4,
    grad_accum_steps=2,
    sync_each_micro_batch=True,
    reshard_after_forward=True,
    bucket_cap_mb=2.82,
    blocks_per_unit=1,
    activation_checkpointing="none",
    num_workers=0,
    prefetch_factor=None,
)
MIB = 1 / 1024
LARGE_GIB = 4.0


def limited(source, gib, **changes):
    """3.3 million parameters: 26 MiB of weights, gradients and optimizer state on each of two ranks."""
    return make_spec(source, KNOBS, memory_limit_gib=gib, **{"model": {"preset": "tiny"}, "seq_len": 64, **changes})


@pytest.mark.parametrize(("limit_mib", "num_threads"), [(2, 1), (14, 1), (40, 1), (12, 2), (31, 2)])
def test_a_config_larger_than_the_limit_fails_in_the_real_allocator(ranks, text_folder, limit_mib, num_threads):
    gang = ranks.run(limited(text_folder, limit_mib * MIB), num_threads)
    assert gang.outcome is Outcome.OOM_DEVICE, str(gang)
    assert EXIT_OOM in gang.exit_codes
    for code, report in zip(gang.exit_codes, gang.reports, strict=True):
        assert code != 0, str(gang)
        assert (code == EXIT_OOM) == (report is not None and report.outcome == "oom_device"), str(gang)
        assert report is None or report.phase in ("build", "first_step", "warmup"), str(gang)


def test_one_ranks_out_of_memory_is_the_whole_trials_outcome(ranks, text_folder):
    hungry = {"preset": "tiny", "rank": 1, "extra_mib": 1024}
    gang = ranks.run(
        limited(text_folder, 0.5, workload="sabotage:HungryDecoder", import_paths=(str(HERE),), model=hungry)
    )
    assert gang.outcome is Outcome.OOM_DEVICE, str(gang)
    assert gang.exit_codes[1] == EXIT_OOM
    assert gang.reports[1].outcome == "oom_device"
    assert "allocate memory" in gang.reports[1].reason
    assert gang.exit_codes[0] not in (0, EXIT_OOM)


def test_a_roomy_limit_is_ok_and_the_tensors_peak_repeats_exactly(ranks, text_folder):
    first, second = (ranks.run(limited(text_folder, LARGE_GIB)) for _ in range(2))
    for gang in (first, second):
        assert gang.outcome is Outcome.OK, str(gang)
        for report in gang.reports:
            assert 0 < report.allocated_bytes <= report.reserved_bytes < LARGE_GIB * 2**30
    peaks = [[report.allocated_bytes for report in gang.reports] for gang in (first, second)]
    assert peaks[0] == peaks[1]
