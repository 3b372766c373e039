"""The Backend of a store that runs in a node, reached over a socket.

While no node is available, every call behaves as with an empty store: nothing is found and nothing is stored.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

import msgspec
import numpy as np

from kvtide.block import BlockKey, Group, Layout, Span
from kvtide.clock import Clock
from kvtide.errors import AccessError, KvtideError, RightError, TierError
from kvtide.index.keys import Chain, Model, Tenant
from kvtide.index.lease import Reservation
from kvtide.interrupts import again_if_interrupted
from kvtide.node import protocol as p
from kvtide.node.client.completions import Completion
from kvtide.node.client.link import NodeLate, NodeLink, NodeUnavailable
from kvtide.plan.planner import Plan
from kvtide.plan.prefill import Prefill, PrefillCost
from kvtide.plan.usage_tracker import Turn
from kvtide.serial_executor import SerialExecutor
from kvtide.store.backend import BlockNames, CollectedBlocks, PersistRequest, PrefixLease, persisted
from kvtide.store.explanation import ExplainedBlocks, Explanation, Why
from kvtide.store.known_models import describe
from kvtide.transfer.transfer import Transfer
from kvtide.transfer.write_results import Persisted, Unwritten

__all__ = ["RemoteBackend", "absent_each", "find_each"]

_FIRST_PART = 128 << 20
_REST = 1 << 16
"""Maximum bytes of a reservation's message besides digests and token ids."""
_NO_ROWS = np.zeros(0, np.int64)
_DESCRIBED = 1 << 16
"""Blocks that a session remembers to have described. If there are more, it describes them again."""
_DESCRIBED_FOR = 60.0
"""Seconds after which it does so too: the node may have had no room for a description, or have forgotten it because the
block was nowhere for some time."""
_DESCRIPTION = 1 << 20
"""Maximum bytes of the token ids of one description."""

T = TypeVar("T", bound="Transfer | Completion")


class LinkOwner(Protocol):
    """The client that a RemoteBackend belongs to."""

    clock: Clock
    deadline: float
    calls: SerialExecutor

    @property
    def link(self) -> NodeLink:
        """The link to the current node. Raises NodeUnavailable."""

    def promised(self, link: NodeLink, operation: p.Operation, completion: T) -> T:
        """Send an operation whose end the node will report to ``completion``."""

    def models(self, tenant: bytes) -> list[bytes]:
        """See ``Client.models``. Raises NodeUnavailable."""

    def settle(self) -> None:
        """A right of a lost link is not used any more."""


class RemotePrefixLease(PrefixLease):
    """A prefix lease at the node, known by its number."""

    __slots__ = ("_backend", "_counts", "_layout", "_loads", "_matched", "link", "number", "slots")

    def __init__(self, backend: RemoteBackend, link: NodeLink | None, have: int, found: p.Matched) -> None:
        """``link`` is None for the result of a match without a node."""
        slower = found.slower_load, found.slower_compute
        self.plan = Plan(found.blocks, found.load_seconds, found.compute_seconds, found.slower, None, *slower)
        self.have = have
        self.ready = found.ready
        self.pending = found.pending
        self._backend: RemoteBackend | None = backend
        self._layout = backend.layout
        self._counts = found.counts
        self._matched = found.held if found.held >= 0 else found.blocks if found.ready else min(have, found.blocks)
        self._loads: list[Transfer] = []
        self.link = link
        self.number = found.holding
        self.slots = found.slots
        """Where the blocks are, if all are in memory."""

    @property
    def held(self) -> int:
        if self.link is not None and self.slots is None and not self.link.alive:
            return min(self.have, self.plan.blocks)  # without the node, the places of the other blocks are unknown
        reported = [load.report.held for load in self._loads if isinstance(load.report, p.Ended)]
        return max([self._matched, *reported])

    def loaded_by(self, transfer: Transfer) -> None:
        """Follow a load: at its end the node reports how many blocks are in memory."""
        self._loads = [load for load in self._loads if load.report is not None] + [transfer]

    def collected(self, blocks: int) -> None:
        """The node has reported how many blocks are in memory."""
        self._matched = max(self._matched, blocks)

    @property
    def counts(self) -> dict[str, int]:
        return {g.name: n for g, n in zip(self._layout.groups, self._counts, strict=True)}

    @property
    def released(self) -> bool:
        return self._backend is None

    def release(self) -> None:
        backend, self._backend, self.slots = self._backend, None, None
        if backend is not None and self.link is not None:
            again_if_interrupted(partial(backend.release, self.link, self.number))


class _RemoteReservation(Reservation):
    """A reservation at the node, by its number; ``link`` is None when its end need not be reported."""

    __slots__ = ("link", "number")

    def __init__(
        self,
        keys: Sequence[BlockKey],
        views: Sequence[Span],
        depths: Sequence[int],
        finish: Callable[[Reservation, bool], None],
    ) -> None:
        super().__init__(keys, _NO_ROWS, views, depths, [], finish)
        self.link: NodeLink | None = None
        self.number = 0


class RemoteBackend:
    """The Backend of a store that runs in a node."""

    def __init__(self, client: LinkOwner, model: Model, tenant: Tenant) -> None:
        self._client = client
        self.layout: Layout = model.layout
        groups, size = p.describe(model.layout), model.layout.block_tokens
        namespace, about = model.namespace(tenant), describe(model, tenant)
        self._opening = p.Open(groups, size, namespace, tenant.tag, about, tenant.proof)
        self._lock = threading.Lock()
        self._link: NodeLink | None = None
        self._number = 0
        self._first_life = ""
        """The run of the node (``Welcome.life``) at which the session was first opened."""
        self._invited: tuple[str, int] | None = None
        self._described: set[bytes] = set()
        """Digests of blocks that were described to the current node lately."""
        self._described_since = 0.0

    @property
    def first_part(self) -> int:
        return _FIRST_PART if self.has_colder else self.largest

    @property
    def has_colder(self) -> bool:
        """Whether the node has tiers below DRAM."""
        try:
            return self._client.link.welcome.colder
        except NodeUnavailable:
            return False

    @property
    def largest(self) -> int:
        try:
            return self._client.link.welcome.largest
        except NodeUnavailable:
            return 0

    def _session(self) -> tuple[NodeLink, int]:
        """The session at the current node; opens it if necessary."""
        if self._link is not None and self._link.alive:
            return self._link, self._number
        with self._lock:
            link = self._client.link
            if link is not self._link:
                number = link.ask_one(self._opening)
                assert isinstance(number, int)
                try:
                    if self._invited is not None:
                        link.ask_one(p.Invite(number, *self._invited))
                except RightError:  # the node has not yet ended the worker group of the last session
                    link.post(p.Close(number))
                    raise NodeUnavailable from None
                except NodeLate:  # this session will not be used
                    link.post(p.Close(number))
                    raise
                self._number = number
                self._described = set()
                self._first_life = self._first_life or link.welcome.life
                self._link = link  # assigned last: a thread that finds it reads the number without the lock
            return link, self._number

    def open(self) -> None:
        """Open the session at the node now instead of at its first use: a node reports events only for blocks of open
        sessions. An error is reported at the first use."""
        with contextlib.suppress(NodeUnavailable, KvtideError):
            self._session()

    def invite(self, token: str, ranks: int) -> None:
        """Let workers join this session, at this node and its successors."""
        with self._lock:
            self._invited, link = (token, ranks), self._link
        with contextlib.suppress(NodeUnavailable):
            if link is self._session()[0]:  # otherwise it was just opened, with the invitation
                link.tell(p.Invite(self._number, token, ranks))

    # -- reading ------------------------------------------------------------------------------------------

    def match(
        self,
        names: BlockNames,
        have: int,
        prefill: Prefill | None,
        again: bool = False,
        record: bool = True,
        request: str = "",
    ) -> RemotePrefixLease:
        try:
            link, session = self._session()
            speed, cost = self._wired(prefill, have, names.blocks)
            had = min(have, names.blocks)
            asked = p.Match(session, names.joined, had, speed, cost, again, names.tokens, record, request)
            found = link.ask_one(asked)
            assert isinstance(found, p.Matched)
            link.own(found.holding, found.slots or ())
            self._describe(link, session, names, found.blocks)
            return RemotePrefixLease(self, link, have, found)
        except NodeUnavailable:
            nothing = [0] * len(self.layout.groups)
            missed = p.Matched(0, min(have, names.blocks), 0.0, None, nothing, True, False, None)
            return RemotePrefixLease(self, None, have, missed)

    def _wired(
        self, prefill: Prefill | None, have: int, blocks: int
    ) -> tuple[float | None, tuple[float, float] | None]:
        """The caller's prefill cost as fields of ``Match``: with the mean speed, for nodes that know only that."""
        if not isinstance(prefill, PrefillCost):
            return prefill, None
        tokens = self.layout.block_tokens
        mean = prefill.speed(min(have, blocks) * tokens, max(1, blocks) * tokens)
        return mean, (prefill.per_token, prefill.per_token_context)

    def find(self, names: BlockNames) -> list[bool]:
        try:
            link, operation = self.finding(names.joined)
            found = link.ask_one(operation)
            assert isinstance(found, p.Found)
            return found.blocks
        except NodeUnavailable:
            return [False] * names.blocks

    def finding(self, digests: bytes) -> tuple[NodeLink, p.Find]:
        """The request that finds the blocks with these digests, and the link to send it over. Raises
        NodeUnavailable."""
        link, session = self._session()
        return link, p.Find(session, digests)

    def explain(self, names: BlockNames, prefill: Prefill | None) -> Explanation:
        why = Why.NO_NODE
        with contextlib.suppress(NodeUnavailable):
            link, session = self._session()
            if p.EXPLAIN in link.welcome.features:
                answer = link.ask_one(p.Explain(session, names.joined, *self._wired(prefill, 0, names.blocks)))
                return self._explanation(answer, link)
            why = Why.NOT_RECORDED
        nothing = (ExplainedBlocks(0, names.blocks, why),) if names.blocks else ()
        return Explanation(names.tokens, self.layout.block_tokens, nothing, self._client.clock.time())

    def explain_request(self, request: str) -> Explanation | None:
        with contextlib.suppress(NodeUnavailable):
            link, session = self._session()
            if p.EXPLAIN in link.welcome.features:
                answer = link.ask_one(p.Explain(session, b"", request=request, past=True))
                return None if answer is None else self._explanation(answer, link)
        return None

    def _explanation(self, answer: object, link: NodeLink) -> Explanation:
        """A node without a disk does not know that it was restarted; a session that is older does."""
        found = msgspec.convert(answer, Explanation)
        return found if link.welcome.life == self._first_life else found.after_restart()

    def models(self) -> list[bytes]:
        with contextlib.suppress(NodeUnavailable):
            return self._client.models(self._opening.tenant)
        return []

    def asking_absent(self, digests: bytes) -> tuple[NodeLink, p.Absent]:
        """The request that finds out whether the prompt with these blocks is absent, and the link to send it over.
        Raises NodeUnavailable, also for a node that does not know this request."""
        link, session = self._session()
        if p.ABSENT not in link.welcome.features:
            raise NodeUnavailable
        return link, p.Absent(session, digests)

    def missed(self, digests: bytes, tokens: int, request: str = "") -> None:
        """Let the node count and record a prompt that was absent. Does not wait for it."""
        with contextlib.suppress(NodeUnavailable, KvtideError):  # a lost count has no other effect
            link, session = self._session()
            if p.ABSENT in link.welcome.features:
                link.later(p.Missed(session, digests, tokens, request))

    def _collected(self, blocks: int, slots: list[p.Slots], link: NodeLink, right: int) -> CollectedBlocks:
        found = {g.name: some for g, some in zip(self.layout.groups, slots, strict=True)}
        sizes = {name: geometry.footprint for name, geometry in self.layout.geometry.items()}
        views = {name: link.spans(some.places, sizes[name], right) for name, some in found.items()}
        return CollectedBlocks(blocks, {name: some.first for name, some in found.items()}, views)

    def release(self, link: NodeLink, holding: int) -> None:
        self._give_back(link, holding, p.Release(self._number, [holding]))

    def _give_back(self, link: NodeLink, right: int, operation: p.Operation, wait: bool = False) -> None:
        link.disown(right)
        try:
            if link is not self._link:
                raise NodeUnavailable
            if wait:
                link.tell(operation)
            else:
                link.later(operation)
        except NodeUnavailable:
            self._client.settle()

    def load(self, holding: RemotePrefixLease, deadline: float | None) -> Transfer:
        transfer = Transfer.within(self._client.clock, deadline, self._client.deadline, self._client.calls.put)
        if holding.ready or holding.link is None:
            transfer.started()
            return transfer
        try:
            holding.loaded_by(transfer)
            self._client.promised(holding.link, p.Load(self._number, holding.number, deadline), transfer)
        except NodeUnavailable:
            transfer.cancel()
        return transfer

    def collect(self, holding: RemotePrefixLease) -> CollectedBlocks:
        if holding.released:
            raise RightError("this match was released while its load was under way")
        link, number, slots = holding.link, holding.number, holding.slots
        if link is not None:
            with contextlib.suppress(NodeUnavailable):
                if slots is not None:
                    return self._collected(holding.plan.blocks, slots, link, number)
                answer = link.ask_one(p.Collect(self._number, number))
                assert isinstance(answer, p.Collected)
                holding.collected(answer.blocks)
                return self._collected(answer.blocks, answer.slots, link, number)
        blocks = min(holding.have, holding.plan.blocks)
        tokens = self.layout.block_tokens
        first = {g.name: g.needs(blocks, tokens, holding.have).start for g in self.layout.groups}
        return CollectedBlocks(blocks, first, {name: [] for name in first})

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
    ) -> Reservation:
        last = after if isinstance(after, _RemoteReservation) else None
        try:
            link, wanted = self.reserving(groups, names, start, stop, ttl, priority, last)
            made = self._ask_reserve(link, wanted, last)
            footprints = [self.layout.geometry[g.name].footprint for g in self.layout.groups]
            slots = link.spans(made.places, max(footprints))
            link.own(made.reservation)
        except NodeUnavailable:
            nothing = _RemoteReservation([], [], [], self._finish)
            nothing.refused = (stop - start) * len(groups)
            return nothing
        if last is not None:
            if last.link is link:
                link.disown(last.number)
                last.link = None  # the node has sealed it
            last.seal()
        views = [span[: footprints[g]] for span, g in zip(slots, made.groups, strict=True)]
        reservation = _RemoteReservation(self.keys(wanted, made), views, made.depths, self._finish)
        reservation.link, reservation.number, reservation.refused = link, made.reservation, made.refused
        reservation.pending = made.pending
        return reservation

    def _ask_reserve(self, link: NodeLink, wanted: p.Reserve, last: _RemoteReservation | None) -> p.Reserved:
        """Ask for a reservation. ``last`` is sealed in the same request if it is of the same link. Raises
        NodeUnavailable."""
        try:
            made = link.ask_one(wanted)
        except NodeLate as late:
            if last is not None:  # it is written, and counts as stored
                if late.sent and wanted.after is not None:
                    link.disown(last.number)
                    last.link = None  # sealed by this request, or by the Finish that late_answers.py sends
                last.seal()
            raise
        except AccessError:  # a client that may only read continues without storing, as without a node
            raise NodeUnavailable from None
        assert isinstance(made, p.Reserved)
        return made

    def reserving(
        self,
        groups: Sequence[Group],
        names: BlockNames,
        start: int,
        stop: int,
        ttl: float | None,
        priority: int,
        last: _RemoteReservation | None = None,
        writers: Sequence[int] = (),
        wait: bool = True,
    ) -> tuple[NodeLink, p.Reserve]:
        """The request for a reservation, to be written by this client or by ``writers``, and the link to send it over.
        Raises NodeUnavailable."""
        link, session = self._session()
        digests, tokens = names.joined[: 32 * stop], b""
        first = start if p.TOKENS_FROM_START in link.welcome.features else 0
        if link.welcome.tokens and len(digests) + 4 * self.layout.block_tokens * (stop - first) < p.LARGEST - _REST:
            # for longer prompts the records have no token ids
            tokens = names.tokens_of(first, stop - first)
        self._describe(link, session, names, stop)
        sealed = last.number if last is not None and last.link is link else None
        numbers = [self.layout.groups.index(g) for g in groups]
        return link, p.Reserve(
            session, numbers, digests, start, stop, ttl, priority, tokens, sealed, list(writers), wait
        )

    def _describe(self, link: NodeLink, session: int, names: BlockNames, stop: int) -> None:
        """Tell the node, if it wants to know, what those of the first ``stop`` blocks consist of that it was not told.
        Does not wait, and raises nothing: without it these blocks are not published."""
        wants = link.welcome.describe
        if not wants or not isinstance(names, Chain) or not names.plain:
            return
        known, joined, first, now = self._described, names.joined, stop, self._client.clock.monotonic()
        if len(known) > _DESCRIBED or now > self._described_since + _DESCRIBED_FOR:
            known.clear()
            self._described_since = now
        while first and joined[32 * first - 32 : 32 * first] not in known:
            first -= 1
        if first == stop:
            return
        step = max(1, _DESCRIPTION // (4 * self.layout.block_tokens))
        with contextlib.suppress(NodeUnavailable, KvtideError):
            for at in range(first, stop, step):
                end = min(at + step, stop)
                digests = joined[32 * at : 32 * end]
                tokens = names.tokens_of(at, end - at) if wants == 2 else b""
                link.later(p.Describe(session, names.parent(at), digests, tokens))
                known.update(digests[i : i + 32] for i in range(0, len(digests), 32))

    def keys(self, wanted: p.Reserve, made: p.Reserved) -> list[BlockKey]:
        """The keys of the blocks that were given slots."""
        return [
            BlockKey(wanted.digests[32 * d : 32 * d + 32] + self.layout.groups[g].suffix)
            for g, d in zip(made.groups, made.depths, strict=True)
        ]

    def abort(self, link: NodeLink, reservation: int) -> None:
        """Give up a reservation made for workers."""
        with contextlib.suppress(NodeUnavailable, RightError):  # it has ended already
            link.tell(p.Finish(self._number, reservation, False))

    def _finish(self, reservation: Reservation, sealed: bool) -> None:
        assert isinstance(reservation, _RemoteReservation)
        link, number = reservation.link, reservation.number
        if link is not None:  # without a node the blocks are not stored, as if they were evicted
            # No caller waits for the end of an abort, least of all one that closes while the node hangs.
            self._give_back(link, number, p.Finish(self._number, number, sealed), wait=sealed)

    def persist(self, names: BlockNames, wanted: Mapping[str, range]) -> PersistRequest:
        transfer = Transfer(self._client.clock, run=self._client.calls.put)
        blocks = [(name, number) for name, numbers in wanted.items() for number in numbers]
        refused: Unwritten | None = None
        groups = {g.name: i for i, g in enumerate(self.layout.groups)}
        asked = [(groups[name], some.start, some.stop) for name, some in wanted.items() if some]
        try:
            link, session = self._session()
            stop = max((last for _, _, last in asked), default=0)
            if asked:
                self._client.promised(link, p.Flush(session, names.joined[: 32 * stop], asked), transfer)
        except NodeLate:
            refused = Unwritten.TIMEOUT
        except NodeUnavailable:
            refused = Unwritten.NODE_GONE
        except AccessError:  # a client that may only read has stored nothing
            refused = Unwritten.NOT_STORED
        except RightError:
            refused = Unwritten.CLIENT_LIMIT
        if refused is not None or not asked:
            transfer.cancel()

        def result() -> Persisted:
            report, failed = transfer.report, dict[tuple[int, int], Unwritten]()
            for_all = refused
            if refused is None and isinstance(report, p.Ended):
                failed = {(group, number): Unwritten.of(why) for group, number, why in report.failed}
                for_all = None if report.written >= 0 else Unwritten.UNKNOWN
            elif refused is None and transfer.ended:
                for_all = Unwritten.CANCELLED if link.alive else Unwritten.NODE_GONE
            elif refused is None:
                for_all = Unwritten.TIMEOUT
            return persisted((block, for_all or failed.get((groups[block[0]], block[1]))) for block in blocks)

        return PersistRequest(transfer, result)

    # -- keeping and removing -----------------------------------------------------------------------------

    def pin(self, names: BlockNames, stop: int | None, step: int) -> int:
        try:
            link, session = self._session()
            operation = p.Pin(session, names.joined, stop, step)
            try:
                count = link.ask_one(operation)
            except NodeLate as late:
                if step < 0 and not late.sent:
                    link.later(operation)
                return 0
        except NodeUnavailable:
            return 0
        assert isinstance(count, int)
        return count

    def drop(self, names: BlockNames, start: int, timeout: float | None) -> int:
        gone = "the node went away before it said that the blocks are erased; drop them again when it is back"
        late = "the node has not answered in time whether the blocks are erased; drop them again when it does"
        try:
            link, session = self._session()
            completion = self._client.promised(link, p.Drop(session, names.joined, start), Completion())
        except NodeLate:
            raise TierError(late) from None
        except NodeUnavailable:
            raise TierError(gone) from None
        if not completion.event.wait(timeout):
            blocks = names.blocks - start
            raise TierError(f"dropping {blocks} blocks took longer than {timeout} s; it goes on in the background")
        if completion.lost:
            raise TierError(gone)
        if completion.failure:
            raise TierError(
                f"{completion.failure} dropped blocks could not be erased from disk. They are not served, but may be "
                "found again when the node is next started: see its log for the disk's error, then drop them again"
            )
        return completion.count

    def expire(self, names: BlockNames, start: int, ttl: float | None, timeout: float | None) -> int:
        gone = "the node went away before it said when the blocks expire; call expire again when it is back"
        late = "the node has not answered in time when the blocks expire; call expire again when it does"
        try:
            link, session = self._session()
            completion = self._client.promised(link, p.Expire(session, names.joined, start, ttl), Completion())
        except NodeLate:
            raise TierError(late) from None
        except NodeUnavailable:
            raise TierError(gone) from None
        if not completion.event.wait(timeout):
            raise TierError(
                f"changing the expiry of {names.blocks - start} blocks took longer than {timeout} s; it goes on in the "
                "background"
            )
        if completion.lost:
            raise TierError(gone)
        if completion.failure:
            raise TierError(
                f"the copies on disk of {completion.failure} blocks still say that they live longer. They expire as "
                "asked while the node runs: see its log for the disk's error, then call expire again"
            )
        return completion.count

    def expect(self, names: BlockNames, turn: Turn | None, returns_in: float | None) -> None:
        with contextlib.suppress(NodeUnavailable, KvtideError):  # losing the hint has no other effect
            link, session = self._session()
            if p.EXPECT in link.welcome.features and not link.behind:
                link.post(p.Expect(session, names.joined, turn or "", returns_in))

    def close(self) -> None:
        with contextlib.suppress(NodeUnavailable), self._lock:
            if self._link is not None and self._link.alive:
                self._link.post(p.Close(self._number))


def find_each(wanted: Sequence[tuple[RemoteBackend, Sequence[bytes]]]) -> list[list[bool]]:
    """Which blocks with these digests the node has, for each backend, in one request. All backends are of one client.
    Blocks that the node refuses to look up count as not found."""
    found = [[False] * len(digests) for _, digests in wanted]
    try:
        requests = [backend.finding(b"".join(digests)) for backend, digests in wanted]
        # If the client reconnected between two of these, an earlier number may be another session of the new link:
        # there the digests name no block, because those of each model and tenant are different.
        answers = requests[-1][0].ask([operation for _, operation in requests]) if requests else []
    except NodeUnavailable:
        return found
    return [a.blocks if isinstance(a, p.Found) else none for a, none in zip(answers, found, strict=True)]


def absent_each(prompts: Sequence[Sequence[tuple[RemoteBackend, bytes]]]) -> list[bool]:
    """For each prompt whether the node has nothing of it: see ``protocol.Absent``. One request for all. Of each prompt
    there are its digests for each backend. All backends are of one client. A prompt for which the node does not answer
    counts as not absent."""
    nothing = [False] * len(prompts)
    try:
        requests = [backend.asking_absent(digests) for prompt in prompts for backend, digests in prompt]
        if len({id(link) for link, _ in requests}) != 1:  # the client reconnected: some sessions are of the old link
            return nothing
        answers = requests[0][0].ask([operation for _, operation in requests])
    except NodeUnavailable:
        return nothing
    rest = iter(answers)
    each = [[next(rest) for _ in prompt] for prompt in prompts]
    return [all(answer is True for answer in some) for some in each]
