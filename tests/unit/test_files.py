"""Files that appear whole or not at all, to whoever looks for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.history import History
from tests.unit.test_history import row
from trials.files import write_whole


@pytest.mark.parametrize("pattern", ["*", "*.parquet", "*.yaml", "*.json"])
def test_no_pattern_finds_a_file_of_a_name_that_is_not_yet_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    """pathlib's patterns match names that start with a dot."""
    seen: list[Path] = []
    rename = Path.rename

    def look_first(aside: Path, path: Path) -> Path:
        seen.extend(found for found in tmp_path.glob(pattern) if found.suffix != ".part")
        return rename(aside, path)

    monkeypatch.setattr(Path, "rename", look_first)
    for name in ("row.parquet", "best.yaml", "summary.json"):
        write_whole(tmp_path / name, "whole")
        assert not seen
        assert (tmp_path / name).read_text() == "whole"
        (tmp_path / name).unlink()


def test_an_attempt_that_was_not_renamed_is_in_no_history(tmp_path: Path) -> None:
    history = History(tmp_path)
    whole = history.append(row(0))
    write_whole(tmp_path / "copy", whole.read_bytes())
    (tmp_path / "copy").rename(tmp_path / f".{history.append(row(1)).name}.part")
    (tmp_path / "trial-0001-attempt-0.parquet").unlink()
    assert [found["trial"] for found in history.rows()[0]] == [0]
    assert [path.name for path in tmp_path.glob("*.parquet")] == [whole.name]
