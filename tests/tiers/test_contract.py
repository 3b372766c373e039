"""Every tier, in every mode, under the one contract."""

from __future__ import annotations

from pathlib import Path

from kvtide.testing.blocks import Bytes, floats
from kvtide.testing.tier import TierContract
from kvtide.tiers.base import Tier
from kvtide.tiers.dram import Dram
from kvtide.tiers.noop import Noop
from kvtide.tiers.nvme import Nvme


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
