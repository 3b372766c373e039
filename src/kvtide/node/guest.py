"""A client as the node sees it: a process, its sessions, and what it holds.

What a client holds, it holds until it says so or its process is dead: a closed socket alone proves nothing, for a
stopped process may still write into its slots. It sent a pidfd with its hello; when its socket closes, its rights wait
for that.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np

from kvtide.block import BlockKey, Layout
from kvtide.desk import LocalDesk, LocalHolding
from kvtide.errors import KvtideError, LayoutError, RightError
from kvtide.events import BlockStored, Event
from kvtide.index.index import DRAM
from kvtide.index.keys import ROOT
from kvtide.index.lease import Reservation
from kvtide.node import protocol as p
from kvtide.node.connection import Connection
from kvtide.node.ledger import Ledger
from kvtide.store import Store
from kvtide.transfer.transfer import Transfer

__all__ = ["Guest", "Host"]

log = logging.getLogger("kvtide.node")

_MOST = 10_000
"""Rights that one client may have at a time."""
_DESCRIPTORS = 64
"""That go with one frame."""


class Host(Protocol):
    """The node."""

    store: Store
    loop: asyncio.AbstractEventLoop
    ledger: Ledger

    def soon(self, call: Callable[[], None]) -> None:
        """Call in the loop, from any thread."""

    def left(self, guest: Guest) -> None:
        """A client has ended, and holds nothing any more."""


class _Names:
    """A prompt's blocks, as they came over the socket."""

    def __init__(self, digests: bytes, tokens: bytes = b"", size: int = 0) -> None:
        if len(digests) % 32:
            raise LayoutError(f"{len(digests)} bytes of digests are no multiple of 32")
        self._digests = [digests[i : i + 32] for i in range(0, len(digests), 32)]
        if len(set(self._digests)) != len(self._digests):
            raise LayoutError("a prompt cannot have one block twice")
        self._tokens = tokens
        self._size = size

    @property
    def blocks(self) -> int:
        return len(self._digests)

    def keys(self, suffix: bytes) -> list[BlockKey]:
        return [BlockKey(d + suffix) for d in self._digests]

    def parent(self, block: int) -> bytes:
        return self._digests[block - 1] if block else ROOT

    def tokens_of(self, block: int) -> bytes:
        return self._tokens[block * self._size : (block + 1) * self._size]


class _Session:
    """A session of a client: its desk, and what it holds."""

    def __init__(self, layout: Layout, desk: LocalDesk) -> None:
        self.layout = layout
        self.desk = desk
        self.holdings: dict[int, LocalHolding] = {}
        self.reservations: dict[int, Reservation] = {}

    @property
    def rights(self) -> int:
        return len(self.holdings) + len(self.reservations)

    def holding(self, number: int) -> LocalHolding:
        try:
            return self.holdings[number]
        except KeyError:
            raise RightError(f"there is no holding {number}") from None

    def reservation(self, number: int) -> Reservation:
        try:
            return self.reservations[number]
        except KeyError:
            raise RightError(f"there is no reservation {number}") from None

    def end(self) -> None:
        """Give everything back: nobody looks at the memory any more."""
        for give_back in [h.release for h in self.holdings.values()] + [r.abort for r in self.reservations.values()]:
            try:
                give_back()
            except Exception:  # the others must not suffer
                log.exception("a right could not be given back")
        self.holdings.clear()
        self.reservations.clear()
        self.desk.close()


class Guest:
    """A client: a process, what it may do, and what it holds."""

    def __init__(self, host: Host, connection: Connection, name: str, token: str, pidfd: int) -> None:
        self._host = host
        self._store = host.store
        self._connection = connection
        self._forget = connection.lost
        self.name = name
        """What it calls itself, in all its lives' nodes."""
        self.token = token
        self._pidfd = pidfd
        self.notices: Connection | None = None
        self._numbers = itertools.count(1)
        self._sessions: dict[int, _Session] = {}
        self._loads: dict[int, Transfer] = {}
        self._known: set[int] = set()
        """Segments whose descriptors it has."""
        self._new: list[int] = []
        self._removals = 0
        self._decoder = msgspec.msgpack.Decoder(p.Request)
        self._unfollow: Callable[[], None] | None = None
        connection.receive = self._receive
        connection.lost = self._lost

    @property
    def rights(self) -> int:
        return sum(s.rights for s in self._sessions.values())

    # -- requests -----------------------------------------------------------------------------------------

    def _receive(self, body: bytes) -> None:
        request = self._decoder.decode(body)
        self._new = []
        answers = [self._answer(operation) for operation in request.operations]
        new, dram = self._new, self._store.dram
        gone: list[int] = []
        if dram.removals != self._removals:
            self._removals = dram.removals
            gone = sorted(self._known - dram.serials)
            self._known.difference_update(gone)
        if new:
            self._host.ledger.lent(self.name, self._connection.pid, new, [dram.nbytes(serial) for serial in new])
        while len(new) > _DESCRIPTORS:
            first, new = new[:_DESCRIPTORS], new[_DESCRIPTORS:]
            self._connection.send(p.Reply(0, [], first), [dram.descriptor(serial) for serial in first])
        reply = p.Reply(request.number, answers, new, gone)
        self._connection.send(reply, [dram.descriptor(serial) for serial in new])

    def _answer(self, operation: p.Operation) -> p.Answer:
        try:
            if self.rights >= _MOST and isinstance(operation, p.Match | p.Reserve):
                raise RightError(f"this client holds {_MOST} rights; release some")
            answer: p.Answer = _ANSWERS[type(operation)](self, operation)
            return answer
        except KvtideError as e:
            return p.Failure(type(e).__name__, str(e))

    def _session(self, number: int) -> _Session:
        try:
            return self._sessions[number]
        except KeyError:
            raise RightError(f"there is no session {number}") from None

    def _open(self, o: p.Open) -> int:
        try:
            layout = p.layout_of(o.groups, o.block_tokens)
        except ValueError as e:
            raise LayoutError(str(e)) from e
        if (len(o.namespace), len(o.tenant)) != (32, 16):
            raise LayoutError("a namespace has 32 bytes and a tenant's tag 16")
        number = next(self._numbers)
        self._sessions[number] = _Session(layout, LocalDesk(self._store, layout, o.namespace, o.tenant))
        return number

    def _close(self, o: p.Close) -> None:
        self._session(o.session).end()
        del self._sessions[o.session]

    def _match(self, o: p.Match) -> p.Matched:
        session = self._session(o.session)
        if o.have < 0:
            raise LayoutError(f"have is {o.have}")
        found = session.desk.match(_Names(o.digests), o.have, o.prefill)
        number = next(self._numbers)
        session.holdings[number] = found
        plan = found.plan
        return p.Matched(
            number,
            plan.blocks,
            plan.load_seconds,
            plan.compute_seconds,
            [found.counts[g.name] for g in session.layout.groups],
            found.ready,
            found.pending,
            self._slots(session, found).slots if found.ready else None,
        )

    def _slots(self, session: _Session, holding: LocalHolding) -> p.Collected:
        blocks, first, places = session.desk.places(holding)
        groups = session.layout.groups
        return p.Collected(blocks, [p.Slots(first[g.name], self._addresses(places[g.name])) for g in groups])

    def _addresses(self, places: list[int]) -> bytes:
        found = self._store.dram.addresses(np.array(places, np.int64))
        for serial in set((found >> np.uint64(40)).tolist()) - self._known:
            self._known.add(serial)
            self._new.append(serial)
        return found.tobytes()

    def _load(self, o: p.Load) -> int:
        session = self._session(o.session)
        transfer = session.desk.load(session.holding(o.holding), o.deadline)
        return self._promise(transfer)

    def _promise(self, transfer: Transfer) -> int:
        number = next(self._numbers)
        self._loads[number] = transfer

        def ended() -> None:
            self._loads.pop(number, None)
            self.tell(p.Ended(number))

        transfer.on_end(lambda: self._host.soon(ended))
        return number

    def _cancel(self, o: p.Cancel) -> None:
        if (transfer := self._loads.get(o.load)) is not None:
            transfer.cancel()

    def _collect(self, o: p.Collect) -> p.Collected:
        session = self._session(o.session)
        return self._slots(session, session.holding(o.holding))

    def _release(self, o: p.Release) -> None:
        holdings = self._session(o.session).holdings
        for number in o.holdings:
            if (holding := holdings.pop(number, None)) is not None:
                holding.release()

    def _reserve(self, o: p.Reserve) -> p.Reserved:
        session = self._session(o.session)
        layout = session.layout
        names = _Names(o.digests, o.tokens, 4 * layout.block_tokens)
        if not 0 <= o.start <= o.stop <= names.blocks or any(not 0 <= g < len(layout.groups) for g in o.groups):
            raise LayoutError(f"blocks {o.start} to {o.stop} of groups {o.groups} are not in this prompt")
        if not -100 <= o.priority <= 100 or (o.ttl is not None and not o.ttl > 0):
            raise LayoutError(f"priority {o.priority} or ttl {o.ttl} is out of range")
        groups = [layout.groups[g] for g in o.groups]
        after = session.reservation(o.after) if o.after is not None else None
        made = session.desk.reserve(groups, names, o.start, o.stop, o.ttl, o.priority, after)
        if o.after is not None:
            del session.reservations[o.after]
        number = next(self._numbers)
        session.reservations[number] = made
        suffixes = {g.suffix: i for i, g in enumerate(layout.groups)}
        places = self._store.index.place[DRAM][made.rows].tolist()
        return p.Reserved(
            number, made.refused, [suffixes[k[32:]] for k in made.keys], list(made.depths), self._addresses(places)
        )

    def _finish(self, o: p.Finish) -> None:
        reservation = self._session(o.session).reservation(o.reservation)
        if o.sealed:
            reservation.seal()
        else:
            reservation.abort()
        del self._session(o.session).reservations[o.reservation]

    def _pin(self, o: p.Pin) -> int:
        return self._session(o.session).desk.pin(_Names(o.digests), o.stop, 1 if o.step > 0 else -1)

    def _drop(self, o: p.Drop) -> int:
        session, number = self._session(o.session), next(self._numbers)
        names = _Names(o.digests)
        keys = [k for g in session.layout.groups for k in names.keys(g.suffix)[o.start :]]
        found = 0

        def done(failed: int) -> None:
            self._host.soon(lambda: self.tell(p.Ended(number, found, f"{failed}" if failed else "")))

        found = self._store.pipeline.drop(keys, done)
        return number

    def _flush(self, _: p.Flush) -> int:
        number = next(self._numbers)

        def flush() -> None:
            self._store.flush()
            self._host.soon(lambda: self.tell(p.Ended(number)))

        self._host.loop.run_in_executor(None, flush)
        return number

    def _statistics(self, _: p.Statistics) -> Any:
        return msgspec.to_builtins(self._store.statistics())

    def _follow(self, o: p.Follow) -> None:
        if o.on and self._unfollow is None:
            self._unfollow = self._store.follow(self._happened)
        elif not o.on and self._unfollow is not None:
            self._unfollow()
            self._unfollow = None

    def _unmapped(self, o: p.Unmapped) -> None:
        self._host.ledger.unmapped(self.name, o.names)

    def _happened(self, event: Event) -> None:
        keys = [bytes(k) for k in event.keys]
        notice: p.Notice = (
            p.Stored(event.tier, keys) if isinstance(event, BlockStored) else p.Removed(event.tier, keys, event.reason)
        )
        self._host.soon(lambda: self.tell(notice))

    def tell(self, notice: p.Notice) -> None:
        if self.notices is not None:
            self.notices.send(notice)

    # -- the end ------------------------------------------------------------------------------------------

    def _lost(self) -> None:
        """The socket was closed: the rights stay until the process cannot use them any more."""
        self._forget()
        if self._unfollow is not None:
            self._unfollow()
            self._unfollow = None
        for transfer in list(self._loads.values()):
            transfer.cancel()
        if self.notices is not None:
            self.notices.close()
        if not self.rights:
            self._end()
            return
        log.info("client %d is gone with %d rights; they wait for its death", self._connection.pid, self.rights)
        self._host.loop.add_reader(self._pidfd, self._died)

    def _died(self) -> None:
        self._host.loop.remove_reader(self._pidfd)
        self._end()

    def _end(self) -> None:
        for session in self._sessions.values():
            session.end()
        self._sessions.clear()
        os.close(self._pidfd)
        self._host.ledger.left(self.name)
        self._host.left(self)


_ANSWERS: dict[type, Callable[[Guest, Any], Any]] = {
    p.Open: Guest._open,
    p.Close: Guest._close,
    p.Match: Guest._match,
    p.Load: Guest._load,
    p.Cancel: Guest._cancel,
    p.Collect: Guest._collect,
    p.Release: Guest._release,
    p.Reserve: Guest._reserve,
    p.Finish: Guest._finish,
    p.Pin: Guest._pin,
    p.Drop: Guest._drop,
    p.Flush: Guest._flush,
    p.Statistics: Guest._statistics,
    p.Follow: Guest._follow,
    p.Unmapped: Guest._unmapped,
}
