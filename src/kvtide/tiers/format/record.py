"""The record format of a stored block: a header of whole 4 KiB pages, then its sections, each padded to 4 KiB.

::

    offset  bytes  field
    clear, also when the record is encrypted
         0      8  magic "KVTIDE\\r\\n"
         8      2  version
        10      2  header pages
        12      4  flags (bit 0: the body below is encrypted; others must be 0)
        16     16  checksum of the header, with this field as zeros (XXH3-128)
        32     16  data-key id (zeros: not encrypted)
        48     32  salt (zeros: not encrypted)
        80     16  tag of the encrypted body (zeros: not encrypted)
    body
        96      8  sequence number, never reused within a directory
       104      8  created, seconds since 1970 (float64)
       112      8  expiry, likewise (infinity: never)
       120      4  depth: how many blocks come before it in its chain
       124      4  tokens covered
       128      8  stored length: the bytes of all sections as stored here, padding included
       136      8  raw length: the bytes of all sections as an engine sees them
       144      2  codec
       146      2  priority (signed)
       148      4  number of sections
       152      4  length of the fields that follow the section table
       156      4  zeros
       160     48  key: 32 bytes of digest, then the group's name, padded with zeros
       208     32  parent's digest
       240     32  namespace
       272     16  tenant tag
       288     16  layout digest
       304      8  in shared storage: the last drop log page that its writer had applied (drop_log.py), else 0
       312      8  zeros
       320   32*n  section table: offset in the record (u64), stored length (u32), raw length (u32),
                   XXH3-128 of the stored bytes, or the AEAD tag (16)
         .         fields: tag (u16; 0x8000 and above: a reader that does not know it must refuse), zeros (u16),
                   length (u32), bytes

All numbers are little-endian. A reader skips an unknown field below 0x8000. Whatever a reader must not misread is a
required field (0x8000 and above), a flag, a codec, or a new version. Magic, version, header pages and checksum have the
same place and meaning in every version, so that records of another version are distinguished from damage. Headers are
authoritative: every reader checks a record's key, sequence and checksums, and a record that does not match is a miss.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from kvtide.block import ALIGN, BlockKey, Geometry, Span, padded
from kvtide.tiers.base import fingerprint
from kvtide.tiers.format.reason import Reason

__all__ = [
    "BODY",
    "FAR",
    "FLAG_SEALED",
    "MAGIC",
    "SECTION",
    "VERSION",
    "Header",
    "NotForAsker",
    "OtherVersion",
    "Rejected",
    "belongs",
    "check_table",
    "checksums",
    "cuts_of",
    "expire_at",
    "header_bytes",
    "mark_of",
    "parse",
    "plain",
    "recognise",
    "sealed_by",
    "section_table",
    "sound",
    "unchecked_table",
    "verify",
]

MAGIC = b"KVTIDE\r\n"
VERSION = 1
FLAG_SEALED = 1
FAR = 1 << 62
"""A sequence number that no writer reaches by counting. See recovery.py for how it is handled if found."""

_CLEAR = struct.Struct("<8sHHI16s16s32s16s")
_BODY = struct.Struct("<QddIIQQHhIII48s32s32s16s16sQ8x")
BODY = _CLEAR.size
TABLE = BODY + _BODY.size
assert TABLE == 320

SECTION = np.dtype([("offset", "<u8"), ("stored", "<u4"), ("raw", "<u4"), ("check", "V16")])
_PLACE = struct.Struct("<QII")
"""An entry of the section table without the checksum."""
FIELD = struct.Struct("<HHI")
FIELD_TOKENS = 1
REQUIRED = 0x8000

_ZEROS = bytes(16)
_EXPIRY = struct.Struct("<d")
_EXPIRY_AT = BODY + 16

_NAMES = struct.Struct("<Q40xH2xII4x48s32x32s16s16s")
"""Of the body: sequence, codec, number of sections, length of fields, key, namespace, tenant, layout."""


class Rejected(Exception):  # noqa: N818 - a verdict, not an error
    """A record that cannot be read, used or written, with the reason. In the tiers, it becomes a miss."""

    def __init__(self, reason: Reason, text: str = "") -> None:
        """``text`` is shown instead of the reason's own."""
        super().__init__(text or reason.value)
        self.reason = reason


class NotForAsker(Rejected):
    """A record that may be intact, but that this reader cannot have: it is another owner's, or its key is unavailable
    now."""


class OtherVersion(Rejected):
    """A whole record that another version of kvtide wrote, and that this one cannot read.

    It is a miss, but not garbage: a ``newer`` one is overwritten only on request, an older one only when its space is
    needed.
    """

    def __init__(self, text: str, *, newer: bool = True) -> None:
        super().__init__(Reason.ANOTHER_VERSION, text)
        self.newer = newer


@dataclass(slots=True)
class Header:
    """The metadata in a record."""

    key: BlockKey
    parent: bytes
    namespace: bytes
    tenant: bytes
    layout: bytes
    sequence: int
    depth: int
    tokens_covered: int
    codec: int
    raw: int
    sections: npt.NDArray[np.void]
    created: float = 0.0
    expiry: float = math.inf
    priority: int = 0
    tokens: bytes = b""
    sealed: tuple[bytes, bytes] | None = None
    """The id of the data key and the salt; None: not encrypted. Encryption follows after ``pack_into``."""
    heard: int = 0

    @property
    def pages(self) -> int:
        fields = FIELD.size + len(self.tokens) if self.tokens else 0
        return -(-(TABLE + len(self.sections) * SECTION.itemsize + fields) // ALIGN)

    @property
    def identity(self) -> int:
        """The fingerprint of its owner and layout."""
        return fingerprint(self.namespace, self.tenant, self.layout, self.key[32:])

    @property
    def stored(self) -> int:
        """The bytes of all sections as stored in the record, padding included."""
        offset, stored, _, _ = self.sections[-1].item()
        return int(offset) + padded(stored) - self.pages * ALIGN

    def pack_into(self, out: Span) -> None:
        """Write the header at the start of ``out``, which is at least ``pages`` pages."""
        rest = self.sections.tobytes()
        fields = 0
        if self.tokens:
            rest += FIELD.pack(FIELD_TOKENS, 0, len(self.tokens)) + self.tokens
            fields = FIELD.size + len(self.tokens)
        size = padded(TABLE + len(rest))
        offset, stored, _ = _PLACE.unpack_from(rest, (len(self.sections) - 1) * SECTION.itemsize)
        start = _CLEAR.pack(MAGIC, VERSION, size // ALIGN, 0, _ZEROS, _ZEROS, _ZEROS, _ZEROS)
        body = _BODY.pack(
            self.sequence,
            self.created,
            self.expiry,
            self.depth,
            self.tokens_covered,
            offset + padded(stored) - size,
            self.raw,
            self.codec,
            self.priority,
            len(self.sections),
            fields,
            0,
            self.key,
            self.parent,
            self.namespace,
            self.tenant,
            self.layout,
            self.heard,
        )
        out[:size] = (start + body + rest).ljust(size, b"\0")
        out[16:32] = xxh3_128_digest(out[:size])


@lru_cache(256)  # called three times for each block that is written, with few sizes
def header_bytes(sections: int, tokens: int = 0) -> int:
    """The size of the header of a record with that many sections and, kept in it, that many bytes of tokens."""
    fields = FIELD.size + tokens if tokens else 0
    return padded(TABLE + sections * SECTION.itemsize + fields)


def recognise(data: Span) -> int:
    """The number of header bytes that start at ``data``. Raises Rejected if it is no record of any version."""
    if len(data) < ALIGN:
        raise Rejected(Reason.TORN)
    magic, _, pages, *_ = _CLEAR.unpack_from(data)
    if magic != MAGIC:
        raise Rejected(Reason.NO_RECORD)
    if not pages:
        raise Rejected(Reason.CORRUPT_HEADER)
    return int(pages) * ALIGN


def _no_key(page: bytearray) -> None:
    raise Rejected(Reason.KEY_NOT_HERE)


def belongs(page: Span, tenant: bytes, keys: Collection[bytes]) -> bool:
    """Whether a record that begins with this page belongs to a tenant that has or had data keys with these ids.

    Nothing is verified or decrypted: records to be destroyed must be found without their key.
    """
    mark = mark_of(page)
    return mark == tenant or mark in keys


def mark_of(page: Span) -> bytes:
    """What identifies the owner of a record that begins with this page: its tenant's tag, or the id of its data key."""
    if page[:8] != MAGIC:
        return b""
    return bytes(page[32:48] if page[12] & FLAG_SEALED else page[272:288])


def expire_at(header: Span, when: float) -> None:
    """Set the expiry in a header, which must be complete and not encrypted."""
    _EXPIRY.pack_into(header, _EXPIRY_AT, when)
    header[16:32] = _ZEROS
    header[16:32] = xxh3_128_digest(header)


def sealed_by(page: Span | bytearray) -> tuple[bytes, bytes]:
    """The id of the key, and the salt, of an encrypted record that begins with this page."""
    return bytes(page[32:48]), bytes(page[48:80])


def parse(data: Span, unseal: Callable[[bytearray], None] = _no_key) -> Header:
    """The header that starts at ``data``. Raises Rejected, with the reason, for anything that is not whole.

    ``unseal`` decrypts the body of an encrypted header in place, or raises Rejected.
    """
    size = recognise(data)
    if len(data) < size:
        raise Rejected(Reason.TORN)
    whole = bytearray(data[:size])
    whole[16:32] = _ZEROS
    if xxh3_128_digest(whole) != data[16:32]:
        raise Rejected(Reason.CORRUPT_HEADER)
    version = int.from_bytes(whole[8:10], "little")
    reader = _READERS.get(version)
    if reader is None:
        raise OtherVersion(f"version {version}", newer=version > VERSION)
    return reader(whole, unseal)


def _read_1(whole: bytearray, unseal: Callable[[bytearray], None]) -> Header:
    """A header of version 1, whose checksum is right."""
    size, sealed = len(whole), None
    if int.from_bytes(whole[12:16], "little") & ~FLAG_SEALED:
        raise OtherVersion("unknown flags")
    if whole[12]:
        sealed = sealed_by(whole)
        unseal(whole)
    (
        sequence,
        created,
        expiry,
        depth,
        tokens_covered,
        _stored,
        raw,
        codec,
        priority,
        count,
        fields_size,
        _,
        key,
        parent,
        namespace,
        tenant,
        layout,
        heard,
    ) = _BODY.unpack_from(whole, BODY)
    table = TABLE + count * SECTION.itemsize
    if not count or table + fields_size > size or sequence >= 2 * FAR:  # the last does not fit into an int64
        raise Rejected(Reason.CORRUPT_HEADER)
    sections = np.frombuffer(whole, SECTION, count, TABLE)
    return Header(
        BlockKey(key.rstrip(b"\0")),
        parent,
        namespace,
        tenant,
        layout,
        sequence,
        depth,
        tokens_covered,
        codec,
        raw,
        sections,
        created,
        expiry,
        priority,
        _tokens(memoryview(whole)[table : table + fields_size]),
        sealed,
        heard,
    )


_READERS: dict[int, Callable[[bytearray, Callable[[bytearray], None]], Header]] = {VERSION: _read_1}
"""The reader of each version's headers. When a version is added, the reader of the previous one stays."""


def _tokens(fields: Span) -> bytes:
    tokens = b""
    while fields:
        if len(fields) < FIELD.size:
            raise Rejected(Reason.CORRUPT_HEADER)
        tag, _, size = FIELD.unpack_from(fields)
        if FIELD.size + size > len(fields):
            raise Rejected(Reason.CORRUPT_HEADER)
        if tag == FIELD_TOKENS:
            tokens = bytes(fields[FIELD.size : FIELD.size + size])
        elif tag >= REQUIRED:
            raise OtherVersion(f"required field {tag:#x} is not known here")
        fields = fields[FIELD.size + size :]
    return tokens


@dataclass(frozen=True, slots=True)
class PlainRecord:
    """The layout of sections that are stored unchanged, one stride apart."""

    start: bytes
    """The start of the header of such a record."""
    table: tuple[bytes, ...]
    """The table's entry of each section without its checksum, each followed by an empty string in the checksum's
    place."""
    cuts: tuple[slice, ...]
    """The sections in a block's memory."""


@lru_cache(maxsize=256)
def plain(geometry: Geometry, first: int) -> PlainRecord:
    """The layout for blocks of that geometry, in records whose payload starts at ``first``."""
    starts = range(0, geometry.footprint, geometry.stride)
    return PlainRecord(
        _CLEAR.pack(MAGIC, VERSION, first // ALIGN, 0, _ZEROS, _ZEROS, _ZEROS, _ZEROS)[:16],
        tuple(part for i in starts for part in (_PLACE.pack(first + i, geometry.section, geometry.section), b"")),
        tuple(slice(i, i + geometry.section) for i in starts),
    )


def cuts_of(table: npt.NDArray[np.void]) -> tuple[slice, ...]:
    """The stored sections of a table in a payload that begins with the first of them."""
    starts = (table["offset"] - table["offset"][0]).astype(np.int64)
    return tuple(map(slice, starts.tolist(), (starts + table["stored"]).tolist()))


def checksums(payload: Span, cuts: Iterable[slice]) -> Iterator[bytes]:
    """The checksums of parts of ``payload``.

    A block has a hundred sections or so, and these are most of the calls that moving one takes: no Python code runs
    between them.
    """
    return map(xxh3_128_digest, map(payload.__getitem__, cuts))


def section_table(payload: Span, usual: PlainRecord, known: Sequence[bytes] = ()) -> bytes:
    """The section table of a record with that payload, stored unchanged. The first checksums may be ``known``."""
    table = list(usual.table)
    table[1::2] = [*known, *checksums(payload, usual.cuts[len(known) :])]
    return b"".join(table)


def unchecked_table(usual: PlainRecord) -> npt.NDArray[np.void]:
    """The section table of a record whose payload is stored unchanged, with space for tags."""
    return np.frombuffer(bytearray(b"".join(part or _ZEROS for part in usual.table)), SECTION)


def sound(
    page: Span,
    payload: Span,
    geometry: Geometry,
    names: tuple[int, BlockKey, bytes, bytes, bytes],
    known: Sequence[bytes] = (),
) -> bool:
    """Whether header and payload are this block's, stored unchanged, with nothing else in the record, and verified.

    ``names`` are its sequence number, key, namespace, tenant and layout; ``known`` the checksums of the first sections,
    if they were computed while the others were being read. This is the fast path of ``parse``,
    ``check_table`` and ``verify`` for the usual record. For any other record, and for a bad one, the result is False,
    and those functions tell why. ``page`` is the header alone.
    """
    head = page.tobytes()
    count = geometry.sections
    sequence, key, *rest = names
    # First of all, since the geometry may be another node's lie, and ``plain`` makes and keeps much for many sections.
    if _NAMES.unpack_from(head, _CLEAR.size) != (sequence, 0, count, 0, key.ljust(48, b"\0"), *rest):
        return False
    usual = plain(geometry, len(page))
    if head[:16] != usual.start or xxh3_128_digest(head[:16] + _ZEROS + head[32:]) != head[16:32]:
        return False
    return head[TABLE : TABLE + count * SECTION.itemsize] == section_table(payload, usual, known)


def verify(header: Header, sections: range, payload: Span, geometry: Geometry | None = None) -> None:
    """Check stored sections against the table; ``payload`` starts with the first of them. Raises Rejected.

    With ``geometry``, they were stored unchanged, as ``check_table`` has found.
    """
    table = header.sections[sections.start : sections.stop]
    cuts = cuts_of(table) if geometry is None else plain(geometry, header.pages * ALIGN).cuts[: len(table)]
    if b"".join(checksums(payload, cuts)) != table["check"].tobytes():
        raise Rejected(Reason.CORRUPT_PAYLOAD)


def check_table(header: Header, first: int, geometry: Geometry, room: int) -> None:
    """Check that sections lie between ``first`` and ``room``, where their codec puts them. Raises Rejected.

    A header's checksum guards against accidents, not against a faulty writer.
    """
    table = header.sections
    if len(table) != geometry.sections:
        raise NotForAsker(Reason.ANOTHER_LAYOUT)
    usual = plain(geometry, first)
    places = np.frombuffer(table, "V16")[0::2].tobytes()
    if header.codec == 0 and places == b"".join(usual.table) and first + geometry.footprint <= room:
        return
    if (table["raw"] != geometry.section).any():
        raise NotForAsker(Reason.ANOTHER_LAYOUT)
    offsets, stored = table["offset"], table["stored"]
    ends = offsets.astype(np.int64) + (stored.astype(np.int64) + ALIGN - 1) // ALIGN * ALIGN
    inside = (stored <= table["raw"]).all() and (offsets <= room).all() and offsets[0] >= first and ends[-1] <= room
    if header.codec == 0 or not inside or (offsets[1:] < ends[:-1]).any():
        raise Rejected(Reason.CORRUPT_HEADER)
