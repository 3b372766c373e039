"""What a node gives to other nodes: the blocks of its own DRAM and NVMe, as records.

It never asks further: not its own peers, because two nodes could ask each other for ever, and not shared storage, which
the asker can read itself.

A block in DRAM is sent from the memory it is in, under a lease, so that it is neither evicted nor overwritten
meanwhile. A block on NVMe is read through the tier's lane, like a read of this node's own, into memory of its own. Both
are counted against one budget, ``_PART`` of the DRAM budget but at least one block, from before they are leased until
they were sent: slow askers cannot keep more than that from being evicted. A request that does not fit waits a moment,
and is then answered with BUSY.

A block is named by its full key, and its row must belong to the identity that the asker names; so an asker learns of a
key that it cannot name, or of one that belongs to another identity, that it is not there. A tenant whose key was
destroyed has no blocks."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import structs

from kvtide.block import BlockKey, Span
from kvtide.index.index import DRAM, SEALED, Index, Rows
from kvtide.store.partition import NVME, Partition
from kvtide.store.store import Store
from kvtide.tiers.base import Identity, Read, ReadResult, Write
from kvtide.tiers.format.encryption import Encryption
from kvtide.tiers.format.packer import Packer, header_of
from kvtide.tiers.format.record import Rejected
from kvtide.tiers.format.scratch import Scratch
from kvtide.tiers.peers.protocol import ALL, LocatedBlocks, Presence
from kvtide.transfer.cold_tier import ColdTier

__all__ = ["AskedBlock", "PeerBlocks", "SentBlock"]

_PART = 8


class AskedBlock(NamedTuple):
    """A block that is wanted, and its sections from ``first`` on: that many, or ``ALL``."""

    digest: bytes
    first: int
    sections: int


class SentBlock(NamedTuple):
    """The answer for one block."""

    presence: Presence
    header: Span = memoryview(b"")
    payload: Span = memoryview(b"")


_MISS, _BUSY = SentBlock(Presence.MISS), SentBlock(Presence.BUSY)


class _Budget:
    """Bytes that answers may hold at a time. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._changed = threading.Condition()

    def take(self, nbytes: int, timeout: float) -> bool:
        """Take that much, as soon as it is free; a single answer may be larger than the limit. False after
        ``timeout``."""
        with self._changed:
            fits = self._changed.wait_for(lambda: not self._taken or self._taken + nbytes <= self._limit, timeout)
            self._taken += nbytes if fits else 0
            return fits

    def give(self, nbytes: int) -> None:
        with self._changed:
            self._taken -= nbytes
            self._changed.notify_all()

    @property
    def taken(self) -> int:
        return self._taken


class _Taken:
    """What one answer has taken of a budget. A part may be kept beyond the answer, until a late read has ended."""

    def __init__(self, budget: _Budget, nbytes: int) -> None:
        self._budget = budget
        self._nbytes = nbytes

    def keep(self, nbytes: int) -> None:
        """``give`` gives back so much, and ``close`` the rest."""
        self._nbytes -= nbytes

    def give(self, nbytes: int) -> None:
        self._budget.give(nbytes)

    def close(self) -> None:
        self._budget.give(self._nbytes)


class PeerBlocks:
    """The blocks of a store for other nodes. Thread-safe."""

    def __init__(self, store: Store, timeout: float) -> None:
        """An answer may take ``timeout`` seconds, until it can be sent."""
        self._store = store
        self._timeout = timeout
        self._encryption = Encryption(store.key_ring, seals=False)
        self._budget = _Budget(store.config.dram.budget // _PART)

    @property
    def bytes_held(self) -> int:
        """Bytes of the answers that are being prepared or sent."""
        return self._budget.taken

    def locate(self, identity: Identity, digests: Sequence[bytes]) -> LocatedBlocks:
        """Which blocks are there."""
        partition = self._store.partition_of(identity.tenant)
        index = partition.index
        keys = [BlockKey(digest + identity.group) for digest in digests]
        with index.lock:
            rows = self._rows(partition, keys, identity)
            hits = rows[rows > 0]
            return LocatedBlocks(
                (rows > 0).astype(np.uint8),
                index.expiry[hits],
                index.depth[hits],
                b"".join([index.parent(row) for row in hits.tolist()]),
                index.priority[hits],
            )

    def _rows(self, partition: Partition, keys: Sequence[BlockKey], identity: Identity) -> Rows:
        """The rows of blocks that are complete in this node's DRAM or NVMe; 0 for others. Call with the index lock
        held."""
        index = partition.index
        try:
            self._encryption.new(identity.tenant)
        except Rejected:
            return np.zeros(len(keys), np.int64)
        rows = index.own_rows(keys, identity.fingerprint)
        here = index.state[DRAM][rows] == SEALED
        if partition.nvme is not None:
            here |= index.state[NVME][rows] == SEALED
        if index.mortal:
            here &= index.expiry[rows] > self._store.clock.time()
        rows[~here] = 0
        return rows

    @contextlib.contextmanager
    def opened(self, identity: Identity, asked: Sequence[AskedBlock], packer: Packer) -> Iterator[list[SentBlock]]:
        """Records of blocks, which stay as they are inside the ``with``. The headers are memory of the packer."""
        footprint = identity.geometry.footprint
        nbytes = len(asked) * footprint
        end = time.monotonic() + self._timeout / 2
        with contextlib.ExitStack() as stack:
            if footprint > self._store.config.dram.budget:  # no such block is there
                yield [_MISS] * len(asked)
                return
            if not self._budget.take(nbytes, self._timeout / 4):
                yield [_BUSY] * len(asked)
                return
            taken = _Taken(self._budget, nbytes)
            stack.callback(taken.close)
            partition = self._store.partition_of(identity.tenant)
            writes, reads = self._lease(partition, identity, asked, stack)
            nvme = partition.nvme
            busy = bool(reads and nvme is not None and self._read(nvme, reads, writes, taken, end))
            sent = [_MISS] * len(asked)
            size = max((header_of(write) for write in writes.values()), default=0)
            pages = packer.header.get(size * len(asked))
            for i, write in writes.items():
                span = write.span
                first, count = asked[i].first, asked[i].sections
                sections = identity.geometry.sections
                wanted = range(sections) if count == ALL else range(first, first + count)
                if wanted.stop > sections or (count == ALL and first):
                    continue
                page = pages[i * size : (i + 1) * size]
                packer.pack(write).name(page, 0, self._store.clock.time())
                stride = identity.geometry.stride
                sent[i] = SentBlock(Presence.HIT, page, span[wanted.start * stride : wanted.stop * stride])
            if busy:
                sent = [_BUSY if i in reads and i not in writes else one for i, one in enumerate(sent)]
            yield sent

    def _lease(
        self, partition: Partition, identity: Identity, asked: Sequence[AskedBlock], stack: contextlib.ExitStack
    ) -> tuple[dict[int, Write], dict[int, Write]]:
        """Lease the blocks that are there. Returns those in DRAM, and those to be read from NVMe, by their number among
        ``asked``; the latter with an empty span."""
        index, pipeline = partition.index, partition.pipeline
        keys = [BlockKey(one.digest + identity.group) for one in asked]
        writes: dict[int, Write] = {}
        reads: dict[int, Write] = {}
        with index.lock:
            rows = self._rows(partition, keys, identity)
            stack.callback(pipeline.lease(np.unique(rows[rows > 0])).release)
            for i, row in enumerate(rows.tolist()):
                if not row:
                    continue
                if index.state[DRAM][row] == SEALED:
                    span = pipeline.sealed_span(row, identity)
                    if span is not None:
                        writes[i] = _record(index, row, keys[i], identity, span)
                else:
                    place = int(index.place[NVME][row])
                    reads[i] = _record(index, row, keys[i], identity, memoryview(b""), place)
        return writes, reads

    def _read(
        self, cold: ColdTier, wanted: dict[int, Write], writes: dict[int, Write], taken: _Taken, end: float
    ) -> bool:
        """Read blocks from NVMe, and add those that are good to ``writes``. Returns whether it took too long."""
        items: list[Read] = []
        for write in wanted.values():
            # Memory of its own for each: a read that hangs may still fill it, whenever it ends.
            span = Scratch().get(write.identity.geometry.footprint)
            items.append(Read(write.key, write.identity, write.owner, span))
        results: list[ReadResult] = []
        ended = threading.Event()
        nbytes = sum(len(item.span) for item in items)
        taken.keep(nbytes)

        def done(found: Sequence[ReadResult]) -> None:
            results.extend(found)
            taken.give(nbytes)
            ended.set()

        cold.lane.read(items, done, lambda: False)
        if not ended.wait(max(0.0, end - time.monotonic())):
            return True
        for (i, write), item, good in zip(wanted.items(), items, results, strict=True):
            if good:
                writes[i] = structs.replace(write, span=item.span)
        return False


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
