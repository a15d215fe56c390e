"""Debian's chromium, headless, and pages of runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from tests.cluster.tuned import tune
from tests.unit.test_simulated_run import autotune

BROWSER, DRIVER = "chromium", "chromedriver"
FLAGS = (
    "--headless",
    "--no-sandbox",  # for root, in a container
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
CLUSTER = "nodes=2 gpus=8 device='NVIDIA H100 80GB HBM3'"


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    found = {name: shutil.which(name) for name in (BROWSER, DRIVER)}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        pytest.fail(f"{' and '.join(missing)} not found: apt-get install chromium chromium-driver", pytrace=False)
    options = webdriver.ChromeOptions()
    options.binary_location = found[BROWSER] or ""
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(found[DRIVER]))
    yield driver
    driver.quit()


@pytest.fixture(scope="session")
def simulated_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with a winner, its gain taken apart, and its cost."""
    folder = tmp_path_factory.mktemp("simulated")
    options = ("--set", "measure.rounds=3", "--set", "cluster.nodes_per_trial=2", "--trials", "12")
    autotune("run", "llama3-8b", "--simulate", CLUSTER, "--output", str(folder / "run"), *options)
    autotune("waterfall", str(folder / "run"))
    autotune("report", str(folder / "run"), "-o", str(folder / "page.html"), "--tokens", "1T", "--price", "2.5")
    return folder / "page.html"


@pytest.fixture(scope="session")
def measured_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run that really trained, on one rank."""
    folder = tmp_path_factory.mktemp("measured")
    run = tune(folder)
    autotune("report", str(run), "-o", str(folder / "page.html"))
    return folder / "page.html"
