"""Converts between a block in memory and its record: shared by all tiers that store records.

A record is written in two steps, because its size is known only when its payload is made, and the header's content only
when the record has its place::

    packed = packer.pack(item)                       # compress, encrypt or compute the checksums
    packed.name(page, sequence, created)             # the header, into a buffer of packed.header bytes

It is read in one step. The caller reads the start of a record, and the rest of it directly into the block's span, and
asks the packer whether that was the block. If more is needed (the header is longer than usual, the sections are
compressed, only some of them are wanted), the packer fetches it. Nothing is trusted before it is verified.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.block import Span, padded
from kvtide.errors import ConfigError
from kvtide.tiers.base import Read, Write
from kvtide.tiers.format import codec
from kvtide.tiers.format.encryption import OPEN, TAG, Encryption, RecordCipher, TaggedBuffer, turn
from kvtide.tiers.format.reason import Reason
from kvtide.tiers.format.record import (
    BODY,
    FLAG_SEALED,
    Header,
    NotForAsker,
    Rejected,
    check_table,
    header_bytes,
    parse,
    recognise,
    sealed_by,
    sound,
    verify,
)
from kvtide.tiers.format.scratch import Pool, Scratch, Workspace

__all__ = ["Fetch", "Packed", "Packer", "check_sections", "header_of", "usual_header"]

Fetch = Callable[[Sequence[Span], int], int]
"""Fill buffers from a record, starting at that offset in it; returns how many bytes were read."""


def header_of(item: Write) -> int:
    """The size of the header of its record."""
    return header_bytes(item.identity.geometry.sections, len(item.tokens))


def usual_header(item: Read) -> int:
    """The size of the header of its record, if there is nothing unusual in it."""
    return header_bytes(item.identity.geometry.sections)


class Packed(NamedTuple):
    """A block that is ready to be written as soon as it has its header."""

    item: Write
    header: int
    """Bytes of the header."""
    payload: Span
    """The block's own span, or memory of the packer, valid until it packs another block with the same ``number``."""
    table: npt.NDArray[np.void]
    codec: int
    seal: RecordCipher | None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole record."""
        return self.header + len(self.payload)

    def name(self, page: Span, sequence: int, created: float) -> None:
        """Write the header into ``page``."""
        item, identity = self.item, self.item.identity
        Header(
            item.key,
            item.parent,
            identity.namespace,
            identity.tenant,
            identity.layout,
            sequence,
            item.depth,
            identity.block_tokens,
            self.codec,
            identity.geometry.nbytes,
            self.table,
            created,
            item.expiry,
            item.priority,
            item.tokens,
            heard=item.since,
        ).pack_into(page)
        if self.seal is not None:
            self.seal.close_header(page)


class _Turn:
    """A thread's turn to decrypt records, which few threads have at a time, and the ciphers for it. Looking up a key
    may take long, so that is done before."""

    __slots__ = ("_encryption", "_has", "_lock", "_seals")

    def __init__(
        self, lock: threading.Lock | None, encryption: Encryption, names: Iterable[tuple[bytes, bytes]]
    ) -> None:
        """``names`` are the key ids and salts of the records. Without a ``lock`` any number of threads have a turn."""
        self._lock = lock
        self._has = False
        self._encryption = encryption
        self._seals = {name: self._find(name) for name in names}

    def take(self) -> None:
        if self._lock is not None and not self._has:
            self._lock.acquire()
            self._has = True

    def give(self) -> None:
        """Let other threads have their turn."""
        if self._lock is not None and self._has:
            self._has = False
            self._lock.release()

    def _find(self, name: tuple[bytes, bytes]) -> RecordCipher | Exception:
        try:
            return self._encryption.old(*name)
        except Exception as e:  # noqa: BLE001 - raised when that record is decrypted
            return e

    def seal(self, name: tuple[bytes, bytes]) -> RecordCipher:
        """The cipher of a record. Raises Rejected."""
        if name not in self._seals:  # the record has changed meanwhile
            self.give()
            self._seals[name] = self._find(name)
            self.take()
        found = self._seals[name]
        if isinstance(found, Exception):
            raise found
        return found


class Packer:
    """Makes records from blocks and blocks from records. For one thread at a time."""

    __slots__ = (
        "_asides",
        "_codec",
        "_decoder",
        "_encryption",
        "_longer",
        "_payload",
        "_sealed",
        "_shared",
        "_turn",
        "header",
        "workspace",
    )

    def __init__(self, compression: str, encryption: Encryption = OPEN, pool: Pool | None = None) -> None:
        self.header = Scratch()
        """For headers, the thread's own."""
        self._longer = Scratch()
        """For a header that is longer than usual."""
        if pool is not None:
            pool.hold_header(self.header)
            pool.hold_header(self._longer)
        self.workspace = Workspace(pool)
        """The rest of its memory, which is used between its ``begin`` and ``end``."""
        self._payload = Scratch()
        self._sealed = [Scratch()]
        self.workspace.keep(self._payload)
        self.workspace.keep(self._sealed[0])
        self._asides: list[TaggedBuffer] = []
        self._encryption = encryption
        self._shared = turn()
        self._turn: _Turn | None = None
        self._codec = codec.make(compression)
        self._decoder = self._codec
        if self._codec is not None:
            self.workspace.keep(self._codec.work)

    def to_write(self, items: Sequence[Write]) -> int:
        """Bytes of memory needed to pack blocks together."""
        total = 0
        for item in items:
            geometry = item.identity.geometry
            if self._codec is not None:
                total = max(total, geometry.footprint + codec.work_of(geometry.section))
        if self._encryption.seals:
            total += sum(padded(item.identity.geometry.footprint + TAG) for item in items)
        return total

    def to_read(self, items: Sequence[Read]) -> int:
        """Bytes of memory needed to read blocks together to where ``into`` says.

        What else a record needs is known only after its header was read.
        """
        found = (item.identity.geometry for item in items)
        return sum(TaggedBuffer.needed(geometry) for geometry in found if self._encryption.aside(geometry))

    def to_open(self, items: Sequence[Read]) -> int:
        """Bytes of memory needed, at most, to decode these blocks one after the other, whatever their records."""
        found = (item.identity.geometry for item in items)
        return max(g.footprint + codec.work_of(g.section) + padded(g.section + TAG) for g in found)

    def pack(self, item: Write, number: int = 0) -> Packed:
        """Make the record of a block, except for the header.

        Blocks that are not compressed may be packed together, each with a ``number`` of its own, from 0 on.
        """
        identity, size = item.identity, header_of(item)
        seal = self._encryption.new(identity.tenant)
        payload, table, kind = codec.encode(
            item.span, identity.geometry, identity.itemsize, size, self._codec, self._payload, checked=seal is None
        )
        if seal is not None:
            if number == len(self._sealed):
                self._sealed.append(Scratch())
                self.workspace.keep(self._sealed[-1])
            room = self._sealed[number].get(len(payload) + TAG)
            with self._shared if self._encryption.turns(identity.geometry.section) else nullcontext():
                payload = seal.close_sections(payload, table, item.key, room)
        return Packed(item, size, payload, table, kind, seal)

    def into(self, item: Read, number: int) -> Sequence[Span]:
        """The best buffers for the payload of a record that is wanted completely and is as long as the block.

        That is the block's span or, where it saves a copy in decryption, memory of the packer, valid until the next
        call with the same ``number``. Pass the number to ``unpack`` then.
        """
        if not self._encryption.aside(item.identity.geometry):
            return [item.span]
        if number == len(self._asides):
            self._asides.append(TaggedBuffer())
            self.workspace.keep(self._asides[-1])
        return self._asides[number].sections(item.identity.geometry)

    def unpack(
        self, item: Read, sequence: int, start: Span, got: int, room: int, fetch: Fetch, number: int | None = None
    ) -> int:
        """The number of bytes of a block that were read and verified, after the first ``got`` of its record were read.

        ``start`` has the usual size of its header; the payload, if all is wanted, is in its span or, with a ``number``,
        where ``into`` said. The record has ``room`` bytes at most. Raises Rejected if it is not the block, or not
        whole.
        """
        self._encryption.check(start)
        names, geometry = item.identity, item.identity.geometry
        guess, whole = len(start), item.sections is None
        aside = self._asides[number] if number is not None and self._encryption.aside(geometry) else None
        expected = sequence, item.key, names.namespace, names.tenant, names.layout
        usual = whole and aside is None and got == guess + geometry.footprint
        if usual and sound(start, item.span, geometry, expected):
            return geometry.footprint
        if self._turn is not None:
            return self._open(self._turn, item, sequence, start, got, room, fetch, aside)
        with self.together([item], [start[:got]]) as mine:
            return self._open(mine, item, sequence, start, got, room, fetch, aside)

    def _open(
        self,
        mine: _Turn,
        item: Read,
        sequence: int,
        start: Span,
        got: int,
        room: int,
        fetch: Fetch,
        aside: TaggedBuffer | None,
    ) -> int:
        """``unpack`` a record that is encrypted, or otherwise unusual, in this thread's turn."""
        names, geometry = item.identity, item.identity.geometry
        whole, sections = item.sections is None, item.wanted
        if not sections:
            raise Rejected(Reason.NO_SUCH_SECTIONS)

        def fetched(into: Sequence[Span], offset: int) -> int:
            mine.give()  # it may hang
            count = fetch(into, offset)
            mine.take()
            return count

        def work(nbytes: int) -> None:
            if not self.workspace.working:
                mine.give()  # other threads may wait for their turn while holding memory that this one waits for
                self.workspace.begin(nbytes)
                mine.take()

        mine.take()
        size = recognise(start[:got])
        if size > room:
            raise Rejected(Reason.CORRUPT_HEADER)
        if size != len(start):
            start = self._longer.get(size)  # headers of other records may lie beside it
            got = fetched([start, item.span[: max(0, room - size) if whole else 0]], 0)
            self._encryption.check(start)  # it may differ from what the first read returned
            aside = None
        header = parse(start[:got], lambda page: mine.seal(sealed_by(page)).open_header(page))
        _check_names(header, item, sequence)
        check_table(header, size, geometry, room)
        if header.codec == codec.RAW:
            payload = item.span
            nbytes = len(sections) * geometry.stride
        else:
            table = header.sections[sections.start : sections.stop]
            nbytes = int(table["offset"][-1]) + padded(int(table["stored"][-1])) - int(table["offset"][0])
            work(nbytes + codec.work_of(geometry.section) + padded(geometry.section + TAG))
            payload = self._payload.get(nbytes)
        if whole and header.codec == codec.RAW and (aside is None or header.sealed is not None):
            if got < size + nbytes:
                raise Rejected(Reason.TORN)
        else:
            aside = None
            if fetched([payload[:nbytes]], int(header.sections["offset"][sections.start])) < nbytes:
                raise Rejected(Reason.TORN)
        if header.sealed is None:
            verify(header, sections, payload, geometry if header.codec == codec.RAW else None)
        elif aside is not None:
            mine.seal(header.sealed).open_aside(aside, header.sections, geometry, item.key, payload)
        else:
            work(padded(geometry.section + TAG))
            room_for_one = self._sealed[0].get(geometry.section + TAG)
            seal = mine.seal(header.sealed)
            seal.open_sections(payload, header.sections, sections, item.key, room_for_one)
        if header.codec != codec.RAW:
            mine.give()
            codec.decode(header, sections, payload, item.span, geometry, names.itemsize, self._reader())
        return nbytes

    @contextmanager
    def together(self, items: Sequence[Read], starts: Sequence[Span]) -> Iterator[_Turn]:
        """Unpack records that begin with ``starts`` in one turn: with one turn for each, threads mostly wait for each
        other."""
        sealed = {sealed_by(start) for start in starts if len(start) >= BODY and start[12] & FLAG_SEALED}
        short = any(self._encryption.turns(item.identity.geometry.section) for item in items)
        self._turn = mine = _Turn(self._shared if sealed and short else None, self._encryption, sealed)
        try:
            yield mine
        finally:
            self._turn = None
            mine.give()

    def _reader(self) -> codec.Codec:
        """The decoder of compressed records, also where this tier writes raw ones."""
        if self._decoder is None:
            try:
                self._decoder = codec.make("zstd")
            except ConfigError as e:
                raise Rejected(Reason.NO_CODEC) from e
            assert self._decoder is not None
            self.workspace.keep(self._decoder.work)
        return self._decoder


def check_sections(header: Header, payload: Span, encryption: Encryption) -> None:
    """Check all sections of a record against their checksums or tags; ``payload`` may not be used after that.

    Raises Rejected.
    """
    sections = range(len(header.sections))
    if header.sealed is None:
        verify(header, sections, payload)
    else:
        room = Scratch().get(int(header.sections["stored"].max()) + TAG)
        encryption.old(*header.sealed).open_sections(payload, header.sections, sections, header.key, room)


def _check_names(header: Header, item: Read, sequence: int) -> None:
    identity = item.identity
    if header.key != item.key or header.sequence != sequence:
        raise Rejected(Reason.ANOTHER_BLOCK)
    if (header.namespace, header.tenant, header.layout) != (identity.namespace, identity.tenant, identity.layout):
        raise NotForAsker(Reason.ANOTHER_OWNER)
