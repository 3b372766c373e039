"""What a session asks of a store, by the names of blocks: the line along which a store can be cut in two.

A ``Session`` knows tokens and its callers' buffers. A ``Desk`` knows blocks by name and answers with memory; nothing
that crosses it is larger than names, numbers and the right to look at slots. Here is the desk of a store in this
process; a node's client has another, with the store behind a socket.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvtide.block import BlockKey, Group, Layout, Span
from kvtide.errors import RightError
from kvtide.index.index import DRAM, SEALED, Rows, every
from kvtide.index.lease import Lease, Reservation
from kvtide.index.recent import Part, Recent, Resident
from kvtide.plan.planner import Plan
from kvtide.tiers.base import Identity
from kvtide.transfer.pipeline import Pledge
from kvtide.transfer.transfer import Transfer

if TYPE_CHECKING:
    from kvtide.store import Store

__all__ = ["Collected", "Desk", "Holding", "LocalDesk", "Names"]

_AFTER = 16
"""Beginnings that are remembered of a prompt."""
_FIRST_PART = 8 << 20


class Names(Protocol):
    """The blocks of a prompt; a ``Chain`` is one."""

    @property
    def blocks(self) -> int: ...

    @property
    def joined(self) -> bytes:
        """The digests, one after another: what tells one prompt from another."""

    def keys(self, suffix: bytes) -> list[BlockKey]: ...

    def parent(self, block: int) -> bytes: ...

    def tokens_of(self, block: int) -> bytes: ...


class Holding:
    """A prefix that the store has and holds, until it is released."""

    __slots__ = ("have", "pending", "plan", "ready")

    plan: Plan
    have: int
    """Blocks at the start that need not be loaded."""
    ready: bool
    pending: bool

    @property
    def counts(self) -> dict[str, int]:
        """How many blocks of each group a load brings."""
        raise NotImplementedError

    def release(self) -> None:
        """Let the blocks go."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Collected:
    """What is in memory of a holding: so many blocks of the prompt, and the slots of each group from ``first`` on."""

    blocks: int
    first: dict[str, int]
    spans: dict[str, list[Span]]


class Desk(Protocol):
    """For one model and tenant. Safe from any thread."""

    @property
    def largest(self) -> int:
        """Bytes that one reservation should have at most, so that there can be room for it."""

    @property
    def first_part(self) -> int:
        """Bytes that a store begins with: few where colder tiers wait for them, many where a part costs a message."""

    def match(self, names: Names, have: int, prefill: float | None) -> Holding:
        """The longest prefix that is here and worth loading, when ``have`` blocks are with the caller already."""

    def find(self, names: Names) -> list[bool]:
        """Which blocks are here now, with all groups that are required."""

    def load(self, holding: Any, deadline: float | None) -> Transfer:
        """Bring what is held to DRAM, within ``deadline`` seconds (None: the configuration's)."""

    def collect(self, holding: Any) -> Collected:
        """The longest part of what is held that is in DRAM now."""

    def reserve(
        self,
        groups: Sequence[Group],
        names: Names,
        start: int,
        stop: int,
        ttl: float | None,
        priority: int,
        after: Reservation | None = None,
    ) -> Reservation:
        """Slots for those blocks from ``start`` to ``stop`` that are not here.

        Until it ends, no block of the prompt before ``stop`` leaves: room for its next blocks must not be made by
        losing its first ones. ``after``, of the blocks before, is sealed in between, when its blocks are kept already.
        """

    def pin(self, names: Names, stop: int | None, step: int) -> int:
        """Pin (``step`` 1) or unpin (-1) blocks; answers how many. Pins end with the session at the latest."""

    def drop(self, names: Names, start: int, timeout: float | None) -> int:
        """Remove blocks for good; answers how many there were."""

    def close(self) -> None:
        """The session has ended, and has given back its rights."""


class LocalHolding(Holding):
    """A part of a prompt, under a lease."""

    __slots__ = ("lease", "part")

    def __init__(self, plan: Plan, have: int, part: Part, lease: Lease, ready: bool, pending: bool) -> None:
        self.plan = plan
        self.have = have
        self.part = part
        self.lease: Lease | None = lease
        self.ready = ready
        self.pending = pending

    @property
    def counts(self) -> dict[str, int]:
        return {name: len(rows) for name, rows in self.part.rows.items()}

    def release(self) -> None:
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()


class LocalDesk:
    """The desk of a store in this process."""

    def __init__(
        self, store: Store, layout: Layout, namespace: bytes, tenant: bytes, domain: int = 0, tag: bytes = b""
    ) -> None:
        """``domain`` is the trust domain whose memory the blocks lie in, and ``tag`` ends their names."""
        self.store = store
        self._index = store.index
        self._pipeline = store.pipeline
        self.layout = layout
        tokens, sizes = layout.block_tokens, layout.geometry
        self._identities = {
            g.name: Identity(
                namespace, tenant, layout.digest, g.suffix + tag, tokens, sizes[g.name], g.itemsize, domain
            )
            for g in layout.groups
        }
        self.numbers = {g.suffix + tag: i for i, g in enumerate(layout.groups)}
        """What ends the keys of each group: the group's number."""
        self._budget = store.room_of(tenant)
        self.largest = min(store.largest_part, self._budget)
        self.first_part = _FIRST_PART if store.has_colder else self.largest
        self._checked = store.config.dram.checksum
        self._prefill = store.config.plan.prefill_tokens_per_second
        self._footprint = sum(layout.geometry[g.name].footprint for g in layout.groups)
        self.pinned = 0  # bytes, each block once
        self._recent = Recent(self._index)
        self._more = partial(store.search.pending, layout, self._identities)

    # -- reading ------------------------------------------------------------------------------------------

    def match(self, names: Names, have: int, prefill: float | None, room: int | None = None) -> LocalHolding:
        """``room``: bytes that may be held at most, if that is less than all of DRAM."""
        layout, index = self.layout, self._index
        room = self._budget if room is None else max(0, min(room, self._budget))
        speed = self._prefill if prefill is None else prefill
        now = self.store.sweep()
        with index.lock:
            resident = self._recent.find(names.joined)
            if resident is None:
                rows = {g.name: index.rows(names.keys(g.suffix)) for g in layout.groups}
                resident = None if self._checked else self._recent.note(names.joined, rows)
            if resident is not None and (names.blocks - have) * self._footprint <= room:
                return self._all_here(names, resident, have, speed, now)
            rows = resident.rows if resident is not None else rows
            whole = {name: index.usable(r, now) for name, r in rows.items()}
            if have:
                for mask in whole.values():
                    mask[:have] = True
            usable = index.lengths(layout, rows, whole)
            plan = self.store.planner.plan(layout, rows, usable, have, speed, self.store.read_bytes_queued, room)
            wanted = {g.name: g.needs(plan.blocks, layout.block_tokens, have) for g in layout.groups}
            needed = {name: rows[name][need.start : need.stop].copy() for name, need in wanted.items()}
            for g in layout.groups:
                if not g.required:
                    needed[g.name] = needed[g.name][: _leading(whole[g.name][have : plan.blocks])]
            part = Part(needed, self._nbytes(needed))
            lease = self._pipeline.lease(part.all)
            if self._recent.is_new(names.parent(names.blocks), plan.blocks, now):
                for r in rows.values():
                    chain_rows = r[: plan.blocks]
                    self._pipeline.asked(chain_rows[chain_rows > 0], names.blocks)
            ready = every(index.state[DRAM][part.all] == SEALED)
            pending = names.blocks > plan.blocks and self._more(names.keys, rows, whole, usable, plan.blocks)
            colder = None if ready else [(wanted[name].start, r) for name, r in needed.items()]
            self.store.planner.count(plan, names.blocks, have, layout.block_tokens, colder)
        return LocalHolding(plan, have, part, lease, ready, pending)

    def _all_here(self, names: Names, resident: Resident, have: int, speed: float, now: float) -> LocalHolding:
        """The usual answer, at little cost: all is in DRAM (what has expired was swept). Under the lock."""
        blocks = names.blocks
        have = min(have, blocks)
        part = resident.after.get(have)
        if part is None:
            wanted = {g.name: g.needs(blocks, self.layout.block_tokens, have) for g in self.layout.groups}
            needed = {name: resident.rows[name][need.start : need.stop] for name, need in wanted.items()}
            if len(resident.after) >= _AFTER:
                resident.after.clear()
            part = resident.after[have] = Part(needed, self._nbytes(needed))
        lease = self._pipeline.lease(part.all)
        if self._recent.is_new(names.parent(blocks), blocks, now):
            for r in resident.rows.values():
                self._pipeline.asked(r, blocks)
        plan = Plan(blocks, 0.0, 0.0 if speed > 0 else None)
        self.store.planner.count(plan, blocks, have, self.layout.block_tokens, None)
        return LocalHolding(plan, have, part, lease, True, False)

    def find(self, names: Names) -> list[bool]:
        layout, index, now = self.layout, self._index, self.store.sweep()
        with index.lock:
            rows = {g.name: index.rows(names.keys(g.suffix)) for g in layout.groups}
            whole = {name: index.usable(r, now) for name, r in rows.items()}
            here = np.logical_and.reduce([whole[g.name] for g in layout.groups if g.required])
            if not here.all():
                self._more(names.keys, rows, whole, here[:0], int(np.argmin(here)))
        return list(map(bool, here))

    def load(self, holding: LocalHolding, deadline: float | None) -> Transfer:
        transfer = Transfer.within(self.store.clock, deadline, self.store.config.plan.deadline_seconds)
        if holding.ready:
            transfer.started()
        else:
            wanted = [(rows, self._identities[name]) for name, rows in holding.part.rows.items()]
            self._pipeline.load(wanted, transfer)
        return transfer

    def collect(self, holding: LocalHolding) -> Collected:
        blocks, first, places = self.places(holding)
        dram, geometry = self.store.dram, self.layout.geometry
        return Collected(blocks, first, {n: dram.spans(p.tolist(), geometry[n].footprint) for n, p in places.items()})

    def places(self, holding: LocalHolding) -> tuple[int, dict[str, int], dict[str, Rows]]:
        """As ``collect``, with places in the arena instead of memory."""
        index, layout, blocks = self._index, self.layout, holding.plan.blocks
        with index.lock:
            if holding.lease is None:
                raise RightError("this match was released while its load was under way")
            place = index.place[DRAM]
            if holding.ready and not self._checked:
                first = {g.name: g.needs(blocks, layout.block_tokens, holding.have).start for g in layout.groups}
                places = {name: place[rows] for name, rows in holding.part.rows.items()}
                self.store.dram.moved(read=self._nbytes(places))
                return blocks, first, places
            whole, first = {}, {}
            for g in layout.groups:
                mask = np.zeros(blocks, np.bool_)
                mask[: holding.have] = True
                start = g.needs(blocks, layout.block_tokens, holding.have).start
                rows = holding.part.rows[g.name]
                mask[start : start + len(rows)] = index.state[DRAM][rows] == SEALED
                whole[g.name], first[g.name] = mask, start
            spaced = {name: np.zeros(blocks, np.int64) for name in whole}
            come = int(np.flatnonzero(index.lengths(layout, spaced, whole))[-1])
            places = {}
            for g in layout.groups:
                mine = holding.part.rows[g.name][: max(0, come - first[g.name])]
                if not g.required:
                    mine = mine[: _leading(index.state[DRAM][mine] == SEALED)]
                for row in mine.tolist():
                    if not self._pipeline.intact(row):
                        raise AssertionError(f"a block in DRAM changed after it was sealed: {index.key(row).hex()}")
                places[g.name] = place[mine]
        self.store.dram.moved(read=self._nbytes(places))
        return come, first, places

    def _nbytes(self, blocks: dict[str, Rows]) -> int:
        """Bytes of so many blocks of each group."""
        return sum(len(found) * self.layout.geometry[name].footprint for name, found in blocks.items())

    # -- writing ------------------------------------------------------------------------------------------

    def reserve(
        self,
        groups: Sequence[Group],
        names: Names,
        start: int,
        stop: int,
        ttl: float | None,
        priority: int,
        after: Reservation | None = None,
        keep: int = sys.maxsize,
    ) -> Reservation:
        """``keep``: bytes of blocks before ``stop`` that may stay for it, at most."""
        expiry = self.store.sweep() + (float("inf") if ttl is None else ttl)
        with contextlib.ExitStack() as stack:
            kept: list[tuple[Rows, int]] = []
            for group in groups:
                size = self.layout.geometry[group.name].footprint
                with self._index.lock:
                    rows = self._raised(names, group, stop, priority)
                    rows = stack.enter_context(self._pipeline.keep(rows, keep // size)).rows
                    kept.append((rows[self._index.state[DRAM][rows] == SEALED], size))
                keep -= len(kept[-1][0]) * size
            if after is not None:
                after.followed = True
                after.seal()
            numbers = range(start, stop)
            reservation = self._pipeline.reserve(
                [
                    Pledge(
                        self._identities[group.name],
                        names.keys(group.suffix)[start:stop],
                        [names.parent(i) for i in numbers],
                        numbers,
                        expiry,
                        priority,
                        [names.tokens_of(i) for i in numbers] if self.store.config.nvme.token_ids else (),
                    )
                    for group in groups
                ]
            )
            if ttl is not None:
                self.store.expect_expiry(expiry)
            leases = stack.pop_all()
        reservation.kept = kept

        def ended(reservation: Reservation) -> None:
            if reservation.sealed and not reservation.followed:
                with self._index.lock:
                    for group in groups:
                        self._pipeline.stored(self._raised(names, group, stop, priority))
            leases.close()

        reservation.on_end.append(ended)
        return reservation

    def _rows(self, names: Names, group: Group, stop: int | None) -> Rows:
        """The rows of a prompt's blocks up to ``stop``, those that there are. Under the index's lock."""
        rows = self._index.rows(names.keys(group.suffix)[:stop])
        return rows[rows > 0]

    def _raised(self, names: Names, group: Group, stop: int, priority: int) -> Rows:
        """The same, of at least that priority from now on: a parent outlasts its children."""
        rows = self._rows(names, group, stop)
        self._index.priority[rows] = np.maximum(self._index.priority[rows], priority)
        return rows

    # -- keeping and removing -----------------------------------------------------------------------------

    def pin(self, names: Names, stop: int | None, step: int) -> int:
        index, count = self._index, 0
        with index.lock:
            for group in self.layout.groups:
                rows, size = self._rows(names, group, stop), self.layout.geometry[group.name].footprint
                if step < 0:
                    ended, last = index.unpin(rows, self)
                    count, self.pinned = count + ended, self.pinned - last * size
                else:
                    count, self.pinned = count + len(rows), self.pinned + index.pin(rows, self) * size
        return count

    def drop(self, names: Names, start: int, timeout: float | None) -> int:
        return self.store.drop([k for g in self.layout.groups for k in names.keys(g.suffix)[start:]], timeout)

    def close(self) -> None:
        with self._index.lock:
            self._index.unpin_all(self)


def _leading(mask: np.ndarray[Any, np.dtype[np.bool_]]) -> int:
    """How many True come first."""
    return len(mask) if mask.all() else int(np.argmin(mask))
