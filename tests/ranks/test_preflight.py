"""The closed form of memory beside what real trials on two gloo ranks track."""

from __future__ import annotations

import pytest

from tests.benchmarks.tracked import CONFIGS, compare
from tests.ranks.harness import RankServer


@pytest.mark.parametrize("config", CONFIGS[::6], ids=lambda config: config[0])
def test_the_peak_of_live_tensors_is_the_closed_forms(ranks: RankServer, config: tuple[str, str, dict]) -> None:
    found = compare(ranks, config)
    assert abs(found["error"]) < 0.05, found
