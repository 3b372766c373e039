"""The interface between a session and a store, in terms of block names.

A ``Session`` handles tokens and its callers' buffers. A ``Backend`` knows blocks by name and returns memory. Only
names, numbers and rights to read or write slots cross this interface, never the bytes of blocks, so that a store can
run in another process.
``LocalBackend`` is for a store in this process; a node's client has another, which reaches the store through a socket.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from kvtide.block import BlockKey, Group, Layout, Span
from kvtide.errors import RightError
from kvtide.index import work_slices
from kvtide.index.absence_log import AbsenceCause
from kvtide.index.index import DRAM, SEALED, Mask, Rows, every
from kvtide.index.keys import ROOT
from kvtide.index.lease import Lease, Reservation
from kvtide.index.pins import PinCharge, Pins
from kvtide.index.prompt_cache import CachedPrompt, PromptCache, PromptRows
from kvtide.interrupts import again_if_interrupted
from kvtide.plan.planner import Plan
from kvtide.plan.prefill import Prefill, PrefillCost, cost_of
from kvtide.plan.usage_tracker import Turn
from kvtide.store.explain import Explainer, explained
from kvtide.store.explanation import Explanation
from kvtide.store.partition import Partition
from kvtide.store.recorder import RecordedShape
from kvtide.tiers.base import Identity
from kvtide.transfer.pipeline import WriteRequest
from kvtide.transfer.transfer import Transfer
from kvtide.transfer.write_results import Persisted, Unwritten

__all__ = ["Backend", "BlockNames", "CollectedBlocks", "LocalBackend", "PersistRequest", "PrefixLease", "persisted"]

_AFTER = 16
"""Number of distinct ``have`` values for which a cached prompt remembers its rows."""
_FIRST_PART = 8 << 20
_BROUGHT = 8
"""At most 1/``_BROUGHT`` of DRAM may be loaded at a time for one prompt that is expected back."""


class BlockNames(Protocol):
    """The blocks of a prompt; ``Chain`` implements it."""

    @property
    def blocks(self) -> int: ...

    @property
    def tokens(self) -> int:
        """Number of tokens in the prompt, including those after its last full block; fewer if the caller did not
        say."""

    @property
    def joined(self) -> bytes:
        """The concatenated digests, which identify the prompt."""

    def keys(self, suffix: bytes) -> list[BlockKey]: ...

    def parent(self, block: int) -> bytes: ...

    def tokens_of(self, block: int, blocks: int = 1) -> bytes: ...


class PrefixLease:
    """A prefix that the store has, and holds until it is released."""

    __slots__ = ("have", "pending", "plan", "ready")

    plan: Plan
    have: int
    """Number of blocks at the start that need not be loaded."""
    ready: bool
    """Whether a load has nothing to do, because all blocks of all groups are in DRAM."""
    pending: bool

    @property
    def held(self) -> int:
        """Number of blocks at the start of the prompt available now: from DRAM, or because the caller has them."""
        raise NotImplementedError

    @property
    def counts(self) -> dict[str, int]:
        """Number of blocks of each group that a load returns."""
        raise NotImplementedError

    def release(self) -> None:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class CollectedBlocks:
    """The blocks of a prefix lease that are in memory: ``blocks`` of the prompt, and each group's slots from block
    ``first`` on."""

    blocks: int
    first: dict[str, int]
    spans: dict[str, list[Span]]


@dataclass(frozen=True, slots=True)
class PersistRequest:
    """A request to make blocks durable: a transfer that ends when they are, and a function that returns the current
    result."""

    transfer: Transfer
    result: Callable[[], Persisted]


class Backend(Protocol):
    """The interface to a store for one model and tenant. Thread-safe."""

    @property
    def largest(self) -> int:
        """The most bytes that one reservation should take, so that eviction can make space for it."""

    @property
    def first_part(self) -> int:
        """Bytes in the first part of a store: few where colder tiers wait for them, many where each part costs a
        message."""

    def match(
        self,
        names: BlockNames,
        have: int,
        prefill: Prefill | None,
        again: bool = False,
        record: bool = True,
        request: str = "",
    ) -> PrefixLease:
        """Lease the longest prefix that is present and worth loading, when the caller already has ``have`` blocks.

        ``again``: this match belongs to a use of these blocks that was counted before. ``record`` and ``request``: see
        ``Session.match``.
        """

    def find(self, names: BlockNames) -> list[bool]:
        """Which blocks are present now, with all required groups."""

    def explain(self, names: BlockNames, prefill: Prefill | None) -> Explanation:
        """Why each block is a hit or a miss. Changes nothing."""

    def explain_request(self, request: str) -> Explanation | None:
        """Why each block of a past request was a hit or a miss; None if it is not remembered."""

    def models(self) -> list[bytes]:
        """Descriptions of the models that sessions of this tenant were opened for."""

    def load(self, holding: Any, deadline: float | None) -> Transfer:
        """Load the leased prefix into DRAM within ``deadline`` seconds (None: the configured deadline)."""

    def collect(self, holding: Any) -> CollectedBlocks:
        """The longest part of the leased prefix that is in DRAM now."""

    def reserve(
        self,
        groups: Sequence[Group],
        names: BlockNames,
        start: int,
        stop: int,
        ttl: float | None,
        priority: int,
        after: Reservation | None = None,
    ) -> Reservation:
        """Reserve slots for those blocks from ``start`` to ``stop`` that the store lacks.

        Until the reservation ends, no block of the prompt before ``stop`` is evicted: space for the next blocks must
        not be made by evicting the first ones. ``after``, a reservation of the preceding blocks, is sealed once those
        are held.
        """

    def persist(self, names: BlockNames, wanted: Mapping[str, range]) -> PersistRequest:
        """Begin to make blocks durable, by group and number. Blocks still being written are waited for."""

    def pin(self, names: BlockNames, stop: int | None, step: int) -> int:
        """Pin (``step`` 1) or unpin (-1) blocks; returns how many. Pins end with the session at the latest."""

    def drop(self, names: BlockNames, start: int, timeout: float | None) -> int:
        """Remove blocks permanently; returns how many were found."""

    def expire(self, names: BlockNames, start: int, ttl: float | None, timeout: float | None) -> int:
        """Let blocks expire exactly ``ttl`` seconds from now; returns how many were found."""

    def expect(self, names: BlockNames, turn: Turn | None, returns_in: float | None) -> None:
        """Record that blocks were used, with a hint about their next use; see ``Session.expect``. Does not block."""

    def close(self) -> None:
        """Called when the session has ended and released its leases and reservations."""


class LocalPrefixLease(PrefixLease):
    """A leased part of a prompt in a store of this process."""

    __slots__ = ("_backend", "lease", "part")

    def __init__(
        self, backend: LocalBackend, plan: Plan, have: int, part: PromptRows, lease: Lease, ready: bool, pending: bool
    ) -> None:
        self._backend = backend
        self.plan = plan
        self.have = have
        self.part = part
        self.lease: Lease | None = lease
        self.ready = ready
        self.pending = pending

    @property
    def held(self) -> int:
        return self.plan.blocks if self.ready else self._backend.held(self)

    @property
    def counts(self) -> dict[str, int]:
        return {name: len(rows) for name, rows in self.part.rows.items()}

    def release(self) -> None:
        lease, self.lease = self.lease, None
        if lease is not None:
            again_if_interrupted(lease.release)  # a repeated call would find nothing to release


class _Digests:
    """A prompt known only by the digests of its blocks. ``tag`` is the suffix of their keys."""

    def __init__(self, joined: bytes, tag: bytes) -> None:
        self.joined = joined
        self.blocks = len(joined) // 32
        self.tokens = 0
        self._tag = tag

    def keys(self, suffix: bytes) -> list[BlockKey]:
        return [BlockKey(self.parent(i + 1) + suffix + self._tag) for i in range(self.blocks)]

    def parent(self, block: int) -> bytes:
        return self.joined[32 * block - 32 : 32 * block] if block else ROOT

    def tokens_of(self, block: int, blocks: int = 1) -> bytes:
        return b""


class LocalBackend:
    """The interface to a store in this process."""

    def __init__(
        self,
        partition: Partition,
        layout: Layout,
        namespace: bytes,
        tenant: bytes,
        domain: int = 0,
        tag: bytes = b"",
        charge: PinCharge | None = None,
        proof: bytes = b"",
    ) -> None:
        """``domain``: the trust domain whose memory has the blocks; ``tag``: the suffix of their keys.

        ``charge`` is called with the number of bytes pinned. ``proof``: see ``Tenant.proof``.
        """
        self.partition = partition
        self._index = partition.index
        self._pipeline = partition.pipeline
        self._ready = partition.pipeline.ready
        self.layout = layout
        tokens, sizes = layout.block_tokens, layout.geometry
        self.identities = {
            g.name: Identity(
                namespace, tenant, layout.digest, g.suffix + tag, tokens, sizes[g.name], g.itemsize, domain
            )
            for g in layout.groups
        }
        self.asker = {who.group: who.fingerprint for who in self.identities.values()}
        """The fingerprint of each group's blocks, by the suffix of the group's keys."""
        self.numbers = {g.suffix + tag: i for i, g in enumerate(layout.groups)}
        """The number of each group, by the suffix of the group's keys."""
        self._budget = partition.room_of(tenant)
        self.largest = min(partition.largest_part, self._budget)
        self.first_part = _FIRST_PART if partition.has_colder else self.largest
        self._checked = partition.config.dram.checksum
        self._prefill = cost_of(partition.config.plan.prefill_tokens_per_second)
        self._footprint = sum(layout.geometry[g.name].footprint for g in layout.groups)
        self.pins = Pins(charge)
        self._prompt_cache = PromptCache(self._index)
        self._more = partial(partition.pending_blocks.pending, layout, self.identities)
        self._recorder = partition.recorder
        self._shape = RecordedShape(tokens, self._footprint)
        self._tenant, self._tag = tenant, tag
        self._explainer = Explainer(partition, layout, self.identities, tenant, proof)
        self.first_use: Callable[[], object] | None = None
        """Called at the first match or store; not when something is explained, which changes nothing."""

    def _used(self) -> None:
        if (call := self.first_use) is not None:
            self.first_use = None
            call()

    # -- reading ------------------------------------------------------------------------------------------

    def match(
        self,
        names: BlockNames,
        have: int,
        prefill: Prefill | None,
        again: bool = False,
        record: bool = True,
        request: str = "",
        room: int | None = None,
    ) -> LocalPrefixLease:
        """``room``: the most bytes that may be held, if less than all of DRAM."""
        if self.first_use is not None:
            self._used()
        room = self._budget if room is None else max(0, min(room, self._budget))
        if self.partition.prefetcher.wants_uses and not again:
            self.partition.prefetcher.used(self, names.blocks, names.parent)
        cost = self._prefill if prefill is None else cost_of(prefill)
        # A request that is matched again, because more was pending, is remembered as it was found last.
        asked = request if (record or request) and not again else None
        try:
            now = self.partition.sweep()
            with self._index.lock:
                try:
                    found = self._match(names, have, cost, room, now, again, asked, not record)
                except BaseException:
                    self._pipeline.repair()
                    raise
        finally:
            if self._ready:  # notify those who waited for loads that were abandoned or repaired here
                self._pipeline.call_ready()
        if record and not again:
            self._record(names, names.tokens, have, cost)
        return found

    def _record(self, names: BlockNames, tokens: int, have: int = 0, prefill: PrefillCost | None = None) -> None:
        if self._recorder is not None:
            # A client's claim about its prompt's length is trusted only as far as its blocks confirm it.
            full = names.blocks * self._shape.block_tokens
            known = tokens if 0 <= tokens - full < self._shape.block_tokens else full
            have = min(have, names.blocks)
            self._recorder.request(names.joined, known, self._shape, self._tenant, self._tag, have, prefill)

    def _match(
        self,
        names: BlockNames,
        have: int,
        prefill: PrefillCost | None,
        room: int,
        now: float,
        again: bool,
        asked: str | None,
        later: bool,
    ) -> LocalPrefixLease:
        """``asked``: the engine's name of the request, if it is to be remembered; ``later``: if it was matched
        before."""
        layout, index = self.layout, self._index
        if self._pipeline.abandoned:
            self._pipeline.reclaim()
        resident = self._prompt_cache.find(names.joined, now)
        if resident is None:
            rows = self._all_rows(names)
            resident = None if self._checked else self._prompt_cache.note(names.joined, rows, now)
        if resident is not None and (names.blocks - have) * self._footprint <= room:
            if asked:
                self._explainer.remember_hits(asked, names.blocks, names.tokens, now, have, later)
            return self._all_here(names, resident, have, prefill, now, again)
        rows = resident.rows if resident is not None else rows
        whole = {name: index.usable(r, now) for name, r in rows.items()}
        if have:
            for mask in whole.values():
                mask[:have] = True
        usable = index.lengths(layout, rows, whole)
        plan = self.partition.planner.plan(layout, rows, usable, have, prefill, self.partition.read_bytes_queued, room)
        wanted = {g.name: g.needs(plan.blocks, layout.block_tokens, have) for g in layout.groups}
        needed = {name: rows[name][need.start : need.stop].copy() for name, need in wanted.items()}
        for g in layout.groups:
            if not g.required:
                needed[g.name] = needed[g.name][: _leading(whole[g.name][have : plan.blocks])]
        part = PromptRows(needed, self._nbytes(needed))
        lease = self._pipeline.lease(part.all)
        if not again and self._prompt_cache.is_new(names.parent(names.blocks), plan.blocks, now):
            for r in rows.values():
                chain_rows = r[: plan.blocks]
                self._pipeline.record_request(chain_rows[chain_rows > 0], names.blocks)
        ready = every(index.state[DRAM][part.all] == SEALED)
        pending = names.blocks > plan.blocks and self._more(names.keys, rows, whole, usable, plan.blocks)
        if not again:
            colder = None if ready else [(wanted[name].start, r) for name, r in needed.items()]
            self.partition.planner.count(plan, names.blocks, have, layout.block_tokens, colder)
        if asked or (asked is not None and plan.blocks < names.blocks):
            found = names.joined, names.tokens, rows, whole, usable, plan, now, ready, have
            self._explainer.remember(asked, *found, later, pending)
        return LocalPrefixLease(self, plan, have, part, lease, ready, pending)

    def _all_rows(self, names: BlockNames) -> dict[str, Rows]:
        """The rows of a prompt's blocks, by group; 0 for blocks of other identities. Call with the index lock held."""
        rows, mine = self._index.own_rows, self.identities
        return {g.name: rows(names.keys(g.suffix), mine[g.name].fingerprint) for g in self.layout.groups}

    def _all_here(
        self, names: BlockNames, resident: CachedPrompt, have: int, prefill: PrefillCost | None, now: float, again: bool
    ) -> LocalPrefixLease:
        """The common case, made cheap: all blocks are in DRAM and none has expired. Call with the lock held."""
        blocks = names.blocks
        have = min(have, blocks)
        part = resident.after.get(have)
        if part is None:
            wanted = {g.name: g.needs(blocks, self.layout.block_tokens, have) for g in self.layout.groups}
            needed = {name: resident.rows[name][need.start : need.stop] for name, need in wanted.items()}
            if len(resident.after) >= _AFTER:
                resident.after.clear()
            part = resident.after[have] = PromptRows(needed, self._nbytes(needed))
        lease = self._pipeline.lease(part.all)
        plan = Plan(blocks, 0.0, None if prefill is None else 0.0)
        if not again:
            if self._prompt_cache.is_new(names.parent(blocks), blocks, now):
                for r in resident.rows.values():
                    self._pipeline.record_request(r, blocks)
            self.partition.planner.count(plan, blocks, have, self.layout.block_tokens, None)
        return LocalPrefixLease(self, plan, have, part, lease, True, False)

    def is_absent(self, names: BlockNames) -> bool:
        """Whether nothing is stored of a prompt, nothing of it is being written, and nothing may be in shared
        storage."""
        layout = self.layout
        with self._index.lock:
            rows = self._all_rows(names)
            if not names.blocks or any(rows[g.name].any() for g in layout.groups if g.required):
                return False
            nothing = {name: np.zeros(names.blocks, np.bool_) for name in rows}
            return not self._more(names.keys, rows, nothing, np.zeros(0, np.bool_), 0)

    def missed(self, names: BlockNames, tokens: int, request: str = "") -> None:
        """Count and record a prompt of ``tokens`` tokens as a match that found nothing."""
        self._used()
        with self._index.lock:
            self._explainer.remember_miss(request, names.joined, tokens)
            self.partition.planner.count(Plan(0, 0.0, None), names.blocks, 0, self.layout.block_tokens)
        if self.partition.prefetcher.wants_uses:
            self.partition.prefetcher.used(self, names.blocks, names.parent)
        self._record(names, tokens)

    def find(self, names: BlockNames) -> list[bool]:
        layout, index, now = self.layout, self._index, self.partition.sweep()
        with index.lock:
            rows = self._all_rows(names)
            whole = {name: index.usable(r, now) for name, r in rows.items()}
            here = np.logical_and.reduce([whole[g.name] for g in layout.groups if g.required])
            if not here.all():
                self._more(names.keys, rows, whole, here[:0], int(np.argmin(here)))
        return list(map(bool, here))

    def explain(self, names: BlockNames, prefill: Prefill | None) -> Explanation:
        layout, index, partition = self.layout, self._index, self.partition
        cost = self._prefill if prefill is None else cost_of(prefill)
        now = partition.clock.time()
        with index.lock:
            rows = self._all_rows(names)
            whole = {name: index.usable(r, now) for name, r in rows.items()}
            usable = index.lengths(layout, rows, whole)
            queued = partition.read_bytes_queued
            plan = partition.planner.plan(layout, rows, usable, 0, cost, queued, self._budget, trials=False)
            build = explained(partition, layout, self.identities, names.joined, rows, whole, usable, plan, now)
        return build()

    def explain_request(self, request: str) -> Explanation | None:
        return self._explainer.past(request)

    def models(self) -> list[bytes]:
        return self.partition.context.known_models.of(self._tenant, self._tag)

    def load(self, holding: LocalPrefixLease, deadline: float | None) -> Transfer:
        transfer, slices = self.begin_load(holding, deadline)
        for _ in slices:
            pass
        return transfer

    def begin_load(
        self, holding: LocalPrefixLease, deadline: float | None, blocks: int = sys.maxsize, *, wait: bool = True
    ) -> tuple[Transfer, Iterator[int]]:
        """As ``load``, but begun in slices of ``blocks`` blocks: the iterator begins one slice per step and yields its
        size. With ``wait`` False it yields 0 where memory is not available yet; the caller then continues a little
        later."""
        usual = self.partition.config.plan.deadline_seconds
        if (most := holding.plan.trial) is not None:  # see planner.py
            given = usual or None if deadline is None else deadline
            deadline = most if given is None else min(most, given)
        transfer = Transfer.within(self.partition.clock, deadline, usual)
        if holding.ready:
            transfer.started()
            return transfer, iter(())
        wanted = [(rows, self.identities[name]) for name, rows in holding.part.rows.items()]
        return transfer, self._pipeline.load_in_slices(wanted, transfer, blocks, wait=wait)

    def collect(self, holding: LocalPrefixLease) -> CollectedBlocks:
        blocks, first, places = self.places(holding)
        dram, geometry = self.partition.dram, self.layout.geometry
        return CollectedBlocks(
            blocks, first, {n: dram.spans(p.tolist(), geometry[n].footprint) for n, p in places.items()}
        )

    def places(self, holding: LocalPrefixLease) -> tuple[int, dict[str, int], dict[str, Rows]]:
        """As ``collect``, but returns places in the arena instead of memory."""
        index, layout, blocks = self._index, self.layout, holding.plan.blocks
        with index.lock:
            if holding.lease is None:
                raise RightError("this match was released while its load was under way")
            place = index.place[DRAM]
            if holding.ready and not self._checked:
                first = {g.name: g.needs(blocks, layout.block_tokens, holding.have).start for g in layout.groups}
                places = {name: place[rows] for name, rows in holding.part.rows.items()}
                self.partition.dram.count_bytes(read=self._nbytes(places))
                return blocks, first, places
            come, first, whole = self._come(holding)
            places = {}
            for g in layout.groups:
                mine = holding.part.rows[g.name][: max(0, come - first[g.name])]
                if not g.required:
                    mine = mine[: _leading(whole[g.name][first[g.name] :][: len(mine)])]
                for row in mine.tolist():
                    if not self._pipeline.intact(row):
                        raise AssertionError(f"a block in DRAM changed after it was sealed: {index.key(row).hex()}")
                places[g.name] = place[mine]
        self.partition.dram.count_bytes(read=self._nbytes(places))
        return come, first, places

    def held(self, holding: LocalPrefixLease) -> int:
        """Number of blocks of the prompt available from DRAM now; 0 if the lease was released."""
        with self._index.lock:
            if holding.lease is None:
                return 0
            # Leased blocks stay in DRAM, so this need not be checked again.
            here = every(self._index.state[DRAM][holding.part.all] == SEALED)
            others = (self._index.others(r, self.identities[n].fingerprint) for n, r in holding.part.rows.items())
            holding.ready = here and all(other is None for other in others)
            return self._come(holding)[0]

    def _come(self, holding: LocalPrefixLease) -> tuple[int, dict[str, int], dict[str, Mask]]:
        """The longest prefix that the rules of all groups allow from DRAM alone; also each group's first leased block
        number and the mask of its present blocks. Call with the lock held."""
        index, layout, blocks = self._index, self.layout, holding.plan.blocks
        whole, first = {}, {}
        for g in layout.groups:
            mask = np.zeros(blocks, np.bool_)
            mask[: holding.have] = True
            start = g.needs(blocks, layout.block_tokens, holding.have).start
            rows = holding.part.rows[g.name]
            mask[start : start + len(rows)] = index.state[DRAM][rows] == SEALED
            # A held row that was in no tier for a while may now have another identity's block.
            if (other := index.others(rows, self.identities[g.name].fingerprint)) is not None:
                mask[start : start + len(rows)] &= ~other
            whole[g.name], first[g.name] = mask, start
        spaced = {name: np.zeros(blocks, np.int64) for name in whole}
        return int(np.flatnonzero(index.lengths(layout, spaced, whole))[-1]), first, whole

    def _nbytes(self, blocks: dict[str, Rows]) -> int:
        return sum(len(found) * self.layout.geometry[name].footprint for name, found in blocks.items())

    # -- writing ------------------------------------------------------------------------------------------

    def reserve(
        self,
        groups: Sequence[Group],
        names: BlockNames,
        start: int,
        stop: int,
        ttl: float | None,
        priority: int,
        after: Reservation | None = None,
        keep: int = sys.maxsize,
        *,
        wait: bool = True,
    ) -> Reservation:
        """``keep``: the most bytes of blocks before ``stop`` to hold for it. ``wait``: see ``Pipeline``."""
        self._used()
        now = self.partition.sweep()
        expiry = now + (float("inf") if ttl is None else ttl)
        if self._recorder is not None:
            self._recorder.ttl = ttl
        if now >= self._index.next_expiry:
            self._remove_expired(groups, names, stop, now)
        with contextlib.ExitStack() as stack:
            kept: list[tuple[Rows, int]] = []
            for group in groups:
                size = self.layout.geometry[group.name].footprint
                with self._index.lock:
                    rows = self._raised(names, group, stop, priority)
                    rows = stack.enter_context(self._pipeline.hold_parents(rows, keep // size)).rows
                    kept.append((rows[self._index.state[DRAM][rows] == SEALED], size))
                keep -= len(kept[-1][0]) * size
            if after is not None:
                after.followed = True
                after.seal()
            numbers = range(start, stop)
            reservation = self._pipeline.reserve(
                [
                    WriteRequest(
                        self.identities[group.name],
                        names.keys(group.suffix)[start:stop],
                        [names.parent(i) for i in numbers],
                        numbers,
                        expiry,
                        priority,
                        [names.tokens_of(i) for i in numbers] if self.partition.config.nvme.token_ids else (),
                    )
                    for group in groups
                ],
                wait=wait,
            )
            leases = stack.pop_all()
        reservation.kept = kept
        if not reservation.keys and not reservation.refused:
            self._extend(groups, names, stop, expiry)  # nothing will be written, so no seal will extend the expiry

        def ended(reservation: Reservation) -> None:
            try:
                if reservation.sealed and not reservation.followed:
                    self._stored(groups, names, stop, priority, expiry)
            finally:
                leases.close()

        reservation.on_end.append(ended)
        return reservation

    def note_dropped(self, keys: Sequence[BlockKey], group: Group, cause: AbsenceCause) -> None:
        """Record that blocks of a group were to be stored and were not."""
        self._pipeline.note_dropped(keys, self.identities[group.name], cause)

    def _stored(self, groups: Sequence[Group], names: BlockNames, stop: int, priority: int, expiry: float) -> None:
        try:
            with self._index.lock:
                try:
                    for group in groups:
                        rows = self._raised(names, group, stop, priority)
                        self._pipeline.extend(rows, expiry)
                        self._pipeline.stored(rows)
                except BaseException:
                    self._pipeline.repair()
                    raise
        finally:
            if self._ready:
                self._pipeline.call_ready()

    def _extend(self, groups: Sequence[Group], names: BlockNames, stop: int, expiry: float) -> None:
        """Let all blocks of a prompt up to ``stop`` live until ``expiry`` at least, including those that others
        stored."""
        if self._index.mortal:
            for group in groups:
                with self._index.lock:
                    self._pipeline.extend(self._rows(names, group, stop), expiry)

    def _remove_expired(self, groups: Sequence[Group], names: BlockNames, stop: int, now: float) -> None:
        """Remove the expired blocks of a prompt, so that they can be stored again."""
        for group in groups:
            for keys in work_slices.parts(names.keys(group.suffix)[:stop]):
                try:
                    with self._index.lock:
                        rows = self._index.rows(keys)
                        events = self.partition.expire_rows(rows[(rows > 0) & (self._index.expiry[rows] <= now)])
                finally:
                    if self._ready:
                        self._pipeline.call_ready()
                self.partition.feed.publish(events)

    def _rows(self, names: BlockNames, group: Group, stop: int | None) -> Rows:
        """The rows of those of a prompt's blocks up to ``stop`` that are present. Call with the index lock held."""
        rows = self._index.own_rows(names.keys(group.suffix)[:stop], self.identities[group.name].fingerprint)
        return rows[rows > 0]

    def _raised(self, names: BlockNames, group: Group, stop: int, priority: int) -> Rows:
        """As ``_rows``, after raising their priority to at least ``priority``: a parent must outlast its children."""
        rows = self._rows(names, group, stop)
        self._index.priority[rows] = np.maximum(self._index.priority[rows], priority)
        return rows

    def persist(self, names: BlockNames, wanted: Mapping[str, range], most: int = sys.maxsize) -> PersistRequest:
        """``most``: the most bytes of blocks to hold for it; the rest is refused."""
        blocks: list[tuple[str, int]] = []
        asked: list[tuple[BlockKey, Identity]] = []
        for name, numbers in wanted.items():
            keys, who = names.keys(self.layout.group(name).suffix), self.identities[name]
            for number in numbers:
                blocks.append((name, number))
                most -= who.geometry.footprint
                if most >= 0:
                    asked.append((keys[number], who))
        request = self._pipeline.persister.persist(asked, self.partition.clock)

        def result() -> Persisted:
            reasons = [request.reason(i) for i in range(len(asked))]
            reasons += [Unwritten.CLIENT_LIMIT] * (len(blocks) - len(asked))
            return persisted(zip(blocks, reasons, strict=True))

        return PersistRequest(request.transfer, result)

    # -- pinning and removing -----------------------------------------------------------------------------

    def pin(self, names: BlockNames, stop: int | None, step: int) -> int:
        index, count, now = self._index, 0, self.partition.clock.time()
        for group in self.layout.groups:
            size, mine = self.layout.geometry[group.name].footprint, self.identities[group.name].fingerprint
            for keys in work_slices.parts(names.keys(group.suffix)[:stop]):
                with index.lock:
                    try:
                        rows = index.own_rows(keys, mine) if step > 0 else index.rows(keys)
                        rows = rows[rows > 0]
                        if step < 0:
                            count += index.unpin(rows, self.pins)
                        else:
                            rows = rows[index.expiry[rows] > now]
                            index.pin(rows, self.pins, size)
                            count += len(rows)
                    except BaseException:
                        index.repair_pins(self.pins)
                        raise
        return count

    def drop(self, names: BlockNames, start: int, timeout: float | None) -> int:
        keys = [k for g in self.layout.groups for k in names.keys(g.suffix)[start:]]
        return self.partition.drop(keys, timeout, who=self.asker)

    def expire(self, names: BlockNames, start: int, ttl: float | None, timeout: float | None) -> int:
        keys, heads = self.expiring(names, start)
        return self.partition.expire(keys, heads, self.expiry(ttl), timeout, self.asker)

    def expiring(self, names: BlockNames, start: int) -> tuple[list[BlockKey], list[BlockKey]]:
        """The keys of a prompt's blocks from ``start`` on, and of those before."""
        every = [names.keys(g.suffix) for g in self.layout.groups]
        return [k for keys in every for k in keys[start:]], [k for keys in every for k in keys[:start]]

    def expiry(self, ttl: float | None) -> float:
        """The time at which a block expires that lives ``ttl`` seconds from now."""
        return float("inf") if ttl is None else self.partition.clock.time() + ttl

    def expect(self, names: BlockNames, turn: Turn | None, returns_in: float | None) -> None:
        self.partition.sweep()
        with self._index.lock:
            rows = {g.name: self._rows(names, g, None) for g in self.layout.groups}
            self._pipeline.expect(list(rows.values()), turn, returns_in)
        if returns_in is not None and (nbytes := self._nbytes(rows)):
            self.partition.prefetcher.expect(self, names.joined, nbytes, returns_in)

    def bring_back(self, joined: bytes, seconds: float) -> Transfer | None:
        names = _Digests(joined, self._tag)
        holding = self.match(names, 0, 0, again=True, room=self._budget // _BROUGHT)
        begun: Transfer | None = None
        try:
            with self._index.lock:
                if not holding.ready and self._pipeline.has_space_for_expected(holding.part.all, holding.part.nbytes):
                    rows = [self._rows(names, g, holding.plan.blocks) for g in self.layout.groups]
                    # Loaded blocks that are not marked as expected would be evicted first.
                    if self._pipeline.keep_expected(rows, seconds):
                        begun = Transfer.within(self.partition.clock, seconds, 0.0)
            if begun is not None:
                begun.on_end(partial(again_if_interrupted, holding.release))
                wanted = [(rows, self.identities[name]) for name, rows in holding.part.rows.items()]
                for count in self._pipeline.load_in_slices(wanted, begun, sys.maxsize, wait=False):
                    if not count:  # memory would have to be taken from the system, which is not worth waiting for here
                        begun.cancel()
        except BaseException:
            if begun is not None:
                begun.cancel()
            holding.release()
            raise
        if begun is None:
            holding.release()
        return begun

    def close(self) -> None:
        self.partition.prefetcher.forget(self)
        more = True
        while more:
            with self._index.lock:
                try:
                    more = self._index.unpin_some(self.pins, work_slices.SLICE)
                except BaseException:
                    self._index.repair_pins(self.pins)
                    raise


def persisted(blocks: Iterable[tuple[tuple[str, int], Unwritten | None]]) -> Persisted:
    """Summarize the outcome for blocks, given by group and number; the reason is None for durable ones."""
    durable, failed = 0, dict[str, dict[int, Unwritten]]()
    for (name, number), reason in blocks:
        if reason is None:
            durable += 1
        else:
            failed.setdefault(name, {})[number] = reason
    return Persisted(durable, failed)


def _leading(mask: np.ndarray[Any, np.dtype[np.bool_]]) -> int:
    """Number of leading True values."""
    return len(mask) if mask.all() else int(np.argmin(mask))
