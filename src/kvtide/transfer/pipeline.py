"""Moves blocks between tiers and keeps the index true while they move.

Decide under the index's lock, act outside it: each verb first changes rows and collects what is to be done (reads,
writes, events), then does it. A row on the move is held, so it cannot be evicted or forgotten meanwhile.

Up: a row in a colder tier gets a slot in DRAM, PENDING there, and a read. Whoever asks for it meanwhile joins:
``_flights`` has, for each pending row, the transfers that wait for it. When the read is verified the row is SEALED in
DRAM; if it fails, the bad copy is dropped and the row is a miss.

Down: a sealed row is written to a colder tier while it stays readable in DRAM. If the lane has no room the write is not
made: stores are dropped, callers never wait.

Out: a drop is answered when no tier can bring the block back. A copy that is just being written cannot be erased yet;
it is as soon as it is written, and the drop waits for that too (``_dying``).
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtide.block import BlockKey
from kvtide.events import BlockRemoved, BlockStored, Event, Feed
from kvtide.index.index import ABSENT, DRAM, NOWHERE, PENDING, SEALED, Index, Mask, Rows, every
from kvtide.index.lease import Lease, Reservation
from kvtide.plan.admit import Admission
from kvtide.plan.evict import Evictor, Policy
from kvtide.tiers.base import Identity, Read, Tier, Write
from kvtide.tiers.dram import Dram
from kvtide.tiers.segments import ladder
from kvtide.transfer.lane import Lane
from kvtide.transfer.residents import Residents, rows_of
from kvtide.transfer.transfer import Transfer

__all__ = ["Cold", "Pipeline", "Pledge"]

_CHUNK = 64 << 20
"""A read is cut into jobs of this many bytes, so that deadlines and cancellation bite."""

_WRITES = 8
"""A write is cut into jobs of this many blocks, so that a read that comes meanwhile need not wait for all."""


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
    """Blocks of one group, in order, that somebody wants to store; in columns."""

    identity: Identity
    keys: Sequence[BlockKey]
    parents: Sequence[bytes]
    depths: Sequence[int]
    expiry: float = float("inf")
    priority: int = 0
    tokens: Sequence[bytes] = ()


@dataclass(slots=True)
class _Granted:
    """What a reservation has got so far."""

    keys: list[BlockKey]
    rows: list[int]
    places: list[int]
    depths: list[int]
    sizes: list[int]


class _Tally:
    """Counts the parts of a drop; the last to end calls ``done``, in no lock, with the number of failures."""

    __slots__ = ("_done", "_failed", "_left", "_lock")

    def __init__(self, parts: int, done: Callable[[int], None]) -> None:
        self._left = parts
        self._failed = 0
        self._done = done
        self._lock = threading.Lock()

    def more(self) -> None:
        """One part more. Some other has not ended yet."""
        with self._lock:
            self._left += 1

    def end(self, results: Sequence[bool]) -> None:
        with self._lock:
            self._left -= 1
            self._failed += len(results) - sum(results)
            if self._left:
                return
        self._done(self._failed)


@dataclass(slots=True)
class _Dying:
    """A key's copies in one tier that are to be erased without anybody having asked for it now."""

    copies: int = 0
    erased: bool = True
    waiting: list[_Tally] = field(default_factory=list)


def _part(rows: Rows, mask: Mask) -> tuple[Rows, Rows]:
    """Rows that the mask has, and those that it has not."""
    return (rows, rows[:0]) if every(mask) else (rows[mask], rows[~mask])


class Pipeline:
    """The only place that changes where rows are. Safe from any thread."""

    def __init__(
        self, index: Index, dram: Dram, colds: Sequence[Cold], policy: Policy, feed: Feed, checksum: bool = False
    ) -> None:
        self._index = index
        self._dram = dram
        self._colds = colds
        self._policy = policy
        self._feed = feed
        self._residents = Residents(index, dram, checksum)
        self._keep_leaving = any(c.admission.keeps_leaving for c in colds)
        self._evictor = Evictor(index, DRAM, dram, policy, self._may_leave if self._keep_leaving else None)
        self._flights: dict[int, tuple[Transfer, ...]] = {}
        self._dying: dict[tuple[int, BlockKey], _Dying] = {}
        self._ahead = 0
        self.counts: Counter[str] = Counter()
        """What happened, by name; see ``docs/glossary.md``."""

    @property
    def blocks_doomed(self) -> int:
        """Dropped blocks that somebody still holds."""
        return len(self._residents.doomed)

    @property
    def blocks_pending(self) -> int:
        """Rows that somebody waits for."""
        return len(self._flights)

    def lease(self, rows: Rows) -> Lease:
        """Hold distinct rows. Under the index's lock."""
        return self._residents.lease(rows)

    def intact(self, row: int) -> bool:
        """Whether a row in DRAM still has the bytes that were sealed (see ``dram.checksum``). Under the lock."""
        if self._residents.intact(row):
            return True
        self.counts["blocks changed in DRAM after they were sealed"] += 1
        return False

    def used(self, rows: Rows) -> None:
        """Blocks of one chain, head first, are being stored. Under the index's lock."""
        self._policy.touch(rows)

    def keep(self, rows: Rows) -> Lease:
        """Blocks of one chain, head first, are about to get children: hold those that only DRAM has. Under the lock."""
        self._policy.touch(rows)
        return self.lease(rows[~self._saved(rows)])

    def touch(self, rows: Rows) -> None:
        """Blocks of one chain, head first, were asked for. Under the index's lock."""
        self._policy.touch(rows)
        for cold in self._colds:
            wanted = rows[cold.admission.on_touch(rows)]
            if len(wanted):
                self._write_down(cold, wanted)

    # -- in from callers ----------------------------------------------------------------------------------

    def reserve(self, pledges: Sequence[Pledge]) -> Reservation:
        """Slots in DRAM for blocks that are not here. What is here, or finds no room, is not in the answer."""
        granted = _Granted([], [], [], [], [])
        for pledge in pledges:
            self._reserve(pledge, granted)
        return Reservation(
            granted.keys,
            rows_of(granted.rows),
            [self._dram.span(place, size) for place, size in zip(granted.places, granted.sizes, strict=True)],
            granted.depths,
            [self._dram.generation(place) for place in granted.places],
            self._finish,
        )

    def _reserve(self, pledge: Pledge, granted: _Granted) -> None:
        size = pledge.identity.geometry.footprint
        done = 0
        while done < len(pledge.keys):
            events: list[Event] = []
            with self._index.lock:
                done = self._grant(pledge, done, granted, events)
            self._feed.publish(events)
            if done < len(pledge.keys) and not self._dram.grow(size):
                self.counts["stores dropped: no room in DRAM"] += len(pledge.keys) - done
                return

    def _grant(self, pledge: Pledge, start: int, granted: _Granted, events: list[Event]) -> int:
        """Give slots to blocks from ``start`` on; answers where it ended, for want of a slot that growing may give."""
        index, size = self._index, pledge.identity.geometry.footprint
        known = index.rows(pledge.keys[start:])
        absent = index.state[DRAM][known] == ABSENT
        for cold in self._colds:
            absent &= index.state[cold.number][known] == ABSENT
        wanted = (np.flatnonzero(absent) + start).tolist()
        places = self._take(size, len(wanted), events)
        rows = []
        for i in wanted[: len(places)]:
            # A key may be known and yet nowhere: somebody holds it.
            row = index.row(pledge.keys[i]) or index.add(pledge.keys[i], pledge.parents[i], pledge.depths[i])
            rows.append(row)
            if pledge.tokens:
                self._residents.tokens[row] = pledge.tokens[i]
        if rows:
            self._dram.own(rows_of(places), rows_of(rows))
            self._residents.enter(rows_of(rows), places, pledge.identity)
            index.expiry[rows] = pledge.expiry
            index.priority[rows] = pledge.priority
        granted.keys += [pledge.keys[i] for i in wanted[: len(places)]]
        granted.rows += rows
        granted.places += places
        granted.depths += [pledge.depths[i] for i in wanted[: len(places)]]
        granted.sizes += [size] * len(places)
        return wanted[len(places)] if len(places) < len(wanted) else len(pledge.keys)

    def _take(self, size: int, count: int, events: list[Event], owners: Rows | None = None) -> list[int]:
        """Slots in DRAM for as many as can be had, by evicting too, but not by growing. Under the lock."""
        places = self._dram.take_many(size, count, owners)
        while (left := count - len(places)) and not self._dram.growable(size):
            if not self._make_room(ladder(size), left, events):
                break
            places += self._dram.take_many(size, left, None if owners is None else owners[-left:])
        return places

    def _finish(self, reservation: Reservation, sealed: bool) -> None:
        """The end of a reservation."""
        index, rows = self._index, reservation.rows
        events: list[Event] = []
        with index.lock:
            generations = [self._dram.generation(p) for p in index.place[DRAM][rows].tolist()]
            assert generations == reservation.generations, "a slot changed hands under a writer"
            good = np.full(len(rows), sealed)
            if self._residents.doomed:
                good &= ~self._residents.are_doomed(rows)
            kept = rows[good]
            self._residents.clear_padding(kept)
            self._residents.seal(kept)
            for row in rows[~good].tolist():
                self._residents.leave(row)
            ready = self._landed(rows, good)
            for cold in self._colds:
                wanted = kept[cold.admission.on_store(kept)]
                if len(wanted):
                    self._write_down(cold, wanted)
            self.counts["blocks stored"] += len(kept)
            if self._feed.followed and len(kept):
                events.append(BlockStored("dram", index.keys(kept)))
            self._residents.unhold(rows)
            if self._keep_leaving:
                self._save_ahead()
        self._feed.publish(events)
        ready()

    # -- up -----------------------------------------------------------------------------------------------

    def load(self, wanted: Sequence[tuple[Rows, Identity]], transfer: Transfer) -> None:
        """Bring rows to DRAM for ``transfer``. They are distinct, and the caller holds them."""
        for rows, _ in wanted:
            transfer.expect(rows.tolist())
        for rows, identity in wanted:
            left = rows
            while len(left):
                left = self._start(left, identity, transfer)
                if len(left) and not self._dram.grow(identity.geometry.footprint):
                    self.counts["loads dropped: no room in DRAM"] += len(left)
                    transfer.finish(left.tolist(), [False] * len(left))
                    break
        transfer.started()

    def _start(self, rows: Rows, identity: Identity, transfer: Transfer) -> Rows:
        """Start or join a read for each row. Answers those for which DRAM must grow first."""
        index = self._index
        events: list[Event] = []
        jobs: list[tuple[Cold, Rows, list[Read]]] = []
        with index.lock:
            here, away, left = rows[:0], rows, rows[:0]
            state = index.state[DRAM][rows]
            if not every(state == ABSENT):
                here, away = rows[state == SEALED], rows[state == ABSENT]
                for row in rows[state == PENDING].tolist():
                    self._flights[row] = (*self._flights.get(row, ()), transfer)
            for cold in self._colds:
                mine, away = _part(away, index.state[cold.number][away] == SEALED)
                places = self._take(identity.geometry.footprint, len(mine), events, mine)
                if len(places) < len(mine):
                    mine, rest = mine[: len(places)], mine[len(places) :]
                    if self._dram.growable(identity.geometry.footprint):
                        left = np.concatenate([left, rest])
                    else:
                        self.counts["loads dropped: no room in DRAM"] += len(rest)
                        away = np.concatenate([away, rest])
                if len(mine):
                    jobs += self._fly(cold, mine, places, identity, transfer)
        self._feed.publish(events)
        if len(here):
            transfer.finish(here.tolist(), [True] * len(here))
        if len(away):
            transfer.finish(away.tolist(), [False] * len(away))
        for cold, flying, reads in jobs:
            cold.lane.read(
                reads,
                functools.partial(self._read_done, cold, flying, reads),
                functools.partial(self._unwanted, cold, flying, reads),
            )
        return left

    def _fly(
        self, cold: Cold, rows: Rows, places: list[int], identity: Identity, transfer: Transfer
    ) -> list[tuple[Cold, Rows, list[Read]]]:
        """Give rows their slots and make the reads that fill them."""
        index, size = self._index, identity.geometry.footprint
        self._residents.enter(rows, places, identity)
        self._flights.update(dict.fromkeys(rows.tolist(), (transfer,)))
        reads = [
            Read(key, identity, source, span)
            for key, source, span in zip(
                index.keys(rows), index.place[cold.number][rows].tolist(), self._dram.spans(places, size), strict=True
            )
        ]
        step = max(1, _CHUNK // size)
        return [(cold, rows[i : i + step], reads[i : i + step]) for i in range(0, len(rows), step)]

    def _unwanted(self, cold: Cold, rows: Rows, reads: list[Read]) -> bool:
        """Whether a read that is about to start is wanted by nobody any more; then it has ended."""
        with self._index.lock:
            if any(t.wanted for row in rows.tolist() for t in self._flights.get(row, ())):
                return False
            # Under the same lock: nobody may join a read that will not be made.
            ready = self._land(cold, rows, reads, None)
        ready()
        return True

    def _read_done(self, cold: Cold, rows: Rows, reads: list[Read], results: Sequence[bool]) -> None:
        with self._index.lock:
            ready = self._land(cold, rows, reads, results)
        ready()

    def _land(self, cold: Cold, rows: Rows, reads: list[Read], results: Sequence[bool] | None) -> Callable[[], None]:
        """Reads ended: well, badly, or (``results`` None) before they began. Call the answer outside the lock."""
        index = self._index
        bad: list[tuple[BlockKey, int]] = []
        good = np.array(results, np.bool_) if results is not None else np.zeros(len(rows), np.bool_)
        if self._residents.doomed:
            good &= ~self._residents.are_doomed(rows)
        arrived, lost = _part(rows, good)
        self._residents.seal(arrived)
        if len(lost):
            for i in np.flatnonzero(~good).tolist():
                row = int(rows[i])
                self._residents.leave(row)
                same = index.place[cold.number][row] == reads[i].place
                if results is not None and not results[i] and same and row not in self._residents.doomed:
                    bad.append((reads[i].key, index.remove(row, cold.number)))
        tell = self._landed(rows, good)
        events: list[Event] = []
        if self._feed.followed and len(arrived):
            events.append(BlockStored("dram", index.keys(arrived)))
        self.counts[f"blocks read from {cold.name}"] += len(arrived)
        self._residents.unhold(rows)
        if bad:
            self.counts[f"blocks unreadable in {cold.name}"] += len(bad)
            events.append(BlockRemoved(cold.name, tuple(k for k, _ in bad), "unreadable"))
            for key, _ in bad:
                self._dies(cold, key)

        def ready() -> None:
            if bad:
                self._erase(cold, bad)
            self._feed.publish(events)
            tell()

        return ready

    def _landed(self, rows: Rows, good: Mask) -> Callable[[], None]:
        """What to call, outside the lock, for those who wait for rows."""
        numbers, arrived = rows.tolist(), good.tolist()
        pop = self._flights.pop
        # Each transfer is told of all the rows; it knows which of them it waits for.
        waiting = {t for transfers in {pop(row, ()) for row in numbers} for t in transfers}

        def tell() -> None:
            for transfer in waiting:
                transfer.finish(numbers, arrived)

        return tell

    # -- down ---------------------------------------------------------------------------------------------

    def _write_down(self, cold: Cold, rows: Rows) -> None:
        """Start writing rows of DRAM to ``cold``, as far as its lane has room; the rest is dropped. Under the lock."""
        if refused := len(self._submit(cold, rows)):
            self.counts[f"stores dropped: the queue of {cold.name} is full"] += refused

    def _submit(self, cold: Cold, rows: Rows) -> Rows:
        """Start writing rows of DRAM to ``cold``; answers those for which its lane has no room. Under the lock."""
        index = self._index
        rows = rows[(index.state[cold.number][rows] == ABSENT) & (index.state[DRAM][rows] == SEALED)]
        if self._residents.doomed:  # dropped, and held by somebody: not to be written any more
            rows = rows[[row not in self._residents.doomed for row in rows.tolist()]]
        items: list[Write] = []
        for row in rows.tolist():
            span = self._residents.span(row)
            if not cold.lane.room(len(span)):
                break
            write = Write(
                index.key(row),
                self._residents.identity(row),
                span,
                index.parent[row].tobytes(),
                int(index.depth[row]),
                row,
                float(index.expiry[row]),
                int(index.priority[row]),
                self._residents.tokens.get(row, b"") if cold.keep_tokens else b"",
            )
            items.append(write)
        rows, refused = rows[: len(items)], rows[len(items) :]
        index.state[cold.number][rows] = PENDING
        index.hold(rows)
        for i in range(0, len(items), _WRITES):
            part = items[i : i + _WRITES]
            # Submitting takes no I/O; a tier that answers at once takes the index's lock again, which is reentrant.
            cold.lane.write(part, functools.partial(self._written, cold, part))
        return refused

    def _written(self, cold: Cold, items: Sequence[Write], places: Sequence[int]) -> None:
        index = self._index
        kept: list[BlockKey] = []
        dropped: list[tuple[BlockKey, int]] = []
        with index.lock:
            for item, place in zip(items, places, strict=True):
                index.remove(item.owner, cold.number)
                if item.owner in self._residents.doomed:
                    # A failed write too may have left its name.
                    dropped.append((item.key, place))
                elif place == NOWHERE:
                    self._residents.refused.add(item.owner)
                else:
                    index.put(item.owner, cold.number, SEALED, place)
                    self._residents.refused.discard(item.owner)
                    kept.append(item.key)
            self.counts[f"blocks written to {cold.name}"] += len(kept)
            self._residents.unhold(rows_of([item.owner for item in items]))
        if dropped:
            self._erase(cold, dropped)
        if kept:
            self._feed.publish([BlockStored(cold.name, tuple(kept))])

    def _saved(self, rows: Rows) -> Mask:
        """Which rows are whole in a colder tier too."""
        saved = np.zeros(len(rows), np.bool_)
        for cold in self._colds:
            saved |= self._index.state[cold.number][rows] == SEALED
        return saved

    def _may_leave(self, rows: Rows) -> Mask:
        """Which rows need not wait in DRAM for a colder tier: it has them, or would not take them."""
        free = self._saved(rows)
        if self._residents.refused:
            free |= np.array([row in self._residents.refused for row in rows.tolist()], np.bool_)
        return free

    def _save_ahead(self) -> None:
        """Write the coldest blocks down before they must leave, so that room can be made at once."""
        segments = self._dram.segments
        if self._ahead > 0 or segments.used * 2 < segments.budget:
            self._ahead -= 1
            return
        with self._dram.book_lock:
            count = max(8, self._dram.blocks // 8)
        rows = self._evictor.coldest(count)
        for cold in self._colds:
            if cold.admission.keeps_leaving:
                self._write_down(cold, rows[~self._saved(rows)])
        self._ahead = count // 4

    def flush(self) -> None:
        """Write down what only DRAM has, hottest first, where the admission says that it should outlive DRAM."""
        for cold in self._colds:
            if not cold.admission.keeps_leaving:
                continue
            with self._index.lock:
                # Pinned ones too: what must not leave DRAM must not be lost with it either.
                rows = np.flatnonzero(self._index.state[DRAM][: self._index.size] == SEALED)
                rows = rows[~self._saved(rows)]
                rows = self._submit(cold, rows[np.argsort(self._policy.score(rows))[::-1]])
            while len(rows):
                cold.lane.wait_idle()
                with self._index.lock:
                    rows = self._submit(cold, rows)

    # -- out ----------------------------------------------------------------------------------------------

    def _make_room(self, size: int, count: int, events: list[Event]) -> bool:
        """Evict from DRAM so that up to ``count`` slots of ``size`` come free. Under the lock."""
        rows = self._evictor.victims(size, count)
        if not rows:
            if self._keep_leaving:
                self._ahead = 0
                self._save_ahead()
            return False
        if self._feed.followed:
            events.append(BlockRemoved("dram", self._index.keys(rows_of(rows)), "evicted"))
        for row in rows:
            self._residents.leave(row)
            self._index.retire(row)
        self.counts["blocks evicted from dram"] += len(rows)
        return True

    def make_room(self, number: int, size: int) -> bool:
        """Evict from a tier so that a slot of ``size`` comes free; False if nothing may leave."""
        events: list[Event] = []
        with self._index.lock:
            made = self._make_room(size, 1, events) if number == DRAM else self._make_cold_room(number, size, events)
        self._feed.publish(events)
        return made

    def _make_cold_room(self, number: int, size: int, events: list[Event]) -> bool:
        cold = next(c for c in self._colds if c.number == number)
        assert cold.evictor is not None
        rows = cold.evictor.victims(size)
        keys = self._index.keys(rows_of(rows))
        for row, key in zip(rows, keys, strict=True):
            cold.tier.evict(key, self._index.remove(row, number))
            self._index.retire(row)
        if rows:
            events.append(BlockRemoved(cold.name, keys, "evicted"))
            self.counts[f"blocks evicted from {cold.name}"] += len(rows)
        return bool(rows)

    def drop(self, keys: Sequence[BlockKey], done: Callable[[int], None]) -> int:
        """Remove blocks from every tier; answers how many there were. ``done`` gets the number not erased."""
        index = self._index
        events: list[Event] = []
        erase: list[tuple[Cold, list[tuple[BlockKey, int]]]] = []
        tally = _Tally(1 + len(self._colds), done)
        with index.lock:
            rows = index.rows(keys)
            for cold in self._colds:
                # Row 0 is nowhere; but a tier may have traces of blocks that the index knows nothing of any more.
                erase.append((cold, list(zip(keys, index.place[cold.number][rows].tolist(), strict=True))))
            found = rows[rows > 0].tolist()
            for row in found:
                self._detach(row, "dropped", events)
            self.counts["blocks dropped"] += len(found)
            for dying in self._dying_among(keys):
                tally.more()
                dying.waiting.append(tally)
        self._feed.publish(events)
        for cold, items in erase:
            cold.tier.drop(items, tally.end)
        tally.end(())
        return len(found)

    def _dying_among(self, keys: Sequence[BlockKey]) -> list[_Dying]:
        if not self._dying:
            return []
        return [self._dying[c.number, k] for c in self._colds for k in keys if (c.number, k) in self._dying]

    def _dies(self, cold: Cold, key: BlockKey) -> None:
        """A copy of ``key`` will be erased from ``cold`` by ``_erase``. Under the lock."""
        self._dying.setdefault((cold.number, key), _Dying()).copies += 1

    def _erase(self, cold: Cold, items: list[tuple[BlockKey, int]]) -> None:
        """Erase copies that were said to die."""
        cold.tier.drop(items, functools.partial(self._erased, cold, items))

    def _erased(self, cold: Cold, items: list[tuple[BlockKey, int]], results: Sequence[bool]) -> None:
        ended: list[_Dying] = []
        with self._index.lock:
            for (key, _), erased in zip(items, results, strict=True):
                dying = self._dying[cold.number, key]
                dying.copies -= 1
                dying.erased &= erased
                if not dying.copies:
                    ended.append(self._dying.pop((cold.number, key)))
        for dying in ended:
            for tally in dying.waiting:
                tally.end((dying.erased,))

    def _detach(self, row: int, reason: str, events: list[Event]) -> None:
        """Take a row from the index, so that nobody finds it; its slots follow when nobody holds it."""
        index = self._index
        key = index.key(row)
        for cold in self._colds:
            if index.state[cold.number][row] == SEALED:
                index.remove(row, cold.number)
                events.append(BlockRemoved(cold.name, (key,), reason))
            elif index.state[cold.number][row] == PENDING:
                self._dies(cold, key)
        if index.state[DRAM][row] == SEALED:
            events.append(BlockRemoved("dram", (key,), reason))
        index.detach(row)
        self._residents.doom(row)

    def expire(self, rows: Rows) -> list[Event]:
        """Remove blocks whose time is over. Under the lock; answers what is to be published."""
        events: list[Event] = []
        for row in rows.tolist():
            key = self._index.key(row)
            for cold in self._colds:
                if self._index.state[cold.number][row] == SEALED:
                    cold.tier.evict(key, int(self._index.place[cold.number][row]))
            self._detach(row, "expired", events)
        self.counts["blocks expired"] += len(rows)
        return events
