"""Every kind of shared storage under the one contract, with real servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtide.testing.blobs import BlobsContract
from kvtide.testing.servers import S3Server, ValkeyServer
from kvtide.tiers.shared.blobs import Blobs
from kvtide.tiers.shared.files import Files
from kvtide.tiers.shared.objects import Objects
from kvtide.tiers.shared.valkey import Valkey


class TestFiles(BlobsContract):
    def make(self, where: Path) -> Blobs:
        return Files(where)


class TestLocalObjects(BlobsContract):
    def make(self, where: Path) -> Blobs:
        return Objects(where.as_uri())


class TestS3(BlobsContract):
    @pytest.fixture(autouse=True)
    def server(self, s3: S3Server) -> None:
        self.endpoint = s3.endpoint

    def make(self, where: Path) -> Blobs:
        return Objects("s3://kvtide/some/folder", endpoint=self.endpoint)


class TestValkey(BlobsContract):
    dated = False

    @pytest.fixture(autouse=True)
    def server(self, valkey: ValkeyServer) -> None:
        self.url = valkey.url

    def make(self, where: Path) -> Blobs:
        return Valkey(self.url)
