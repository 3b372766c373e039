"""Moves blocks between tiers and keeps the index true while they move.

Decide under the index's lock, act outside it: each verb first changes rows and collects what is to be done (reads,
writes, events), then does it. A row on the move is held, so it cannot be evicted or forgotten meanwhile.

Up: a row in a colder tier gets a slot in DRAM, PENDING there, and a read. Whoever asks for it meanwhile joins:
``_flights`` has, for each pending row, the transfers that wait for it. When the read is verified the row is SEALED in
DRAM; if it fails, the bad copy is dropped and the row is a miss.

Down: a sealed row is written to a colder tier while it stays readable in DRAM. If the lane has no room the write is not
made: stores are dropped, callers never wait.

Dropping a row that somebody holds: the key is taken from the index at once, so nobody finds it any more; the slots
follow when the last holder lets go (``_doomed``).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvtide.block import BlockKey
from kvtide.events import BlockRemoved, BlockStored, Event, Feed
from kvtide.index.index import ABSENT, DRAM, NOWHERE, PENDING, SEALED, Index, Rows
from kvtide.index.lease import Lease, Reservation
from kvtide.plan.admit import Admission
from kvtide.plan.evict import Evictor, Policy
from kvtide.tiers.base import Identity, Read, Tier, Write
from kvtide.tiers.dram import Dram
from kvtide.tiers.segments import ladder
from kvtide.transfer.lane import Lane
from kvtide.transfer.transfer import Transfer

__all__ = ["Cold", "Pipeline", "Pledge"]

_CHUNK = 64 << 20
"""A read is cut into jobs of this many bytes, so that deadlines and cancellation bite."""


@dataclass(frozen=True, slots=True)
class Cold:
    """A tier below DRAM, with what belongs to it."""

    number: int
    name: str
    tier: Tier
    lane: Lane
    admission: Admission
    evictor: Evictor | None
    """None for a tier that makes its own room."""
    keep_tokens: bool = False


@dataclass(frozen=True, slots=True)
class Pledge:
    """A block that somebody wants to store."""

    key: BlockKey
    parent: bytes
    depth: int
    identity: Identity
    expiry: float = float("inf")
    priority: int = 0
    tokens: bytes = b""


class Pipeline:
    """The only place that changes where rows are. Safe from any thread."""

    def __init__(
        self,
        index: Index,
        dram: Dram,
        colds: Sequence[Cold],
        policy: Policy,
        feed: Feed,
        checksum: bool = False,
    ) -> None:
        self._index = index
        self._dram = dram
        self._colds = colds
        self._policy = policy
        self._feed = feed
        self._keep_leaving = any(c.admission.keeps_leaving for c in colds)
        self._evictor = Evictor(index, DRAM, dram, policy, self._saved if self._keep_leaving else None)
        self._flights: dict[int, list[Transfer]] = {}
        self._identities: list[Identity] = []
        """Of rows that are in DRAM: what a colder tier must know of them. ``Index.space`` points here."""
        self._spaces: dict[int, int] = {}
        self._tokens: dict[int, bytes] = {}
        self._checks: dict[int, int] | None = {} if checksum else None
        self._doomed: set[int] = set()
        self._ahead = 0
        self.counts: Counter[str] = Counter()
        """What happened, by name; see ``docs/glossary.md``."""

    # -- leases -------------------------------------------------------------------------------------------

    def lease(self, rows: Rows) -> Lease:
        """Hold distinct rows. Under the index's lock."""
        self._index.hold(rows)
        return Lease(self._release, rows)

    def _release(self, rows: Rows) -> None:
        with self._index.lock:
            self._unhold(rows)

    def _unhold(self, rows: Rows) -> None:
        if self._doomed:
            last = [r for r in rows.tolist() if r in self._doomed and self._index.holds[r] == 1]
            self._index.unhold(rows)
            for row in last:
                self._doomed.discard(row)
                self._vacate(row)
        else:
            self._index.unhold(rows)

    def _vacate(self, row: int) -> None:
        """Give back whatever slots a detached row has, and the row."""
        if self._index.state[DRAM][row] == SEALED:
            self._dram.release(self._index.remove(row, DRAM))
            self._forget(row)
        self._index.retire(row)

    def _forget(self, row: int) -> None:
        """``row`` left DRAM."""
        if self._tokens:
            self._tokens.pop(row, None)
        if self._checks:
            self._checks.pop(row, None)

    def _space(self, identity: Identity) -> int:
        space = self._spaces.get(id(identity))
        if space is None:
            space = self._spaces[id(identity)] = len(self._identities)
            self._identities.append(identity)
        return space

    def _seal(self, row: int, place: int) -> None:
        self._index.put(row, DRAM, SEALED, place)
        if self._checks is not None:
            self._checks[row] = self._checksum(row, place)

    def _checksum(self, row: int, place: int) -> int:
        size = self._identities[self._index.space[row]].geometry.footprint
        return xxh3_64_intdigest(self._dram.span(place, size))

    def intact(self, row: int) -> bool:
        """Whether a row in DRAM still has the bytes that were sealed; always True without ``dram.checksum``."""
        if self._checks is None or row not in self._checks:
            return True
        if self._checksum(row, int(self._index.place[DRAM][row])) == self._checks[row]:
            return True
        self.counts["blocks changed in DRAM after they were sealed"] += 1
        return False

    def used(self, rows: Rows) -> None:
        """Blocks of one chain, head first, are being stored. Under the index's lock."""
        self._policy.touch(rows)

    def touch(self, rows: Rows) -> None:
        """Blocks of one chain, head first, were asked for. Under the index's lock."""
        index = self._index
        self._policy.touch(rows)
        for cold in self._colds:
            wanted = rows[cold.admission.on_touch(rows)]
            if len(wanted):
                self._write_down(cold, wanted)
        seen = index.touches[rows]
        index.touches[rows] = seen + (seen < 255)

    # -- in from callers ----------------------------------------------------------------------------------

    def reserve(self, pledges: Sequence[Pledge]) -> Reservation:
        """Slots in DRAM for blocks that are not here. What is here, or finds no room, is not in the answer."""
        granted: list[tuple[Pledge, int, int]] = []
        waiting = list(pledges)
        while waiting:
            events: list[Event] = []
            with self._index.lock:
                waiting = self._grant(waiting, granted, events)
            self._feed.publish(events)
            if waiting and not self._dram.grow(waiting[0].identity.geometry.footprint):
                with self._index.lock:
                    waiting = self._grant(waiting, granted, events, evict=True)
                self._feed.publish(events)
                if waiting and not self._dram.grow(waiting[0].identity.geometry.footprint):
                    self.counts["stores dropped: no room in DRAM"] += len(waiting)
                    break
        rows = np.array([row for _, row, _ in granted], np.int64)
        return Reservation(
            [p.key for p, _, _ in granted],
            rows,
            [self._dram.span(place, p.identity.geometry.footprint) for p, _, place in granted],
            [p.depth for p, _, _ in granted],
            [self._dram.generation(place) for _, _, place in granted],
            self._finish,
        )

    def _grant(
        self,
        waiting: list[Pledge],
        granted: list[tuple[Pledge, int, int]],
        events: list[Event],
        evict: bool = False,
    ) -> list[Pledge]:
        """Give slots to pledges in order; answers those for which there was none."""
        index = self._index
        for i, pledge in enumerate(waiting):
            row = index.row(pledge.key)
            if row and (index.state[DRAM][row] != ABSENT or any(index.state[c.number][row] for c in self._colds)):
                continue
            size = pledge.identity.geometry.footprint
            place = self._dram.take(size, row or index.next_row)
            while place is None and evict and self._make_room(ladder(size), events, len(waiting) - i):
                place = self._dram.take(size, row or index.next_row)
                if place is None and self._dram.segments.spare(ladder(size)):
                    break
            if place is None:
                return waiting[i:]
            row = row or index.add(pledge.key, pledge.parent, pledge.depth)
            index.put(row, DRAM, PENDING, place)
            index.holds[row] += 1
            index.expiry[row] = pledge.expiry
            index.priority[row] = pledge.priority
            index.space[row] = self._space(pledge.identity)
            if pledge.tokens:
                self._tokens[row] = pledge.tokens
            granted.append((pledge, row, place))
        return []

    def _finish(self, reservation: Reservation, sealed: bool) -> None:
        """The end of a reservation."""
        index, rows = self._index, reservation.rows
        events: list[Event] = []
        ready: list[Callable[[], None]] = []
        with index.lock:
            for row, generation in zip(rows.tolist(), reservation.generations, strict=True):
                place = int(index.place[DRAM][row])
                assert self._dram.generation(place) == generation, "a slot changed hands under a writer"
                if sealed and row not in self._doomed:
                    self._seal(row, place)
                else:
                    self._dram.release(index.remove(row, DRAM))
                    self._forget(row)
                ready += self._landed(row, sealed and row not in self._doomed)
            if sealed:
                kept = rows[index.state[DRAM][rows] == SEALED]
                for cold in self._colds:
                    wanted = kept[cold.admission.on_store(kept)]
                    if len(wanted):
                        self._write_down(cold, wanted)
                if len(kept):
                    events.append(BlockStored("dram", tuple(index.key(r) for r in kept.tolist())))
                self.counts["blocks stored"] += len(kept)
            self._unhold(rows)
            if self._keep_leaving:
                self._save_ahead()
        self._feed.publish(events)
        for call in ready:
            call()

    # -- up -----------------------------------------------------------------------------------------------

    def load(self, wanted: Iterable[tuple[int, Identity]], transfer: Transfer) -> None:
        """Bring rows to DRAM for ``transfer``. The caller holds them."""
        events: list[Event] = []
        jobs: list[tuple[Cold, list[tuple[int, Read]]]] = []
        todo = list(wanted)
        transfer.expect(row for row, _ in todo)
        while todo:
            with self._index.lock:
                todo, ended = self._start_reads(todo, transfer, jobs, events)
            self._feed.publish(events)
            events.clear()
            transfer.finish([row for row, _ in ended], [good for _, good in ended])
            if todo and not self._dram.grow(todo[0][1].geometry.footprint):
                self.counts["loads dropped: no room in DRAM"] += len(todo)
                transfer.finish([row for row, _ in todo], [False] * len(todo))
                break
        for cold, items in jobs:
            self._read(cold, items)
        transfer.started()

    def _start_reads(
        self,
        todo: list[tuple[int, Identity]],
        transfer: Transfer,
        jobs: list[tuple[Cold, list[tuple[int, Read]]]],
        events: list[Event],
    ) -> tuple[list[tuple[int, Identity]], list[tuple[int, bool]]]:
        """Start or join a read for each row. Answers those that need DRAM to grow, and those that ended at once."""
        index = self._index
        ended: list[tuple[int, bool]] = []
        for i, (row, identity) in enumerate(todo):
            state = index.state[DRAM][row]
            if state == SEALED:
                ended.append((row, True))
                continue
            if state == PENDING:
                self._flights.setdefault(row, []).append(transfer)
                continue
            cold = next((c for c in self._colds if index.state[c.number][row] == SEALED), None)
            if cold is None or row in self._doomed:
                ended.append((row, False))
                continue
            size = identity.geometry.footprint
            place = self._dram.take(size, row)
            if place is None and self._dram.growable(size):
                return todo[i:], ended
            while place is None and self._make_room(ladder(size), events):
                place = self._dram.take(size, row)
                if place is None and self._dram.growable(size):
                    return todo[i:], ended
            if place is None:
                ended.append((row, False))
                self.counts["loads dropped: no room in DRAM"] += 1
                continue
            index.put(row, DRAM, PENDING, place)
            index.holds[row] += 1
            index.space[row] = self._space(identity)
            self._flights[row] = [transfer]
            item = Read(
                index.key(row),
                identity,
                int(index.place[cold.number][row]),
                self._dram.span(place, size),
            )
            if not jobs or jobs[-1][0] is not cold or len(jobs[-1][1]) * size >= _CHUNK:
                jobs.append((cold, []))
            jobs[-1][1].append((row, item))
        return [], ended

    def _read(self, cold: Cold, items: list[tuple[int, Read]]) -> None:
        def done(results: Sequence[bool]) -> None:
            self._read_done(cold, items, results)

        def cancel() -> bool:
            with self._index.lock:
                if any(t.wanted for row, _ in items for t in self._flights.get(row, ())):
                    return False
            self._read_done(cold, items, None)
            return True

        cold.lane.read([item for _, item in items], done, cancel)

    def _read_done(self, cold: Cold, items: list[tuple[int, Read]], results: Sequence[bool] | None) -> None:
        """Reads ended: well, badly, or (``results`` None) before they began."""
        index = self._index
        ready: list[Callable[[], None]] = []
        good: list[BlockKey] = []
        bad: list[tuple[BlockKey, int]] = []
        with index.lock:
            for i, (row, item) in enumerate(items):
                arrived = results is not None and results[i] and row not in self._doomed
                if arrived:
                    self._seal(row, int(index.place[DRAM][row]))
                    good.append(item.key)
                else:
                    self._dram.release(index.remove(row, DRAM))
                    self._forget(row)
                    same = index.place[cold.number][row] == item.place
                    if results is not None and not results[i] and same and row not in self._doomed:
                        bad.append((item.key, index.remove(row, cold.number)))
                ready += self._landed(row, arrived)
            self.counts[f"blocks read from {cold.name}"] += len(good)
            self.counts[f"blocks unreadable in {cold.name}"] += len(bad)
            self._unhold(np.array([row for row, _ in items], np.int64))
        events: list[Event] = []
        if good:
            events.append(BlockStored("dram", tuple(good)))
        if bad:
            cold.tier.drop(bad, lambda _: None)
            events.append(BlockRemoved(cold.name, tuple(k for k, _ in bad), "unreadable"))
        self._feed.publish(events)
        for call in ready:
            call()

    def _landed(self, row: int, arrived: bool) -> list[Callable[[], None]]:
        """What to call, outside the lock, for those who wait for ``row``."""
        return [functools.partial(t.finish, [row], [arrived]) for t in self._flights.pop(row, ())]

    # -- down ---------------------------------------------------------------------------------------------

    def _write_down(self, cold: Cold, rows: Rows) -> int:
        """Start writing rows of DRAM to ``cold``, as far as its lane has room. Under the lock; answers how many."""
        index = self._index
        items: list[tuple[int, Write]] = []
        for row in rows.tolist():
            if index.state[cold.number][row] != ABSENT or index.state[DRAM][row] != SEALED:
                continue
            identity = self._identities[index.space[row]]
            size = identity.geometry.footprint
            if not cold.lane.room(size):
                self.counts[f"stores dropped: the queue of {cold.name} is full"] += 1
                continue
            index.put(row, cold.number, PENDING, NOWHERE)
            index.holds[row] += 1
            write = Write(
                index.key(row),
                identity,
                self._dram.span(int(index.place[DRAM][row]), size),
                index.parent[row].tobytes(),
                int(index.depth[row]),
                row,
                float(index.expiry[row]),
                int(index.priority[row]),
                self._tokens.get(row, b"") if cold.keep_tokens else b"",
            )
            items.append((row, write))
        for i in range(0, len(items), 8):
            part = items[i : i + 8]
            # Submitting takes no I/O; a tier that answers at once takes the index's lock again, which is reentrant.
            cold.lane.write([w for _, w in part], functools.partial(self._written, cold, part))
        return len(items)

    def _written(self, cold: Cold, items: list[tuple[int, Write]], places: Sequence[int]) -> None:
        index = self._index
        kept: list[BlockKey] = []
        dropped: list[tuple[BlockKey, int]] = []
        with index.lock:
            for (row, item), place in zip(items, places, strict=True):
                index.remove(row, cold.number)
                if place == NOWHERE:
                    continue
                if row in self._doomed:
                    dropped.append((item.key, place))
                else:
                    index.put(row, cold.number, SEALED, place)
                    kept.append(item.key)
            self.counts[f"blocks written to {cold.name}"] += len(kept)
            self._unhold(np.array([row for row, _ in items], np.int64))
        if dropped:
            cold.tier.drop(dropped, lambda _: None)
        if kept:
            self._feed.publish([BlockStored(cold.name, tuple(kept))])

    def _saved(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which rows are whole in a colder tier too."""
        saved = np.zeros(len(rows), np.bool_)
        for cold in self._colds:
            saved |= self._index.state[cold.number][rows] == SEALED
        return saved

    def _save_ahead(self) -> None:
        """Write the coldest blocks down before they must leave, so that room can be made at once."""
        segments = self._dram.segments
        if self._ahead > 0 or segments.used * 2 < segments.budget:
            self._ahead -= 1
            return
        count = max(8, self._dram.blocks // 8)
        rows = self._evictor.coldest(count)
        for cold in self._colds:
            if cold.admission.keeps_leaving:
                self._write_down(cold, rows[~self._saved(rows)])
        self._ahead = count // 4

    def flush(self) -> None:
        """Write down what only DRAM has, hottest first, where the admission says that it should outlive DRAM."""
        with self._index.lock:
            for cold in self._colds:
                if cold.admission.keeps_leaving:
                    rows = self._evictor.coldest(self._dram.blocks)[::-1]
                    rows = rows[~self._saved(rows)]
                    while len(rows):
                        self._write_down(cold, rows)
                        left = rows[self._index.state[cold.number][rows] == ABSENT]
                        if len(left) == len(rows):
                            break
                        rows = left
                        self._index.lock.release()
                        try:
                            cold.lane.wait_idle()
                        finally:
                            self._index.lock.acquire()

    # -- out ----------------------------------------------------------------------------------------------

    def _make_room(self, size: int, events: list[Event], count: int = 1) -> bool:
        """Evict from DRAM so that up to ``count`` slots of ``size`` come free. Under the lock."""
        rows = self._evictor.victims(size, count)
        keys = [self._index.key(row) for row in rows]
        for row in rows:
            self._dram.release(self._index.remove(row, DRAM))
            self._forget(row)
            self._index.retire(row)
        if rows:
            events.append(BlockRemoved("dram", tuple(keys), "evicted"))
        self.counts["blocks evicted from dram"] += len(rows)
        if not rows and self._keep_leaving:
            self._ahead = 0
            self._save_ahead()
        return bool(rows)

    def make_room(self, number: int, size: int) -> bool:
        """Evict from a tier so that a slot of ``size`` comes free; False if nothing may leave."""
        if number == DRAM:
            events: list[Event] = []
            with self._index.lock:
                made = self._make_room(size, events)
            self._feed.publish(events)
            return made
        cold = next(c for c in self._colds if c.number == number)
        assert cold.evictor is not None
        with self._index.lock:
            rows = cold.evictor.victims(size)
            keys = []
            for row in rows:
                key = self._index.key(row)
                cold.tier.evict(key, self._index.remove(row, number))
                self._index.retire(row)
                keys.append(key)
            self.counts[f"blocks evicted from {cold.name}"] += len(rows)
        if keys:
            self._feed.publish([BlockRemoved(cold.name, tuple(keys), "evicted")])
        return bool(rows)

    def drop(self, keys: Sequence[BlockKey], done: Callable[[int], None]) -> int:
        """Remove blocks from every tier; answers how many there were. ``done`` gets the number not erased."""
        index = self._index
        events: list[Event] = []
        erase: list[tuple[Cold, list[tuple[BlockKey, int]]]] = []
        with index.lock:
            found = [row for key in keys if (row := index.row(key))]
            for cold in self._colds:
                # A tier may have traces of blocks that the index knows nothing of any more.
                places = [
                    (
                        key,
                        int(index.place[cold.number][row]) if (row := index.row(key)) else NOWHERE,
                    )
                    for key in keys
                ]
                erase.append((cold, places))
            for row in found:
                self._detach(row, "dropped", events)
            self.counts["blocks dropped"] += len(found)
        self._feed.publish(events)
        self._erase(erase, done)
        return len(found)

    def _erase(self, erase: list[tuple[Cold, list[tuple[BlockKey, int]]]], done: Callable[[int], None]) -> None:
        left, failed = len(erase), 0
        if not erase:
            done(0)
        for cold, items in erase:

            def one(results: Sequence[bool]) -> None:
                nonlocal left, failed
                with self._index.lock:
                    left -= 1
                    failed += sum(not r for r in results)
                    last = left == 0
                if last:
                    done(failed)

            cold.tier.drop(items, one)

    def _detach(self, row: int, reason: str, events: list[Event]) -> None:
        """Take a row from the index, so that nobody finds it; its slots follow when nobody holds it."""
        index = self._index
        key = index.key(row)
        for cold in self._colds:
            if index.state[cold.number][row] == SEALED:
                index.remove(row, cold.number)
                events.append(BlockRemoved(cold.name, (key,), reason))
        if index.state[DRAM][row] != ABSENT:
            events.append(BlockRemoved("dram", (key,), reason))
        index.detach(row)
        if index.holds[row]:
            self._doomed.add(row)
        else:
            self._vacate(row)

    def expire(self, rows: Rows) -> None:
        """Remove blocks whose time is over."""
        events: list[Event] = []
        with self._index.lock:
            for row in rows.tolist():
                key = self._index.key(row)
                for cold in self._colds:
                    if self._index.state[cold.number][row] == SEALED:
                        cold.tier.evict(key, int(self._index.place[cold.number][row]))
                self._detach(row, "expired", events)
            self.counts["blocks expired"] += len(rows)
        self._feed.publish(events)

    @property
    def blocks_doomed(self) -> int:
        return len(self._doomed)

    @property
    def blocks_pending(self) -> int:
        """Rows that somebody waits for."""
        return len(self._flights)
