"""Reports what is in the directory of an NVMe tier, without opening the tier.

Nothing is written, created, locked or repaired: every file is opened read-only, so a directory that another process has
open can be inspected too. Blocks may then move during the inspection, so a block that looks damaged is checked against
the journal once more before it is reported.

A directory holds more headers than blocks. Which of them count is decided as in recovery: by the journal where it is
trusted; else every whole header counts, the newest of a key. The others are *stale*: left by evicted blocks, to be
overwritten.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtide.block import ALIGN, Span, padded
from kvtide.errors import TierError, TierVersionError
from kvtide.tiers.format.codec import PLANES, RAW, ZSTD
from kvtide.tiers.format.encryption import OPEN, Encryption
from kvtide.tiers.format.packer import check_sections
from kvtide.tiers.format.reason import NO_KEY, Reason
from kvtide.tiers.format.record import Header, OtherVersion, Rejected, parse
from kvtide.tiers.format.scratch import Scratch
from kvtide.tiers.nvme.directory import FORMAT, Directory, SegmentHeader, unreadable
from kvtide.tiers.nvme.journal import HOLDS, PER_SLOT, RESERVE, boot_id, latest, longest, replay
from kvtide.tiers.segments import place_of, segment_of, slot_of
from kvtide.tiers.syscalls import AnyPath, Disk, check_regular

__all__ = [
    "Block",
    "Damage",
    "Depth",
    "InspectionReport",
    "JournalState",
    "Progress",
    "SegmentState",
    "SlotKind",
    "advice",
    "look",
]

Progress = Callable[[str, int, int], None]
"""Called with the current activity, how much of it is done, and the total."""

_THREADS = 4
_CODECS = {RAW: "raw", PLANES: "zstd, all planes", ZSTD: "zstd"}
_OURS = {"kvtide.json", "lock", "journal", "heard", "speeds"}
_PASSING = {"journal.new", "kvtide.json.new", "heard.new", "speeds.new", "measuring", "probe"}
"""Files that a killed process may leave behind and the next opening removes or replaces."""


class SegmentFault(StrEnum):
    """What is wrong with a segment file."""

    NONE = ""
    EMPTIED = "emptied"
    TRUNCATED = "truncated"
    UNREADABLE = "unreadable"
    OLD_FORMAT = "of an older format"
    NO_HEADER = "no usable header"


@dataclass(frozen=True, slots=True)
class SegmentState:
    """One segment file."""

    number: int
    slot: int
    """Bytes of each slot."""
    slots: int
    blocks: int
    stale: int
    nbytes: int
    problem: str = ""
    """What is wrong with it, in words."""
    version: int = FORMAT
    """A segment of an older version is only read, until it is empty."""
    kept: int = 0
    """Slots with records of another version, which are not overwritten."""
    fault: SegmentFault = SegmentFault.NONE

    @property
    def free(self) -> int:
        return self.slots - self.blocks - self.kept


@dataclass(frozen=True, slots=True)
class SlotKind:
    """Blocks that differ only in their tokens."""

    namespace: str
    tenant: str
    layout: str
    group: str
    block_tokens: int
    codec: str
    blocks: int
    raw: int
    """Bytes as an engine sees them."""
    stored: int
    """Bytes of their sections on disk, padding included."""


@dataclass(frozen=True, slots=True)
class JournalState:
    trusted: bool
    doubt: str
    """Why the journal is not trusted."""
    records: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Depth:
    """How many blocks have a depth from ``first`` to ``last``."""

    first: int
    last: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Damage:
    """A block that is a miss, and why."""

    segment: int
    slot: int
    key: str
    reason: str
    """In words."""
    code: Reason | None = None
    """Why its record was rejected, if that is why."""


@dataclass(frozen=True, slots=True)
class Block:
    key: str
    group: str
    depth: int
    segment: int
    slot: int
    sequence: int
    raw: int
    stored: int
    created: float
    expiry: float | None
    priority: int


@dataclass(frozen=True, slots=True)
class InspectionReport:
    """The result of an inspection. ``damaged`` lists what the headers show; after ``verify``, what every byte shows."""

    path: str
    version: int
    holder: int | None
    """The process that has the directory open, as far as the system reports it."""
    journal: JournalState
    segments: list[SegmentState]
    kinds: list[SlotKind]
    depths: list[Depth]
    blocks: int
    stale: int
    expired: int
    oldest: float | None
    newest: float | None
    raw: int
    stored: int
    on_disk: int
    """Bytes that the files take from the filesystem."""
    budget: int
    """The smallest ``nvme.budget`` with which the next opening keeps all segments."""
    strays: list[str]
    damaged: list[Damage]
    verified_blocks: int | None = None
    verified_bytes: int | None = None
    newest_blocks: list[Block] | None = None
    kept: list[Damage] = field(default_factory=list)
    """Records of other versions of kvtide, which this one cannot read."""


class _ReadOnly(Disk):
    """A disk that is only read."""

    def open(self, path: AnyPath, *, direct: bool, create: bool = False) -> int:
        assert not create
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with contextlib.suppress(OSError):
            if direct:
                return os.open(path, flags | os.O_DIRECT)
        return os.open(path, flags)


_ROW = np.dtype(
    [
        ("place", "<i8"),
        ("sequence", "<u8"),
        ("key", "S48"),
        ("kind", "<i4"),
        ("depth", "<u4"),
        ("raw", "<u8"),
        ("stored", "<u8"),
        ("extent", "<u8"),
        ("created", "<f8"),
        ("expiry", "<f8"),
        ("priority", "<i2"),
    ]
)
_Rows = npt.NDArray[np.void]
_Mask = npt.NDArray[np.bool_]
_KindKey = tuple[bytes, bytes, bytes, bytes, int, int]


def look(
    path: Path,
    *,
    verify: bool = False,
    newest: int = 0,
    progress: Progress | None = None,
    encryption: Encryption = OPEN,
) -> InspectionReport:
    """Inspect the directory ``path``. Raises TierError if it is not a kvtide directory.

    ``verify`` reads every block and checks every section; ``newest`` lists that many of the newest blocks.
    """
    return _Look(path, progress or (lambda what, done, total: None), encryption).report(verify, newest)


class _Look:
    """One inspection: the open files, and the findings so far."""

    def __init__(self, path: Path, progress: Progress, encryption: Encryption) -> None:
        self._path = path
        self._progress = progress
        self._disk = _ReadOnly()
        self._directory = Directory(path, self._disk, encryption)
        self._files: dict[int, int] = {}
        self._headers: dict[int, SegmentHeader] = {}
        self._problems: dict[int, tuple[SegmentFault, str]] = {}
        self._kinds: dict[_KindKey, int] = {}
        self._bad: dict[int, Rejected] = {}
        """By place: slots whose header is present but cannot be read, with the reason."""
        self._kept: dict[int, OtherVersion] = {}
        """By place: slots with records of other versions."""
        self._promised: dict[int, int] = {}
        """By place: the expected sequence number of each slot whose block is damaged."""
        self._own = threading.local()

    def report(self, check_bytes: bool, newest: int) -> InspectionReport:
        self._check()
        holder = _holder(self._path / "lock")
        try:
            self._open()
            journal, records = self._journal()
            rows = self._read_headers()
            live, damaged = self._live(rows, records if journal.trusted else None)
            verified = verified_bytes = None
            if check_bytes:
                damaged += self._verify(rows[live])
                damaged = self._still(damaged, journal.trusted)
                verified, verified_bytes = int(live.sum()), int(rows["extent"][live].sum())
            return self._summary(
                holder, journal, rows, live, damaged, verified, verified_bytes, newest if newest > 0 else 0
            )
        finally:
            for fd in self._files.values():
                os.close(fd)

    def _check(self) -> None:
        if not self._path.is_dir():
            what = "is not a directory" if self._path.exists() else "does not exist"
            raise TierError(f"{self._path} {what}: give the directory that nvme.path names")
        try:
            self._directory.check()
        except FileNotFoundError:
            raise TierError(
                f"{self._path} has no kvtide.json, so it is not the directory of an NVMe tier: "
                "give the one that nvme.path names"
            ) from None

    # -- reading ------------------------------------------------------------------------------------------

    def _open(self) -> None:
        for number in self._directory.segments():
            path = self._directory.segment(number)
            try:
                fd = self._disk.open(path, direct=True)
                try:
                    size = check_regular(fd, path).st_size
                except OSError:
                    self._disk.close(fd)
                    raise
            except OSError as e:
                if e.errno in (errno.EMFILE, errno.ENFILE):
                    raise TierError(f"{self._path} has more segments than files may be open: raise ulimit -n") from e
                self._problems[number] = SegmentFault.UNREADABLE, f"unreadable: {e.strerror}"
                continue
            self._files[number] = fd
            if not size:
                self._problems[number] = SegmentFault.EMPTIED, "emptied"
                continue
            try:
                header = self._headers[number] = self._directory.segment_header(fd)
            except OtherVersion as e:
                if e.newer:
                    raise TierVersionError(
                        f"{path} has format {str(e).split()[-1]}, newer than this kvtide's {FORMAT}; "
                        "nothing was touched. Upgrade kvtide to look into it"
                    ) from None
                self._problems[number] = SegmentFault.OLD_FORMAT, f"of an older format: {e}"
                continue
            except Rejected as e:
                self._problems[number] = SegmentFault.NO_HEADER, str(e)
                continue
            except OSError as e:
                self._problems[number] = SegmentFault.UNREADABLE, f"unreadable: {e.strerror}"
                continue
            if size < header.nbytes:
                missing = f"truncated: {header.nbytes - size} bytes are missing"
                self._problems[number] = SegmentFault.TRUNCATED, missing

    def _journal(self) -> tuple[JournalState, _Rows]:
        path = self._directory.journal
        for _ in range(5):  # the end of a journal that is being written may look torn for an instant
            most = longest(sum(header.slots for header in self._headers.values()))
            records, doubt = replay(path, boot_id(), self._directory.encryption, most)
            if doubt != "torn":
                break
        size = path.stat().st_size if path.exists() else 0
        return JournalState(not doubt, doubt, len(records), size), latest(records)

    def _read_headers(self) -> _Rows:
        total = sum(h.slots for h in self._headers.values())
        parts: list[_Rows] = []
        done = 0
        for number, header in self._headers.items():
            found: list[tuple[object, ...]] = []
            for slot, record in self._directory.records(self._files[number], header):
                place = place_of(number, slot)
                if isinstance(record, OtherVersion):
                    self._kept[place] = record
                elif isinstance(record, Rejected):
                    self._bad[place] = _without_traceback(record)
                elif _extent(record) > header.size:
                    self._bad[place] = Rejected(Reason.CORRUPT_HEADER)
                else:
                    found.append(self._row(place, record))
                if not slot % 64:
                    self._progress("reading headers", done + slot, total)
            parts.append(np.array(found, _ROW))
            done += header.slots
        self._progress("reading headers", done, total)
        return np.concatenate(parts) if parts else np.zeros(0, _ROW)

    def _row(self, place: int, header: Header) -> tuple[object, ...]:
        kind = (
            header.namespace,
            header.tenant,
            header.layout,
            bytes(header.key[32:]),
            header.tokens_covered,
            header.codec,
        )
        return (
            place,
            header.sequence,
            header.key,
            self._kinds.setdefault(kind, len(self._kinds)),
            header.depth,
            header.raw,
            header.stored,
            _extent(header),
            header.created,
            header.expiry,
            header.priority,
        )

    def _live(self, rows: _Rows, records: _Rows | None) -> tuple[_Mask, list[Damage]]:
        """Which rows are blocks, and which blocks are missing. ``records`` is None if the journal is not trusted."""
        live = np.zeros(len(rows), np.bool_)
        if records is None:
            order = np.lexsort((rows["sequence"], rows["key"]))
            keys = rows["key"][order]
            live[order[np.append(keys[1:] != keys[:-1], True)] if len(rows) else []] = True
            return live, [_damage(p, "", why) for p, why in self._bad.items()]
        promised = records[(records["kind"] == HOLDS) & self._fitting(records)]
        at = np.searchsorted(promised["place"], rows["place"])
        known = at < len(promised)
        at[~known] = 0
        if len(promised):
            mine = promised[at]
            live = known & (mine["place"] == rows["place"]) & (mine["sequence"] == rows["sequence"].astype(np.int64))
            live &= np.ascontiguousarray(mine["key"]).view("S48") == rows["key"]
        missing = promised[~np.isin(promised["place"], [*rows["place"][live], *self._kept])]
        keys = np.ascontiguousarray(missing["key"]).view("S48").tolist()
        self._promised.update(zip(missing["place"].tolist(), missing["sequence"].tolist(), strict=True))
        return live, [
            self._missing(place, key.hex()) for place, key in zip(missing["place"].tolist(), keys, strict=True)
        ]

    def _fitting(self, records: _Rows) -> _Mask:
        """Which journal records refer to segments as they are divided now, or to segments that cannot be read."""
        numbers = records["place"] >> 32
        fits: _Mask = np.isin(
            numbers, [n for n, (fault, _) in self._problems.items() if fault is not SegmentFault.EMPTIED]
        )
        for number, header in self._headers.items():
            mine = (numbers == number) & ((records["place"] & 0xFFFFFFFF) < header.slots)
            fits |= mine & (records["sequence"] >= header.cut)
        return fits

    def _missing(self, place: int, key: str) -> Damage:
        """What is to be said of a block that the journal names and that is not there."""
        if segment_of(place) not in self._headers:
            reason = f"segment: {self._problems[segment_of(place)][1]}"
        elif place in self._bad:
            return _damage(place, key, self._bad[place])
        else:
            reason = "no such record: dropped or never finished"
        return Damage(segment_of(place), slot_of(place), key, reason)

    # -- checking every byte ------------------------------------------------------------------------------

    def _verify(self, rows: _Rows) -> Iterator[Damage]:
        total, done = int(rows["extent"].sum()), 0
        rows = rows[np.argsort(rows["place"])]
        self._progress("verifying", 0, total)
        with ThreadPoolExecutor(_THREADS) as pool:
            for first in range(0, len(rows), 256):
                part = rows[first : first + 256]
                for row, reason in zip(part, pool.map(self._wrong, part), strict=True):
                    done += int(row["extent"])
                    self._progress("verifying", done, total)
                    if reason is not None:
                        place = int(row["place"])
                        self._promised[place] = int(row["sequence"])
                        yield _damage(place, row["key"].hex(), reason)

    def _wrong(self, row: np.void) -> Rejected | None:
        """Why a block is damaged; None if it is whole."""
        if not hasattr(self._own, "scratch"):
            self._own.scratch = Scratch()
        place, extent = int(row["place"]), int(row["extent"])
        header = self._headers[segment_of(place)]
        data: Span = self._own.scratch.get(extent)
        try:
            got = self._disk.read(self._files[segment_of(place)], [data], ALIGN + slot_of(place) * header.size)
            if got < extent:
                return Rejected(Reason.TORN)
            record = parse(data, self._directory.encryption.open_header)
            if record.key != row["key"] or record.sequence != row["sequence"]:
                return Rejected(Reason.ANOTHER_BLOCK)
            check_sections(record, data[int(record.sections["offset"][0]) :], self._directory.encryption)
        except Rejected as e:
            return _without_traceback(e)
        except OSError as e:
            return unreadable(e)
        return None

    def _still(self, damaged: list[Damage], trusted: bool) -> list[Damage]:
        """Leave out blocks that only looked damaged because their slots were reused meanwhile."""
        if not damaged or not trusted:
            return damaged
        journal, records = self._journal()
        if not journal.trusted:
            return damaged
        holding = records[records["kind"] == HOLDS]
        now = dict(zip(holding["place"].tolist(), holding["sequence"].tolist(), strict=True))
        places = {d: place_of(d.segment, d.slot) for d in damaged}
        return [d for d, place in places.items() if now.get(place) == self._promised[place]]

    # -- summing up ---------------------------------------------------------------------------------------

    def _summary(
        self,
        holder: int | None,
        journal: JournalState,
        rows: _Rows,
        live: _Mask,
        damaged: list[Damage],
        verified: int | None,
        verified_bytes: int | None,
        newest: int,
    ) -> InspectionReport:
        blocks = rows[live]
        counts = [Counter((part["place"] >> 32).tolist()) for part in (blocks, rows[~live])]
        segments = []
        for number in sorted({*self._headers, *self._problems}):
            header = self._headers.get(number)
            fault, problem = self._problems.get(number, (SegmentFault.NONE, ""))
            with contextlib.suppress(OSError):
                segments.append(
                    SegmentState(
                        number,
                        header.size if header else 0,
                        header.slots if header else 0,
                        counts[0][number],
                        counts[1][number],
                        self._directory.segment(number).stat().st_size,
                        problem,
                        header.version if header else FORMAT,
                        sum(segment_of(place) == number for place in self._kept),
                        fault,
                    )
                )
        created = blocks["created"][np.isfinite(blocks["created"])]
        return InspectionReport(
            path=str(self._path),
            version=FORMAT,
            holder=holder,
            journal=journal,
            segments=segments,
            kinds=self._kind_states(blocks),
            depths=_depths(blocks["depth"]),
            blocks=len(blocks),
            stale=len(rows) - len(blocks),
            expired=int(np.count_nonzero(blocks["expiry"] <= time.time())),
            oldest=float(created.min()) if len(created) else None,
            newest=float(created.max()) if len(created) else None,
            raw=int(blocks["raw"].sum()),
            stored=int(blocks["stored"].sum()),
            on_disk=sum(f.stat().st_blocks * 512 for f in self._path.iterdir() if f.is_file()),
            budget=RESERVE + sum(h.nbytes + h.slots * PER_SLOT for h in self._headers.values()),
            strays=sorted(
                f.name
                for f in self._path.iterdir()
                if f.name not in _OURS and not (f.suffix == ".segment" and f.stem.isdecimal())
            ),
            damaged=sorted(damaged, key=lambda d: (d.segment, d.slot)),
            verified_blocks=verified,
            verified_bytes=verified_bytes,
            newest_blocks=self._newest(blocks, newest) if newest else None,
            kept=[_damage(p, "", why) for p, why in sorted(self._kept.items())],
        )

    def _kind_states(self, blocks: _Rows) -> list[SlotKind]:
        found = []
        for (namespace, tenant, layout, group, tokens, codec), number in self._kinds.items():
            mine = blocks[blocks["kind"] == number]
            if len(mine):
                found.append(
                    SlotKind(
                        namespace.hex(),
                        tenant.hex(),
                        layout.hex(),
                        group.decode(errors="replace"),
                        tokens,
                        _CODECS.get(codec, f"unknown ({codec})"),
                        len(mine),
                        int(mine["raw"].sum()),
                        int(mine["stored"].sum()),
                    )
                )
        return sorted(found, key=lambda kind: kind.blocks, reverse=True)

    def _newest(self, blocks: _Rows, count: int) -> list[Block]:
        order = np.argsort(blocks["sequence"])[::-1][:count]
        return [
            Block(
                row["key"][:32].hex(),
                row["key"][32:].decode(errors="replace"),
                int(row["depth"]),
                segment_of(int(row["place"])),
                slot_of(int(row["place"])),
                int(row["sequence"]),
                int(row["raw"]),
                int(row["stored"]),
                float(row["created"]),
                float(row["expiry"]) if math.isfinite(row["expiry"]) else None,
                int(row["priority"]),
            )
            for row in blocks[order]
        ]


def _extent(header: Header) -> int:
    """The bytes of a record from the start of its slot."""
    ends = header.sections["offset"] + header.sections["stored"].astype(np.uint64)
    return padded(int(ends.max()))


def _depths(depths: npt.NDArray[np.uint32]) -> list[Depth]:
    """A histogram whose bins grow fourfold: chains are short or long, seldom in between."""
    found, first, last = [], 0, 0
    while len(depths) and first <= int(depths.max()):
        count = int(np.count_nonzero((depths >= first) & (depths <= last)))
        found.append(Depth(first, last, count))
        first, last = last + 1, last * 4 + 3
    return found


def _holder(lock: Path) -> int | None:
    """The process that holds the lock, from the kernel's list: trying the lock here could make another process's open
    fail."""
    with contextlib.suppress(OSError, ValueError):
        about, named = lock.stat(), lock.read_text().strip()
        device = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}"
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, _, _, pid, file, *_ = line.replace("-> ", "waits-").split()
            # Some filesystems list another device than stat does; the process id in the file then decides.
            if kind == "FLOCK" and (
                file == f"{device}:{about.st_ino}" or (file.endswith(f":{about.st_ino}") and pid == named)
            ):
                return int(pid)
    return None


def _without_traceback(e: Rejected) -> Rejected:
    """The same verdict, without the frames of its traceback: they keep the bytes that were read."""
    return Rejected(e.reason, str(e))


def _damage(place: int, key: str, why: Rejected) -> Damage:
    return Damage(segment_of(place), slot_of(place), key, str(why), why.reason)


def _reasons(found: Sequence[Damage]) -> str:
    """How many blocks have each reason, the most frequent first."""
    counted = Counter(d.reason for d in found)
    return ", ".join(f"{count} {reason}" for reason, count in counted.most_common())


def advice(report: InspectionReport) -> list[str]:
    """What happens to the findings, and what the operator can do. There is no repair step: the next opening handles
    them."""
    said = []
    if report.holder is not None:
        said.append(
            f"Process {report.holder} has this directory open: what is shown was true while it was read. "
            "Nothing was taken from it."
        )
    if not report.journal.trusted and report.segments:
        said.append(
            f"The journal is {report.journal.doubt}. The next opening reads all headers instead and writes a new one; "
            "that only costs time, and evicted blocks that were not overwritten may be found again."
        )
    for segment in report.segments:
        name = f"{segment.number:05}.segment"
        if segment.fault is SegmentFault.TRUNCATED:
            said.append(
                f"{name} is {segment.problem}. The next opening makes it whole again; blocks in the missing part "
                "will be misses."
            )
        elif segment.fault is SegmentFault.OLD_FORMAT:
            said.append(
                f"{name} is {segment.problem}. It cannot be read any more; the next opening keeps it, and deletes it "
                "when space is needed."
            )
        elif segment.fault is SegmentFault.UNREADABLE:
            said.append(f"{name} is {segment.problem}. Check its permissions and the disk's log.")
        elif segment.fault not in (SegmentFault.NONE, SegmentFault.EMPTIED):
            said.append(
                f"{name} has no usable header ({segment.problem}). The next opening deletes it and gives its bytes "
                "back; its blocks are lost. Copy it away first if you want to look into it."
            )
    if old := [s for s in report.segments if s.version < FORMAT]:
        said.append(
            f"{len(old)} segments have an older format. Their blocks are read, nothing is written to them, and each is "
            "reused in the current format once its blocks are gone."
        )
    if report.kept:
        said.append(
            f"{len(report.kept)} records were written by another version of kvtide ({_reasons(report.kept)}). They are "
            "misses, but stay where they are and count; upgrade kvtide to use them, or drop their blocks."
        )
    if report.damaged:
        said.append(
            f"{len(report.damaged)} damaged blocks ({_reasons(report.damaged)}) are misses: each is dropped when it is "
            "first asked for and computed again, and its slot is reused. Nothing needs to be done."
        )
        codes = {d.code for d in report.damaged}
        if codes & NO_KEY:
            said.append("Encrypted records can only be read with their keys: see [security] in the configuration.")
        if codes & {Reason.CORRUPT_PAYLOAD, Reason.CORRUPT_HEADER} and report.holder is None:
            said.append(
                "One or two after a crash or a power loss are what was being written then. If they keep coming, "
                "suspect the disk: look at its log and at smartctl."
            )
    unknown = [kind.codec for kind in report.kinds if kind.codec.startswith("unknown")]
    if unknown:
        said.append(f"Blocks with codec {unknown[0]} were written by a newer kvtide; this one takes them for misses.")
    if report.expired:
        said.append(f"{report.expired} blocks have expired; they are removed soon after the next opening.")
    if passing := [name for name in report.strays if name in _PASSING]:
        said.append(f"{', '.join(passing)}: left by a process that was killed; the next opening removes it.")
    if foreign := [name for name in report.strays if name not in _PASSING]:
        said.append(f"{', '.join(foreign)}: not a file of kvtide, and left alone.")
    if report.segments and report.holder is None:
        said.append(
            f"To get the space back, delete the whole directory. To keep everything, open it with nvme.budget at "
            f"{-(-report.budget // 2**20)} MiB or more: below that, whole segments are deleted."
        )
    return said
