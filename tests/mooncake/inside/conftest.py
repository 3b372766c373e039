"""One master and one holder for all tests that break neither."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.mooncake.servers import Holder, MooncakeMaster


@pytest.fixture(scope="session")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    with MooncakeMaster(tmp_path_factory.mktemp("master")) as server, Holder(server, 512 << 20):
        yield server
