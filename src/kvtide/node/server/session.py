"""A client's session at the node: its Backend, its prefix leases and its reservations."""

from __future__ import annotations

import logging
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvtide.block import BlockKey, Group
from kvtide.errors import LayoutError, RightError
from kvtide.index.absence_log import AbsenceCause
from kvtide.index.keys import ROOT
from kvtide.index.lease import Reservation
from kvtide.index.pins import PinCharge
from kvtide.node import protocol as p
from kvtide.node import work_limits
from kvtide.node.events.described import BlockSource
from kvtide.node.server.workers import ServerWorkerGroup
from kvtide.plan.prefill import Prefill, PrefillCost
from kvtide.store.backend import LocalBackend, LocalPrefixLease
from kvtide.store.node_statistics import ModelStatistics
from kvtide.store.partition import Partition

__all__ = ["ClientMemory", "ServerSession", "WireBlockNames"]

log = logging.getLogger("kvtide.node")

_RIGHTS = 10_000
"""Maximum number of rights of one session at a time."""
_NO_COUNTS = np.zeros(1, np.int32)


class WireBlockNames:
    """The names of a prompt's blocks, as received over the socket."""

    _digests: tuple[Any, ...] = ()
    _keys: dict[bytes, list[BlockKey]] | None = None
    """Computed at the first use: many prompts are found by all their digests together, and need no keys."""

    def __init__(
        self, digests: bytes, groups: int = 1, tokens: bytes = b"", size: int = 0, tag: bytes = b"", first: int = 0
    ) -> None:
        """``tag`` is that of the client's trust domain; ``tokens`` has ``size`` bytes per block, starting at block
        ``first``."""
        self.blocks, rest = divmod(len(digests), 32)
        if rest:
            raise LayoutError(f"{len(digests)} bytes of digests are no multiple of 32")
        if self.blocks * groups > work_limits.BLOCKS:
            raise LayoutError(
                f"a prompt of {self.blocks} blocks is too long; "
                f"{work_limits.BLOCKS} of all groups together are the limit"
            )
        self._tag = tag
        self.tokens = 0
        self.joined = digests
        self._tokens = tokens
        self._size = size
        self._first = first

    def keys(self, suffix: bytes) -> list[BlockKey]:
        if self._keys is None:
            self._digests = struct.unpack("32s" * self.blocks, self.joined)
            if len(set(self._digests)) != self.blocks:
                raise LayoutError("a prompt cannot have one block twice")
            self._keys = {}
        keys = self._keys.get(suffix)
        if keys is None:
            ending = suffix + self._tag
            keys = self._keys[suffix] = [digest + ending for digest in self._digests]
        return keys

    def parts(self, start: int, stop: int | None, blocks: int) -> Iterator[WireBlockNames]:
        """The blocks from ``start`` to ``stop``, as prompts of at most ``blocks`` blocks."""
        some = range(self.blocks)[start:stop]
        for at in range(some.start, some.stop, blocks):
            end = min(at + blocks, some.stop)
            yield WireBlockNames(self.joined[32 * at : 32 * end], tag=self._tag)

    def parent(self, block: int) -> bytes:
        return self.joined[32 * block - 32 : 32 * block] if block else ROOT

    def tokens_of(self, block: int, blocks: int = 1) -> bytes:
        at = (block - self._first) * self._size
        return self._tokens[at : at + self._size * blocks]


class ClientMemory:
    """The node's memory that one client uses, in all its sessions.

    It outlives the sessions: slots that workers still use after a session has ended are still unavailable to others.

    Requests with the same beginning lease the same blocks. While plenty of memory is left, the bytes of all leases are
    simply added up; when it is not, each block is counted once, which takes longer.
    """

    __slots__ = ("_counts", "_enough", "_first", "_free", "_held", "_kept", "_others", "_partition", "keeps")

    def __init__(self, room: int) -> None:
        self._free = room
        """Bytes that the client may still lease, reserve or pin, not counting its pins. For the node's thread only."""
        self._partition: Partition | None = None
        self._first = PinCharge()
        """The client's pins in ``_partition``. Pins may end on any thread, for instance when a block expires."""
        self._others: dict[Partition, PinCharge] = {}
        """The client's pins in other partitions. There are some only where shares are reserved for tenants."""
        self.keeps = room
        """Bytes of blocks preceding the reserved ones that may still be protected from eviction for this client,
        besides its own rights. Blocks beyond that may be evicted."""
        self._enough = room // 2
        self._kept: defaultdict[Partition, Counter[int]] = defaultdict(Counter)
        """For each row, how many of the client's reservations protect it: those of one prompt protect the same rows."""
        self._held: dict[LocalPrefixLease, LocalBackend] = {}
        self._counts: dict[Partition, npt.NDArray[np.int32]] | None = None
        """For each row, how many of the client's leases have it; counted once memory is not plentiful."""

    @property
    def room(self) -> int:
        """Bytes that the client may still use. More is a miss: a client that hangs must leave space for others."""
        free = self._free - self._first.nbytes
        if self._others:
            free -= sum(charge.nbytes for charge in self._others.values())
        return free

    def charge(self, nbytes: int) -> None:
        """Add to the bytes in use by the client; ``nbytes`` may be negative."""
        self._free -= nbytes

    def pins(self, partition: Partition) -> PinCharge:
        """The counter of the client's pins in a partition, for its sessions."""
        if self._partition is None:
            self._partition = partition
        return self._first if partition is self._partition else self._others.setdefault(partition, PinCharge())

    def hold(self, holding: LocalPrefixLease, backend: LocalBackend) -> None:
        self._held[holding] = backend
        if self._counts is not None:
            self._free -= self._count(holding, backend, 1)
            return
        self._free -= holding.part.nbytes
        if not self.ample:
            self._counts = {}
            for held, its in self._held.items():
                self._free += held.part.nbytes - self._count(held, its, 1)

    def give_back(self, holding: LocalPrefixLease) -> None:
        backend = self._held.pop(holding)
        if self._counts is None:
            self._free += holding.part.nbytes
            return
        self._free += self._count(holding, backend, -1)
        if not self._held:
            self._counts = None

    def _count(self, holding: LocalPrefixLease, backend: LocalBackend, step: int) -> int:
        """Count the lease's rows, or remove them from the count (``step`` -1); returns the bytes of those in no other
        lease."""
        assert self._counts is not None
        nbytes = 0
        for name, rows in holding.part.rows.items():
            counts = self._counts.get(backend.partition, _NO_COUNTS)
            top = int(rows.max(initial=0))
            if top >= len(counts):
                counts = np.pad(counts, (0, 2 * top + 1 - len(counts)))
                self._counts[backend.partition] = counts
            counts[rows] += step
            alone = int(np.count_nonzero(counts[rows] == max(0, step)))
            nbytes += alone * backend.layout.geometry[name].footprint
        return nbytes

    def room_for(self, backend: LocalBackend, names: WireBlockNames, have: int) -> int:
        """Bytes that a match of this prompt may lease: the leading blocks that are leased already cost nothing."""
        if self._counts is None:
            return self.room
        counts, index, free = self._counts.get(backend.partition, _NO_COUNTS), backend.partition.index, 0
        for group in backend.layout.groups:
            with index.lock:
                rows = index.rows(names.keys(group.suffix))[have:]
            here = (rows > 0) & (rows < len(counts))
            held = np.append(counts[np.where(here, rows, 0)] * here > 0, False)
            free += int(np.argmin(held)) * backend.layout.geometry[group.name].footprint
        return self.room + free

    def reserved(self, made: Reservation, nbytes: int, partition: Partition) -> None:
        """Charge the slots of a reservation, and the blocks that it protects from eviction, until it ends."""
        kept, counts = [(rows.tolist(), size) for rows, size in made.kept], self._kept[partition]
        self._free -= nbytes
        for rows, size in kept:
            self.keeps -= size * sum(row not in counts for row in rows)
            counts.update(rows)

        def let_go(_: Reservation) -> None:
            self._free += nbytes
            for rows, size in kept:
                for row in rows:
                    counts[row] -= 1
                    if not counts[row]:
                        del counts[row]
                        self.keeps += size

        made.on_end.append(let_go)

    @property
    def ample(self) -> bool:
        """Whether so much memory is left to the client that processing its releases can wait."""
        if self._others:
            return self.room > self._enough
        return self._free - self._first.nbytes > self._enough  # called twice at every step of an engine


class ServerSession:
    """A client's session: its Backend, its prefix leases and its reservations."""

    def __init__(self, backend: LocalBackend, account: ClientMemory, model: ModelStatistics | None) -> None:
        """``model``: the model's entry in the statistics, if it may be shown."""
        self.layout = backend.layout
        self.model = model
        self.backend = backend
        self._account = account
        self.holdings: dict[int, LocalPrefixLease] = {}
        self.reservations: dict[int, Reservation] = {}
        self.worker_group: ServerWorkerGroup | None = None
        self.described = False
        """Whether its client has described a block."""
        self.source: BlockSource | None = None
        """For KV events; None if its blocks are not published, or none was described."""

    @property
    def rights(self) -> int:
        return (
            len(self.holdings)
            + len(self.reservations)
            + (self.worker_group.rights if self.worker_group is not None else 0)
        )

    @property
    def slots(self) -> int:
        """Number of slots of the session's own rights, without those of its workers."""
        held = sum(len(h.part.all) for h in self.holdings.values())
        return held + sum(len(r.keys) for r in self.reservations.values())

    def holding(self, number: int) -> LocalPrefixLease:
        try:
            return self.holdings[number]
        except KeyError:
            raise RightError(f"there is no prefix lease {number}") from None

    def reservation(self, number: int) -> Reservation:
        try:
            return self.reservations[number]
        except KeyError:
            raise RightError(f"there is no reservation {number}") from None

    def check_rights(self) -> None:
        if len(self.holdings) + len(self.reservations) >= _RIGHTS:
            raise RightError(f"this session holds {_RIGHTS} rights; release some")

    def match(
        self,
        number: int,
        names: WireBlockNames,
        have: int,
        prefill: Prefill | None,
        again: bool,
        record: bool,
        request: str,
    ) -> LocalPrefixLease:
        """Match a prompt and keep the prefix lease under ``number``."""
        room = self._account.room_for(self.backend, names, have)
        holding = self.backend.match(names, have, prefill, again, record, request, room)
        self.holdings[number] = holding
        self._account.hold(holding, self.backend)
        return holding

    def explained(self, o: p.Explain, names: WireBlockNames) -> msgspec.Raw:
        """The answer to ``Explain``."""
        if o.prefill is not None and not o.prefill >= 0:
            raise LayoutError(f"prefill is {o.prefill}; it cannot be less than 0")
        prefill = o.prefill if o.cost is None else PrefillCost(*o.cost)
        found = self.backend.explain_request(o.request) if o.past else self.backend.explain(names, prefill)
        return msgspec.Raw(msgspec.msgpack.encode(found))

    def pin(self, names: WireBlockNames, stop: int | None, step: int) -> int:
        return self.backend.pin(names, stop, step)

    def reserve(self, number: int, made: Reservation, writers: Sequence[int]) -> None:
        """Keep a reservation under ``number``, to be written by the client or by workers of its group."""
        self._account.reserved(made, sum(len(view) for view in made.views), self.backend.partition)
        if writers:
            assert self.worker_group is not None
            self.worker_group.delegate(number, made, writers)
        else:
            self.reservations[number] = made

    def beyond_share(self, groups: Sequence[Group], names: WireBlockNames, start: int, stop: int) -> None:
        """Record that these blocks were not stored because the client may hold no more memory."""
        for group in groups:
            self.backend.note_dropped(names.keys(group.suffix)[start:stop], group, AbsenceCause.CLIENT_SHARE)

    def release(self, number: int) -> int:
        """The client does not use a leased prefix any more; its workers may. Returns how many blocks the lease has."""
        holding = self.holdings.pop(number, None)
        if holding is None:
            return 0
        if self.worker_group is None:
            self._give_back(holding)
        else:
            self.worker_group.when_free(number, lambda: self._give_back(holding))
        return len(holding.part.all)

    def _give_back(self, holding: LocalPrefixLease) -> None:
        holding.release()
        self._account.give_back(holding)

    def ending(self) -> Iterator[int]:
        """Give back all rights: the client does not use the memory any more, though its workers may.

        Yields the units of work of each step; other clients may be served between the steps.
        """
        while self.holdings:
            number, holding = next(iter(self.holdings.items()))
            self._end(partial(self.release, number))
            yield 1 + len(holding.part.all) // work_limits.MOVE
        while self.reservations:
            _, reservation = self.reservations.popitem()
            self._end(reservation.abort)
            yield 1 + len(reservation.keys) * work_limits.MOVE
        if self.worker_group is not None:
            self._end(self.worker_group.fail)
        self.backend.close()

    @staticmethod
    def _end(call: Callable[[], object]) -> None:
        try:
            call()
        except Exception:  # the other rights must still be given back
            log.exception("a right could not be given back")
