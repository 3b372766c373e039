"""The node's side of one client: its sessions, the rights that it holds, and the answers to its requests.

A *right* is permission to use slots of the node's memory: a prefix lease, a reservation, or a worker's use of either.
When they are given back although the client has not done so: ``client_exit.py``.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from types import GeneratorType
from typing import Any

import msgspec

from kvtide.counts import Count
from kvtide.errors import KvtideError, LayoutError, RightError
from kvtide.index import work_slices
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.index.lease import Reservation
from kvtide.node import protocol as p
from kvtide.node import work_limits
from kvtide.node.roles import NEEDS, Role
from kvtide.node.server.access import Access
from kvtide.node.server.client_exit import ClientExit
from kvtide.node.server.client_groups import ClientGroups
from kvtide.node.server.connection import Connection
from kvtide.node.server.forget import erase
from kvtide.node.server.handler_context import NodeContext
from kvtide.node.server.notices import NoticeSender
from kvtide.node.server.segments import SegmentExporter
from kvtide.node.server.session import ClientMemory, ServerSession, WireBlockNames
from kvtide.node.server.workers import ServerWorkerGroup
from kvtide.plan.prefill import PrefillCost
from kvtide.plan.usage_tracker import TURNS
from kvtide.security.key_ring import OWN
from kvtide.store.backend import LocalBackend, LocalPrefixLease
from kvtide.store.forget import Forgotten
from kvtide.store.node_statistics import ClientStatistics, ModelStatistics
from kvtide.transfer.pipeline import DropRequest, Expiring
from kvtide.transfer.write_results import Flushed, by_value

__all__ = ["LARGEST_PART", "ClientHandler"]

log = logging.getLogger("kvtide.node")

_SESSIONS = 4096
LARGEST_PART = 1 << 30
"""Maximum bytes of one reservation. Taking more memory from the system would make the other clients wait."""
_RANKS = 4096
"""Maximum number of workers of one session."""
_SUFFIX = 16
"""Maximum bytes of a key after its digest: records have no space for more."""
_LARGEST = 1 << 40
"""Upper limit of a block's bytes: offsets of slots have 40 bits."""
_STATUS = 4 << 20
"""Maximum bytes of the statistics: a connection with more than 8 MiB unsent is closed."""
_MODELS = 16
"""Maximum number of models listed in the statistics of one client."""
_SHORT = 1 << 13
"""Maximum bytes of a request that is executed in one step, if it is only a match."""
_WHOLE = 1 << 16
"""Maximum bytes of a request that is decoded in one go. Short numbers in long lists take much longer to decode than
their bytes suggest."""
_DAY = 86400.0
"""Maximum seconds until the expected next use of a prompt."""
_GROWING = 1.0
"""Seconds that a client waits for memory that is being taken from the system, before it gets what is available. A
client waits for any answer at most twice that long."""
_TRIES = 4
"""How often a reservation is tried for a client that waits for memory."""
_PAST = 2048
"""Units to explain a past request. Its blocks are not counted: their reasons are found out only once."""
_DESCRIPTORS = 64
"""Maximum number of descriptors in one frame."""


_TEXT = 1000
"""Maximum characters of an error message sent to a client: it may contain what the client sent."""
_FAULT = "client %d could not be served: %s"
_UNSTORED: dict[p.DropReason, Count] = {
    "memory": Count.STORE_NO_MEMORY_YET,
    "late": Count.STORE_NODE_LATE,
    "pages": Count.STORE_ENGINE_PAGES,
}
_RAW = msgspec.msgpack.Decoder(p.RawRequest)
_OPERATION: msgspec.msgpack.Decoder[p.Operation] = msgspec.msgpack.Decoder(p.Operation)


class ClientHandler:
    """One connected client: its process, its access, its sessions and rights."""

    def __init__(
        self,
        host: NodeContext,
        connection: Connection,
        access: Access,
        name: str,
        token: str,
        pidfd: int,
        features: frozenset[str] = frozenset(),
    ) -> None:
        """``features``: the features that both the client and the node support."""
        self._tokens_from_start = p.TOKENS_FROM_START in features
        self._left = self._spent = 0
        """Units of work that the current request may still take, and units spent in its current step."""
        self._context = host
        self._store = host.store
        self._connection = connection
        self._access = access
        self._previous_lost = connection.lost
        self.name = name
        """The name that the client chose; it stays the same when the node is restarted."""
        self.token = token
        self._exit = ClientExit(host.loop, pidfd, self._ending)
        self._numbers = host.numbers
        self._session_identities: Counter[int] = Counter()
        """Fingerprints of the identities (model and tenant) that its sessions are for, with the number of sessions of
        each."""
        mine = None if access.role is Role.ADMIN else self._session_identities
        self.notices = NoticeSender(host.store.feed, host.soon, self._numbers, access.tag, mine)
        self._sessions: dict[int, ServerSession] = {}
        self._exporter = SegmentExporter(host.store, access.role >= Role.WRITE)
        self._groups = ClientGroups(host.worker_groups, self._exporter, self._numbers, access)
        memory = sum(partition.config.dram.budget for partition in host.store.partitions)
        self._account = ClientMemory(int(memory * host.store.config.node.client_share))
        self._decoder = msgspec.msgpack.Decoder(p.Request)
        self._connected_at = host.loop.time()
        self.requests = self.failures = 0
        self._encoded_statistics = msgspec.Raw()
        """The encoded statistics, computed during the request number ``_encoded_at``."""
        self._encoded_at = 0
        self._lost_blocks = host.store.lost
        """Blocks that the node lost unwritten, as last reported to this client."""
        connection.receive = self._receive
        connection.lost = self._lost

    @property
    def process(self) -> int:
        return self._connection.pid

    @property
    def domain(self) -> int:
        return self._access.domain

    @property
    def rights(self) -> int:
        return sum(s.rights for s in self._sessions.values()) + self._groups.visits

    def statistics(self) -> ClientStatistics:
        c, age, sessions = self._connection, self._context.loop.time() - self._connected_at, self._sessions.values()
        reading, writing = sum(len(s.holdings) for s in sessions), sum(s.rights - len(s.holdings) for s in sessions)
        rights = len(sessions), reading, writing, self._groups.visits
        slots = 0 if c.open else sum(s.slots for s in sessions)
        # Each model once, and only a few of them: the statistics of all clients must fit into one answer.
        models = {(s.model.namespace, s.layout.digest): s.model for s in sessions if s.model is not None}
        return ClientStatistics(
            c.pid,
            c.open,
            age,
            *rights,
            self.requests,
            self.failures,
            c.unsent_bytes,
            slots,
            list(models.values())[:_MODELS],
        )

    # -- requests -----------------------------------------------------------------------------------------

    def _receive(self, body: bytes | memoryview) -> Iterator[int] | int:
        """Execute a request and answer it. Returns the work as steps, or the units it took if it is done; see
        ``work_limits.py``."""
        self.requests += 1
        if len(body) > _WHOLE:  # then each operation is decoded just before it is executed
            raw = _RAW.decode(body)
            return self._in_steps(raw.number, raw.operations)
        try:
            request = self._decoder.decode(body)
        except msgspec.DecodeError:
            raw = _RAW.decode(body)
            return self._in_steps(raw.number, [self._understood(operation) for operation in raw.operations])
        operations = request.operations
        if len(body) <= _SHORT and operations and type(match := operations[-1]) is p.Match:
            if len(operations) == 1:
                return self._at_once(request.number, match, None)
            if len(operations) == 2 and type(release := operations[0]) is p.Release and len(release.holdings) == 1:
                return self._at_once(request.number, match, release)
        return self._in_steps(request.number, operations)

    def _at_once(self, number: int, match: p.Match, release: p.Release | None) -> int:
        """Execute the request that engines send at every step: a match, and the release of the previous step's lease.
        It is so short that other clients need not be served in between."""
        self._left, self._spent = work_limits.FRAME, 2 * work_limits.OPERATION
        if release is None:
            self._reply(number, [self._answer(match)])  # type: ignore[list-item]  # not an iterator: see _match
        elif self._account.ample:  # enough of the client's share is left: the answer goes first
            self._reply(number, [None, self._answer(match)])  # type: ignore[list-item]
            self._answer(release)
        else:
            self._reply(number, [self._answer(release), self._answer(match)])  # type: ignore[list-item]
        return self._spent

    def _in_steps(self, number: int, operations: Sequence[p.Operation | p.Failure | msgspec.Raw]) -> Iterator[int]:
        # A caller waits for the match, but not for the releases sent with it: they are executed after the reply.
        late = p.Release if operations and type(operations[-1]) is p.Match and self._account.ample else None
        answers: list[p.Answer] = []
        self._left, self._spent = work_limits.FRAME, 0
        for operation in operations:
            if self._spent >= work_limits.STEP:
                yield self._step()
            if type(operation) is late:
                answers.append(None)
                continue
            self._spent += work_limits.OPERATION
            if type(operation) is msgspec.Raw:
                self._spent += len(memoryview(operation)) // work_limits.NUMBERS
                operation = self._understood(operation)
            if type(operation) is p.Failure:
                self.failures += 1
                answers.append(operation)
                continue
            answer = self._answer(operation)
            if isinstance(answer, GeneratorType):
                answer = yield from self._in_slices(type(operation), answer)
            answers.append(answer)  # type: ignore[arg-type]  # every iterator that a handler returns is a generator
        self._reply(number, answers)
        if late is not None:
            for operation in operations[:-1]:
                if type(operation) is late:
                    if self._spent >= work_limits.STEP:
                        yield self._step()
                    answer = self._answer(operation)
                    if isinstance(answer, GeneratorType):
                        yield from self._in_slices(late, answer)
        yield self._spent

    def _step(self) -> int:
        spent, self._spent = self._spent, 0
        return spent

    def _charge(self, units: int) -> None:
        """Count the work of an operation before it is executed. Raises LayoutError if it is too much for one
        request."""
        first = self._left >= work_limits.FRAME  # never refused: it can be sent in a request of its own
        if units > self._left and units and not first:
            raise LayoutError(
                f"the operations of one request may take {work_limits.FRAME} units of work together, and those before "
                "this one took most of them; send it in a request of its own (docs/protocol.md tells what counts)"
            )
        self._left -= units
        self._spent += units

    def _in_slices(self, kind: type, steps: Iterator[p.Answer]) -> Generator[int, None, p.Answer]:
        """Execute an operation that is done in slices: each step yields its number of units, the last one the
        answer."""
        try:
            last = next(steps)
            for step in steps:
                assert isinstance(last, int)
                yield last if last == work_limits.PAUSE else self._step() + last
                last = step
            return last
        except KvtideError as e:
            return self._refused(e)
        except Exception:
            log.exception(_FAULT, self._connection.pid, _name(kind))
            return self._faulty(kind)

    @staticmethod
    def _understood(raw: msgspec.Raw) -> p.Operation | p.Failure:
        """Decode one operation of a request that could not be decoded as a whole; returns a Failure if this one is
        invalid."""
        try:
            return _OPERATION.decode(raw)
        except msgspec.DecodeError as e:
            return p.Failure(LayoutError.__name__, f"the node does not understand this operation: {e}")

    def _answer(self, operation: p.Operation | p.Failure) -> p.Answer | Iterator[p.Answer]:
        kind = type(operation)
        try:
            if self._access.role < NEEDS[kind]:
                who = f"user {self._connection.uid}"
                raise self._context.refusals.refuse(who, self._access.role, _name(kind), NEEDS[kind])
            return _ANSWERS[kind](self, operation)
        except KvtideError as e:
            return self._refused(e)
        except Exception:
            log.exception(_FAULT, self._connection.pid, _name(kind))
            return self._faulty(kind)

    def _refused(self, e: KvtideError) -> p.Failure:
        self.failures += 1
        return p.Failure(type(e).__name__, str(e)[:_TEXT])

    def _faulty(self, kind: type) -> p.Failure:
        """The failure to answer after a bug in the node: only this operation fails."""
        self.failures += 1
        return p.Failure(KvtideError.__name__, f"the node failed at {_name(kind)}; its log says why")

    def _reply(self, number: int, answers: list[p.Answer]) -> None:
        """Send the answers, with descriptors of the segments that they refer to and the client does not have yet."""
        gone, new = self._exporter.gone(), self._exporter.take_new()
        if not new:
            self._connection.send(p.Reply(number, answers, [], gone))
            return
        try:
            self._context.mapped_memory.lent(
                self.name, self._connection.pid, [n.serial for n in new], [n.nbytes for n in new]
            )
        except OSError:
            for lent in new:
                os.close(lent.fd)
            raise
        while len(new) > _DESCRIPTORS:
            first, new = new[:_DESCRIPTORS], new[_DESCRIPTORS:]
            self._connection.send(p.Reply(0, [], [n.serial for n in first]), [n.fd for n in first])
        reply = p.Reply(number, answers, [n.serial for n in new], gone)
        self._connection.send(reply, [n.fd for n in new])

    def _session(self, number: int) -> ServerSession:
        try:
            return self._sessions[number]
        except KeyError:
            raise RightError(f"there is no session {number}") from None

    def _open(self, o: p.Open) -> int:
        self._charge(len(o.groups) * work_limits.GROUP)
        try:
            layout = p.layout_of(o.groups, o.block_tokens)
        except ValueError as e:
            raise LayoutError(str(e)) from e
        if (len(o.namespace), len(o.tenant)) != (32, 16) or o.tenant == OWN:
            raise LayoutError("a namespace has 32 bytes and a tenant's tag 16, not all zero")
        if any(len(g.suffix + self._access.tag) > _SUFFIX for g in layout.groups):
            most = _SUFFIX - len(self._access.tag)
            raise LayoutError(f"the names of a layout's groups have at most {most} letters here")
        if any(geometry.footprint >= _LARGEST for geometry in layout.geometry.values()):
            raise LayoutError(f"a block has less than {_LARGEST} bytes")
        if len(self._sessions) >= _SESSIONS:
            raise RightError(f"this client has {_SESSIONS} sessions; close some")
        number, access = next(self._numbers), self._access
        partition = self._store.partition_of(o.tenant)
        charge = self._account.pins(partition)
        backend = LocalBackend(partition, layout, o.namespace, o.tenant, access.domain, access.tag, charge, o.proof)
        model = ModelStatistics(o.namespace.hex(), layout.groups) if o.tenant == DEFAULT_TENANT.tag else None
        self._sessions[number] = ServerSession(backend, self._account, model)
        self._session_identities.update(backend.asker.values())
        if self._store.config.explain.memory:
            note = self._store.known_models.note
            backend.first_use = partial(note, o.tenant, access.tag, o.namespace, o.model)
        return number

    def _close(self, o: p.Close) -> Iterator[p.Answer]:
        session = self._session(o.session)
        yield from self._end_session(session)
        if self._sessions.pop(o.session, None) is not None:
            for whose in session.backend.asker.values():
                self._session_identities[whose] -= 1
                if not self._session_identities[whose]:
                    del self._session_identities[whose]
        yield None

    def _end_session(self, session: ServerSession) -> Iterator[int]:
        """Yields the units of work of each step."""
        if session.worker_group is not None:
            self._withdraw(session.worker_group)
        yield from session.ending()

    def _withdraw(self, worker_group: ServerWorkerGroup) -> None:
        """Let no more workers join. Those that have joined must join again, in another session."""
        if self._context.worker_groups.get(worker_group.token) is worker_group:
            del self._context.worker_groups[worker_group.token]

    def _match(self, o: p.Match) -> p.Matched:
        session = self._session(o.session)
        session.check_rights()
        if o.have < 0 or (o.prefill is not None and not o.prefill >= 0):
            raise LayoutError(f"have is {o.have} and prefill {o.prefill}; neither can be less than 0")
        names, number = self._names(session, o.digests), next(self._numbers)
        names.tokens, have = o.tokens, o.have if o.have < names.blocks else names.blocks
        prefill = o.prefill if o.cost is None else PrefillCost(*o.cost)
        found = session.match(number, names, have, prefill, o.again, o.record, o.request)
        return p.Matched(
            number,
            found.plan.blocks,
            found.plan.load_seconds,
            found.plan.compute_seconds,
            [len(rows) for rows in found.part.rows.values()],
            found.ready,
            found.pending,
            # If the session has workers, they read the blocks: the client's own process need not map the memory.
            self._ready_slots(session, found) if found.ready and session.worker_group is None else None,
            found.held,
            found.plan.slower,
            found.plan.slower_load,
            found.plan.slower_compute,
        )

    def _find(self, o: p.Find) -> p.Found:
        session = self._session(o.session)
        return p.Found(session.backend.find(self._names(session, o.digests)))

    def _absent(self, o: p.Absent) -> bool:
        session = self._session(o.session)
        return session.backend.is_absent(self._names(session, o.digests))

    def _missed(self, o: p.Missed) -> None:
        session = self._session(o.session)
        session.backend.missed(self._names(session, o.digests), o.tokens, o.request)

    def _describe(self, o: p.Describe) -> None:
        session, events = self._session(o.session), self._context.events
        blocks, rest = divmod(len(o.digests), 32)
        wrong = rest or len(o.parent) != 32 or len(o.tokens) not in (0, 4 * session.layout.block_tokens * blocks)
        if wrong or blocks > work_limits.BLOCKS:
            raise LayoutError("a description has 32 bytes for each block and its parent, and all their tokens or none")
        self._charge(blocks)
        if events is None or not blocks or len(o.tokens) < 4 * (events.wants == 2):
            return
        if not session.described:
            session.described, session.source = True, events.source(session.backend)
        if session.source is not None:
            events.describe(session.source, o.parent, o.digests, o.tokens)

    def _explain(self, o: p.Explain) -> Any:
        session = self._session(o.session)
        if o.past:  # all remembered requests may have to be looked at, and one be explained
            self._charge(_PAST + len(self._store.recent_requests))
        names = self._names(session, b"" if o.past else o.digests)
        self._charge(names.blocks * len(session.layout.groups))  # besides looking them up: their records
        answer = session.explained(o, names)
        self._charge(len(memoryview(answer)) // work_limits.ANSWER_BYTES)
        return answer

    def _models(self, o: p.Models) -> dict[str, list[bytes]]:
        found = self._store.known_models.of(o.tenant, self._access.tag)
        self._charge(work_limits.GROUP + sum(map(len, found)) // work_limits.ANSWER_BYTES)
        return {"models": found}

    def _names(self, session: ServerSession, digests: bytes, tokens: bytes = b"", first: int = 0) -> WireBlockNames:
        """The blocks that a request names; charges their work. ``first`` is the block whose tokens come first in
        ``tokens``."""
        layout = session.layout
        groups = len(layout.groups)
        names = WireBlockNames(digests, groups, tokens, 4 * layout.block_tokens, self._access.tag, first)
        units = names.blocks * groups
        if units > self._left:
            self._charge(units)
        else:
            self._left -= units
            self._spent += units
        return names

    def _ready_slots(self, session: ServerSession, holding: LocalPrefixLease) -> list[p.Slots]:
        part = holding.part
        if part.note is None:
            part.note = self._exporter.slots(session.backend, holding).slots
        else:
            session.backend.partition.dram.count_bytes(read=part.nbytes)
        slots: list[p.Slots] = part.note
        return slots

    def _load(self, o: p.Load) -> Iterator[int]:
        session = self._session(o.session)
        if o.deadline is not None and math.isnan(o.deadline):
            raise LayoutError("a deadline is a number of seconds, not nan")
        holding = session.holding(o.holding)
        if not holding.ready:
            self._charge(len(holding.part.all))
            self._left -= len(holding.part.all) * (work_limits.MOVE - 1)  # spent slice by slice
        number = self.notices.completion()
        transfer, slices = session.backend.begin_load(holding, o.deadline, work_limits.SLICE, wait=False)
        self.notices.follow_load(number, transfer, holding)
        if transfer.deadline is not None:
            left = max(0.0, transfer.deadline - self._store.clock.monotonic())
            timer = self._context.loop.call_later(left, transfer.cancel)
            transfer.on_end(lambda: self._context.soon(timer.cancel))
        end = time.monotonic() + _GROWING
        for count in slices:
            if not count and time.monotonic() >= end:
                transfer.cancel()  # this client's other requests wait behind it; what has been loaded by now is used
            yield count * work_limits.MOVE or work_limits.PAUSE
        yield number

    def _cancel(self, o: p.Cancel) -> None:
        self.notices.cancel(o.load)

    def _collect(self, o: p.Collect) -> p.Collected:
        session = self._session(o.session)
        holding = session.holding(o.holding)
        self._charge(len(holding.part.all))
        return self._exporter.slots(session.backend, holding)

    def _release(self, o: p.Release) -> Iterator[p.Answer] | None:
        # Giving back is counted as work, but never refused.
        session = self._session(o.session)
        if len(o.holdings) == 1:
            self._spent += 1 + session.release(o.holdings[0]) // work_limits.MOVE
            return None
        return self._release_many(session, o.holdings)

    def _release_many(self, session: ServerSession, holdings: list[int]) -> Iterator[p.Answer]:
        units = 0
        for number in holdings:
            units += 1 + session.release(number) // work_limits.MOVE
            if units >= work_limits.STEP:
                yield units
                units = 0
        yield units
        yield None

    def _reserve(self, o: p.Reserve) -> p.Reserved | Iterator[p.Answer]:
        session = self._session(o.session)
        session.check_rights()
        layout = session.layout
        names = self._names(session, o.digests, o.tokens, o.start if self._tokens_from_start else 0)
        known = set(o.groups) <= set(range(len(layout.groups))) and len(set(o.groups)) == len(o.groups)
        if not 0 <= o.start <= o.stop <= names.blocks or not known:
            raise LayoutError(f"blocks {o.start} to {o.stop} of groups {o.groups} are not in this prompt")
        if not -100 <= o.priority <= 100 or (o.ttl is not None and not o.ttl > 0):
            raise LayoutError(f"priority {o.priority} or ttl {o.ttl} is out of range")
        self._spent += len(o.writers)
        if o.writers and (
            session.worker_group is None or any(not 0 <= w < session.worker_group.ranks for w in o.writers)
        ):
            raise LayoutError(f"of {len(o.writers)} ranks, some are not among those that were invited to this session")
        groups = [layout.groups[g] for g in o.groups]
        after = session.reservation(o.after) if o.after is not None else None
        each = sum(layout.geometry[g.name].footprint for g in groups)
        room = min(self._account.room, LARGEST_PART)
        most = work_limits.RESERVED // max(1, len(groups))
        stop = min(o.stop, o.start + min(most, max(0, room) // max(1, each)))
        keep = max(0, self._account.keeps)
        units = max(0, stop - o.start) * len(groups) * work_limits.MOVE
        self._left -= units
        self._spent += units
        reserve = partial(
            session.backend.reserve, groups, names, o.start, stop, o.ttl, o.priority, keep=keep, wait=False
        )
        made = reserve(after=after)
        if o.after is not None:
            del session.reservations[o.after]
        refused = (o.stop - stop) * len(groups)
        if refused:
            session.beyond_share(groups, names, stop, o.stop)
        if made.later and o.wait:
            return self._reserve_later(o, session, made, reserve, refused)
        return self._reserved(o, session, made, refused)

    def _reserve_later(
        self, o: p.Reserve, session: ServerSession, made: Reservation, reserve: Callable[[], Reservation], refused: int
    ) -> Iterator[p.Answer]:
        """Let this client wait until there is memory for its reservation, while the other clients are served."""
        end, dram = time.monotonic() + _GROWING, session.backend.partition.dram
        for _ in range(_TRIES):  # each try is as much work as the first
            needed = (len(made.keys) + made.later) * max(g.footprint for g in session.layout.geometry.values())
            made.abort()
            yield work_limits.PAUSE
            while not dram.in_hand(needed) and time.monotonic() < end:
                yield work_limits.PAUSE
            made = reserve()
            if not made.later or time.monotonic() >= end:
                break
        yield self._reserved(o, session, made, refused)

    def _reserved(self, o: p.Reserve, session: ServerSession, made: Reservation, refused: int) -> p.Reserved:
        made.refused += refused
        if o.wait:
            session.backend.partition.pipeline.counts[Count.STORE_NO_MEMORY_YET] += made.later
        number = next(self._numbers)
        session.reserve(number, made, o.writers)
        return self._exporter.reserved(number, made, session.backend, addressed=not o.writers)

    def _not_stored(self, o: p.NotStored) -> None:
        self._store.main.pipeline.counts[_UNSTORED[o.reason]] += o.blocks

    def _finish(self, o: p.Finish) -> None:
        worker_group = self._session(o.session).worker_group
        if worker_group is not None and not o.sealed and worker_group.abort(o.reservation):
            return
        reservation = self._session(o.session).reservation(o.reservation)
        self._spent += len(reservation.keys) * work_limits.MOVE
        if o.sealed:
            reservation.seal()
        else:
            reservation.abort()
        del self._session(o.session).reservations[o.reservation]

    # -- an engine of several processes -------------------------------------------------------------------

    def _invite(self, o: p.Invite) -> None:
        session = self._session(o.session)
        if session.worker_group is not None or o.token in self._context.worker_groups or len(o.token) < 16:
            raise RightError("a session is opened to workers once, with a token of its own")
        if not 1 <= o.ranks <= _RANKS:
            raise RightError(f"a session has 1 to {_RANKS} workers, not {o.ranks}")
        session.worker_group = ServerWorkerGroup(
            session.backend, session.holdings, o.token, o.ranks, self._access.domain
        )
        self._context.worker_groups[o.token] = session.worker_group

    def _leave(self, o: p.Leave) -> None:
        self._spent += self._groups.leave(o)

    # -- keeping, removing, watching ----------------------------------------------------------------------

    def _pin(self, o: p.Pin) -> Iterator[int]:
        session = self._session(o.session)
        names, step = self._names(session, o.digests), 1 if o.step > 0 else -1
        most = max(g.footprint for g in session.layout.geometry.values())
        if step > 0 and len(range(names.blocks)[: o.stop]) * len(session.layout.groups) * most > self._account.room:
            yield 0
            return
        count, each = 0, len(session.layout.groups)
        self._left -= names.blocks * each * (work_limits.MOVE - 1)  # spent slice by slice
        for part in names.parts(0, o.stop, max(1, work_limits.SLICE // each)):
            yield part.blocks * each * work_limits.MOVE
            count += session.pin(part, None, step)
        yield count

    def _drop(self, o: p.Drop) -> Iterator[int]:
        session = self._session(o.session)
        names, groups = self._names(session, o.digests), session.layout.groups
        self._left -= names.blocks * len(groups) * (work_limits.MOVE - 1)  # spent slice by slice
        number = self.notices.completion()
        keys = [k for g in groups for k in names.keys(g.suffix)[o.start :]]

        def done(failed: int) -> None:
            self._context.soon(lambda: self.notices.keep(number, drop.found, f"{failed}" if failed else ""))

        drop = DropRequest(session.backend.partition.pipeline, keys, done, who=session.backend.asker)
        yield from self._all_of(drop.step)
        yield number

    def _expire(self, o: p.Expire) -> Iterator[int]:
        session = self._session(o.session)
        names = self._names(session, o.digests)
        if not 0 <= o.start <= names.blocks or (o.ttl is not None and not o.ttl > 0):
            raise LayoutError(f"block {o.start} of {names.blocks}, or ttl {o.ttl}, is out of range")
        self._left -= names.blocks * len(session.layout.groups) * (work_limits.MOVE - 1)  # spent slice by slice
        keys, heads = session.backend.expiring(names, o.start)
        number, partition = self.notices.completion(), session.backend.partition

        def done(failed: int) -> None:
            self._context.soon(lambda: self.notices.keep(number, expiring.found, f"{failed}" if failed else ""))

        when, who = session.backend.expiry(o.ttl), session.backend.asker
        expiring = Expiring(partition.pipeline, keys, heads, when, partition.sweep(), done, who)
        yield from self._all_of(expiring.step)
        yield number

    def _expect(self, o: p.Expect) -> None:
        session = self._session(o.session)
        if o.returns_in is not None and not 0 < o.returns_in < math.inf:
            raise LayoutError(f"returns_in is {o.returns_in}, not a time to come")
        returns_in = None if o.returns_in is None else min(o.returns_in, _DAY)
        session.backend.expect(self._names(session, o.digests), TURNS.get(o.turn), returns_in)

    def _all_of(self, step: Callable[[], bool]) -> Iterator[int]:
        """Call ``step``, which does one slice of the index's, until it returns False; then the request's next operation
        follows."""
        try:
            while step():
                yield work_slices.SLICE * work_limits.MOVE
        except GeneratorExit:
            # The client hung up. Blocks that are half dropped would come back, so the work is still completed.
            self._in_turns(step)
            raise
        self._spent += work_slices.SLICE * work_limits.MOVE

    def _in_turns(self, step: Callable[[], bool]) -> None:
        """Call ``step`` until it returns False, and serve the other clients in between."""
        if step():
            self._context.loop.after_others(lambda: self._in_turns(step))

    def _flush(self, o: p.Flush) -> int:
        if o.blocks:
            return self._persist(o)
        number = self.notices.completion()

        def done(found: Flushed) -> None:
            if not found.complete:
                self.notices.keep(number)
                return
            # Lost blocks are reported once to each client, whichever other clients flush.
            before, self._lost_blocks = self._lost_blocks, self._store.lost
            lost = by_value(self._lost_blocks - before)
            self.notices.end(p.Ended(number, written=found.written, unwritten=by_value(found.unwritten), lost=lost))

        self._context.flush(done)
        return number

    def _persist(self, o: p.Flush) -> int:
        session = self._session(o.session)
        names, groups = self._names(session, o.digests), session.layout.groups
        known = len({group for group, _, _ in o.blocks}) == len(o.blocks)
        if not known or not all(0 <= g < len(groups) and 0 <= a <= b <= names.blocks for g, a, b in o.blocks):
            raise LayoutError(f"some of the blocks that are to be durable are not in this prompt of {names.blocks}")
        number, account = self.notices.completion(), self._account
        room = max(0, account.room)
        wanted = {groups[group].name: range(first, stop) for group, first, stop in o.blocks}
        held = min(room, sum(len(some) * session.layout.geometry[name].footprint for name, some in wanted.items()))
        account.charge(held)
        persisting = session.backend.persist(names, wanted, held)

        def ended() -> p.Ended:
            account.charge(-held)
            found = persisting.result()
            numbers = {group.name: i for i, group in enumerate(groups)}
            failed = [(numbers[name], i, why.value) for name, some in found.failed.items() for i, why in some.items()]
            return p.Ended(number, written=found.durable, failed=failed)

        self.notices.follow_persist(number, persisting.transfer, ended)
        return number

    def _forget_tenant(self, o: p.ForgetTenant) -> int:
        number, c = self.notices.completion(), self._connection

        def ended(forgotten: Forgotten, failure: str) -> None:
            announced = forgotten.announced
            self.notices.end(p.Ended(number, forgotten.blocks, failure, forgotten.held, announced=announced))

        erase(self._context.store, self._context.soon, o.tenant, f"user {c.uid}, process {c.pid}", ended)
        return number

    def _drain(self, o: p.Drain) -> bool:
        return self._context.drain(o.resume)

    def _statistics(self, _: p.Statistics) -> Any:
        # Computed once per frame: a thousand of them in one frame would make the other clients wait for a second.
        if self._encoded_at != self.requests:
            self._encoded_at = self.requests
            status = self._context.status(None if self._access.role is Role.ADMIN else self.domain)
            self._encoded_statistics = msgspec.Raw(msgspec.msgpack.encode(status))
        if len(memoryview(self._encoded_statistics)) > _STATUS:
            raise RightError("there are too many clients and models for one answer; ask the node's /metrics")
        self._charge(len(memoryview(self._encoded_statistics)) // work_limits.ANSWER_BYTES)
        return self._encoded_statistics

    def _follow(self, o: p.Follow) -> None:
        self.notices.follow(o.on)

    def _unmapped(self, o: p.Unmapped) -> None:
        self._spent += len(o.names)
        self._context.mapped_memory.unmapped(self.name, o.names)

    def _end_earlier_rights(self, o: p.EndEarlierRights) -> None:
        if o.token != self.token:
            self._context.forget(o.token, self.process)

    # -- the end ------------------------------------------------------------------------------------------

    def _lost(self) -> None:
        """The socket was closed: the rights are kept until the process cannot use them any more."""
        self._previous_lost()
        self._exporter.close()
        self.notices.close()
        self._groups.lost()
        for session in self._sessions.values():
            if session.worker_group is not None:
                self._withdraw(session.worker_group)
                session.worker_group.fail()
        if not self.rights:
            self._exit.end()
            return
        log.info(
            "client %d has disconnected with %d rights; they are kept until its process exits",
            self._connection.pid,
            self.rights,
        )
        self._exit.wait()

    def end(self) -> None:
        """The client's process does not use any of these rights any more."""
        self._connection.close()
        self._exit.end()

    def _ending(self) -> Iterator[int]:
        self._groups.end()
        for session in self._sessions.values():
            yield from self._end_session(session)
        self._sessions.clear()
        self._context.mapped_memory.left(self.name)
        self._context.left(self.token, self.domain, self.requests, self.failures)


def _name(kind: type) -> str:
    """The name of an operation in messages, which is its name in the protocol."""
    return str(kind.__struct_config__.tag)  # type: ignore[attr-defined]


_ANSWERS: dict[type, Callable[[ClientHandler, Any], p.Answer | Iterator[p.Answer]]] = {
    p.Open: ClientHandler._open,
    p.Close: ClientHandler._close,
    p.Match: ClientHandler._match,
    p.Find: ClientHandler._find,
    p.Absent: ClientHandler._absent,
    p.Missed: ClientHandler._missed,
    p.Load: ClientHandler._load,
    p.Cancel: ClientHandler._cancel,
    p.Collect: ClientHandler._collect,
    p.Release: ClientHandler._release,
    p.Reserve: ClientHandler._reserve,
    p.NotStored: ClientHandler._not_stored,
    p.Finish: ClientHandler._finish,
    p.Pin: ClientHandler._pin,
    p.Drop: ClientHandler._drop,
    p.Flush: ClientHandler._flush,
    p.ForgetTenant: ClientHandler._forget_tenant,
    p.Statistics: ClientHandler._statistics,
    p.Follow: ClientHandler._follow,
    p.Unmapped: ClientHandler._unmapped,
    p.Invite: ClientHandler._invite,
    p.Join: lambda handler, o: handler._groups.join(o, handler._charge),
    p.Visit: lambda handler, o: handler._groups.visit(o, handler._charge),
    p.Fill: lambda handler, o: handler._groups.fill(o, handler._charge),
    p.Leave: lambda handler, o: handler._leave(o),
    p.Resign: lambda handler, o: handler._groups.resign(o),
    p.EndEarlierRights: ClientHandler._end_earlier_rights,
    p.Expire: ClientHandler._expire,
    p.Expect: ClientHandler._expect,
    p.Explain: ClientHandler._explain,
    p.Models: ClientHandler._models,
    p.Drain: ClientHandler._drain,
    p.Describe: ClientHandler._describe,
}
