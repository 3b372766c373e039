"""Every tier, in every mode, under the one contract."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.noop import Noop
from kvtide.testing.any_tier import AnyTierContract
from kvtide.testing.blocks import Bytes, floats
from kvtide.testing.keys import ring_in
from kvtide.testing.servers import S3Server, ValkeyServer
from kvtide.testing.tier import TierContract
from kvtide.tiers.base import Tier
from kvtide.tiers.dram.tier import Dram
from kvtide.tiers.format.encryption import Encryption
from kvtide.tiers.nvme.tier import Nvme
from kvtide.tiers.shared.budget import BudgetCoordinatorStatistics
from kvtide.tiers.shared.files import Files
from kvtide.tiers.shared.objects import Objects
from kvtide.tiers.shared.tier import Permit, Shared
from kvtide.tiers.shared.valkey import Valkey


class TestNoop(TierContract):
    keeps_bytes = False

    def make(self, where: Path, budget: int) -> Tier:
        return Noop(budget)


class TestDram(TierContract):
    checks_identity = False

    def make(self, where: Path, budget: int) -> Tier:
        return Dram(budget, segment=512 << 10)


class TestDramPrefaulted(TierContract):
    checks_identity = False

    def make(self, where: Path, budget: int) -> Tier:
        return Dram(budget, segment=512 << 10, prefault=True)


class TestNvme(TierContract):
    persistent = True

    def make(self, where: Path, budget: int) -> Tier:
        return Nvme(where, budget, segment=512 << 10)


class TestNvmeBuffered(TierContract):
    persistent = True

    def make(self, where: Path, budget: int) -> Tier:
        return Nvme(where, budget, segment=512 << 10, direct=False)


class TestNvmeDurable(TierContract):
    persistent = True

    def make(self, where: Path, budget: int) -> Tier:
        return Nvme(where, budget, segment=512 << 10, threads=2, durable=True)


class TestNvmeCompressed(TierContract):
    """Blocks of numbers, which shrink, in slots of many sizes."""

    persistent = True

    def make(self, where: Path, budget: int) -> Tier:
        return Nvme(where, budget, segment=512 << 10, compression="zstd")

    def content(self, key: bytes, nbytes: int) -> Bytes:
        return floats(key, nbytes)


class TestNvmeIncompressible(TierContract):
    """Blocks that a codec cannot shrink are kept as they are."""

    persistent = True

    def make(self, where: Path, budget: int) -> Tier:
        return Nvme(where, budget, segment=512 << 10, compression="zstd")


class Limit:
    """Credit for blocks of at most so many bytes."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    @property
    def largest(self) -> int:
        return self._nbytes

    def take(self, name: str, nbytes: int) -> Permit | None:
        return Permit(math.inf, nbytes)

    def end(self, permit: Permit, *, failed: bool) -> None: ...

    def used(self, names: Sequence[str]) -> None: ...

    def coordinator_statistics(self) -> BudgetCoordinatorStatistics:
        return BudgetCoordinatorStatistics()


class TestFiles(AnyTierContract):
    persistent = True
    counts = False

    def make(self, where: Path, budget: int) -> Tier:
        return Shared(Files(where), credit=Limit(budget))


class TestFilesBuffered(AnyTierContract):
    persistent = True
    counts = False

    def make(self, where: Path, budget: int) -> Tier:
        return Shared(Files(where, direct=False), credit=Limit(budget))


class TestFilesCompressed(AnyTierContract):
    persistent = True
    counts = False

    def make(self, where: Path, budget: int) -> Tier:
        return Shared(Files(where), compression="zstd", credit=Limit(budget))

    def content(self, key: bytes, nbytes: int) -> Bytes:
        return floats(key, nbytes)


class TestFilesSealed(AnyTierContract):
    persistent = True
    counts = False

    def make(self, where: Path, budget: int) -> Tier:
        return Shared(Files(where), encryption=Encryption(ring_in(where.parent)), credit=Limit(budget))


class TestS3(TestFiles):
    @pytest.fixture(autouse=True)
    def server(self, s3: S3Server) -> None:
        self.endpoint = s3.endpoint

    def make(self, where: Path, budget: int) -> Tier:
        return Shared(Objects(f"s3://contract{where}", endpoint=self.endpoint), credit=Limit(budget))


class TestValkey(TestFiles):
    @pytest.fixture(autouse=True)
    def server(self, valkey: ValkeyServer) -> None:
        self.url = valkey.url

    def make(self, where: Path, budget: int) -> Tier:
        return Shared(Valkey(self.url, folder=str(where)), credit=Limit(budget))


class TestNvmeSealed(TierContract):
    persistent = True

    def make(self, where: Path, budget: int) -> Tier:
        return Nvme(where, budget, segment=512 << 10, encryption=Encryption(ring_in(where.parent)))


class TestNvmeSealedAndCompressed(TierContract):
    persistent = True

    def make(self, where: Path, budget: int) -> Tier:
        encryption = Encryption(ring_in(where.parent))
        return Nvme(where, budget, segment=512 << 10, compression="zstd", encryption=encryption)

    def content(self, key: bytes, nbytes: int) -> Bytes:
        return floats(key, nbytes)
