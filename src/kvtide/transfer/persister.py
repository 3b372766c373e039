"""Makes blocks durable: written and synced in a tier that survives a restart.

A request has a list of blocks and a ``Transfer`` that ends when each block is durable or cannot become so. Each block
is held meanwhile, so that no tier evicts it, and passes through these states, in ``_advance``::

    being stored, or read from a tier  ->  wait until it is in DRAM
    in DRAM only                       ->  write it to the first durable tier that has not refused it yet
    being written                      ->  wait until the write has ended
    in a durable tier                  ->  sync it there, and check that it is still there: then it is durable. If the
                                           record says that the block expires sooner than it does, renew it first
    in a tier that is not durable      ->  read it first

Writes on request bypass the admission, and are not refused because a queue is full: they wait for their turn
(``Demotion.write_on_request``), while the caller does not block. Write budgets and quotas apply to them too.

A block that is dropped or expires meanwhile is not durable. If a caller stores it again, or replaces a writer that
never finished, the new row is followed.

Thread-safe. ``_advance`` is called when a step has ended, on the tiers' threads too; it never blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvtide.block import BlockKey
from kvtide.clock import Clock
from kvtide.counts import TierCount
from kvtide.events import BlockRemoved, Event
from kvtide.index.index import DRAM, PENDING, SEALED
from kvtide.index.lease import Lease
from kvtide.interrupts import again_if_interrupted
from kvtide.tiers.base import Identity, Renewal, Renewing
from kvtide.transfer.cold_tier import ColdTier
from kvtide.transfer.context import TransferContext
from kvtide.transfer.demotion import Demotion
from kvtide.transfer.promotion import Promotion
from kvtide.transfer.residents import rows_of
from kvtide.transfer.transfer import Transfer
from kvtide.transfer.write_results import Unwritten

__all__ = ["DurableRequest", "Persister"]

_SLICE = 512
"""Blocks examined in one hold of the index lock."""


class _Block:
    """One block of a request."""

    __slots__ = ("identity", "key", "lease", "loaded", "number", "reason", "row", "tried")

    def __init__(self, number: int, key: BlockKey, identity: Identity) -> None:
        self.number = number
        self.key = key
        self.identity = identity
        self.row = 0
        """The row held by ``lease``."""
        self.lease: Lease | None = None
        self.tried: list[int] = []
        """Numbers of the tiers to which it was written on request."""
        self.loaded = False
        self.reason: Unwritten | None = None
        """Why it will not become durable."""


class DurableRequest:
    """Blocks to be made durable; ``transfer`` counts them by their number in the request."""

    def __init__(
        self,
        wanted: Iterable[tuple[BlockKey, Identity]],
        transfer: Transfer,
        advance: Callable[[DurableRequest, Sequence[_Block]], None],
    ) -> None:
        self.transfer = transfer
        self.blocks = [_Block(i, key, identity) for i, (key, identity) in enumerate(wanted)]
        self.go_on: Callable[[Sequence[_Block]], None] = functools.partial(advance, self)
        """Do the next step for these blocks. Always the same object, so that blocks that end together are passed to it
        together."""
        self.closed = False
        """Whether the store was closed before the request ended."""

    def reason(self, number: int) -> Unwritten | None:
        """Why a block is not durable, as far as known now; None if it is."""
        if number in self.transfer.arrived:
            return None
        if (reason := self.blocks[number].reason) is not None:
            return reason
        if self.closed:
            return Unwritten.CLOSED
        return Unwritten.CANCELLED if self.transfer.ended else Unwritten.TIMEOUT


class _Arriving(Transfer):
    """Waits for blocks that others write into DRAM; each continues when it is complete, or has failed."""

    def __init__(self, request: DurableRequest, blocks: Sequence[_Block]) -> None:
        super().__init__(request.transfer.clock)
        self._go_on = request.go_on
        self._blocks = {block.row: block for block in blocks}

    def finish(self, rows: Sequence[int], arrived: Sequence[bool]) -> None:
        with self._lock:
            here = [block for row in rows if (block := self._blocks.get(row)) is not None]
        if here:
            self._go_on(here)
        with self._lock:  # only now: an interrupted caller repeats the call
            for row in rows:
                self._blocks.pop(row, None)
            self._ended = not self._blocks


_Syncing = tuple[DurableRequest, _Block, int]
"""A block to be synced, and its place."""


class Persister:
    """Makes blocks durable."""

    def __init__(self, context: TransferContext, demotion: Demotion, promotion: Promotion) -> None:
        self._index, self._residents = context.index, context.residents
        self._feed, self._counts = context.feed, context.counts
        self._interrupted = context.interrupted
        self._colds = {cold.number: cold for cold in context.colds}
        self._writable = any(not cold.read_only for cold in context.colds)
        self._durable = [cold for cold in context.colds if cold.sync is not None]
        self._demotion = demotion
        self._promotion = promotion
        self._open: set[DurableRequest] = set()
        self._syncs: dict[int, list[_Syncing]] = {cold.number: [] for cold in self._durable}
        """Blocks to be synced when the current sync has ended, by tier."""
        self._busy: dict[int, list[_Syncing]] = {}
        """Blocks being synced, by tier."""
        self._closed = False

    def __len__(self) -> int:
        """Number of requests that have not ended."""
        return len(self._open)

    def persist(self, wanted: Iterable[tuple[BlockKey, Identity]], clock: Clock) -> DurableRequest:
        """Begin to make distinct blocks durable."""
        transfer = Transfer(clock)
        request = DurableRequest(wanted, transfer, self._advance)
        transfer.expect(range(len(request.blocks)))
        transfer.on_end(functools.partial(self._ended, request))
        try:
            with self._index.lock:
                closed = self._closed
                if not closed:
                    self._open.add(request)
            if closed:
                self._cut_off(request)
            elif not self._durable:
                self._end(request, request.blocks, Unwritten.NOT_DURABLE if self._writable else Unwritten.NO_TIER)
            else:
                self._hold_all(request)
                self._advance(request, request.blocks)
            transfer.started()
        except BaseException:
            again_if_interrupted(functools.partial(self._withdraw, request))
            raise
        return request

    def _withdraw(self, request: DurableRequest) -> None:
        """Cancel a request whose caller was interrupted and will never receive it."""
        request.transfer.cancel()
        with self._index.lock:
            self._demotion.withdraw(request.go_on)
        self._ended(request)  # again: the callback may have been interrupted
        self._promotion.call_ready()
        self._demotion.tell()

    def close(self) -> None:
        """Cancel all open requests: no block moves any more."""
        with self._index.lock:
            self._closed = True
            requests = list(self._open)
        for request in requests:
            self._cut_off(request)

    def _cut_off(self, request: DurableRequest) -> None:
        request.closed = True
        request.transfer.cancel()

    def _ended(self, request: DurableRequest) -> None:
        for first in range(0, len(request.blocks), _SLICE):
            with self._index.lock:
                for block in request.blocks[first : first + _SLICE]:
                    if block.lease is not None:
                        self._demotion.unwatch(block.row, request.go_on)
                    self._let_go(block)
        with self._index.lock:
            self._open.discard(request)

    def _let_go(self, block: _Block) -> None:
        """Call with the lock held."""
        lease, block.lease = block.lease, None
        if lease is not None:
            lease.release()

    def _end(self, request: DurableRequest, blocks: Sequence[_Block], reason: Unwritten | None) -> None:
        """End blocks that are durable (``reason`` None) or will not become so. Call without the lock."""
        if not blocks:
            return
        with self._index.lock:
            for block in blocks:
                block.reason = reason
                self._let_go(block)
        request.transfer.finish([block.number for block in blocks], [reason is None] * len(blocks))

    # -- the states of a block ----------------------------------------------------------------------------

    def _hold_all(self, request: DurableRequest) -> None:
        """Hold all known blocks first; otherwise the last ones could be evicted meanwhile."""
        for first in range(0, len(request.blocks), _SLICE):
            with self._index.lock:
                if request.transfer.ended:
                    return
                try:
                    for block in request.blocks[first : first + _SLICE]:
                        self._follow(block)
                except BaseException:
                    self._interrupted()
                    raise

    def _follow(self, block: _Block) -> bool:
        """Hold the row that has the block's key now; returns False if there is none. Call with the lock held."""
        row = int(self._index.own_rows([block.key], block.identity.fingerprint)[0])
        if row != block.row or block.lease is None:
            self._let_go(block)
            block.row, block.loaded = row, False
            block.tried.clear()
            if row:
                block.lease = self._residents.lease(rows_of([row]))
        return bool(row)

    def _advance(self, request: DurableRequest, blocks: Sequence[_Block]) -> None:
        """Start the next step for each of these blocks; it is called again when that step has ended."""
        for first in range(0, len(blocks), _SLICE):
            self._step(request, blocks[first : first + _SLICE])

    def _step(self, request: DurableRequest, blocks: Sequence[_Block]) -> None:
        failed: dict[Unwritten, list[_Block]] = {}
        syncs: dict[int, list[_Syncing]] = {}
        writes: set[int] = set()
        loads: list[_Block] = []
        with self._index.lock:
            if request.transfer.ended:
                return
            try:
                self._decide(request, blocks, failed, syncs, writes, loads)
            except BaseException:
                self._interrupted()
                raise
        for reason, some in failed.items():
            self._end(request, some, reason)
        for number, pending in syncs.items():
            self._sync(self._colds[number], pending)
        for number in writes:
            self._demotion.write_on_request(self._colds[number])
        for block in loads:  # from a tier that is not durable
            loading = Transfer(request.transfer.clock)
            loading.on_end(functools.partial(request.go_on, [block]))
            self._promotion.load([(rows_of([block.row]), block.identity)], loading)

    def _decide(
        self,
        request: DurableRequest,
        blocks: Sequence[_Block],
        failed: dict[Unwritten, list[_Block]],
        syncs: dict[int, list[_Syncing]],
        writes: set[int],
        loads: list[_Block],
    ) -> None:
        """Decide the next step of each block: fills in the blocks that failed, the blocks to sync, the tiers to write
        to, and the blocks to read. Call with the lock held."""
        index = self._index
        landing: list[_Block] = []
        for block in blocks:
            known = block.row
            if not self._follow(block):
                failed.setdefault(Unwritten.REMOVED if known else Unwritten.NOT_STORED, []).append(block)
                continue
            row, cold = block.row, self._where(block)
            if cold is not None and index.state[cold.number][row] == SEALED:
                place = int(index.place[cold.number][row])
                syncs.setdefault(cold.number, []).append((request, block, place))
            elif any(self._demotion.watched(c, row, block) for c in self._durable):
                pass  # repeated after an interrupt: the block already waits
            elif cold is not None:
                self._demotion.watch(cold, row, request.go_on, block)
            elif index.state[DRAM][row] == PENDING:
                landing.append(block)
            elif index.state[DRAM][row] == SEALED:
                target = next((c for c in self._durable if c.number not in block.tried), None)
                if target is None:
                    failed.setdefault(self._refusal(block), []).append(block)
                else:
                    writes.add(target.number)
                    self._demotion.request(target, row, request.go_on, block)
                    block.tried.append(target.number)
            elif not block.loaded and any(index.state[number][row] == SEALED for number in self._colds):
                block.loaded = True
                loads.append(block)
            else:
                failed.setdefault(self._refusal(block), []).append(block)
        if landing:
            arriving = _Arriving(request, landing)
            for block in landing:
                self._promotion.join(block.row, arriving)

    def _where(self, block: _Block) -> ColdTier | None:
        """The durable tier that has the block or is about to get it. Call with the lock held."""
        coming = None
        for cold in self._durable:
            state = self._index.state[cold.number][block.row]
            if state == SEALED:
                return cold
            if state == PENDING and coming is None:
                coming = cold
        return coming

    def _refusal(self, block: _Block) -> Unwritten:
        """Why no tier has taken the block: the reason of the nearest tier tried. Call with the lock held."""
        if not block.tried:
            return Unwritten.REMOVED
        reasons = self._residents.unwritten.get(block.row, {})
        return reasons.get(block.tried[0], Unwritten.WRITE_FAILED)

    # -- syncing ------------------------------------------------------------------------------------------

    def _sync(self, cold: ColdTier, blocks: list[_Syncing]) -> None:
        """Sync blocks, batched with all others that arrive while a sync is under way."""
        assert cold.sync is not None
        number = cold.number
        batch: list[_Syncing] = []
        try:
            with self._index.lock:
                self._syncs[number] += blocks
                if number in self._busy or not self._syncs[number]:
                    return
                batch = self._busy[number] = self._syncs[number]
                self._syncs[number] = []
                early = self._early(cold, batch)
            if early and isinstance(cold.tier, Renewing):
                cold.tier.renew(list(early.values()), functools.partial(self._renewed, cold, batch, early))
            else:
                self._sync_now(cold, batch, frozenset())
        except BaseException:
            with self._index.lock:
                # It is unknown whether the tier received the sync, and other requests wait for it: sync once more.
                if self._busy.get(number) is batch:
                    del self._busy[number]
                    self._syncs[number] += batch
            self._sync(cold, [])
            raise

    def _early(self, cold: ColdTier, batch: Sequence[_Syncing]) -> dict[int, Renewal]:
        """By number, the blocks of a batch whose records say that they expire sooner than they do: after a restart
        that would be true. Call with the lock held."""
        index, prolonged = self._index, self._residents.prolonged
        if cold.shared or not prolonged:  # a blob is not changed: it keeps the expiry with which it was written first
            return {}
        return {
            i: (block.key, place, float(index.expiry[block.row]))
            for i, (_, block, place) in enumerate(batch)
            if block.row in prolonged
        }

    def _renewed(
        self, cold: ColdTier, batch: list[_Syncing], early: Mapping[int, Renewal], results: Sequence[bool]
    ) -> None:
        index = self._index
        good = dict(zip(early, results, strict=True))
        with index.lock:
            for i, (_, _, when) in early.items():
                row = batch[i][1].row
                if good[i] and index.expiry[row] == when:  # else it was extended once more
                    self._residents.prolonged.discard(row)
        self._sync_now(cold, batch, frozenset(i for i in early if not good[i]))

    def _sync_now(self, cold: ColdTier, batch: list[_Syncing], early: frozenset[int]) -> None:
        """``early``: the blocks, by number, whose records could not be renewed. They do not become durable so."""
        assert cold.sync is not None
        cold.sync(
            [(block.key, place) for _, block, place in batch], functools.partial(self._synced, cold, batch, early)
        )

    def _synced(self, cold: ColdTier, batch: list[_Syncing], early: frozenset[int], synced: Sequence[bool]) -> None:
        index, number = self._index, cold.number
        results = [good and i not in early for i, good in enumerate(synced)]
        ended: dict[tuple[DurableRequest, Unwritten | None], list[_Block]] = {}
        again: dict[DurableRequest, list[_Block]] = {}
        events: list[Event] = []
        with index.lock:
            if self._busy.get(number) is not batch:
                return  # the batch is synced once more
            del self._busy[number]
            for (request, block, place), good in zip(batch, results, strict=True):
                row = block.row
                there = block.lease is not None and index.row(block.key) == row
                if not there or index.state[number][row] != SEALED or index.place[number][row] != place:
                    again.setdefault(request, []).append(block)  # it was removed meanwhile
                elif good:
                    ended.setdefault((request, None), []).append(block)
                elif index.state[DRAM][row] == SEALED:
                    # A written block that cannot be synced may be lost, and one whose record cannot be renewed expires
                    # too soon: it is written again, elsewhere.
                    index.remove(row, number)
                    self._residents.prolonged.discard(row)
                    if not cold.shared:
                        cold.tier.evict(block.key, place)
                    events.append(BlockRemoved(cold.name, (block.key,), "unreadable", index.identities(rows_of([row]))))
                    again.setdefault(request, []).append(block)
                else:
                    ended.setdefault((request, Unwritten.WRITE_FAILED), []).append(block)
            if False in results:
                self._counts[TierCount.BLOCKS_NOT_SYNCED.of(cold.name)] += results.count(False)
        self._sync(cold, [])
        self._feed.publish(events)
        for (request, reason), blocks in ended.items():
            self._end(request, blocks, reason)
        for request, blocks in again.items():
            self._advance(request, blocks)
