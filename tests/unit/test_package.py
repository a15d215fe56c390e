"""The wheel: built, installed elsewhere, and complete."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FINDS_WHAT_IT_SHIPS = """
import autotune, trials, search_spaces, sys
from autotune.job_file import load_job, shipped
from autotune.hardware import device_table
assert "elsewhere" in autotune.__file__, autotune.__file__
assert "elsewhere" in trials.__file__, trials.__file__
assert {"default", "quickstart"} <= set(shipped("spaces"))
for name in shipped("jobs"):
    load_job(name)
assert len(device_table()) == 50
print("complete")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(ROOT)], check=True, timeout=120)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_code_and_data_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name.split("/")[0] for name in names}
    assert {"autotune", "trials", "search_spaces"} <= packages
    assert not any(name.startswith("tests/") for name in names)
    assert "autotune/devices.csv" in names
    assert "search_spaces/jobs/quickstart.yaml" in names


def test_installed_elsewhere_it_finds_its_spaces_and_jobs(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)],
        check=True,
        timeout=120,
    )
    code = f"import sys\nsys.path.insert(0, {str(target)!r})\n{FINDS_WHAT_IT_SHIPS}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "complete\n", done.stderr
