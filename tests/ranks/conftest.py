from __future__ import annotations

import os

import pytest

from .harness import RankServer, write_text
from .sources import write_sources


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Indexes of text are kept for the session only; ranks inherit it."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    return write_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    server = RankServer(tmp_path_factory.mktemp("ranks"))
    yield server
    server.close()
