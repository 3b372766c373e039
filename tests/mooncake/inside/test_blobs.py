"""The contract of shared storage, over a real master."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.testing.blobs import BlobsContract
from kvtide.tiers.shared.blobs import Blobs
from kvtide.tiers.shared.mooncake import Mooncake
from tests.mooncake.servers import MooncakeMaster


@pytest.fixture(scope="module")
def opened(master: MooncakeMaster) -> Iterator[Mooncake]:
    """One for all tests: closing Mooncake's client takes a second."""
    blobs = Mooncake(master.url)
    yield blobs
    blobs.close()


class TestMooncake(BlobsContract):
    dated = False

    @pytest.fixture
    def blobs(self, opened: Mooncake, master: MooncakeMaster) -> Blobs:
        self.url = master.url
        return opened

    def make(self, where: Path) -> Blobs:
        return Mooncake(self.url)
