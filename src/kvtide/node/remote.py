"""The desk of a store that is behind a socket.

Without a node every answer is that of an empty store: nothing is found, nothing is taken.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np

from kvtide.block import BlockKey, Group, Layout, Span
from kvtide.clock import Clock
from kvtide.desk import Collected, Holding, Names, Persisting, persisted
from kvtide.errors import AccessError, KvtideError, RightError, TierError
from kvtide.index.keys import Model, Tenant
from kvtide.index.lease import Reservation
from kvtide.node import protocol as p
from kvtide.node.line import Late, Line, Lost
from kvtide.node.promises import Promise
from kvtide.plan.planner import Plan
from kvtide.plan.prefill import Prefill, PrefillCost
from kvtide.plan.uses import Turn
from kvtide.tiers.calls import Calls
from kvtide.transfer.transfer import Transfer
from kvtide.transfer.written import Persisted, Unwritten

__all__ = ["RemoteDesk"]

_FIRST_PART = 128 << 20
_REST = 1 << 16
"""Bytes of a reservation's message besides digests and tokens, at most."""
_NO_ROWS = np.zeros(0, np.int64)

T = TypeVar("T", bound="Transfer | Promise")


class Owner(Protocol):
    """The client that a desk belongs to."""

    clock: Clock
    deadline: float
    calls: Calls

    @property
    def line(self) -> Line:
        """The node that there is now. Raises Lost."""

    def promised(self, line: Line, operation: p.Operation, promise: T) -> T:
        """Ask for something whose end will be told to ``promise``."""

    def settle(self) -> None:
        """A right of a line that was lost is not used any more."""


class RemoteHolding(Holding):
    """A holding of the node's, by its number."""

    __slots__ = ("_counts", "_desk", "_layout", "_loads", "_matched", "line", "number", "slots")

    def __init__(self, desk: RemoteDesk, line: Line | None, have: int, found: p.Matched) -> None:
        """Without a ``line``: what is found without a node."""
        self.plan = Plan(found.blocks, found.load_seconds, found.compute_seconds, found.slower)
        self.have = have
        self.ready = found.ready
        self.pending = found.pending
        self._desk: RemoteDesk | None = desk
        self._layout = desk.layout
        self._counts = found.counts
        self._matched = found.held if found.held >= 0 else found.blocks if found.ready else min(have, found.blocks)
        self._loads: list[Transfer] = []
        self.line = line
        self.number = found.holding
        self.slots = found.slots
        """Where the blocks are, if all are in memory."""

    @property
    def held(self) -> int:
        if self.line is not None and self.slots is None and not self.line.alive:
            return min(self.have, self.plan.blocks)  # nobody can say any more where the others are
        told = [load.report.held for load in self._loads if isinstance(load.report, p.Ended)]
        return max([self._matched, *told])

    def loaded_by(self, transfer: Transfer) -> None:
        """At its end the node says how much is held by then."""
        self._loads = [load for load in self._loads if load.report is not None] + [transfer]

    def collected(self, blocks: int) -> None:
        """The node has said how much is held."""
        self._matched = max(self._matched, blocks)

    @property
    def counts(self) -> dict[str, int]:
        return {g.name: n for g, n in zip(self._layout.groups, self._counts, strict=True)}

    @property
    def released(self) -> bool:
        return self._desk is None

    def release(self) -> None:
        desk, self._desk, self.slots = self._desk, None, None
        if desk is not None and self.line is not None:
            desk.release(self.line, self.number)


class _RemoteReservation(Reservation):
    """A reservation of the node's, by its number; ``line`` is None when there is nothing to tell it any more."""

    __slots__ = ("line", "number")

    def __init__(
        self,
        keys: Sequence[BlockKey],
        views: Sequence[Span],
        depths: Sequence[int],
        finish: Callable[[Reservation, bool], None],
    ) -> None:
        super().__init__(keys, _NO_ROWS, views, depths, [], finish)
        self.line: Line | None = None
        self.number = 0


class RemoteDesk:
    """The desk of a store that is behind a socket."""

    def __init__(self, client: Owner, model: Model, tenant: Tenant) -> None:
        self._client = client
        self.layout: Layout = model.layout
        self._opening = p.Open(p.describe(model.layout), model.layout.block_tokens, model.namespace(tenant), tenant.tag)
        self._lock = threading.Lock()
        self._line: Line | None = None
        self._number = 0
        self._invited: tuple[str, int] | None = None

    @property
    def first_part(self) -> int:
        try:
            return _FIRST_PART if self._client.line.welcome.colder else self.largest
        except Lost:
            return 0

    @property
    def largest(self) -> int:
        try:
            return self._client.line.welcome.largest
        except Lost:
            return 0

    def _session(self) -> tuple[Line, int]:
        """Our session at the node that there is now."""
        if self._line is not None and self._line.alive:
            return self._line, self._number
        with self._lock:
            line = self._client.line
            if line is not self._line:
                number = line.ask_one(self._opening)
                assert isinstance(number, int)
                try:
                    if self._invited is not None:
                        line.ask_one(p.Invite(number, *self._invited))
                except RightError:  # the node has not let go of our last session's crew yet
                    line.post(p.Close(number))
                    raise Lost from None
                except Late:  # nobody will know of this session
                    line.post(p.Close(number))
                    raise
                self._number = number
                self._line = line  # last: who finds it takes the number with it
            return line, self._number

    def open(self) -> None:
        """Open our session at the node now, and not when it is first used: a node tells events of open sessions'
        blocks. Whatever is wrong with it is told at its first use."""
        with contextlib.suppress(Lost, KvtideError):
            self._session()

    def invite(self, token: str, ranks: int) -> None:
        """Let workers join this session, at this node and its successors."""
        with self._lock:
            self._invited, line = (token, ranks), self._line
        with contextlib.suppress(Lost):
            if line is self._session()[0]:  # else it was just opened, with the invitation
                line.tell(p.Invite(self._number, token, ranks))

    # -- reading ------------------------------------------------------------------------------------------

    def match(
        self, names: Names, have: int, prefill: Prefill | None, again: bool = False, record: bool = True
    ) -> RemoteHolding:
        try:
            line, session = self._session()
            speed, cost = self._wired(prefill, have, names.blocks)
            had = min(have, names.blocks)
            found = line.ask_one(p.Match(session, names.joined, had, speed, cost, again, names.tokens, record))
            assert isinstance(found, p.Matched)
            line.own(found.holding, found.slots or ())
            return RemoteHolding(self, line, have, found)
        except Lost:
            nothing = [0] * len(self.layout.groups)
            missed = p.Matched(0, min(have, names.blocks), 0.0, None, nothing, True, False, None)
            return RemoteHolding(self, None, have, missed)

    def _wired(
        self, prefill: Prefill | None, have: int, blocks: int
    ) -> tuple[float | None, tuple[float, float] | None]:
        """A caller's cost of computing as ``Match`` has it: with the mean speed for a node that knows no other."""
        if not isinstance(prefill, PrefillCost):
            return prefill, None
        tokens = self.layout.block_tokens
        mean = prefill.speed(min(have, blocks) * tokens, max(1, blocks) * tokens)
        return mean, (prefill.per_token, prefill.per_token_context)

    def find(self, names: Names) -> list[bool]:
        try:
            line, session = self._session()
            found = line.ask_one(p.Find(session, names.joined))
            assert isinstance(found, p.Found)
            return found.blocks
        except Lost:
            return [False] * names.blocks

    def _collected(self, blocks: int, slots: list[p.Slots], line: Line, right: int) -> Collected:
        found = {g.name: some for g, some in zip(self.layout.groups, slots, strict=True)}
        sizes = {name: geometry.footprint for name, geometry in self.layout.geometry.items()}
        views = {name: line.spans(some.places, sizes[name], right) for name, some in found.items()}
        return Collected(blocks, {name: some.first for name, some in found.items()}, views)

    def release(self, line: Line, holding: int) -> None:
        self._give_back(line, holding, p.Release(self._number, [holding]))

    def _give_back(self, line: Line, right: int, operation: p.Operation, wait: bool = False) -> None:
        line.disown(right)
        try:
            if line is not self._line:
                raise Lost
            if wait:
                line.tell(operation)
            else:
                line.later(operation)
        except Lost:
            self._client.settle()

    def load(self, holding: RemoteHolding, deadline: float | None) -> Transfer:
        transfer = Transfer.within(self._client.clock, deadline, self._client.deadline, self._client.calls.put)
        if holding.ready or holding.line is None:
            transfer.started()
            return transfer
        try:
            holding.loaded_by(transfer)
            self._client.promised(holding.line, p.Load(self._number, holding.number, deadline), transfer)
        except Lost:
            transfer.cancel()
        return transfer

    def collect(self, holding: RemoteHolding) -> Collected:
        if holding.released:
            raise RightError("this match was released while its load was under way")
        line, number, slots = holding.line, holding.number, holding.slots
        if line is not None:
            with contextlib.suppress(Lost):
                if slots is not None:
                    return self._collected(holding.plan.blocks, slots, line, number)
                answer = line.ask_one(p.Collect(self._number, number))
                assert isinstance(answer, p.Collected)
                holding.collected(answer.blocks)
                return self._collected(answer.blocks, answer.slots, line, number)
        blocks = min(holding.have, holding.plan.blocks)
        tokens = self.layout.block_tokens
        first = {g.name: g.needs(blocks, tokens, holding.have).start for g in self.layout.groups}
        return Collected(blocks, first, {name: [] for name in first})

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
    ) -> Reservation:
        last = after if isinstance(after, _RemoteReservation) else None
        try:
            line, wanted = self.reserving(groups, names, start, stop, ttl, priority, last)
            made = self._ask_reserve(line, wanted, last)
            footprints = [self.layout.geometry[g.name].footprint for g in self.layout.groups]
            slots = line.spans(made.places, max(footprints))
            line.own(made.reservation)
        except Lost:
            nothing = _RemoteReservation([], [], [], self._finish)
            nothing.refused = (stop - start) * len(groups)
            return nothing
        if last is not None:
            if last.line is line:
                line.disown(last.number)
                last.line = None  # the node has sealed it
            last.seal()
        views = [span[: footprints[g]] for span, g in zip(slots, made.groups, strict=True)]
        reservation = _RemoteReservation(self.keys(wanted, made), views, made.depths, self._finish)
        reservation.line, reservation.number, reservation.refused = line, made.reservation, made.refused
        reservation.pending = made.pending
        return reservation

    def _ask_reserve(self, line: Line, wanted: p.Reserve, last: _RemoteReservation | None) -> p.Reserved:
        """What the node answers. ``last`` is sealed with it, if it is of the same line. Raises Lost."""
        try:
            made = line.ask_one(wanted)
        except Late as late:
            if last is not None:  # it is written, and counts as stored
                if late.sent and wanted.after is not None:
                    line.disown(last.number)
                    last.line = None  # the node seals it with this request, or is told to: see late.py
                last.seal()
            raise
        except AccessError:  # who may only read goes on without storing, as if no node were there
            raise Lost from None
        assert isinstance(made, p.Reserved)
        return made

    def reserving(
        self,
        groups: Sequence[Group],
        names: Names,
        start: int,
        stop: int,
        ttl: float | None,
        priority: int,
        last: _RemoteReservation | None = None,
        writers: Sequence[int] = (),
        wait: bool = True,
    ) -> tuple[Line, p.Reserve]:
        """What the node is asked for a reservation, for ourselves or for ``writers``, and whom to ask. Raises Lost."""
        line, session = self._session()
        digests, tokens = names.joined[: 32 * stop], b""
        first = start if p.TOKENS_FROM_START in line.welcome.features else 0
        if line.welcome.tokens and len(digests) + 4 * self.layout.block_tokens * (stop - first) < p.LARGEST - _REST:
            tokens = b"".join(names.tokens_of(i) for i in range(first, stop))  # records do without those of more
        sealed = last.number if last is not None and last.line is line else None
        numbers = [self.layout.groups.index(g) for g in groups]
        return line, p.Reserve(
            session, numbers, digests, start, stop, ttl, priority, tokens, sealed, list(writers), wait
        )

    def keys(self, wanted: p.Reserve, made: p.Reserved) -> list[BlockKey]:
        """Of the blocks that were given slots."""
        return [
            BlockKey(wanted.digests[32 * d : 32 * d + 32] + self.layout.groups[g].suffix)
            for g, d in zip(made.groups, made.depths, strict=True)
        ]

    def abort(self, line: Line, reservation: int) -> None:
        """Give up what was reserved for others."""
        with contextlib.suppress(Lost, RightError):  # it has ended
            line.tell(p.Finish(self._number, reservation, False))

    def _finish(self, reservation: Reservation, sealed: bool) -> None:
        assert isinstance(reservation, _RemoteReservation)
        line, number = reservation.line, reservation.number
        if line is not None:  # without a node it is not stored, as if it had been evicted
            # Nobody waits for the end of an abort: least of all who closes while the node hangs.
            self._give_back(line, number, p.Finish(self._number, number, sealed), wait=sealed)

    def persist(self, names: Names, wanted: Mapping[str, range]) -> Persisting:
        transfer = Transfer(self._client.clock, run=self._client.calls.put)
        blocks = [(name, number) for name, numbers in wanted.items() for number in numbers]
        refused: Unwritten | None = None
        groups = {g.name: i for i, g in enumerate(self.layout.groups)}
        asked = [(groups[name], some.start, some.stop) for name, some in wanted.items() if some]
        try:
            line, session = self._session()
            stop = max((last for _, _, last in asked), default=0)
            if asked:
                self._client.promised(line, p.Flush(session, names.joined[: 32 * stop], asked), transfer)
        except Late:
            refused = Unwritten.TIMEOUT
        except Lost:
            refused = Unwritten.NODE_GONE
        except AccessError:  # who may only read has stored nothing
            refused = Unwritten.NOT_STORED
        except RightError:
            refused = Unwritten.CLIENT_LIMIT
        if refused is not None or not asked:
            transfer.cancel()

        def result() -> Persisted:
            told, failed = transfer.report, dict[tuple[int, int], Unwritten]()
            for_all = refused
            if refused is None and isinstance(told, p.Ended):
                failed = {(group, number): Unwritten.of(why) for group, number, why in told.failed}
                for_all = None if told.written >= 0 else Unwritten.UNKNOWN
            elif refused is None and transfer.ended:
                for_all = Unwritten.CANCELLED if line.alive else Unwritten.NODE_GONE
            elif refused is None:
                for_all = Unwritten.TIMEOUT
            return persisted((block, for_all or failed.get((groups[block[0]], block[1]))) for block in blocks)

        return Persisting(transfer, result)

    # -- keeping and removing -----------------------------------------------------------------------------

    def pin(self, names: Names, stop: int | None, step: int) -> int:
        try:
            line, session = self._session()
            operation = p.Pin(session, names.joined, stop, step)
            try:
                count = line.ask_one(operation)
            except Late as late:
                if step < 0 and not late.sent:
                    line.later(operation)
                return 0
        except Lost:
            return 0
        assert isinstance(count, int)
        return count

    def drop(self, names: Names, start: int, timeout: float | None) -> int:
        gone = "the node went away before it said that the blocks are erased; drop them again when it is back"
        late = "the node has not answered in time whether the blocks are erased; drop them again when it does"
        try:
            line, session = self._session()
            promise = self._client.promised(line, p.Drop(session, names.joined, start), Promise())
        except Late:
            raise TierError(late) from None
        except Lost:
            raise TierError(gone) from None
        if not promise.event.wait(timeout):
            blocks = names.blocks - start
            raise TierError(f"dropping {blocks} blocks took longer than {timeout} s; it goes on in the background")
        if promise.lost:
            raise TierError(gone)
        if promise.failure:
            raise TierError(
                f"{promise.failure} dropped blocks could not be erased from disk. They are not served, but may be "
                "found again when the node is next started: see its log for the disk's error, then drop them again"
            )
        return promise.count

    def expire(self, names: Names, start: int, ttl: float | None, timeout: float | None) -> int:
        gone = "the node went away before it said when the blocks expire; call expire again when it is back"
        late = "the node has not answered in time when the blocks expire; call expire again when it does"
        try:
            line, session = self._session()
            promise = self._client.promised(line, p.Expire(session, names.joined, start, ttl), Promise())
        except Late:
            raise TierError(late) from None
        except Lost:
            raise TierError(gone) from None
        if not promise.event.wait(timeout):
            raise TierError(
                f"changing the expiry of {names.blocks - start} blocks took longer than {timeout} s; it goes on in the "
                "background"
            )
        if promise.lost:
            raise TierError(gone)
        if promise.failure:
            raise TierError(
                f"the copies on disk of {promise.failure} blocks still say that they live longer. They expire as asked "
                "while the node runs: see its log for the disk's error, then call expire again"
            )
        return promise.count

    def expect(self, names: Names, turn: Turn | None, returns_in: float | None) -> None:
        with contextlib.suppress(Lost, KvtideError):  # a hint that does not reach the node costs nothing else
            line, session = self._session()
            if p.EXPECT in line.welcome.features and not line.behind:
                line.post(p.Expect(session, names.joined, turn or "", returns_in))

    def close(self) -> None:
        with contextlib.suppress(Lost), self._lock:
            if self._line is not None and self._line.alive:
                self._line.post(p.Close(self._number))
