from __future__ import annotations

import pytest

from .harness import RankServer, write_text


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    server = RankServer(tmp_path_factory.mktemp("ranks"))
    yield server
    server.close()
