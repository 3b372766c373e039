"""The face of the store for one model: match, load, store, prefetch, pin, drop.

Nothing here blocks on I/O except what says ``wait``. Every answer about a block is true at the moment it is given and
stays true while its right is held: a ``Match`` keeps its blocks from eviction until it is released.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

import numpy as np
import numpy.typing as npt

from kvtide.block import DTYPES, Geometry, Group, Span
from kvtide.errors import ClosedError, LayoutError, RightError
from kvtide.index.index import DRAM, PENDING, SEALED, Mask, Rows, every
from kvtide.index.keys import DEFAULT_TENANT, Chain, Extra, Model, Tenant, Tokens
from kvtide.index.lease import Lease, Reservation
from kvtide.match import Load, Loaded, Match, Stored
from kvtide.tiers.base import Identity
from kvtide.tiers.copier import Bytes
from kvtide.transfer.pipeline import Pledge
from kvtide.transfer.transfer import Transfer

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvtide.store import Store

    # Arrays are buffers, but their stubs say so only from Python 3.12 on.
    Block = Buffer | npt.NDArray[Any]
    Buffers = Sequence[Block] | Mapping[str, Sequence[Block]]

__all__ = ["Session"]

_FIRST_PART = 64 << 20

P = ParamSpec("P")
T = TypeVar("T")


def _inside(verb: Callable[Concatenate[Session, P], T]) -> Callable[Concatenate[Session, P], T]:
    """A verb that uses the store's memory: closing the store waits for it, and it is refused afterwards."""

    @functools.wraps(verb)
    def inside(session: Session, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with session._store.door:
            return verb(session, *args, **kwargs)

    return inside


class Session:
    """One engine's use of the store: one model, one tenant. Its rights end with it. Safe from any thread."""

    def __init__(self, store: Store, model: Model, tenant: Tenant = DEFAULT_TENANT) -> None:
        self._store = store
        self._index = store.index
        self._pipeline = store.pipeline
        self.model = model
        self.layout = model.layout
        self._namer = model.namer(tenant)
        self._identities = {
            g.name: Identity(
                model.namespace(tenant),
                tenant.tag,
                model.layout.digest,
                g.suffix,
                model.layout.block_tokens,
                model.layout.geometry[g.name],
                DTYPES[g.dtype],
            )
            for g in model.layout.groups
        }
        self._rights: set[Match | Reservation] = set()
        """Strong: views may be in use though their match or reservation was forgotten."""
        self._closed = False

    def __repr__(self) -> str:
        return f"<Session {self.model.weights}{' closed' if self._closed else ''}>"

    # -- names --------------------------------------------------------------------------------------------

    def chain(self, tokens: Tokens = (), extras: Sequence[Extra] = ()) -> Chain:
        """The names of a prompt's blocks. Keep it and ``extend`` it, and each turn costs only its own tokens.

        Every method that takes tokens takes a chain as well.
        """
        return self._namer.chain(tokens, extras)

    def _check_open(self) -> None:
        if self._closed or self._store.closed:
            raise ClosedError("this session is closed; open a new one with store.session(model)")

    def _chain(self, tokens: Tokens | Chain, extras: Sequence[Extra]) -> Chain:
        self._check_open()
        if isinstance(tokens, Chain):
            if extras:
                raise LayoutError("extras are part of a chain: give them when it is made or extended")
            if tokens.namer != self._namer:
                raise LayoutError("this chain was made for another model or tenant: its names mean other blocks")
            return tokens
        return self._namer.chain(tokens, extras)

    # -- reading ------------------------------------------------------------------------------------------

    @_inside
    def match(
        self,
        tokens: Tokens | Chain,
        extras: Sequence[Extra] = (),
        *,
        have: int = 0,
        prefill: float | None = None,
    ) -> Match:
        """The longest prefix of ``tokens`` that the store has and that is worth loading; held until released.

        ``have`` tokens at the start are in the engine already and need not be loaded. ``prefill`` is the engine's
        speed in tokens per second (by default the configuration's): what would take longer to load than to
        compute is left out.
        """
        chain = self._chain(tokens, extras)
        if have < 0:
            raise LayoutError(f"have is {have}, not a number of tokens")
        layout, index = self.layout, self._index
        own = have // layout.block_tokens
        speed = self._store.config.plan.prefill_tokens_per_second if prefill is None else prefill
        keys = {g.name: chain.keys(g.suffix) for g in layout.groups}
        now = self._store.sweep()
        with index.lock:
            rows = {name: index.rows(k) for name, k in keys.items()}
            whole = {name: index.usable(r, now) for name, r in rows.items()}
            if own:
                for mask in whole.values():
                    mask[:own] = True
            usable = index.lengths(layout, rows, whole)
            plan = self._store.planner.plan(
                layout, rows, usable, own, speed, self._store.read_bytes_queued, self._store.config.dram.budget
            )
            needed = {g.name: self._needed(g, rows[g.name], plan.blocks, own) for g in layout.groups}
            for g in layout.groups:
                if not g.required:
                    needed[g.name] = needed[g.name][: _leading(whole[g.name][own : plan.blocks])]
            held = _concatenate(needed.values())
            lease = self._pipeline.lease(held)
            for r in rows.values():
                chain_rows = r[: plan.blocks]
                self._pipeline.asked(chain_rows[chain_rows > 0], chain.blocks)
            ready = every(index.state[DRAM][held] == SEALED)
            pending = chain.blocks > plan.blocks and self._pending(rows, whole, plan.blocks)
        match = Match(self, chain, plan, own, needed, ready, pending, lease)
        self._own(match)
        return match

    def _pending(self, rows: dict[str, Rows], whole: dict[str, Mask], block: int) -> bool:
        """Whether all that ``block`` lacks is just being written."""
        lacking = [rows[g.name][block] for g in self.layout.groups if g.required and not whole[g.name][block]]
        return bool(lacking) and all(self._index.state[DRAM][row] == PENDING for row in lacking)

    def _own(self, right: Match | Reservation) -> None:
        self._rights.add(right)
        if self._closed:  # by another thread, which may have missed this one
            self.close()
            self._check_open()

    def ended(self, right: Match | Reservation) -> None:
        """``right`` was given back."""
        self._rights.discard(right)

    def _needed(self, group: Group, rows: Rows, blocks: int, have: int) -> Rows:
        needs = group.needs(blocks, self.layout.block_tokens)
        return rows[max(needs.start, have) : needs.stop]

    @_inside
    def load(self, match: Match, into: Buffers | None = None, *, deadline: float | None = None) -> Load:
        """Bring a match's blocks to DRAM and, if ``into`` is given, copy them there.

        ``into`` has a writable buffer for each block that ``match.wanted`` names (by group, if the layout has several).
        ``deadline`` is in seconds from now (by default the configuration's): what has not come by then is left
        out, and the result is a shorter prefix.
        """
        self._check_open()
        if match.session is not self:
            raise LayoutError("this match was made by another session; load it there")
        if not match.held:
            raise RightError("this match was released; match again")
        targets = None if into is None else self._targets(match, into)
        seconds = self._store.config.plan.deadline_seconds if deadline is None else deadline
        clock = self._store.clock
        limit = clock.monotonic() + seconds if deadline is not None or seconds > 0 else None
        transfer = Transfer(clock, limit)
        if match.ready:
            transfer.started()
        else:
            wanted = [(rows, self._identities[name]) for name, rows in match.rows.items()]
            self._pipeline.load(wanted, transfer)
        return Load(transfer, lambda: self._collect(match, targets), into is not None)

    def _targets(self, match: Match, into: Buffers) -> dict[str, list[Span]]:
        targets = self._buffers(into, writable=True)
        for group in self.layout.groups:
            given, wanted = targets.setdefault(group.name, []), len(match.rows[group.name])
            if len(given) < wanted and (given or group.required):
                raise LayoutError(
                    f"group {group.name!r} has {len(given)} buffers for {wanted} blocks; see Match.wanted for how many"
                )
        return targets

    @_inside
    def _collect(self, match: Match, into: dict[str, list[Span]] | None) -> Loaded:
        """The longest prefix of ``match`` that is in DRAM now."""
        index, layout = self._index, self.layout
        with index.lock:
            if not match.held:
                raise RightError("this match was released while its load was under way")
            whole, first = {}, {}
            for g in layout.groups:
                mask = np.zeros(match.blocks, np.bool_)
                mask[: match.have] = True
                start = max(g.needs(match.blocks, layout.block_tokens).start, match.have)
                rows = match.rows[g.name]
                mask[start : start + len(rows)] = index.state[DRAM][rows] == SEALED
                whole[g.name], first[g.name] = mask, start
            spaced = {name: np.zeros(match.blocks, np.int64) for name in whole}
            blocks = int(np.flatnonzero(index.lengths(layout, spaced, whole))[-1])
            places = {}
            for g in layout.groups:
                stop = max(0, blocks - first[g.name])
                mine = match.rows[g.name][:stop]
                if not g.required:
                    mine = mine[: _leading(index.state[DRAM][mine] == SEALED)]
                for row in mine.tolist():
                    if not self._pipeline.intact(row):
                        raise AssertionError(f"a block in DRAM changed after it was sealed: {index.key(row).hex()}")
                places[g.name] = index.place[DRAM][mine].tolist()
        views: dict[str, list[Span]] = {}
        dram = self._store.dram
        for name, where in places.items():
            geometry = layout.geometry[name]
            spans = dram.spans(where, geometry.footprint)
            if into is not None:
                pairs = [_same_shape(geometry, span, to) for to, span in zip(into[name], spans, strict=False)]
                self._store.copier.copy([(target, source) for source, target in pairs])
            views[name] = [s.toreadonly() for s in spans]
        return Loaded(blocks * layout.block_tokens, first, views)

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
        stored = sum(
            self._store_group(chain, self.layout.group(name), given, start, ttl, priority)
            for name, given in sources.items()
        )
        now = self._store.clock.time()
        with self._index.lock:
            missing = 0
            for name, given in sources.items():
                keys = chain.keys(self.layout.group(name).suffix)[start : start + len(given)]
                missing += int(np.count_nonzero(~self._index.usable(self._index.rows(keys), now)))
            self._use(chain, start + max((len(g) for g in sources.values()), default=0), priority)
        dropped = min(missing, total - stored)
        return Stored(stored, total - stored - dropped, dropped)

    def _store_group(
        self, chain: Chain, group: Group, given: list[Span], start: int, ttl: float | None, priority: int
    ) -> int:
        geometry, stored = self.layout.geometry[group.name], 0
        # In parts: the first are on their way to colder tiers while the last are copied. Each is larger than the one
        # before, because a part costs something too; none is so large that others could not make room for it.
        most = self._store.config.dram.budget // 8
        first, step = start, max(1, min(_FIRST_PART, most) // geometry.footprint)
        rows, lease = self._keep(chain, group, start + len(given), priority)
        try:
            while first < start + len(given):
                stop = min(first + step, start + len(given))
                with self._reserve(chain, [group], first, stop, ttl, priority) as r:
                    self._store.copier.copy(
                        [
                            _same_shape(geometry, view, given[depth - start])
                            for depth, view in zip(r.depths, r.views, strict=True)
                        ]
                    )
                    rows = np.concatenate([rows, r.rows])
                    with self._index.lock:
                        before, lease = lease, self._pipeline.keep(rows)
                    before.release()
                    r.seal()
                    stored += len(r.keys)
                first, step = stop, max(1, min(2 * step, most // geometry.footprint))
        finally:
            lease.release()
        return stored

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
        chain = self._chain(tokens, extras)
        stop = chain.blocks if stop is None else stop
        self._check_pledge(chain, start, stop, ttl, priority)
        with contextlib.ExitStack() as stack:
            for group in self.layout.groups:
                stack.enter_context(self._keep(chain, group, stop, priority)[1])
            reservation = self._reserve(chain, self.layout.groups, start, stop, ttl, priority)
            with self._index.lock:
                self._use(chain, stop, priority)
        reservation.on_end, reservation.door = self.ended, self._store.door
        self._own(reservation)
        return reservation

    def _check_pledge(self, chain: Chain, start: int, stop: int, ttl: float | None, priority: int) -> None:
        if not 0 <= start <= stop <= chain.blocks:
            raise LayoutError(f"blocks {start} to {stop} are not all in a prompt of {chain.blocks} full blocks")
        if not -100 <= priority <= 100:
            raise LayoutError(f"priority {priority} is not between -100 and 100")
        if ttl is not None and not ttl > 0:
            raise LayoutError(f"a block cannot live {ttl} seconds; give a positive ttl, or none")

    def _rows(self, chain: Chain, group: Group, stop: int) -> Rows:
        """The rows of a prompt's blocks up to ``stop``, those that there are. Under the index's lock."""
        rows = self._index.rows(chain.keys(group.suffix)[:stop])
        return rows[rows > 0]

    def _keep(self, chain: Chain, group: Group, stop: int, priority: int) -> tuple[Rows, Lease]:
        """Hold what there is of a prompt: room for its next blocks must not be made by losing its first ones."""
        with self._index.lock:
            rows = self._rows(chain, group, stop)
            self._index.priority[rows] = np.maximum(self._index.priority[rows], priority)
            return rows, self._pipeline.keep(rows)

    def _reserve(
        self,
        chain: Chain,
        groups: Sequence[Group],
        start: int,
        stop: int,
        ttl: float | None,
        priority: int,
    ) -> Reservation:
        now = self._store.sweep()
        expiry = float("inf") if ttl is None else now + ttl
        numbers = range(start, stop)
        reservation = self._pipeline.reserve(
            [
                Pledge(
                    self._identities[group.name],
                    chain.keys(group.suffix)[start:stop],
                    [chain.parent(i) for i in numbers],
                    numbers,
                    expiry,
                    priority,
                    [chain.tokens_of(i) for i in numbers] if self._store.config.nvme.token_ids else (),
                )
                for group in groups
            ]
        )
        if ttl is not None:
            self._store.expect_expiry(expiry)
        return reservation

    def _use(self, chain: Chain, stop: int, priority: int) -> None:
        """A prompt's blocks up to ``stop`` were stored: they are the newest, and a parent outlasts its children."""
        for group in self.layout.groups:
            rows = self._rows(chain, group, stop)
            self._index.priority[rows] = np.maximum(self._index.priority[rows], priority)
            self._pipeline.stored(rows)

    # -- keeping and removing -----------------------------------------------------------------------------

    @_inside
    def pin(self, tokens: Tokens | Chain, extras: Sequence[Extra] = (), *, stop: int | None = None) -> int:
        """Keep the blocks of a prompt, up to block ``stop``, from eviction until ``unpin``. Answers how many blocks."""
        return self._pin(self._chain(tokens, extras), stop, 1)

    @_inside
    def unpin(self, tokens: Tokens | Chain, extras: Sequence[Extra] = (), *, stop: int | None = None) -> int:
        """End one ``pin`` of the same blocks."""
        return self._pin(self._chain(tokens, extras), stop, -1)

    def _pin(self, chain: Chain, stop: int | None, step: int) -> int:
        index = self._index
        count = 0
        with index.lock:
            for group in self.layout.groups:
                rows = index.rows(chain.keys(group.suffix)[:stop])
                rows = rows[rows > 0]
                if step < 0:
                    rows = rows[index.pins[rows] > 0]
                index.pins[rows] = index.pins[rows].astype(np.int64) + step
                count += len(rows)
            index.changes += 1
        return count

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
        chain = self._chain(tokens, extras)
        keys = [k for g in self.layout.groups for k in chain.keys(g.suffix)[start:]]
        return self._store.drop(keys, timeout)

    # -- the end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release every match and abort every reservation of this session."""
        self._closed = True
        for right in list(self._rights):
            if isinstance(right, Match):
                right.release()
            else:
                right.abort()
        self._store.ended(self)

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
            found[name] = [_bytes(b, size, name, i, writable) for i, b in enumerate(buffers)]
        return found


def _bytes(buffer: Block, size: int, group: str, number: int, writable: bool) -> Span:
    view = memoryview(buffer)  # type: ignore[arg-type,unused-ignore]
    if not view.c_contiguous:
        raise LayoutError(f"buffer {number} of group {group!r} is not contiguous; copy it first")
    if view.nbytes != size:
        raise LayoutError(f"buffer {number} of group {group!r} has {view.nbytes} bytes; a block has {size}")
    if writable and view.readonly:
        raise LayoutError(f"buffer {number} of group {group!r} is read-only; a load must write into it")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _same_shape(geometry: Geometry, slot: Span, block: Span) -> tuple[Bytes, Bytes]:
    """A slot and a caller's block as arrays of one shape: flat, or by section where a slot has padding."""
    flat = np.frombuffer(block, np.uint8)
    if geometry.stride == geometry.section:
        return np.frombuffer(slot, np.uint8), flat
    by_section = np.frombuffer(slot, np.uint8).reshape(geometry.sections, geometry.stride)
    return by_section[:, : geometry.section], flat.reshape(geometry.sections, geometry.section)


def _leading(mask: np.ndarray[Any, np.dtype[np.bool_]]) -> int:
    """How many True come first."""
    return len(mask) if mask.all() else int(np.argmin(mask))


def _concatenate(parts: Collection[Rows]) -> Rows:
    return next(iter(parts)) if len(parts) == 1 else np.concatenate(list(parts))
