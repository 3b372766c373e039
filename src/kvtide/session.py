"""The face of the store for one model: match, load, store, prefetch, pin, drop.

Nothing here blocks on I/O except what says ``wait``. Every answer about a block is true at the moment it is given and
stays true while its right is held: a ``Match`` keeps its blocks from eviction until it is released.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

import numpy.typing as npt

from kvtide.block import Span
from kvtide.desk import Desk
from kvtide.door import Door
from kvtide.errors import ClosedError, LayoutError, RightError
from kvtide.index.keys import DEFAULT_TENANT, Chain, Extra, Model, Tenant, Tokens
from kvtide.index.lease import Reservation
from kvtide.match import Load, Loaded, Match, Stored
from kvtide.tiers.copier import Copier, bytes_of, same_shape
from kvtide.transfer.transfer import Transfer

if TYPE_CHECKING:
    from typing_extensions import Buffer

    # Arrays are buffers, but their stubs say so only from Python 3.12 on.
    Block = Buffer | npt.NDArray[Any]
    Buffers = Sequence[Block] | Mapping[str, Sequence[Block]]

__all__ = ["Home", "Session"]

_PAUSE, _LONGEST = 0.001, 0.05
"""Seconds before it is asked again: the first time, and at most."""

P = ParamSpec("P")
T = TypeVar("T")


def _inside(verb: Callable[Concatenate[Session, P], T]) -> Callable[Concatenate[Session, P], T]:
    """A verb that uses the store's memory: closing the session, or the store, waits for it; then it is refused."""

    @functools.wraps(verb)
    def inside(session: Session, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with session._door:
            return verb(session, *args, **kwargs)

    return inside


class Home:
    """Where sessions live: a store in this process, or the client of a node."""

    copier: Copier

    def __init__(self, again: str) -> None:
        """``again`` says how to open another when this is closed."""
        self._again = f"this store is closed; {again}"
        self.door = Door(self._again)
        """Open while slots may change hands: reservations end on their own, not as verbs of a session."""
        self.closed = False
        self._sessions: set[Session] = set()
        self._lock = threading.Lock()
        """Else a session could be opened that closing does not see."""

    def session(self, model: Model, tenant: Tenant = DEFAULT_TENANT) -> Session:
        """The store as one engine sees it: for one model and tenant."""
        session = Session(self, model, tenant, self._desk(model, tenant))
        with self._lock:
            if self.closed:
                raise ClosedError(self._again)
            self._sessions.add(session)
        return session

    def _desk(self, model: Model, tenant: Tenant) -> Desk:
        raise NotImplementedError

    def ended(self, session: Session) -> None:
        """``session`` was closed."""
        self._sessions.discard(session)

    def _end_sessions(self) -> bool:
        """Close all sessions, and the door. False if that was done before."""
        with self._lock:
            if self.closed:
                return False
            self.closed = True
            sessions = list(self._sessions)
        for session in sessions:
            session.close()
        self.door.shut()
        return True

    def close(self) -> None:
        """End all sessions, and let go of everything."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Session:
    """One engine's use of the store: one model, one tenant. Its rights end with it. Safe from any thread."""

    def __init__(self, home: Home, model: Model, tenant: Tenant, desk: Desk) -> None:
        self._home = home
        self._desk = desk
        self.model = model
        self.layout = model.layout
        self._namer = model.namer(tenant)
        self._rights: set[Match | Reservation] = set()
        """Strong: views may be in use though their match or reservation was forgotten."""
        self._closed = False
        self._door = Door("this session is closed; open a new one with store.session(model)")

    @property
    def desk(self) -> Desk:
        return self._desk

    def __repr__(self) -> str:
        return f"<Session {self.model.weights}{' closed' if self._closed else ''}>"

    # -- names --------------------------------------------------------------------------------------------

    def chain(self, tokens: Tokens = (), extras: Sequence[Extra] = ()) -> Chain:
        """The names of a prompt's blocks. Keep it and ``extend`` it, and each turn costs only its own tokens.

        Every method that takes tokens takes a chain as well.
        """
        return self._namer.chain(tokens, extras)

    def _chain(self, tokens: Tokens | Chain, extras: Sequence[Extra]) -> Chain:
        if isinstance(tokens, Chain):
            if extras:
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
        prefill: float | None = None,
        wait: float = 0.0,
    ) -> Match:
        """The longest prefix of ``tokens`` that the store has and that is worth loading; held until released.

        ``have`` tokens at the start are in the engine already and need not be loaded. ``prefill`` is the engine's
        speed in tokens per second (by default the configuration's): what would take longer to load than to
        compute is left out. As long as more is ``pending`` it is asked again, for ``wait`` seconds at most.
        """
        chain = self._chain(tokens, extras)
        if have < 0:
            raise LayoutError(f"have is {have}, not a number of tokens")
        end, pause = time.monotonic() + wait if wait else 0.0, _PAUSE
        while (match := self._match(chain, have, prefill)).pending and (left := end - time.monotonic()) > 0:
            match.release()
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST)
        return match

    @_inside
    def _match(self, chain: Chain, have: int, prefill: float | None) -> Match:
        match = Match(self, chain, self._desk.match(chain, have // self.layout.block_tokens, prefill))
        self._rights.add(match)
        return match

    @_inside
    def find(self, tokens: Tokens | Chain, extras: Sequence[Extra] = ()) -> list[bool]:
        """Which blocks of a prompt the store has now, each by itself. Nothing is held: they may leave at once.

        What others have written is looked for meanwhile: ask again.
        """
        return self._desk.find(self._chain(tokens, extras))

    def ended(self, right: Match | Reservation) -> None:
        """``right`` was given back."""
        self._rights.discard(right)

    @_inside
    def load(self, match: Match, into: Buffers | None = None, *, deadline: float | None = None) -> Load:
        """Bring a match's blocks to DRAM and, if ``into`` is given, copy them there.

        ``into`` has a writable buffer for each block that ``match.wanted`` names (by group, if the layout has several).
        ``deadline`` is in seconds from now (by default the configuration's): what has not come by then is left
        out, and the result is a shorter prefix.
        """
        if match.session is not self:
            raise LayoutError("this match was made by another session; load it there")
        if not match.held:
            raise RightError("this match was released; match again")
        targets = None if into is None else self._targets(match, into)
        transfer = self._desk.load(match.holding, deadline)
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
        found = self._desk.collect(match.holding)
        if into is not None:
            for name, spans in found.spans.items():
                geometry = self.layout.geometry[name]
                pairs = [same_shape(geometry, span, to) for to, span in zip(into[name], spans, strict=False)]
                self._home.copier.copy([(target, source) for source, target in pairs])
        views = {name: [s.toreadonly() for s in spans] for name, spans in found.spans.items()}
        return Loaded(found.blocks * self.layout.block_tokens, found.first, views)

    def prefetch(
        self, tokens: Tokens | Chain, extras: Sequence[Extra] = (), *, deadline: float | None = None
    ) -> Transfer:
        """Start bringing a prompt's blocks to DRAM, without waiting or holding them afterwards."""
        match = self.match(tokens, extras, prefill=0)
        load = self.load(match, deadline=deadline)
        load.transfer.on_end(match.release)
        return load.transfer

    # -- writing ------------------------------------------------------------------------------------------

    @_inside
    def store(
        self,
        tokens: Tokens | Chain,
        blocks: Buffers,
        extras: Sequence[Extra] = (),
        *,
        start: int = 0,
        ttl: float | None = None,
        priority: int = 0,
    ) -> Stored:
        """Copy blocks into the store; ``blocks[i]`` is the KV of block ``start + i`` of the prompt.

        Each is a buffer of the layout's ``nbytes`` for its group, in canonical order. What is there already is not
        copied. A block lives ``ttl`` seconds at most, and one of higher ``priority`` (-100 to 100) outlasts all of
        lower. Nothing waits for a disk: colder tiers are written in the background.
        """
        chain = self._chain(tokens, extras)
        sources = self._buffers(blocks, writable=False)
        for given in sources.values():
            self._check_pledge(chain, start, start + len(given), ttl, priority)
        total = sum(len(given) for given in sources.values())
        stored = refused = 0
        for name, given in sources.items():
            group, geometry = self.layout.group(name), self.layout.geometry[name]
            # In parts: the first are on their way to colder tiers while the last are copied. Each is larger than the
            # one before, because a part costs something too, but not by so much that a disk, which is half as fast as
            # memory, would stand still; none is so large that others could not make room for it.
            most = self._desk.largest // geometry.footprint
            first, step = start, max(1, min(self._desk.first_part // geometry.footprint, most))
            with contextlib.ExitStack() as parts:
                last: Reservation | None = None
                while first < start + len(given):
                    stop = min(first + step, start + len(given))
                    part = parts.enter_context(
                        self._desk.reserve([group], chain, first, stop, ttl, priority, after=last)
                    )
                    self._home.copier.copy(
                        [
                            same_shape(geometry, view, given[depth - start])
                            for depth, view in zip(part.depths, part.views, strict=True)
                        ]
                    )
                    stored, refused, last = stored + len(part.keys), refused + part.refused, part
                    first, step = stop, max(1, min(2 * step, most))
                if last is not None:
                    last.seal()
        return Stored(stored, total - stored - refused, refused)

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
        """Slots to write blocks ``start`` to ``stop`` into, without a copy: fill its ``views``, then ``seal``.

        Only blocks that are not in the store yet, and for which there is room, are in it; see its ``keys``.
        """
        chain, stop = self.pledge(tokens, extras, start, stop, ttl, priority)
        reservation = self._desk.reserve(self.layout.groups, chain, start, stop, ttl, priority)
        reservation.on_end.append(self.ended)
        reservation.door = self._home.door
        self._rights.add(reservation)
        return reservation

    @_inside
    def pledge(
        self,
        tokens: Tokens | Chain,
        extras: Sequence[Extra],
        start: int,
        stop: int | None,
        ttl: float | None,
        priority: int,
    ) -> tuple[Chain, int]:
        """What is to be written, checked: the prompt's chain, and where to stop."""
        chain = self._chain(tokens, extras)
        stop = chain.blocks if stop is None else stop
        self._check_pledge(chain, start, stop, ttl, priority)
        return chain, stop

    def _check_pledge(self, chain: Chain, start: int, stop: int, ttl: float | None, priority: int) -> None:
        if not 0 <= start <= stop <= chain.blocks:
            raise LayoutError(f"blocks {start} to {stop} are not all in a prompt of {chain.blocks} full blocks")
        if not -100 <= priority <= 100:
            raise LayoutError(f"priority {priority} is not between -100 and 100")
        if ttl is not None and not ttl > 0:
            raise LayoutError(f"a block cannot live {ttl} seconds; give a positive ttl, or none")

    # -- keeping and removing -----------------------------------------------------------------------------

    @_inside
    def pin(self, tokens: Tokens | Chain, extras: Sequence[Extra] = (), *, stop: int | None = None) -> int:
        """Keep the blocks of a prompt, up to block ``stop``, from eviction until ``unpin``. Answers how many blocks.

        Pins are the session's: they end with it, and behind a node with the connection or the node as well.
        """
        return self._desk.pin(self._chain(tokens, extras), stop, 1)

    @_inside
    def unpin(self, tokens: Tokens | Chain, extras: Sequence[Extra] = (), *, stop: int | None = None) -> int:
        """End one ``pin`` of the same blocks by this session. Answers how many blocks had one."""
        return self._desk.pin(self._chain(tokens, extras), stop, -1)

    @_inside
    def drop(
        self,
        tokens: Tokens | Chain,
        extras: Sequence[Extra] = (),
        *,
        start: int = 0,
        timeout: float | None = None,
    ) -> int:
        """Remove a prompt's blocks from block ``start`` on, from every tier, for good. Answers how many there were.

        Returns when they cannot come back, after a power loss either; raises TierError if a tier could not make sure
        of that.
        """
        return self._desk.drop(self.pledge(tokens, extras, start, None, None, 0)[0], start, timeout)

    # -- the end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release every match and abort every reservation of this session, when no call of it is under way any more."""
        self._closed = True
        self._door.shut()
        for right in list(self._rights):
            if isinstance(right, Match):
                right.release()
            else:
                right.abort()
        self._desk.close()
        self._home.ended(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _buffers(self, given: Buffers, *, writable: bool) -> dict[str, list[Span]]:
        """The callers' buffers as bytes, by group, checked against the layout."""
        if not isinstance(given, Mapping):
            if len(self.layout.groups) > 1:
                names = ", ".join(g.name for g in self.layout.groups)
                raise LayoutError(f"this layout has several groups ({names}): give a mapping from group to buffers")
            given = {self.layout.groups[0].name: given}
        found: dict[str, list[Span]] = {}
        for name, buffers in given.items():
            size = self.layout.geometry[self.layout.group(name).name].nbytes
            found[name] = [bytes_of(b, size, name, i, writable) for i, b in enumerate(buffers)]
        return found
