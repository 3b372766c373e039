"""Neighbours on the disk are written together, and no header before its payload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtide.block import ALIGN, BlockKey, Span
from kvtide.testing.blocks import keys
from kvtide.testing.faults import Fault, FaultyDisk, How
from kvtide.testing.keys import ring_in
from kvtide.testing.tier import Caller, shaped
from kvtide.tiers.format.encryption import OPEN, Encryption
from kvtide.tiers.nvme.tier import Nvme

FOUR = shaped(4, 4100)
SLOT = ALIGN + FOUR.geometry.footprint
COUNT = 8
CALLS = 10
"""Two runs of four blocks: five calls each."""


class Watched(FaultyDisk):
    """Knows how far each call to a segment reached and, when it began, which pages had been written before it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.calls: list[tuple[range, set[int]]] = []
        self._written: set[int] = set()

    def forget(self) -> None:
        self.calls.clear()
        self._written.clear()

    def write(self, fd: int, data: Sequence[Span | bytes], offset: int) -> int:
        before = set(self._written)
        count = super().write(fd, data, offset)
        pages = range(offset // ALIGN, (offset + count) // ALIGN)
        self.calls.append((pages, before))
        self._written.update(pages)
        return count


@pytest.fixture(params=["open", "sealed"])
def encryption(request: pytest.FixtureRequest, tmp_path: Path) -> Encryption:
    return OPEN if request.param == "open" else Encryption(ring_in(tmp_path))


def opened(path: Path, disk: FaultyDisk, encryption: Encryption, threads: int = 2) -> Caller:
    return Caller(Nvme(path, 4 << 20, segment=1 << 20, threads=threads, disk=disk, encryption=encryption))


def found(caller: Caller) -> dict[BlockKey, int]:
    return {k: p for held in caller.tier.scan() for k, p in zip(held.keys, held.places.tolist(), strict=True)}


def test_no_header_is_written_before_its_payload(tmp_path: Path, encryption: Encryption) -> None:
    disk = Watched()
    caller = opened(tmp_path / "tier", disk, encryption)
    caller.write(keys(1, start=50), FOUR)  # makes the segment
    disk.forget()
    places = caller.write(keys(COUNT), FOUR)
    assert len(disk.calls) == CALLS
    for place in places:
        header = 1 + place * SLOT // ALIGN
        (before,) = [before for pages, before in disk.calls if header in pages]
        payload = set(range(header + 1, header + SLOT // ALIGN))
        assert payload <= before
    assert all(caller.finds(keys(COUNT), FOUR, places))
    caller.close()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("calls", range(CALLS + 1))
def test_a_power_loss_after_any_call_leaves_blocks_or_misses(
    tmp_path: Path, encryption: Encryption, calls: int, seed: int
) -> None:
    """In slots that held others before, whose headers and payloads may come back piece by piece."""
    disk, path = FaultyDisk(seed), tmp_path / "tier"
    caller = opened(path, disk, encryption)
    old = caller.write(keys(COUNT, start=50), FOUR)
    caller.close()  # by now they are on the medium
    caller = opened(path, disk, encryption)
    found(caller)
    caller.evict(keys(COUNT, start=50), old)
    disk.arm(Fault("write", files="*.segment", after=calls, times=1000))
    new = caller.write(keys(COUNT), FOUR)
    assert set(new) <= {-1, *old}
    assert (-1 in new) == (calls < CALLS)
    disk.die()
    caller.close()
    disk.power_loss()
    again = opened(path, disk, encryption)
    held = found(again)
    again.finds(list(held), FOUR, list(held.values()))  # each that is read has its own bytes, or it fails here
    everybody = [*keys(COUNT), *keys(COUNT, start=50)]
    places = again.write(everybody, FOUR)
    assert all(again.finds(everybody, FOUR, places))
    again.close()


@pytest.mark.parametrize("how", [How.FAIL, How.TORN, How.SHORT])
@pytest.mark.parametrize("after", range(CALLS))
def test_a_call_that_fails_once_costs_no_block(tmp_path: Path, encryption: Encryption, after: int, how: How) -> None:
    disk = FaultyDisk(seed=after)
    caller = Caller(Nvme(tmp_path / "tier", 4 << 20, segment=1 << 20, direct=False, disk=disk, encryption=encryption))
    caller.write(keys(1, start=50), FOUR)
    disk.arm(Fault("write", how, files="*.segment", after=after))
    places = caller.write(keys(COUNT), FOUR)
    assert disk.struck
    assert all(caller.finds(keys(COUNT), FOUR, places))
    assert caller.statistics().failed_writes == 0
    caller.close()


def test_a_page_that_cannot_be_written_costs_its_block_alone(tmp_path: Path, encryption: Encryption) -> None:
    class Scratched(FaultyDisk):
        """One page is bad for good."""

        page = -1

        def write(self, fd: int, data: Sequence[Span | bytes], offset: int) -> int:
            if offset <= self.page * ALIGN < offset + sum(len(d) for d in data):
                raise OSError(5, "Input/output error")
            return super().write(fd, data, offset)

    for bad in range(COUNT):
        for page in range(SLOT // ALIGN):
            disk = Scratched()
            caller = opened(tmp_path / f"{bad}-{page}", disk, encryption, threads=1)
            caller.write(keys(1, start=50), FOUR)
            disk.page = 1 + (1 + bad) * SLOT // ALIGN + page
            places = caller.write(keys(COUNT), FOUR)
            assert caller.finds(keys(COUNT), FOUR, places) == [i != bad for i in range(COUNT)]
            statistics = caller.statistics()
            assert (statistics.failed_writes, statistics.blocks) == (1, COUNT)
            assert statistics.bytes_written == COUNT * SLOT
            caller.close()
