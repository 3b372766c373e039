"""The public interface to the store for one model: match, load, store, prefetch, expect, pin, drop.

No method blocks on I/O unless its description says that it waits. A result about a block is correct when it is
returned, and stays so while its lease or reservation is open: a ``Match`` protects its blocks from eviction until it is
released.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, NamedTuple, ParamSpec, Self, TypeVar, overload

import numpy.typing as npt

from kvtide import arguments, forks
from kvtide.block import Span
from kvtide.call_guard import CallGuard
from kvtide.errors import ClosedError, KvtideError, LayoutError, RightError
from kvtide.index.keys import DEFAULT_TENANT, Chain, Extra, Model, Tenant, Tokens
from kvtide.index.lease import Reservation
from kvtide.interrupts import again_if_interrupted
from kvtide.plan.prefill import Prefill, PrefillCost
from kvtide.plan.usage_tracker import TURNS, Turn
from kvtide.store.backend import Backend
from kvtide.store.explanation import Explanation
from kvtide.store.known_models import differences, read
from kvtide.store.match import Load, Loaded, Match, Persist, Stored
from kvtide.tiers.dram.copy import Copier, bytes_of, same_shape
from kvtide.transfer.transfer import Transfer

if TYPE_CHECKING:
    from typing_extensions import Buffer

    # Arrays are buffers, but their type stubs say so only from Python 3.12 on.
    Block = Buffer | npt.NDArray[Any]
    Buffers = Sequence[Block] | Mapping[str, Sequence[Block]]

__all__ = ["Session", "SessionHost", "WriteArguments", "hints"]

_PART = 4096
"""Blocks that are reserved at a time when a prompt is stored: many small blocks must not keep other callers waiting
either."""
_MOST = 1 << 48
"""The most tokens that an engine may claim to have: more than any prompt."""
_DAY = 86400.0
_NAME = 256
"""The most characters of a request's name."""
_OTHER_MODELS = 16
"""The most other models of a tenant for which a prompt is looked up when it is explained."""
_OTHER_BLOCKS = 20_000
"""The most blocks that are looked up for these models, all together."""
_PAUSE, _LONGEST = 0.001, 0.05
"""Seconds between two matches while waiting for more: the first pause, and the longest."""

P = ParamSpec("P")
T = TypeVar("T")


def _inside(verb: Callable[Concatenate[Session, P], T]) -> Callable[Concatenate[Session, P], T]:
    """Decorates a method that uses the store's memory: closing the session or the store waits for it, and later calls
    are refused."""

    @functools.wraps(verb)
    def inside(session: Session, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with session._guard.lock():
            session._guard.check()
            return verb(session, *args, **kwargs)

    return inside


class WriteArguments(NamedTuple):
    """The blocks to write and how to keep them, as checked by ``Session.write_arguments``."""

    chain: Chain
    start: int
    stop: int
    ttl: float | None
    priority: int


def _lifetime(ttl: float | None) -> float | None:
    if ttl is None:
        return None
    if (isinstance(ttl, float) and math.isnan(ttl)) or not (found := arguments.real(ttl, "ttl")) > 0:
        raise LayoutError(f"a block cannot live {ttl} seconds; give a positive ttl, or none")
    return found


def _tokens(have: int) -> int:
    have = arguments.integer(have, "have")
    if have < 0:
        raise LayoutError(f"have is {have}, not a number of tokens")
    return min(have, _MOST)


def _prefill(prefill: Prefill | None) -> Prefill | None:
    """Check an engine's speed or cost of prefill: see ``Session.match``."""
    if prefill is not None and not isinstance(prefill, PrefillCost):
        prefill = arguments.real(prefill, "prefill")
        if prefill < 0:
            raise LayoutError(f"prefill is {prefill}, not a speed in tokens per second; give 0 or more, or None")
    return prefill


def _priority(priority: int) -> int:
    priority = arguments.integer(priority, "priority")
    if not -100 <= priority <= 100:
        raise LayoutError(f"priority {priority} is not between -100 and 100")
    return priority


def hints(turn: Turn | None, returns_in: float | None) -> tuple[Turn | None, float | None]:
    """Check the hints about a prompt's next use: see ``Session.expect``."""
    if turn is not None and arguments.text(turn, "turn") not in TURNS:
        raise LayoutError(f'turn is {turn!r}; give "tool", "end" or None')
    if returns_in is None:
        return turn, None
    if not 0 < (found := arguments.real(returns_in, "returns_in")) < math.inf:
        raise LayoutError(f"returns_in is {returns_in}, not a time to come; give seconds, more than 0, or None")
    return turn, min(found, _DAY)


class SessionHost:
    """Base class of objects that have sessions: a store in this process, or a node's client."""

    copier: Copier

    def __init__(self, again: str) -> None:
        """``again`` says how to open another one when this is closed."""
        self._again = f"this store is closed; {again}"
        self.origin = forks.here
        """The process that opened it. A process forked from that one must not use it."""
        self.guard = CallGuard(self._again)
        """Open while slots may be reassigned: reservations end outside the methods of a session."""
        self.closed = False
        self._ended = False
        """Whether everything was released, or is about to be."""
        self._sessions: set[Session] = set()
        self._lock = threading.Lock()
        """Without it a session could be opened that closing does not see."""

    def session(self, model: Model, tenant: Tenant = DEFAULT_TENANT) -> Session:
        """Open a session for one model and tenant."""
        forks.check(self.origin)
        arguments.kind(model, Model, "model")
        arguments.kind(tenant, Tenant, "tenant")
        session = Session(self, model, tenant, self._backend(model, tenant))
        with self._lock:
            if self.closed:
                raise ClosedError(self._again)
            self._sessions.add(session)
        return session

    def _backend(self, model: Model, tenant: Tenant) -> Backend:
        raise NotImplementedError

    def ended(self, session: Session) -> None:
        """Called when ``session`` was closed."""
        self._sessions.discard(session)

    def _end_sessions(self) -> bool:
        """Close all sessions and the call guard. Returns False if everything was released before, or belongs to the
        parent process.

        After an interruption it can be repeated.
        """
        if self.origin is not forks.here:
            self.closed = True
            return False
        with self._lock:
            if self._ended:
                return False
            self.closed = True
            sessions = list(self._sessions)
        for session in sessions:
            session.close()
        self.guard.shut()
        return True

    def close(self) -> None:
        """End all sessions and release everything."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Session:
    """One engine's use of the store, for one model and one tenant. Its matches, reservations and pins end with it.
    Thread-safe."""

    def __init__(self, home: SessionHost, model: Model, tenant: Tenant, backend: Backend) -> None:
        self._session_host = home
        self.origin = home.origin
        self._backend = backend
        self.model = model
        self.layout = model.layout
        self._namer, self._tenant = model.namer(tenant), tenant
        self._rights: dict[int, Match | Reservation | weakref.ref[Match] | weakref.ref[Reservation]] = {}
        """Open matches and reservations, by ``id``. References are strong where views were given out, because these may
        be in use although the caller dropped the object. An object dropped without views (by a caller that was
        interrupted) ends by itself."""
        self._closed = False
        self._guard = CallGuard("this session is closed; open a new one with store.session(model)")

    @property
    def backend(self) -> Backend:
        return self._backend

    @property
    def closed(self) -> bool:
        """Whether it is closed or being closed: from then on, the memory of its matches may change."""
        return self._closed

    def __repr__(self) -> str:
        return f"<Session {self.model.weights}{' closed' if self._closed else ''}>"

    # -- names --------------------------------------------------------------------------------------------

    def chain(self, tokens: Tokens = (), extras: Sequence[Extra] = ()) -> Chain:
        """The names of a prompt's blocks. Keep the chain and ``extend`` it; then each turn costs only its own tokens.

        Every method that takes tokens also takes a chain.
        """
        return self._namer.chain(tokens, extras)

    def _chain(self, tokens: Tokens | Chain, extras: Sequence[Extra]) -> Chain:
        if isinstance(tokens, Chain):
            if (type(extras) is not tuple or extras) and arguments.items(extras, Extra, "extras"):
                raise LayoutError("extras are part of a chain: give them when it is made or extended")
            if tokens.namer is not self._namer and tokens.namer != self._namer:
                raise LayoutError("this chain was made for another model or tenant: its names mean other blocks")
            return tokens
        return self._namer.chain(tokens, extras)

    # -- reading ------------------------------------------------------------------------------------------

    def match(
        self,
        tokens: Tokens | Chain,
        extras: Sequence[Extra] = (),
        *,
        have: int = 0,
        prefill: Prefill | None = None,
        wait: float = 0.0,
        again: bool = False,
        record: bool = True,
        request: str = "",
    ) -> Match:
        """The longest prefix of ``tokens`` that the store has and that is worth loading; held until released.

        ``have`` tokens at the start are in the engine already and need not be loaded. ``prefill`` is the engine's speed
        in tokens per second, or a ``PrefillCost`` (by default the configuration's): blocks that take longer to load
        than to compute are left out. While more is ``pending``, the match is repeated, for ``wait`` seconds at most.
        ``again`` says that this match belongs to a use of the prompt for which there was a match before: it is not
        counted again, neither in the statistics nor for eviction.

        A recording of requests (``record.path``) has one entry for each match, except those with ``again``. If a
        request is matched several times because more was pending, only the first match should ``record``. ``request``
        is the engine's name of the request, for ``explain_request``.
        """
        chain = self._chain(tokens, extras)
        if type(have) is not int or not 0 <= have <= _MOST:
            have = _tokens(have)
        if prefill is not None:
            prefill = _prefill(prefill)
        end, pause = 0.0, _PAUSE
        if wait:
            end = time.monotonic() + (arguments.seconds(wait, "wait") or 0.0)
        if request != "":
            request = arguments.text(request, "request")[:_NAME]
        while (match := self._match(chain, have, prefill, again, record, request)).pending:
            if (left := end - time.monotonic()) <= 0:
                break
            record = False
            match.release()
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST)
        return match

    @_inside
    def _match(
        self, chain: Chain, have: int, prefill: Prefill | None, again: bool, record: bool, request: str
    ) -> Match:
        blocks = have // self.layout.block_tokens
        match = Match(self, chain, self._backend.match(chain, blocks, prefill, again, record, request))
        self._rights[id(match)] = weakref.ref(match)
        return match

    @_inside
    def find(self, tokens: Tokens | Chain, extras: Sequence[Extra] = ()) -> list[bool]:
        """Which blocks of a prompt the store has now, each by itself. Nothing is held: they may be evicted at once.

        Blocks that others wrote to shared storage are searched for in the background: call again to see them.
        """
        return self._backend.find(self._chain(tokens, extras))

    @_inside
    def explain(
        self, tokens: Tokens | Chain, extras: Sequence[Extra] = (), *, prefill: Prefill | None = None
    ) -> Explanation:
        """Why each block of a prompt would be a hit or a miss of a match now; ``prefill`` is as for ``match``.

        Changes nothing: nothing is counted, used, held or searched for. ``str`` of the result says it in words. What
        happened to a block is known as far as it was recorded since the store was opened (``explain.memory``). Of other
        models, only those of this tenant are considered, and only while the store remembers that they were used.
        """
        chain = self._chain(tokens, extras)
        found = replace(self._backend.explain(chain, _prefill(prefill)), tokens=chain.tokens)
        return found.with_others(self._elsewhere(chain)) if found.unexplained else found

    def _elsewhere(self, chain: Chain) -> Iterator[tuple[int, tuple[str, ...]]]:
        """For each other model of this tenant: how many of a prompt's first tokens are stored for it, and in what it
        differs."""
        models = (read(description, self._tenant) for description in self._backend.models())
        others = [
            m for m in models if m is not None and m.namespace(self._tenant) != self.model.namespace(self._tenant)
        ]
        blocks = _OTHER_BLOCKS
        for model in others[:_OTHER_MODELS]:
            blocks -= chain.tokens // model.layout.block_tokens
            if blocks < 0:  # a model with tiny blocks: others are looked at all the same
                blocks += chain.tokens // model.layout.block_tokens
                continue
            # another caller described the model: if it cannot be used, this caller is still told of the others
            with contextlib.suppress(KvtideError, TypeError), self._session_host.session(model, self._tenant) as other:
                found = other.backend.explain(other.chain(chain.named, chain.extras), None)
                yield found.stored * model.layout.block_tokens, differences(self.model, model)

    @_inside
    def explain_request(self, request: str) -> Explanation | None:
        """Why each block of a past request was a hit or a miss, given the name that its match had; None if it is not
        remembered. An empty name: the last request. Only requests of this session's model and tenant are found."""
        return self._backend.explain_request(arguments.text(request, "request")[:_NAME])

    def ended(self, right: Match | Reservation) -> None:
        """Called when a match or a reservation has ended."""
        self._rights.pop(id(right), None)

    def _keep(self, right: Match | Reservation) -> None:
        """Called when views of ``right`` are given out."""
        if id(right) in self._rights:
            self._rights[id(right)] = right

    @_inside
    def load(self, match: Match, into: Buffers | None = None, *, deadline: float | None = None) -> Load:
        """Load a match's blocks into DRAM and, if ``into`` is given, copy them there.

        ``into`` has a writable buffer for each block that ``match.wanted`` names (by group, if the layout has several).
        ``deadline`` is in seconds from now (by default the configuration's): blocks that have not arrived by then are
        left out, and the result is a shorter prefix.
        """
        deadline = arguments.seconds(deadline, "deadline")
        if arguments.kind(match, Match, "match").session is not self:
            raise LayoutError("this match was made by another session; load it there")
        if not match.held:
            raise RightError("this match was released; match again")
        targets = None if into is None else self._targets(match, into)
        transfer = self._backend.load(match.holding, deadline)
        return Load(transfer, lambda: self._collect(match, targets), into is not None)

    def _targets(self, match: Match, into: Buffers) -> dict[str, list[Span]]:
        targets = self._buffers(into, writable=True)
        for group in self.layout.groups:
            given, wanted = targets.setdefault(group.name, []), match.holding.counts[group.name]
            if len(given) < wanted and (given or group.required):
                raise LayoutError(
                    f"group {group.name!r} has {len(given)} buffers for {wanted} blocks; see Match.wanted for how many"
                )
        return targets

    @_inside
    def _collect(self, match: Match, into: dict[str, list[Span]] | None) -> Loaded:
        """The longest prefix of ``match`` that is in DRAM now."""
        if into is None:
            self._keep(match)
        found = self._backend.collect(match.holding)
        if into is not None:
            for name, spans in found.spans.items():
                geometry = self.layout.geometry[name]
                pairs = [same_shape(geometry, span, to) for to, span in zip(into[name], spans, strict=False)]
                self._session_host.copier.copy([(target, source) for source, target in pairs])
        views = {name: [s.toreadonly() for s in spans] for name, spans in found.spans.items()}
        return Loaded(found.blocks * self.layout.block_tokens, found.first, views)

    def prefetch(
        self, tokens: Tokens | Chain, extras: Sequence[Extra] = (), *, deadline: float | None = None
    ) -> Transfer:
        """Start loading a prompt's blocks into DRAM, without waiting, and without holding them afterwards."""
        deadline = arguments.seconds(deadline, "deadline")
        match = self.match(tokens, extras, prefill=0, record=False)  # the request itself is still to come
        try:
            load = self.load(match, deadline=deadline)
            load.transfer.on_end(functools.partial(again_if_interrupted, match.release))
        except BaseException:
            match.release()
            raise
        return load.transfer

    # -- writing ------------------------------------------------------------------------------------------

    @overload
    def store(
        self,
        tokens: Tokens | Chain,
        blocks: Buffers,
        extras: Sequence[Extra] = (),
        *,
        start: int = 0,
        ttl: float | None = None,
        priority: int = 0,
        durable: Literal[False] = False,
    ) -> Stored: ...

    @overload
    def store(
        self,
        tokens: Tokens | Chain,
        blocks: Buffers,
        extras: Sequence[Extra] = (),
        *,
        start: int = 0,
        ttl: float | None = None,
        priority: int = 0,
        durable: Literal[True],
    ) -> Persist: ...

    @overload
    def store(
        self,
        tokens: Tokens | Chain,
        blocks: Buffers,
        extras: Sequence[Extra] = (),
        *,
        start: int = 0,
        ttl: float | None = None,
        priority: int = 0,
        durable: bool,
    ) -> Stored: ...

    def store(
        self,
        tokens: Tokens | Chain,
        blocks: Buffers,
        extras: Sequence[Extra] = (),
        *,
        start: int = 0,
        ttl: float | None = None,
        priority: int = 0,
        durable: bool = False,
    ) -> Stored:
        """Copy blocks into the store; ``blocks[i]`` is the KV of block ``start + i`` of the prompt.

        Each is a buffer of the layout's ``nbytes`` for its group, in canonical order. Blocks that the store already has
        are not copied. The call does not wait for a disk: colder tiers are written in the background.

        ``ttl`` is the lifetime in seconds from now of the prompt up to its last block here; by default it never
        expires. A block lives as long as the longest of its stores says, and so do the blocks before it, without which
        it could not be found: storing a prompt again extends its lifetime, and never shortens it. Only ``expire`` does
        that. A block expires with its parent at the latest. Any block may be evicted before it expires, and one of
        higher ``priority`` (-100 to 100) outlasts all of lower.

        With ``durable`` the result can be waited for: it ends when every block of the prompt up to the last one given,
        present before or not, is written and synced in a tier that survives a restart, and says which are not and why.
        Such writes bypass the admission and are not refused by a full queue, but write budgets and quotas can refuse
        them.
        """
        with self._guard.lock():
            self._guard.check()
            return self._store(tokens, blocks, extras, start, ttl, priority, durable)

    def _store(
        self,
        tokens: Tokens | Chain,
        blocks: Buffers,
        extras: Sequence[Extra],
        start: int,
        ttl: float | None,
        priority: int,
        durable: bool,
    ) -> Stored:
        chain = self._chain(tokens, extras)
        sources = self._buffers(blocks, writable=False)
        start, ttl, priority = arguments.integer(start, "start"), _lifetime(ttl), _priority(priority)
        for given in sources.values():
            self._check_range(chain, start, start + len(given))
        total = sum(len(given) for given in sources.values())
        stored = refused = pending = 0
        unsealed: list[Reservation] = []
        waiting = contextlib.ExitStack()
        try:
            for name, given in sources.items():
                group, geometry = self.layout.group(name), self.layout.geometry[name]
                # In parts, so that the first are on their way to colder tiers while the last are copied. Each part is
                # larger than the one before, because each has a cost, but not so much larger that a disk, half as fast
                # as memory, would idle. No part is so large that eviction could not make space for it.
                most = min(self._backend.largest // geometry.footprint, _PART)
                first, step = start, max(1, min(self._backend.first_part // geometry.footprint, most))
                with contextlib.ExitStack() as parts:
                    last: Reservation | None = None
                    while first < start + len(given):
                        stop = min(first + step, start + len(given))
                        part = parts.enter_context(
                            self._backend.reserve([group], chain, first, stop, ttl, priority, after=last)
                        )
                        self._session_host.copier.copy(
                            [
                                same_shape(geometry, view, given[depth - start])
                                for depth, view in zip(part.depths, part.views, strict=True)
                            ]
                        )
                        stored, refused, last = stored + len(part.keys), refused + part.refused, part
                        pending += part.pending
                        first, step = stop, max(1, min(2 * step, most))
                    if last is not None and not durable:
                        last.seal()
                    elif last is not None:
                        unsealed.append(last)
                        waiting.enter_context(parts.pop_all())
            answer = Stored(stored, total - stored - refused - pending, refused, pending)
            if not durable:
                return answer
            # Before the last parts are sealed: until then no block of the prompt is evicted.
            persisting = self._backend.persist(chain, self._durable(start, sources))
            for part in unsealed:
                part.seal()
            return Persist(answer, persisting)
        finally:
            waiting.close()

    def _durable(self, start: int, sources: Mapping[str, Sequence[Span]]) -> dict[str, range]:
        """The blocks that make a prompt durable: those given, and the earlier ones without which they are useless."""
        found = {}
        for name, given in sources.items():
            group, stop = self.layout.group(name), start + len(given)
            first = group.needs(stop, self.layout.block_tokens).start if group.required else start
            found[name] = range(min(start, first), stop)
        return found

    @_inside
    def reserve(
        self,
        tokens: Tokens | Chain,
        extras: Sequence[Extra] = (),
        *,
        start: int = 0,
        stop: int | None = None,
        ttl: float | None = None,
        priority: int = 0,
    ) -> Reservation:
        """Reserve slots to write blocks ``start`` to ``stop`` into without a copy: fill its ``views``, then ``seal``.

        It has only blocks that the store lacks and for which there is space; see its ``keys``. It also has blocks that
        one other writer is writing, because that writer may be slow or never finish. A third writer gets none. ``ttl``
        and ``priority`` are as for ``store``; they take effect when it is sealed, and ``ttl`` counts from this call.
        """
        write_request = self.write_arguments(tokens, extras, start, stop, ttl, priority)
        reservation = self._backend.reserve(
            self.layout.groups,
            write_request.chain,
            write_request.start,
            write_request.stop,
            write_request.ttl,
            write_request.priority,
        )
        reservation.on_end.append(self.ended)
        reservation.guard = self._session_host.guard
        reservation.on_views = self._keep
        self._rights[id(reservation)] = weakref.ref(reservation)
        return reservation

    @_inside
    def write_arguments(
        self,
        tokens: Tokens | Chain,
        extras: Sequence[Extra],
        start: int,
        stop: int | None,
        ttl: float | None,
        priority: int,
    ) -> WriteArguments:
        """Check the arguments of a write."""
        chain = self._chain(tokens, extras)
        start = arguments.integer(start, "start")
        stop = chain.blocks if stop is None else arguments.integer(stop, "stop")
        ttl, priority = _lifetime(ttl), _priority(priority)
        self._check_range(chain, start, stop)
        return WriteArguments(chain, start, stop, ttl, priority)

    def _check_range(self, chain: Chain, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= chain.blocks:
            raise LayoutError(f"blocks {start} to {stop} are not all in a prompt of {chain.blocks} full blocks")

    # -- pinning and removing -----------------------------------------------------------------------------

    @_inside
    def pin(self, tokens: Tokens | Chain, extras: Sequence[Extra] = (), *, stop: int | None = None) -> int:
        """Protect the blocks of a prompt, up to block ``stop``, from eviction until ``unpin``. Returns the number of
        blocks.

        Pins belong to the session: they end with it, and behind a node with the connection or the node as well.
        """
        chain = self._chain(tokens, extras)
        return self._backend.pin(chain, self._up_to(chain, stop), 1)

    @_inside
    def unpin(self, tokens: Tokens | Chain, extras: Sequence[Extra] = (), *, stop: int | None = None) -> int:
        """End one ``pin`` of the same blocks by this session. Returns the number of blocks that had one."""
        chain = self._chain(tokens, extras)
        return self._backend.pin(chain, self._up_to(chain, stop), -1)

    def _up_to(self, chain: Chain, stop: int | None) -> int | None:
        if stop is None:
            return None
        stop = arguments.integer(stop, "stop")
        if stop < 0:
            raise LayoutError(f"stop is {stop}, not a number of blocks")
        return min(stop, chain.blocks)

    @_inside
    def drop(
        self,
        tokens: Tokens | Chain,
        extras: Sequence[Extra] = (),
        *,
        start: int = 0,
        timeout: float | None = None,
    ) -> int:
        """Remove a prompt's blocks from block ``start`` on from every tier, permanently. Returns how many were found.

        Returns when they cannot reappear, not even after a power loss; raises TierError if a tier could not ensure
        that. Other nodes (``peers.addresses``) keep theirs, and after a restart, or 100,000 later drops, they are
        fetched from there again: drop them at each node.
        """
        timeout = arguments.seconds(timeout, "timeout")
        write_request = self.write_arguments(tokens, extras, start, None, None, 0)
        return self._backend.drop(write_request.chain, write_request.start, timeout)

    @_inside
    def expire(
        self,
        tokens: Tokens | Chain,
        ttl: float | None,
        extras: Sequence[Extra] = (),
        *,
        start: int = 0,
        timeout: float | None = None,
    ) -> int:
        """Let a prompt's blocks from block ``start`` on expire ``ttl`` seconds from now; None: keep them until they are
        evicted.

        Unlike ``store`` this also shortens lifetimes, whatever was set before, including those of prompts that continue
        these blocks. The blocks before ``start`` live at least as long. A later ``store`` extends them again. Returns
        how many blocks were found.

        Returns when no record on disk has a later expiry, not even after a power loss; a record that cannot be changed,
        because it is encrypted or in shared storage, is erased instead. Raises TierError if a tier could do neither. To
        remove blocks now, ``drop`` them.
        """
        timeout = arguments.seconds(timeout, "timeout")
        write_request = self.write_arguments(tokens, extras, start, None, ttl, 0)
        return self._backend.expire(write_request.chain, write_request.start, write_request.ttl, timeout)

    @_inside
    def expect(
        self,
        tokens: Tokens | Chain,
        extras: Sequence[Extra] = (),
        *,
        turn: Turn | None = None,
        returns_in: float | None = None,
    ) -> None:
        """Give hints about a prompt's next use, when its request is over, including the answer.

        ``turn`` is ``"tool"`` if the turn ended in a tool call, so that the next request extends this prompt soon, and
        ``"end"`` if a user will answer, or nothing follows. The store learns from its own traffic what that means for
        eviction. ``returns_in`` is the number of seconds until the prompt is expected to be used again (more than a day
        counts as a day): its blocks are kept until then, within bounds.

        Both are hints: no block is held, the call does not wait, and blocks that were already evicted are ignored.
        """
        chain = self._chain(tokens, extras)
        turn, returns_in = hints(turn, returns_in)
        if chain.blocks and (turn is not None or returns_in is not None):
            self._backend.expect(chain, turn, returns_in)

    # -- closing ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release every match and abort every reservation of this session, once its running calls have ended."""
        self._closed = True
        if self.origin is not forks.here:
            return
        self._guard.shut()
        for kept in list(self._rights.values()):
            right = kept() if isinstance(kept, weakref.ref) else kept
            if isinstance(right, Match):
                right.release()
            elif right is not None:
                right.abort()
        self._backend.close()
        self._session_host.ended(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _buffers(self, given: Buffers, *, writable: bool) -> dict[str, list[Span]]:
        """The caller's buffers as bytes, by group, checked against the layout."""
        if not isinstance(given, Mapping):
            if len(self.layout.groups) > 1:
                names = ", ".join(g.name for g in self.layout.groups)
                raise LayoutError(f"this layout has several groups ({names}): give a mapping from group to buffers")
            given = {self.layout.groups[0].name: given}
        found: dict[str, list[Span]] = {}
        for name, buffers in given.items():
            some = arguments.each(buffers, f"group {name!r}", "buffers")
            size = self.layout.geometry[self.layout.group(name).name].nbytes
            found[name] = [bytes_of(b, size, name, i, writable) for i, b in enumerate(some)]
        return found
