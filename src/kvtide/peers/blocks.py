"""What a node gives to other nodes: the blocks of its own DRAM and NVMe, as records.

It never asks further: not its own peers, because two nodes could ask each other for ever, and not shared storage, which
the asker can read itself.

A block in DRAM is sent from the memory it is in, under a lease, so that it is neither evicted nor overwritten
meanwhile; its checksums are computed when it is sent for the first time (``store/outgoing.py`` remembers them). A block
on NVMe is read through the tier's lane, like a read of this node's own, into memory of its own. Both are counted
against one budget, ``_PART`` of the DRAM budget but at least one request, from before they are leased until they were
sent: slow askers cannot keep more than that from being evicted, nor make this node take more. One address gets half of
it, or what one request needs. A request that does not fit waits a moment, and is then answered with BUSY; so are the
last blocks of a request for more than that.

When a block is dropped, or its tenant forgotten, an answer with it is interrupted, and the drop waits until the answer
holds nothing: see ``store/outgoing.py``.

A block is named by its full key, and its row must belong to the identity that the asker names; so an asker learns of a
key that it cannot name, or of one that belongs to another identity, that it is not there. A tenant whose key was
destroyed has no blocks."""

from __future__ import annotations

import contextlib
import functools
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from msgspec import structs

from kvtide.block import ALIGN, DIGEST, BlockKey, Span
from kvtide.index.index import DRAM, SEALED, Index, Rows
from kvtide.store.outgoing import Contents, OutgoingAnswer, OutgoingBlocks
from kvtide.store.partition import NVME, Partition
from kvtide.store.store import Store
from kvtide.tiers.base import Identity, Read, ReadResult, Write
from kvtide.tiers.format.encryption import Encryption
from kvtide.tiers.format.packer import Packer
from kvtide.tiers.format.record import Rejected
from kvtide.tiers.format.scratch import Scratch
from kvtide.tiers.peers.protocol import (
    ALL,
    LARGEST_BLOCK,
    MOST_CREDIT,
    LocatedBlocks,
    Presence,
    RequestCredit,
    as_sent,
)
from kvtide.tiers.peers.transport import PeerConnection
from kvtide.transfer.cold_tier import ColdTier

__all__ = ["AskedBlock", "PeerBlocks", "SentBlock", "host_of"]

_PART = 8
_MEMORY, _DISK = 1 / 4, 3 / 8
"""Parts of ``peers.timeout`` after which an answer does not wait for memory, and for blocks on disk. An asker has two
requests under way, and that long for both."""


class AskedBlock(NamedTuple):
    """A block that is wanted, and its sections from ``first`` on: that many, or ``ALL``."""

    digest: bytes
    first: int
    sections: int


class SentBlock(NamedTuple):
    """The answer for one block."""

    presence: Presence
    payload: Span = memoryview(b"")
    size: int = 0
    """Bytes of the header."""
    known: Span | None = None
    """The header, if it is known."""
    make: Callable[[], Span] = lambda: memoryview(b"")
    """Makes the header, which takes about half as long as to send the block. Valid until the next is made."""
    whole: Write | None = None
    """The block, if all of it is wanted and there is memory to compress it."""
    withdrawn: Callable[[], bool] = lambda: False
    """Whether it may not be sent any more, so that it need not be compressed."""


_MISS, _BUSY = SentBlock(Presence.MISS), SentBlock(Presence.BUSY)


def host_of(peer: str) -> str:
    """The host of another end's address: it has as many ports as it likes."""
    return peer.rpartition(":")[0]


class _Budget:
    """Bytes that answers may hold at a time. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken: Counter[str] = Counter()
        self._changed = threading.Condition()

    @property
    def each(self) -> int:
        """Bytes that the answers to one address may have, if it is more than one."""
        return self._limit // 2

    @property
    def largest(self) -> int:
        """Bytes that one answer may have: not less than a request for whole blocks."""
        return max(self.each, RequestCredit().nbytes)

    def take(self, who: str, nbytes: int, timeout: float) -> bool:
        """Take that much, as soon as it is free; what is larger than the limit is taken alone. False after
        ``timeout``."""
        with self._changed:
            fits = self._changed.wait_for(lambda: self._fits(who, nbytes), timeout)
            if fits:
                self._taken[who] += nbytes
            return fits

    def _fits(self, who: str, nbytes: int) -> bool:
        taken, mine = self.taken, self._taken[who]
        return (not taken or taken + nbytes <= self._limit) and (not mine or mine + nbytes <= self.each)

    def give(self, who: str, nbytes: int) -> None:
        with self._changed:
            self._taken[who] -= nbytes
            if not self._taken[who]:
                del self._taken[who]
            self._changed.notify_all()

    @property
    def taken(self) -> int:
        with self._changed:
            return sum(self._taken.values())


class _Taken:
    """What one answer has taken of a budget. A part may be kept beyond the answer, until a late read has ended."""

    def __init__(self, budget: _Budget, who: str, nbytes: int) -> None:
        self._budget = budget
        self._who = who
        self._nbytes = nbytes

    def keep(self, nbytes: int) -> None:
        """``give`` gives back so much, and ``close`` the rest."""
        self._nbytes -= nbytes

    def give(self, nbytes: int) -> None:
        self._budget.give(self._who, nbytes)

    def close(self) -> None:
        self._budget.give(self._who, self._nbytes)


class _DiskRead:
    """A read of blocks from NVMe, for which an answer waits until it has no more time for it. Thread-safe."""

    def __init__(self, items: Sequence[Read], taken: _Taken, over: threading.Event) -> None:
        """``over`` is set when it has ended, or earlier if nobody wants it any more."""
        self.items = items
        self.results: Sequence[ReadResult] = ()
        self.over = over
        self._taken = taken
        self._lock = threading.Lock()
        self._ended = self._abandoned = False

    @property
    def nbytes(self) -> int:
        return sum(len(item.span) for item in self.items)

    def done(self, results: Sequence[ReadResult]) -> None:
        with self._lock:
            self.results, self._ended = results, True
            late = self._abandoned
        self.over.set()
        if late:
            self.zero()
            self._taken.give(self.nbytes)

    def abandon(self) -> bool:
        """Leave it alone: it fills its memory whenever it ends, and gives back what was taken for that then. False if
        it has ended."""
        with self._lock:
            self._abandoned = not self._ended
            if self._abandoned:
                self._taken.keep(self.nbytes)
            return self._abandoned

    def zero(self) -> None:
        for item in self.items:
            np.frombuffer(item.span, np.uint8)[:] = 0


class _Leased(NamedTuple):
    """The blocks of an answer, by their number in the request."""

    writes: dict[int, Write]
    """Those that are in memory."""
    reads: dict[int, Write]
    """Those to be read from NVMe, with an empty span."""
    contents: dict[int, Contents]
    """Of those in DRAM: under what their headers are remembered."""


class PeerBlocks:
    """The blocks of a store for other nodes. Thread-safe."""

    def __init__(self, store: Store, timeout: float) -> None:
        """An answer may take ``timeout`` seconds, until it can be sent."""
        self._store = store
        self._timeout = timeout
        self._encryption = Encryption(store.key_ring, seals=False)
        self._budget = _Budget(store.config.dram.budget // _PART)

    @property
    def credit(self) -> RequestCredit:
        """What a request may ask for: several may be under way for one address, and few large ones take less work than
        many small ones."""
        return RequestCredit(nbytes=max(RequestCredit().nbytes, min(MOST_CREDIT.nbytes, self._budget.each // 8)))

    @property
    def bytes_held(self) -> int:
        """Bytes of the answers that are being prepared or sent."""
        return self._budget.taken

    def locate(self, identity: Identity, digests: Span) -> LocatedBlocks:
        """Which blocks are there, of those whose digests follow each other in ``digests``."""
        partition = self._store.partition_of(identity.tenant)
        index = partition.index
        keys = _keys(digests, identity.group)
        with index.lock:
            rows = self._rows(partition, keys, identity)
            hits = rows[rows > 0]
            parents = index.parents
            return LocatedBlocks(
                (rows > 0).astype(np.uint8),
                index.expiry[hits],
                index.depth[hits],
                b"".join([(parents[row] or b"")[:DIGEST] for row in hits.tolist()]),
                index.priority[hits],
            )

    def _rows(self, partition: Partition, keys: Collection[BlockKey], identity: Identity) -> Rows:
        """The rows of blocks that are complete in this node's DRAM or NVMe; 0 for others. Call with the index lock
        held."""
        index = partition.index
        if partition.outgoing.refused(identity.tenant):
            return np.zeros(len(keys), np.int64)
        try:
            self._encryption.new(identity.tenant)
        except Rejected:
            return np.zeros(len(keys), np.int64)
        rows = index.rows(keys)
        rows[index.identity[rows] != identity.fingerprint] = 0  # so is a row whose owner is not known
        here = index.state[DRAM][rows] == SEALED
        if partition.nvme is not None:
            here |= index.state[NVME][rows] == SEALED
        if index.mortal:
            here &= index.expiry[rows] > self._store.clock.time()
        rows[~here] = 0
        return rows

    @contextlib.contextmanager
    def opened(
        self, identity: Identity, asked: Sequence[AskedBlock], packer: Packer, asker: PeerConnection, spare: int = 0
    ) -> Iterator[list[SentBlock]]:
        """Records of blocks, which stay as they are inside the ``with``. ``spare``: bytes of memory that it takes to
        compress them, if that is wanted; they count like those of blocks."""
        footprint = identity.geometry.footprint
        if footprint > min(self._store.config.dram.budget, LARGEST_BLOCK):  # no such block is there, or none is sent
            yield [_MISS] * len(asked)
            return
        served = asked[: max(1, self._budget.largest // footprint)]
        rest = [_BUSY] * (len(asked) - len(served))
        who, nbytes = host_of(asker.peer), len(served) * footprint
        end = time.monotonic() + _DISK * self._timeout
        if not self._budget.take(who, nbytes, _MEMORY * self._timeout):
            yield [_BUSY] * len(asked)
            return
        with contextlib.ExitStack() as stack:
            taken = _Taken(self._budget, who, nbytes)
            stack.callback(taken.close)
            compressible = spare > 0 and self._budget.take(who, spare, 0.0)
            if compressible:
                stack.callback(self._budget.give, who, spare)
            partition = self._store.partition_of(identity.tenant)
            wake = threading.Event()

            def interrupt() -> None:
                asker.interrupt()
                wake.set()

            keys: list[BlockKey] = [one.digest + identity.group for one in served]  # type: ignore[misc]
            answer = OutgoingAnswer(identity.tenant, keys, interrupt)
            stack.callback(partition.outgoing.end, answer)
            # What the kernel still has belongs to the answer: it is discarded before the end is told.
            stack.callback(lambda: asker.abort() if answer.withdrawn else None)
            leased = self._lease(partition, identity, keys, answer, stack)
            nvme, late = partition.nvme, set[int]()
            if leased.reads and nvme is not None:
                # Memory of its own for each: a read that hangs may still fill it, whenever it ends.
                items = [Read(w.key, identity, w.owner, Scratch().get(footprint)) for w in leased.reads.values()]
                read = _DiskRead(items, taken, wake)
                stack.callback(lambda: read.zero() if answer.withdrawn else None)
                if self._read(nvme, read, leased, end):
                    late = set(leased.reads)
            sent = self._packed(partition.outgoing, answer, served, leased, late, packer)
            if compressible:
                whole = {i: write for i, write in leased.writes.items() if sent[i].size and served[i].sections == ALL}
                sent = [
                    one._replace(whole=whole.get(i), withdrawn=lambda: answer.withdrawn) for i, one in enumerate(sent)
                ]
            yield sent + rest

    def _packed(
        self,
        outgoing: OutgoingBlocks,
        answer: OutgoingAnswer,
        asked: Sequence[AskedBlock],
        leased: _Leased,
        late: Collection[int],
        packer: Packer,
    ) -> list[SentBlock]:
        """The answers for blocks: records of those that were leased, BUSY for ``late``, and misses."""
        sent = [_BUSY if i in late else _MISS for i in range(len(asked))]

        def made(write: Write, first: int, payload: Span, contents: Contents | None) -> Span:
            page = packer.header.get(ALIGN)
            identity = replace(write.identity, geometry=as_sent(len(payload)))
            packed = packer.pack(structs.replace(write, identity=identity, span=payload))
            packed.name(page, first, self._store.clock.time())
            if contents is not None:
                outgoing.remember(answer, write.key, contents, page.tobytes())
            return page

        for i, write in leased.writes.items():
            geometry = write.identity.geometry
            first, count = asked[i].first, asked[i].sections
            wanted = range(geometry.sections) if count == ALL else range(first, first + count)
            if not wanted or wanted.stop > geometry.sections or (count == ALL and first):
                continue
            payload = write.span[wanted.start * geometry.stride : wanted.stop * geometry.stride]
            # The header covers what is sent: only that of a whole block is remembered.
            contents = leased.contents.get(i) if len(payload) == geometry.footprint else None
            known = None if contents is None else outgoing.header(write.key, contents)
            make = functools.partial(made, write, first, payload, contents)
            sent[i] = SentBlock(Presence.HIT, payload, ALIGN, known, make)
        return sent

    def _lease(
        self,
        partition: Partition,
        identity: Identity,
        keys: Sequence[BlockKey],
        answer: OutgoingAnswer,
        stack: contextlib.ExitStack,
    ) -> _Leased:
        """Lease the blocks that are there."""
        index, pipeline = partition.index, partition.pipeline
        leased = _Leased({}, {}, {})
        with index.lock:
            if not partition.outgoing.begin(answer):
                return leased
            rows = self._rows(partition, keys, identity)
            found = rows.tolist()
            stack.callback(pipeline.lease(np.array(list({*found} - {0}), np.int64)).release)
            sealed, places = (index.state[DRAM][rows] == SEALED).tolist(), index.place[DRAM][rows].tolist()
            for i, row in enumerate(found):
                if not row:
                    continue
                if sealed[i]:
                    span = pipeline.sealed_span(row, identity)
                    if span is not None:
                        leased.writes[i] = write = _record(index, row, keys[i], identity, span)
                        generation = partition.dram.generation(places[i])
                        leased.contents[i] = Contents(places[i], generation, write.expiry, write.priority)
                else:
                    place = int(index.place[NVME][row])
                    leased.reads[i] = _record(index, row, keys[i], identity, memoryview(b""), place)
        return leased

    def _read(self, cold: ColdTier, read: _DiskRead, leased: _Leased, end: float) -> bool:
        """Read blocks from NVMe, and make records of those that are good. Returns whether it took too long."""
        cold.lane.read(read.items, read.done, lambda: False)
        read.over.wait(max(0.0, end - time.monotonic()))
        if read.abandon():
            return True
        for (i, write), item, good in zip(leased.reads.items(), read.items, read.results, strict=True):
            if good:
                leased.writes[i] = structs.replace(write, span=item.span)
        return False


def _keys(digests: Span, group: bytes) -> Sequence[BlockKey]:
    """The keys of a group's blocks: most of the work of a lookup, so no Python code runs for each."""
    whole = np.empty((len(digests) // DIGEST, DIGEST + len(group)), np.uint8)
    whole[:, :DIGEST] = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST)
    whole[:, DIGEST:] = np.frombuffer(group, np.uint8)
    keys: Sequence[BlockKey] = struct.unpack(f"{whole.shape[1]}s" * len(whole), whole.data)
    return keys


def _record(index: Index, row: int, key: BlockKey, identity: Identity, span: Span, place: int = 0) -> Write:
    """A row's block as it is to be sent; ``owner`` is its ``place``."""
    return Write(
        key,
        identity,
        span,
        index.parent(row),
        int(index.depth[row]),
        place,
        float(index.expiry[row]),
        int(index.priority[row]),
    )
