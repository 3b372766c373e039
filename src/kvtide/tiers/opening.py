"""Opening an NVMe directory: what its segments are, and what lies in their slots.

By the journal if it can be trusted, else by the headers, which are the truth. If any file is newer than this kvtide,
nothing is touched.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvtide.block import BlockKey
from kvtide.errors import TierError, TierVersionError
from kvtide.tiers.base import Held
from kvtide.tiers.directory import FORMAT, Directory, SegmentHeader
from kvtide.tiers.journal import FREED, HOLDS, PER_SLOT, RECORD, WRITING, Journal, entry, latest, replay
from kvtide.tiers.record import Header, Rejected
from kvtide.tiers.sealing import NO_KEY
from kvtide.tiers.segments import Segment, Segments, by_segment, place_of, segment_of, slot_of

__all__ = ["ANY", "Opening", "current"]

log = logging.getLogger("kvtide.nvme")

ANY = BlockKey(b"")
"""What a header that could not be read may name: every drop overwrites it."""


def _unread(reason: str) -> bool:
    """Whether a header may be whole, though it could not be read this time."""
    return reason == "torn" or reason.startswith(("unreadable", *NO_KEY))


def current(records: npt.NDArray[np.void], segments: Segments, cuts: dict[int, int]) -> npt.NDArray[np.bool_]:
    """Which journal records speak of slots as they are cut now; ``cuts`` has the sequence number of each cutting."""
    count = max((s.number for s in segments), default=-1) + 1
    slots, first = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    for s in segments:
        slots[s.number], first[s.number] = s.slots, cuts[s.number]
    places = records["place"].astype(np.int64)
    numbers = np.where((places >= 0) & (places >> 32 < count), places >> 32, count)
    current: npt.NDArray[np.bool_] = places & 0xFFFFFFFF < slots[numbers]
    return current & (records["sequence"] >= first[numbers])


class Opening:
    """What was found. Fills ``segments``; the other parts of the book are here until the tier takes them over."""

    def __init__(self, directory: Directory, direct: bool, segments: Segments) -> None:
        self._directory = directory
        self._disk = directory.disk
        self._direct = direct
        self._segments = segments
        self.files: dict[int, int] = {}
        self.sequences: dict[int, npt.NDArray[np.int64]] = {}
        self.sequence = 1
        self.cuts: dict[int, int] = {}
        self.stale: dict[int, BlockKey] = {}
        self.reasons: Counter[str] = Counter()

    def run(self, journal: Journal) -> Held:
        """Open all files; answers what was here before. The journal is then as short as can be."""
        numbers = list(self._directory.segments())
        # First look at all of them: if one is newer, nothing may be touched.
        headers = {number: self._look(number) for number in numbers}
        for number, header in headers.items():
            self._open_segment(number, header)
        records, doubt = replay(self._directory.journal, journal.boot, self._directory.sealing)
        if doubt:
            if numbers:
                log.warning("%s: the journal is %s; reading headers", self._directory.path, doubt)
            records = self._from_headers()
        else:
            records = self._finish_writing(latest(records))
        return self._adopt(records, journal)

    def _look(self, number: int) -> SegmentHeader | str:
        """Open a segment file; answers how it is cut, or why that cannot be said."""
        path = self._directory.segment(number)
        fd = self.files[number] = self._disk.open(path, direct=self._direct)
        if not os.fstat(fd).st_size:
            return ""  # emptied, and not needed since
        try:
            return self._directory.segment_header(fd)
        except OSError as e:
            raise TierError(
                f"{path} cannot be read: {e.strerror or e}. Nothing was touched. Mend the disk, or take that file away "
                "if its blocks may be lost"
            ) from e
        except Rejected as e:
            kind, _, version = str(e).partition(" ")
            if kind == "version" and int(version) > FORMAT:
                raise TierVersionError(
                    f"{path} has format {version}, newer than this kvtide's {FORMAT}; nothing was touched. "
                    "Upgrade kvtide, or give another directory"
                ) from None
            return str(e)

    def _open_segment(self, number: int, header: SegmentHeader | str) -> None:
        """Take a segment into the book, or its bytes back."""
        path, fd = self._directory.segment(number), self.files[number]
        problem = header
        if isinstance(header, SegmentHeader):
            problem = ""
            if header.nbytes + header.slots * PER_SLOT > self._segments.budget - self._segments.taken:
                problem = "over budget"
            elif os.fstat(fd).st_size != header.nbytes:
                try:
                    self._disk.resize(fd, header.nbytes)
                except OSError as e:
                    problem = e.strerror or str(e)
            if not problem:
                self.sequences[number] = np.zeros(header.slots, np.int64)
                self._segments.add(header.size, header.slots, number)
                self.sequence = max(self.sequence, header.cut + 1)
                self.cuts[number] = header.cut
                return
        if problem:
            log.warning("%s: %s; its blocks are lost and its bytes reclaimed", path, problem)
            self.reasons[f"segment: {problem}"] += 1
        self._disk.close(self.files.pop(number))
        self._disk.unlink(path)

    def _from_headers(self) -> npt.NDArray[np.void]:
        """Journal records made from what the slots' headers say."""
        parts: list[bytes] = []
        for segment in self._segments:
            for slot, found in self._records(segment):
                if isinstance(found, str):
                    self.reasons[found] += 1
                    if _unread(found):
                        parts.append(entry(FREED, place_of(segment.number, slot), ANY, self.cuts[segment.number]))
                    continue
                parts.append(
                    entry(
                        HOLDS,
                        place_of(segment.number, slot),
                        found.key,
                        found.sequence,
                        found.parent,
                        found.depth,
                        found.expiry,
                        found.priority,
                    )
                )
        if sealed := {why: count for why, count in self.reasons.items() if why.startswith(NO_KEY)}:
            said = ", ".join(f"{count} {why}" for why, count in sealed.items())
            log.warning(
                "%s: %d sealed records cannot be read (%s) and count as free",
                self._directory.path,
                sum(sealed.values()),
                said,
            )
        return np.frombuffer(b"".join(parts), RECORD)

    def _records(self, segment: Segment, slots: range | None = None) -> Iterator[tuple[int, Header | str]]:
        header = SegmentHeader(segment.size, segment.slots, self.cuts[segment.number])
        return self._directory.records(self.files[segment.number], header, slots)

    def _finish_writing(self, records: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        """Slots whose writer was killed, or failed, hold nothing; but which block do their headers name?"""
        records = records[current(records, self._segments, self.cuts)]
        for i in np.flatnonzero(records["kind"] == WRITING).tolist():
            place = int(records["place"][i])
            slot = slot_of(place)
            records["kind"][i] = FREED
            for _, found in self._records(self._segments[segment_of(place)], range(slot, slot + 1)):
                if isinstance(found, Header):
                    records["key"][i] = found.key
                elif _unread(found):
                    records["key"][i] = ANY
        return records

    def _adopt(self, records: npt.NDArray[np.void], journal: Journal) -> Held:
        """Take the records for true, as far as they fit the segments that are there."""
        records = records[current(records, self._segments, self.cuts)]
        places = records["place"].astype(np.int64)
        self.sequence = max(self.sequence, int(records["sequence"].max(initial=0)) + 1)
        keys: list[BlockKey] = np.ascontiguousarray(records["key"]).view("S48").tolist()
        live = records["kind"] == HOLDS
        if not live.all() or len(keys) != len(set(keys)):
            newest: dict[BlockKey, int] = {}
            for i in np.argsort(records["sequence"]).tolist():
                if live[i]:
                    if keys[i] in newest:
                        live[newest[keys[i]]] = False
                    newest[keys[i]] = i
        self.stale = {int(places[i]): keys[i] for i in np.flatnonzero(~live).tolist()}
        stale = records[~live]
        stale["kind"] = FREED
        records, places = records[live], places[live]
        if not live.all():
            keys = np.ascontiguousarray(records["key"]).view("S48").tolist()
        for number, mine in by_segment(places):
            taken = places[mine] & 0xFFFFFFFF
            self.sequences[number][taken] = records["sequence"][mine]
            self._segments.claim(self._segments[number], taken)
        journal.rewrite(np.concatenate([records, stale]))
        return Held(
            keys=keys,
            parents=np.ascontiguousarray(records["parent"]),
            places=places,
            depths=records["depth"].astype(np.int64),
            expiries=records["expiry"].astype(np.float64),
            priorities=records["priority"].astype(np.int8),
            sequences=records["sequence"].astype(np.int64),
        )
