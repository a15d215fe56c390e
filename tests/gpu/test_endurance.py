"""The endurance run on one GPU: each engine's checkpoint, and what each phase takes of the device."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import ENGINES, gpu_spec
from trials.outcome import Outcome


@pytest.mark.parametrize("engine", ENGINES)
def test_a_checkpoint_brings_all_back_and_each_phase_says_what_it_takes(run_gpu, texts, tmp_path, engine):
    gang = run_gpu(gpu_spec(texts, checkpoint_dir=str(tmp_path / "checkpoint"), **ENGINES[engine]))
    assert gang.outcome is Outcome.OK, str(gang)
    (report,) = gang.reports
    phases = {phase["phase"]: phase for phase in report.endurance["phases"]}
    assert list(phases) == ["train", "evaluate", "save", "load"]
    for phase in phases.values():
        assert 0 < phase["allocated_bytes"] <= phase["reserved_bytes"]
        assert phase["host_bytes"] > 0
    assert phases["evaluate"]["allocated_bytes"] < phases["train"]["allocated_bytes"], "it keeps no activations"
    assert report.allocated_bytes == max(phase["allocated_bytes"] for phase in phases.values())
    assert not (tmp_path / "checkpoint").exists()
