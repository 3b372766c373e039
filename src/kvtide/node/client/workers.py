"""Client interface for an engine of several processes: a scheduler that decides, and workers that move the bytes.

The scheduler's process has a session and makes a ``WorkerGroup`` of it; each worker's process joins with the group's
token and its rank. Only tickets are passed between them, over the engine's own channel::

    group = client.worker_group(session, 2)       worker = client.join(token, rank)
    match = session.match(tokens)
    ticket = group.ticket(match)          --->    with worker.step(loads=[ticket]) as step: ...
    match.release()                       <---    (all have loaded)
    given = group.delegate(tokens)
    given.ticket                          --->    with worker.step(stores=[ticket]) as step: ...
                                                  (sealed when every writer has finished)

A ticket that is no longer valid (released, aborted, or of a node that has exited) is a miss: None in the step.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kvtide import arguments
from kvtide.block import BlockKey, Group, Layout, Span
from kvtide.errors import KvtideError, RightError
from kvtide.index.keys import Chain, Extra, Tokens
from kvtide.node import protocol as p
from kvtide.node.client.backend import LinkOwner, RemoteBackend, RemotePrefixLease
from kvtide.node.client.link import NodeLate, NodeLink, NodeUnavailable
from kvtide.store.match import Loaded, Match
from kvtide.store.session import Session

__all__ = ["Delegated", "Filling", "Step", "Wanted", "Worker", "WorkerGroup", "delegate"]

log = logging.getLogger("kvtide.node")


_TOGETHER = 1 << 22
"""Bytes of digests and token ids after which no more reservations are added to one request."""
_DIGITS = 18
"""Maximum number of digits in the number of a right."""


class Delegated:
    """Blocks that workers are to write. Sealed when every writer is done; ``abort`` gives them up before."""

    def __init__(
        self,
        ticket: str,
        keys: Sequence[BlockKey],
        refused: int,
        abort: Callable[[], None],
        again: Mapping[str, int] | None = None,
    ) -> None:
        self.ticket = ticket
        """For the workers. Empty: there is nothing to write."""
        self.keys = keys
        self.refused = refused
        """Blocks that are not stored, and for which there was no space."""
        self.abort = abort
        self.again: Mapping[str, int] = again or {}
        """By group, the first block to ask for again: the node is taking memory for it."""


class WorkerGroup:
    """The scheduler's side. Made by ``client.worker_group``; ends with its session."""

    def __init__(self, session: Session, ranks: int) -> None:
        assert isinstance(session.backend, RemoteBackend)
        self._session = session
        self._backend = session.backend
        self.ranks = ranks
        self.token = secrets.token_hex(16)
        """For the workers: a process that has it may read and write what the session has leased and reserved."""
        groups = session.layout.groups
        self._writers = sorted({s.rank for g in groups for s in g.slices(ranks)})
        self._backend.invite(self.token, ranks)

    def ticket(self, match: Match) -> str:
        """The ticket with which workers read a match. Do not release the match before all workers have finished."""
        arguments.kind(match, Match, "match")
        holding = match.holding
        if match.session is not self._session or not match.held or not isinstance(holding, RemotePrefixLease):
            raise RightError("this match was released, or is of another session; match again")
        return _ticket(holding.link, holding.number)

    def delegate(
        self,
        tokens: Tokens | Chain,
        extras: Sequence[Extra] = (),
        *,
        groups: Sequence[str] | None = None,
        start: int = 0,
        stop: int | None = None,
        ttl: float | None = None,
        priority: int = 0,
        wait: bool = True,
    ) -> Delegated:
        """Let the workers store blocks ``start`` to ``stop`` of a prompt, of these groups or all; each worker writes
        its own heads of every block. A node that is taking memory from the system answers when it has some, within a
        second or so; without ``wait`` it answers at once, with the memory that it has, and returns in ``again`` what to
        ask for again."""
        chain, start, stop, ttl, priority = self._session.write_arguments(tokens, extras, start, stop, ttl, priority)
        layout = self._session.layout
        names = None if groups is None else arguments.items(groups, str, "groups")
        some = layout.groups if names is None else [layout.group(name) for name in names]
        return delegate([Wanted(self, chain, some, start, stop, ttl, priority, wait)])[0]

    def ask(self, wanted: Wanted) -> tuple[NodeLink, p.Reserve]:
        """The request for these blocks, and the link to send it over. Raises NodeUnavailable."""
        _, chain, groups, start, stop, ttl, priority, wait = wanted
        return self._backend.reserving(groups, chain, start, stop, ttl, priority, None, self._writers, wait)

    def given(self, wanted: Wanted, link: NodeLink, asked: p.Reserve, made: p.Reserved) -> Delegated:
        """The result of the request ``asked``."""
        keys = self._backend.keys(asked, made)
        given = Delegated(
            _ticket(link, made.reservation) if keys else "",
            keys,
            made.refused,
            lambda: self._backend.abort(link, made.reservation),
            _again(made, self._session.layout, wanted.groups, wanted.start, wanted.stop),
        )
        if not keys:
            given.abort()
        return given


class Wanted(NamedTuple):
    """Blocks of a prompt that the workers of a group are to store."""

    worker_group: WorkerGroup
    chain: Chain
    groups: Sequence[Group]
    start: int
    stop: int
    ttl: float | None = None
    priority: int = 0
    wait: bool = False
    """See ``WorkerGroup.delegate``."""


def delegate(wanted: Sequence[Wanted]) -> list[Delegated]:
    """``WorkerGroup.delegate`` for several prompts, of worker groups of one client, with one request to the node.
    Blocks that the node refuses are treated as if there were no space for them."""
    found = [Delegated("", [], (w.stop - w.start) * len(w.groups), lambda: None) for w in wanted]
    asked: list[tuple[int, NodeLink, p.Reserve]] = []
    for i, w in enumerate(wanted):
        try:
            asked.append((i, *w.worker_group.ask(w)))
        except NodeUnavailable:
            pass
        except KvtideError as e:  # the other prompts are still stored
            log.warning("blocks are not stored: %s", e)
    while asked:
        link, nbytes, part = asked[0][1], 0, 0
        while part < len(asked) and asked[part][1] is link and (not part or nbytes < _TOGETHER):
            nbytes += len(asked[part][2].digests) + len(asked[part][2].tokens)
            part += 1
        some, asked = asked[:part], asked[part:]
        try:
            answers = link.ask([operation for _, _, operation in some])
        except NodeUnavailable:
            continue
        except KvtideError as e:
            log.warning("blocks are not stored: %s", e)
            continue
        for (i, _, operation), made in zip(some, answers, strict=True):
            if isinstance(made, p.Reserved):
                with contextlib.suppress(NodeUnavailable):
                    found[i] = wanted[i].worker_group.given(wanted[i], link, operation, made)
            elif isinstance(made, p.Failure) and made.kind == "LayoutError" and len(some) > 1:
                # All of them together were too much work for one request: this one is sent in a request of its own.
                (found[i],) = delegate([wanted[i]])
            elif isinstance(made, p.Failure) and made.kind != "AccessError":
                log.warning("the node does not store blocks: %s", made.text)
    return found


def _again(made: p.Reserved, layout: Layout, groups: Sequence[Group], start: int, stop: int) -> dict[str, int]:
    """For each group the block after the last one that was given a slot, where memory was short. Slots are given in
    order."""
    if not made.later:
        return {}
    last = dict(zip(made.groups, made.depths, strict=True))
    first = {group.name: last.get(layout.groups.index(group), start - 1) + 1 for group in groups}
    return {name: block for name, block in first.items() if block < stop}


@dataclass(frozen=True, slots=True)
class Filling:
    """Slots of which a worker is to write its part: ``views[i]`` is block ``depths[i]`` of ``groups[i]``."""

    groups: list[str]
    depths: list[int]
    views: list[Span]


class Step:
    """The loads and stores of a worker in one step; use it in a ``with``. At its end the slots are not used any more.

    If the ``with`` block is left by an exception, what was to be stored is given up.
    """

    def __init__(self, loads: list[Loaded | None], stores: list[Filling | None], done: Callable[[bool], None]) -> None:
        self.loads = loads
        self.stores = stores
        self._done = done

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.loads, self.stores = [], []
        self._done(kind is None)


class Worker:
    """A worker's side. Made by ``client.join``; close it, or use it in a ``with``. Not safe for several threads at
    once."""

    def __init__(self, client: LinkOwner, token: str, rank: int) -> None:
        self._client = client
        self._token = token
        self.rank = rank
        self._lock = threading.Lock()
        self._link: NodeLink | None = None
        self._number = 0
        with self._lock:
            joined = self._join(client.link)
        self.layout = p.layout_of(joined.groups, joined.block_tokens)
        self.ranks = joined.ranks

    def __repr__(self) -> str:
        return f"<Worker {self.rank} of {self.ranks}>"

    def _join(self, link: NodeLink) -> p.Joined:
        joined = link.ask_one(p.Join(self._token, self.rank))
        assert isinstance(joined, p.Joined)
        self._link, self._number = link, joined.member
        return joined

    def part(self, group: str, view: Span) -> npt.NDArray[np.uint8]:
        """The heads of a block that this rank holds: an array of bytes, a row for each section (layer and K or V)."""
        found, geometry = self.layout.group(group), self.layout.geometry[group]
        share, size = found.share(self.rank, self.ranks), found.head_bytes(self.layout.block_tokens)
        rows = np.frombuffer(view, np.uint8).reshape(geometry.sections, geometry.stride)
        return rows[:, share.start * size : share.stop * size]

    def writes(self, group: str) -> bool:
        """Whether this rank writes its heads of that group: if several ranks hold the same heads, the lowest one writes
        them."""
        return self.layout.group(group).share(self.rank, self.ranks).rank == self.rank

    def step(self, loads: Sequence[str] = (), stores: Sequence[str] = ()) -> Step:
        """Begin to move the blocks of these tickets, with one message to the node."""
        reads, writes = ([_parse(t) for t in arguments.items(some, str, "tickets")] for some in (loads, stores))
        try:
            link = self._client.link
            with self._lock:
                if link is not self._link:
                    self._join(link)
            return self._step(link, reads, writes)
        except (NodeUnavailable, RightError):
            return Step([None] * len(loads), [None] * len(stores), lambda good: None)

    def _step(
        self, link: NodeLink, reads: list[tuple[str, int]], writes: list[tuple[str, int]], again: bool = True
    ) -> Step:
        member, life = self._number, link.welcome.life
        operations: list[p.Operation] = [p.Visit(member, n) for one, n in reads if one == life]
        operations += [p.Fill(member, n) for one, n in writes if one == life]
        all_answers = self._ask(link, operations)
        if again and all_answers and all(isinstance(a, p.Failure) and a.kind == "ClosedError" for a in all_answers):
            with self._lock:  # the scheduler has another session by now
                self._join(link)
            return self._step(link, reads, writes, again=False)
        answers = iter(all_answers)
        found = [next(answers) if one == life else None for one, _ in reads]
        given = [next(answers) if one == life else None for one, _ in writes]
        visited = [n for (_, n), a in zip(reads + writes, found + given, strict=True) if _good(a)]
        use = object()
        link.own(use)

        def done(good: bool) -> None:
            link.disown(use)
            try:
                if visited:
                    link.tell(p.Leave(member, visited, good))
            except NodeUnavailable:
                self._client.settle()

        try:
            return Step(
                [self._loaded(link, a) if isinstance(a, p.Collected) else None for a in found],
                [self._filling(link, a) if isinstance(a, p.Reserved) else None for a in given],
                done,
            )
        except BaseException:
            done(False)
            raise

    def _ask(self, link: NodeLink, operations: list[p.Operation]) -> list[p.Answer]:
        """Send visits and fills. Raises NodeLate if the node does not answer all of them: then none stays in use, and
        the reservations that were to be written are given up."""
        answers: list[p.Answer] = []
        try:
            answers = link.ask(operations) if operations else []
            for i, answer in enumerate(answers):
                if isinstance(answer, p.Failure) and answer.kind == "LayoutError":
                    (answers[i],) = link.ask([operations[i]])  # all together were too much work for one request
        except NodeLate as late:
            if not answers and late.sent:
                raise  # the link gives back what is granted
            for operation, answer in zip_longest(operations, answers):
                match operation:
                    case p.Visit(holding=right) if _good(answer):
                        link.later(p.Leave(self._number, [right], False))
                    case p.Fill(reservation=right):
                        if not _good(answer):  # even so, the node must learn that nothing will be written
                            link.later(operation)
                        link.later(p.Leave(self._number, [right], False))
            raise
        return answers

    def _loaded(self, link: NodeLink, found: p.Collected) -> Loaded:
        groups, tokens = self.layout.groups, self.layout.block_tokens
        pairs = list(zip(groups, found.slots, strict=True))
        views = {g.name: link.spans(s.places, self.layout.geometry[g.name].footprint) for g, s in pairs}
        return Loaded(
            found.blocks * tokens,
            {g.name: s.first for g, s in pairs},
            {name: [v.toreadonly() for v in spans] for name, spans in views.items()},
        )

    def _filling(self, link: NodeLink, given: p.Reserved) -> Filling:
        groups = [self.layout.groups[g] for g in given.groups]
        sizes = [self.layout.geometry[g.name].footprint for g in groups]
        spans = link.spans(given.places, max(sizes, default=0))
        views = [span[:size] for span, size in zip(spans, sizes, strict=True)]
        return Filling([g.name for g in groups], given.depths, views)

    def close(self) -> None:
        """Leave the worker group. What this worker has still to write is given up; what it has written is kept."""
        with contextlib.suppress(NodeUnavailable, RightError):
            if self._link is not None:
                self._link.tell(p.Resign(self._number))
        self._link = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _good(answer: p.Answer) -> bool:
    return isinstance(answer, p.Collected | p.Reserved)


def _ticket(link: NodeLink | None, number: int) -> str:
    return f"{link.welcome.life if link is not None else 'none'}/{number}"


def _parse(ticket: str) -> tuple[str, int]:
    life, _, number = arguments.text(ticket, "ticket").partition("/")
    if not number.isdecimal() or len(number) > _DIGITS:
        raise RightError(f"{ticket!r} is no ticket of a match or of delegated blocks")
    return life, int(number)
