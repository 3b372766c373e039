"""Recovery: opening an NVMe directory and finding its segments and the contents of their slots.

This uses the journal if it can be trusted, else the headers, which are authoritative. If any file is newer than this
kvtide, nothing is touched.

What another version of kvtide wrote is not lost by opening the directory, as long as it fits the budget:

- a segment of an older version is read, and never written to: its blocks are evicted as usual, and the file is reused
  when it is empty;
- a segment of an older version that cannot be read any more is *kept*: it counts, and is removed when space is needed;
- a record that cannot be read, in a segment that can, is kept likewise; a newer one until it is dropped on request.

Sequence numbers continue from the highest one found, so a single forged one could leave none for later writes. No
writer gets to 2^62 by counting. If a number from there on is found, everything with 2^61 or more counts as damaged, and
the count continues from the rest. A lower forged number leaves enough for all writes to come; if it is so close to 2^62
that these pass it, the next opening drops them together with the forged one.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvtide.block import ALIGN, BlockKey, padded
from kvtide.errors import TierError, TierVersionError
from kvtide.tiers.base import Held
from kvtide.tiers.format.reason import NO_KEY, Reason
from kvtide.tiers.format.record import FAR, Header, OtherVersion, Rejected
from kvtide.tiers.nvme.directory import FORMAT, Directory, SegmentHeader
from kvtide.tiers.nvme.journal import (
    FREED,
    HOLDS,
    KEEPS,
    PER_SLOT,
    RECORD,
    WRITING,
    Journal,
    entry,
    latest,
    longest,
    replay,
)
from kvtide.tiers.segments import KEPT, OLD, Segment, Segments, by_segment, place_of, segment_of, slot_of
from kvtide.tiers.syscalls import Irregular, check_regular

__all__ = ["ANY", "Recovery", "current"]

log = logging.getLogger("kvtide.nvme")

ANY = BlockKey(b"")
"""The key of a header that could not be read and may name any block: every drop overwrites it."""


_DOUBTFUL = FAR // 2
"""Everything with this sequence number or a higher one is dropped when one of FAR or more is found."""
_NEVER = (1 << 63) - 1
"""The ``cut`` of a segment that cannot be read: all its journal records are older."""


def _worth(item: tuple[int, SegmentHeader | str]) -> tuple[int, int]:
    """The sort key of a segment: newer formats are worth more, then lower numbers."""
    number, header = item
    return header.version if isinstance(header, SegmentHeader) else FORMAT, -number


def _holds(place: int, found: Header) -> bytes:
    """The journal record for a header."""
    facts = found.parent, found.depth, found.expiry, found.priority, found.identity
    return entry(HOLDS, place, found.key, found.sequence, *facts)


_UNREAD = NO_KEY | {Reason.TORN, Reason.NOT_ENCRYPTED, Reason.UNREADABLE}
"""A header that is rejected for one of these may be whole, though it could not be read this time."""


def current(records: npt.NDArray[np.void], segments: Segments, cuts: dict[int, int]) -> npt.NDArray[np.bool_]:
    """Which journal records refer to slots as segments are divided now; ``cuts`` has the sequence number of each
    division."""
    count = max((s.number for s in segments), default=-1) + 1
    slots, first = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    for s in segments:
        slots[s.number], first[s.number] = s.slots, cuts[s.number]
    places = records["place"].astype(np.int64)
    numbers = np.where((places >= 0) & (places >> 32 < count), places >> 32, count)
    current: npt.NDArray[np.bool_] = places & 0xFFFFFFFF < slots[numbers]
    return current & (records["sequence"] >= first[numbers])


class Recovery:
    """Recovers a directory (``run``). Fills ``segments``; the rest of the state is kept here until the volume takes it
    over."""

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
        self.kept: dict[int, tuple[BlockKey, bool]] = {}
        """Slots with records of other versions: which block each names, if that is known, and whether the version is
        newer."""
        self.unseen: dict[int, npt.NDArray[np.bool_]] = {}
        """By segment: slots whose headers were not read, because the journal says what is in them."""
        self.reasons: Counter[str] = Counter()

    def run(self, journal: Journal) -> Held:
        """Open all files; returns the blocks found. The journal is then as short as possible."""
        numbers = list(self._directory.segments())
        # First look at all of them: if one is newer, nothing may be touched.
        headers = {number: self._look(number) for number in numbers}
        forged = any(isinstance(h, SegmentHeader) and h.readable and h.cut >= FAR for h in headers.values())
        # If the budget does not suffice for all, the oldest are removed first, and before them the unreadable ones.
        for number, header in sorted(headers.items(), key=_worth, reverse=True):
            self._open_segment(number, header)
        self._directory.upgrade()
        # Counts only segments that fit the budget: a header may claim billions of slots.
        most = longest(self._segments.slots)
        records, doubt = replay(self._directory.journal, journal.boot, self._directory.encryption, most)
        if doubt:
            if numbers:
                log.warning("%s: the journal is %s; reading headers", self._directory.path, doubt)
            records = self._from_headers()
            forged = forged or int(records["sequence"].max(initial=0)) >= FAR
        else:
            records = self._finish_writing(latest(records))
            self._not_seen(records)
        if forged:
            records = self._without_doubtful(records)
        return self._adopt(records, journal)

    def _without_doubtful(self, records: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        """Remove everything with a sequence number that no writer reaches; returns the other records."""
        doubtful = [s for s in self._segments if _DOUBTFUL <= self.cuts[s.number] != _NEVER]
        for segment in doubtful:
            number = segment.number
            self._segments.remove(segment)
            self.kept = {place: what for place, what in self.kept.items() if segment_of(place) != number}
            del self.sequences[number], self.cuts[number]
            self.unseen.pop(number, None)
            self._let_go(number, "a sequence number that cannot be")
        cuts = (cut for cut in self.cuts.values() if cut != _NEVER)
        self.sequence = max(cuts, default=0) + 1
        wrong = records["sequence"] >= _DOUBTFUL
        self.reasons += Counter({"a sequence number that cannot be": int(wrong.sum())})
        records = records.copy()
        # Their slots are free. The blocks that their headers name are as doubtful: every drop overwrites them.
        records["kind"][wrong], records["key"][wrong], records["sequence"][wrong] = FREED, ANY, self.sequence
        return records[current(records, self._segments, self.cuts)]

    def _look(self, number: int) -> SegmentHeader | str:
        """Open a segment file; returns its header, or why that cannot be read."""
        path = self._directory.segment(number)
        try:
            fd = self._disk.open(path, direct=self._direct)
            self.files[number] = fd
            if not check_regular(fd, path).st_size:
                return ""  # emptied, and not needed since
        except Irregular as e:
            if path.is_dir() and not path.is_symlink():
                raise TierError(f"cannot open {path}: it is a folder, which is not kvtide's. Remove it") from e
            return str(e.strerror)
        try:
            return self._directory.segment_header(fd)
        except OSError as e:
            raise TierError(
                f"{path} cannot be read: {e.strerror or e}. Nothing was touched. Repair the disk, or remove that file "
                "if its blocks may be lost"
            ) from e
        except OtherVersion as e:
            if e.newer:
                raise TierVersionError(
                    f"{path} has format {str(e).split()[-1]}, newer than this kvtide's {FORMAT}; nothing was touched. "
                    "Upgrade kvtide, or give another directory"
                ) from None
            return SegmentHeader(max(ALIGN, padded(os.fstat(fd).st_size) - ALIGN), 1, _NEVER, version=-1)
        except Rejected as e:
            return str(e)

    def _open_segment(self, number: int, header: SegmentHeader | str) -> None:
        """Add a segment to the table, or reclaim its bytes."""
        path = self._directory.segment(number)
        problem = header
        if isinstance(header, SegmentHeader):
            problem, fd = "", self.files[number]
            if header.nbytes + header.slots * PER_SLOT > self._segments.budget - self._segments.taken:
                problem = "over budget"
            elif header.version == FORMAT and os.fstat(fd).st_size != header.nbytes:
                try:
                    self._disk.resize(fd, header.nbytes)
                except OSError as e:
                    # The existing part can be read. Slots after its end are empty; a write there may succeed later.
                    log.warning("%s is shorter than it was, and stays so: %s", path, e.strerror or e)
                    self.reasons[f"segment: {e.strerror or e}"] += 1
            if not problem:
                self.sequences[number] = np.zeros(header.slots, np.int64)
                segment = self._segments.add(
                    header.size | (OLD if header.version < FORMAT else 0), header.slots, number
                )
                self.cuts[number] = header.cut
                if header.readable:
                    self.sequence = max(self.sequence, header.cut + 1)
                else:
                    log.warning("%s has a format that cannot be read any more; it stays until space is needed", path)
                    self._segments.claim(segment, np.zeros(1, np.int64), KEPT)
                    self.kept[place_of(number, 0)] = ANY, False
                return
        assert isinstance(problem, str)
        self._let_go(number, problem)

    def _let_go(self, number: int, problem: str) -> None:
        path, fd = self._directory.segment(number), self.files.pop(number, None)
        if problem:
            log.warning("%s: %s; its blocks are lost and its bytes reclaimed", path, problem)
            self.reasons[f"segment: {problem}"] += 1
        if fd is not None:
            self._disk.close(fd)
        self._disk.unlink(path)

    def _from_headers(self) -> npt.NDArray[np.void]:
        """Journal records made from the slots' headers."""
        parts: list[bytes] = []
        no_key: Counter[str] = Counter()
        for segment in self._segments:
            if self.cuts[segment.number] == _NEVER:
                continue
            for slot, found in self._records(segment):
                if isinstance(found, OtherVersion):
                    place = place_of(segment.number, slot)
                    parts.append(entry(KEEPS, place, ANY, self.cuts[segment.number]))
                    self._keep(place, ANY, found)
                    continue
                if isinstance(found, Rejected):
                    self.reasons[str(found)] += 1
                    if found.reason in NO_KEY:
                        no_key[str(found)] += 1
                    if found.reason in _UNREAD:
                        parts.append(entry(FREED, place_of(segment.number, slot), ANY, self.cuts[segment.number]))
                    continue
                parts.append(_holds(place_of(segment.number, slot), found))
        if no_key:
            said = ", ".join(f"{count} {why}" for why, count in no_key.items())
            log.warning(
                "%s: %d encrypted records cannot be read (%s) and count as free",
                self._directory.path,
                no_key.total(),
                said,
            )
        return np.frombuffer(b"".join(parts), RECORD)

    def _keep(self, place: int, key: BlockKey, why: OtherVersion) -> None:
        self.kept[place] = key, why.newer
        self.reasons[str(why)] += 1

    def _not_seen(self, records: npt.NDArray[np.void]) -> None:
        """Note which slots are in use according to the journal alone."""
        places = records["place"][records["kind"] == HOLDS].astype(np.int64)
        for number, mine in by_segment(places):
            self.unseen[number] = np.zeros(self._segments[number].slots, np.bool_)
            self.unseen[number][places[mine] & 0xFFFFFFFF] = True

    def _records(self, segment: Segment, slots: range | None = None) -> Iterator[tuple[int, Header | Rejected]]:
        header = SegmentHeader(segment.size, segment.slots, self.cuts[segment.number])
        return self._directory.records(self.files[segment.number], header, slots)

    def _finish_writing(self, records: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        """Free slots whose writer was killed, or failed, and find out which blocks their headers name.

        Kept records are read too: this version of kvtide may be able to read them.
        """
        records = records[current(records, self._segments, self.cuts)]
        for i in np.flatnonzero(records["kind"] == KEEPS).tolist():
            place = int(records["place"][i])
            key, slot = BlockKey(records["key"][i].tobytes().rstrip(b"\0")), slot_of(place)
            records["kind"][i], records["key"][i] = FREED, ANY
            for _, found in self._records(self._segments[segment_of(place)], range(slot, slot + 1)):
                if isinstance(found, OtherVersion):
                    records["kind"][i], records["key"][i] = KEEPS, key
                    self._keep(place, key, found)
                elif isinstance(found, Header):
                    records[i : i + 1] = np.frombuffer(_holds(place, found), RECORD)
        for i in np.flatnonzero(records["kind"] == WRITING).tolist():
            place = int(records["place"][i])
            slot = slot_of(place)
            records["kind"][i] = FREED
            for _, found in self._records(self._segments[segment_of(place)], range(slot, slot + 1)):
                if isinstance(found, Header):
                    records["key"][i] = found.key
                elif found.reason in _UNREAD:
                    records["key"][i] = ANY
        return records

    def _adopt(self, records: npt.NDArray[np.void], journal: Journal) -> Held:
        """Accept the records, as far as they fit the existing segments."""
        records = records[current(records, self._segments, self.cuts)]
        places = records["place"].astype(np.int64)
        self.sequence = max(self.sequence, int(records["sequence"].max(initial=0)) + 1)
        kept = records[records["kind"] == KEEPS]
        records, places = records[records["kind"] != KEEPS], places[records["kind"] != KEEPS]
        for number, mine in by_segment(kept["place"].astype(np.int64)):
            slots = kept["place"][mine].astype(np.int64) & 0xFFFFFFFF
            self._segments.claim(self._segments[number], slots, KEPT)
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
        journal.rewrite(np.concatenate([records, stale, kept]))
        return Held(
            keys=keys,
            parents=np.ascontiguousarray(records["parent"]),
            places=places,
            depths=records["depth"].astype(np.int64),
            expiries=records["expiry"].astype(np.float64),
            priorities=records["priority"].astype(np.int8),
            sequences=records["sequence"].astype(np.int64),
            identities=records["identity"].astype(np.int64),
        )
