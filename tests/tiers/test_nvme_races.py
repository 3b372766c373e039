"""What may fall between two steps of the NVMe tier, with a disk that stops where it is told to."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtide.block import ALIGN, Span
from kvtide.testing.blocks import keys
from kvtide.testing.faults import Fault, FaultyDisk
from kvtide.testing.tier import Caller, shaped
from kvtide.tiers.base import NOWHERE
from kvtide.tiers.nvme.tier import Nvme

WHO = shaped(1, 60 << 10)
OTHER = shaped(1, 100 << 10)


class SlowErasing(FaultyDisk):
    """When it is ``watched``, overwriting a header with zeros waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.watched = False
        self.erasing = threading.Event()
        self.go_on = threading.Event()

    def write(self, fd: int, data: Sequence[Span | bytes], offset: int) -> int:
        if self.watched and sum(len(d) for d in data) == ALIGN and not any(data[0]):
            self.erasing.set()
            assert self.go_on.wait(60)
        return super().write(fd, data, offset)


def test_a_block_that_gets_the_slot_of_a_block_being_dropped_is_not_erased_with_it(tmp_path: Path) -> None:
    disk = SlowErasing()
    tier = Nvme(tmp_path / "tier", 4 << 20, segment=64 << 10, threads=3, disk=disk)
    caller = Caller(tier)
    old, new = keys(2)
    (place,) = caller.write([old], WHO)
    caller.evict([old], [place])
    disk.watched = True
    dropped = caller.start_drop([(old, NOWHERE)])
    assert disk.erasing.wait(60)
    written = caller.start_write([caller.block(new, WHO)])
    # It may be written now, over the old one, or wait; but once it is acknowledged it stays.
    written._event.wait(0.2)
    disk.go_on.set()
    assert dropped.wait() == [True]
    assert written.wait() == [place], "the slot was not used again; this test shows nothing"
    assert caller.finds([new], WHO, [place]) == [True]
    caller.close()


@pytest.mark.parametrize("call", ["resize", "write", "sync"])
def test_a_segment_that_could_not_be_cut_anew_brings_nothing_back(tmp_path: Path, call: str) -> None:
    """Its old contents are unreachable, but until the disk knows that, a power loss may undo it."""
    back = 0
    for seed in range(12):
        disk = FaultyDisk(seed)
        path = tmp_path / str(seed)
        caller = Caller(Nvme(path, 1 << 20, segment=1 << 20, threads=1, disk=disk))
        held = caller.fill(WHO)
        caller.evict(list(held), list(held.values()))
        if call != "sync":
            caller.drop((keys(1, start=999)[0], NOWHERE))  # syncs what was written
        # Where the disk lacks space, a smaller segment would be tried.
        disk.arm(Fault(call, code=errno.EIO if call == "resize" else errno.ENOSPC, files="*.segment"))
        assert caller.write(keys(1, start=1000), OTHER) == [NOWHERE]
        assert disk.struck
        assert all(caller.drop(*((key, NOWHERE) for key in held)))
        disk.die()
        caller.close()
        disk.power_loss()
        (path / "journal").unlink(missing_ok=True)
        tier = Nvme(path, 1 << 20, segment=1 << 20, disk=disk)
        back += sum(key in held for found in tier.scan() for key in found.keys)
        tier.close()
    assert not back
