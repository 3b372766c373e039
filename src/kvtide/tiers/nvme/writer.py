"""Writes blocks as records to a disk.

A write computes the checksums (and compresses), takes a slot of the right size, evicting if need be, and then does this
in order: journal "slot freed" (for evicted blocks) and "slot is being written", payload, header, journal "slot holds
key" (with the next record, at the latest when the batch ends). A crash at any point leaves either a whole record, or
one whose header or checksums do not match, which is a miss. No fsync is needed for that. ``durable`` adds one before a
write is acknowledged, and ``drop`` always syncs, because a dropped block must not come back.

Writing a header in its own call is only a page, but costs the disk as much as a good part of a block. So neighbouring
slots are written as a *run*, from the last to the first::

    slot        |  n        |  n + 1    |  n + 2    |
                |h| payload |h| payload |h| payload |
    first call                            =========
    second                    =========== =            the payload of n + 1, followed by the header of n + 2
    third         =========== =
    fourth      =

No header is written before the call that wrote its payload has returned, so the order above is kept for every block. If
a call fails, the blocks without a header yet are written again, each alone: not all of them need be bad.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

from kvtide.block import Span
from kvtide.clock import Clock
from kvtide.tiers.base import NOWHERE, Write
from kvtide.tiers.counters import TierCounters
from kvtide.tiers.format.packer import Packer, header_of
from kvtide.tiers.format.reason import Reason
from kvtide.tiers.format.record import Rejected
from kvtide.tiers.nvme.journal import HOLDS, WRITING, entry
from kvtide.tiers.nvme.volume import MakeRoom, Volume
from kvtide.tiers.segments import ladder

__all__ = ["Run", "Writer"]

_RUN = 4
"""The maximum number of blocks of a run: five calls instead of eight. Longer runs gain little, and leave other threads
idle."""
_COPIES = 8 << 20
"""The maximum bytes of a run whose payloads are copies: a thread keeps that much memory for them, or one block's."""


class Slot(NamedTuple):
    """Where a block is to be written, and its record's sequence number."""

    place: int
    fd: int
    offset: int
    sequence: int


_NO_SLOT = Slot(NOWHERE, NOWHERE, NOWHERE, NOWHERE)

Run = Sequence[tuple[Write, Slot | None]]
"""Blocks and their slots, which are adjacent; or one block whose slot is not known yet."""


class _Record(NamedTuple):
    """A block that is ready to be written."""

    slot: Slot
    page: Span
    """The header."""
    payload: Span
    holds: bytes
    """The record for the journal."""


class Writer:
    """Writes to ``volume``. Thread-safe. ``make_room`` is called when the volume is full."""

    def __init__(self, volume: Volume, make_room: MakeRoom | None, clock: Clock, counters: TierCounters) -> None:
        self._volume = volume
        self._make_room = make_room
        self._clock = clock
        self._counters = counters

    def runs(self, batch: Sequence[Write], *, copied: bool) -> list[Run]:
        """Divide blocks that are not compressed into runs, at least two if there are enough blocks.

        The sizes of their records are known, so they get their slots at once. All blocks of a layout have one size, so
        their slots fit exactly: sizes from the ladder would leave gaps, and a disk that is read and written without
        gaps is faster. Encrypted payloads are ``copied``: a packer must have memory for those of a run.
        """
        slots = self._slots([(item, header_of(item) + item.identity.geometry.footprint) for item in batch])
        runs: list[list[tuple[Write, Slot | None]]] = []
        most = min(_RUN, -(-len(batch) // 2), _COPIES // max(len(item.span) for item in batch) if copied else _RUN)
        following = NOWHERE
        for item, slot in zip(batch, slots, strict=True):
            if slot.place == following != NOWHERE and len(runs[-1]) < most:
                runs[-1].append((item, slot))
            else:
                runs.append([(item, slot)])
            following = slot.place + 1 if slot is not _NO_SLOT else NOWHERE
        return list(runs)

    def _slots(self, wanted: Sequence[tuple[Write, int]]) -> list[Slot]:
        """Take slots of the sizes that blocks need, and announce them in the journal."""
        slots: list[Slot] = []
        taken: list[int] = []
        try:
            for size, alike in groupby(wanted, key=itemgetter(1)):
                items, before = [item for item, _ in alike], len(taken)
                taken.extend(self._volume.take(size, [item.owner for item in items], self._make_room))
                places = taken[before:]
                begun = self._volume.begin([item.key for item in items[: len(places)]], places)
                slots += [Slot(place, *where) for place, where in zip(places, begun, strict=True)]
                slots += [_NO_SLOT] * (len(items) - len(places))
            self._volume.note(
                b"".join(
                    [
                        entry(WRITING, slot.place, item.key, slot.sequence)
                        for slot, (item, _) in zip(slots, wanted, strict=True)
                        if slot is not _NO_SLOT
                    ]
                )
            )
        except BaseException:
            for place in taken:
                self._volume.failed(place)
            raise
        return slots

    def write(self, run: Run, packer: Packer) -> list[int]:
        """Returns the places of the blocks; NOWHERE for those that could not be written."""
        named: list[int] = []
        slots = [slot for _, slot in run]
        writing = False
        try:
            records = self._records(run, slots, packer)
            writing = True
            last = records[-1]
            self._volume.write(last.slot.fd, [last.payload], last.slot.offset + len(last.page))
            for behind, record in pairwise(reversed(records)):
                self._name(behind, record.payload)
                named.append(behind.slot.place)
            self._name(records[0])
        except Exception as e:  # noqa: BLE001 - see TierCounters
            if len(run) > 1:
                left = run[: len(run) - len(named)]
                return [self.write([one], packer)[0] for one in left] + named[::-1]
            for slot in slots:
                if slot is not None and slot is not _NO_SLOT:
                    self._volume.failed(slot.place, e if writing else None)
            self._counters.failed("write", e)
            return [NOWHERE]
        return [record.slot.place for record in records]

    def _name(self, record: _Record, before: Span | None = None) -> None:
        self._volume.name(record.slot.place, record.page, record.slot.sequence, record.holds, before)
        self._counters.count_bytes(written=len(record.page) + len(record.payload))

    def _records(self, run: Run, slots: list[Slot | None], packer: Packer) -> list[_Record]:
        """The records of a run. A slot that was not known yet is put into ``slots``."""
        pages = packer.header.get(sum(header_of(item) for item, _ in run))
        records = []
        for i, (item, _) in enumerate(run):
            packed = packer.pack(item, i)
            slot = slots[i] = slots[i] or self._slots([(item, ladder(packed.nbytes))])[0]
            if slot is _NO_SLOT:
                if not self._volume.segments.possible(packed.nbytes):
                    raise Rejected(Reason.TOO_LARGE)
                code = self._volume.refused
                raise OSError(code, os.strerror(code)) if code else Rejected(Reason.FULL)
            page, pages = pages[: packed.header], pages[packed.header :]
            packed.name(page, slot.sequence, self._clock.time())
            facts = item.parent, item.depth, item.expiry, item.priority, item.identity.fingerprint
            holds = entry(HOLDS, slot.place, item.key, slot.sequence, *facts)
            records.append(_Record(slot, page, packed.payload, holds))
        return records
