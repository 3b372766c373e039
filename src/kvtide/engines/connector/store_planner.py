"""The store planner: it reserves space at the node for blocks that a step of the engine will complete.

Space is requested when the step is planned, and the tickets travel with the step's orders. If the node's answer is
late, it is used in a later step, if the pages are still there; until then nothing more is requested. A node that is
still allocating memory from the system reserves what it has, and is asked again for the rest.

A request may finish before there is space for all of it. Then the engine is asked to keep its pages: for all such
requests together at most a twentieth of the engine's pages, and none longer than a second as long as the engine runs.
Blocks that are lost anyway are counted, and the reason is reported to the node.

Each group is stored as far as its pages exist. Where a window has passed a request's first blocks, the full-attention
groups of these blocks are stored nevertheless: with the last blocks of the window group they form a prefix.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kvtide.engines.connector.node_thread import NodeThread, attempt
from kvtide.engines.connector.orders import Storing
from kvtide.engines.connector.request import PageGeometry, Pages, Work
from kvtide.engines.connector.request_state import RequestState
from kvtide.engines.connector.sessions import SessionPool
from kvtide.node.client.workers import Wanted, delegate
from kvtide.node.protocol import DropReason
from kvtide.node.work_limits import RESERVED

__all__ = ["StorePlanner"]

_OPEN = 1024
"""Open tickets that are remembered. Workers report within a step or two that they cannot use one."""
_KEPT = 20
"""Finished requests may keep at most one in this many of the engine's pages."""
_KEEP = 1.0
"""Seconds that they may keep them."""
_LOOK = 64
"""Tokens after which a request that is not stored now is considered again."""


class _Wanted(NamedTuple):
    """Blocks of a request that will be complete, in these groups."""

    request: RequestState
    life: int
    tokens: tuple[int, Sequence[int]]
    groups: Sequence[str]
    start: int
    stop: int


class _Given(NamedTuple):
    """Reserved space for blocks, and the worker group that may fill it."""

    group_token: str
    ticket: str
    """Empty if no block has space yet."""
    abort: Callable[[], None]
    again: Mapping[str, int]
    """For each group the first block for which there is no memory yet."""


@dataclass(slots=True)
class _Kept:
    """A finished request whose pages the engine keeps for the connector."""

    request: RequestState
    work: Work
    pages: int
    until: float
    closing: bool = False
    """Whether the workers were informed that no further store follows."""


class StorePlanner:
    """For use by the thread of an engine's scheduler."""

    def __init__(
        self, node_thread: NodeThread, session_pool: SessionPool, page_geometry: PageGeometry, pool: float, pages: int
    ) -> None:
        """``pool``: if the node has more bytes of DRAM than this, a block is stored as soon as it is computed;
        otherwise once the engine has reused it. ``pages``: total pages of the engine; 0: it keeps none for finished
        requests."""
        self._node_thread = node_thread
        self._session_pool = session_pool
        self._now = session_pool.clock.monotonic
        self._page_geometry = page_geometry
        self._pool = pool
        self._most = pages // _KEPT
        self._reserving: tuple[list[_Wanted], Future[list[_Given | None]]] | None = None
        self._open: OrderedDict[str, Callable[[], None]] = OrderedDict()
        """Abort callbacks of the last tickets given to workers. Workers do not report when they have finished one."""
        self._kept: dict[str, _Kept] = {}

    def stores(self, work: Mapping[str, Work], requests: Mapping[str, RequestState], share: float) -> list[Storing]:
        """Stores for the workers after a step with that work. Waits for the node's answer at most for that ``share`` of
        the step's wait limit."""
        through = self._session_pool.dram > self._pool
        for w in work.values():
            if (r := requests.get(w.id)) is not None and not r.prompt.options.no_store:
                r.due = (w.upto if through else min(w.upto, self._reused(r))) // self._page_geometry.block_tokens
        if self._kept:
            work = {**work, **{id_: kept.work for id_, kept in self._kept.items() if not kept.closing}}
        found = self._placed(work, share)
        if self._reserving is None:
            self._ask(work, requests)
            found += self._placed(work, share)
        return found

    def _ask(self, work: Mapping[str, Work], requests: Mapping[str, RequestState]) -> None:
        """Request space for blocks that will be complete after this step."""
        wanted: list[_Wanted] = []
        for w in work.values():
            r = requests.get(w.id)
            if r is None or r.prompt.options.no_store or not self._lacks(r):
                continue
            pages, again = w.pages(), r.again
            r.again = []
            for group, start, last in again:
                stop = min(last, r.due)
                if start < stop:
                    first = self._page_geometry.whole(pages, start, stop)[group]
                    wanted += self._parts(r, [group], first, stop)
            start, stop = self._next(r)
            found = self._page_geometry.whole(pages, start, stop) if start < stop else {}
            for first in sorted({first for first in found.values() if first < stop}):
                wanted += self._parts(r, [group for group, its in found.items() if its == first], first, stop)
        if wanted:
            nothing: list[_Given | None] = [None] * len(wanted)
            self._reserving = wanted, self._node_thread.ask(partial(self._reserve, wanted), nothing)

    def _parts(self, r: RequestState, groups: Sequence[str], start: int, stop: int) -> Iterator[_Wanted]:
        """Split blocks into parts no larger than the node reserves at a time."""
        named, most = r.unnamed(stop * self._page_geometry.block_tokens), max(1, RESERVED // len(groups))
        for begin in range(start, stop, most):
            yield _Wanted(r, r.life, named, groups, begin, min(stop, begin + most))

    def _next(self, r: RequestState) -> tuple[int, int]:
        """The next blocks of a request to reserve, without those that were loaded from the store."""
        start, stop = r.stored, r.due
        if stop <= r.converted:
            return 0, 0
        if start in r.kept:
            start = r.kept.stop
        elif start < r.kept.start < stop:
            stop = r.kept.start
        return start, stop

    def _lacks(self, r: RequestState) -> bool:
        """Whether blocks of a request must still be reserved."""
        start, stop = self._next(r)
        return bool(r.again) or start < stop

    def _reused(self, r: RequestState) -> int:
        """Tokens of a request to be stored because the engine reused them from other requests. With a window two more
        blocks: the first pages of the reused part are freed, so the next complete prefix ends there."""
        return r.reused if self._page_geometry.lasting else r.reused and r.reused + 2 * self._page_geometry.block_tokens

    def _placed(self, work: Mapping[str, Work], share: float) -> list[Storing]:
        """Stores for which space is reserved, as far as their pages still exist: the answer may be from an earlier
        step."""
        if self._reserving is None or not self._node_thread.soon(self._reserving[1], share):
            return []
        (wanted, answer), self._reserving = self._reserving, None
        stores, again = [], []
        for (r, life, _, groups, start, stop), given in zip(wanted, answer.result(), strict=True):
            if given is None:
                r.stored = max(r.stored, stop)
                continue
            w = work.get(r.prompt.id) if life == r.life and (not r.over or r.prompt.id in self._kept) else None
            pages = w.pages() if w is not None else ()
            found = self._page_geometry.whole(pages, start, stop) if w is not None else {}
            if w is None or any(found[group] > start for group in groups):
                self._node_thread.ask(given.abort, None)
                again.append((r, start))
                continue
            r.stored = max(r.stored, stop)
            r.again += [(group, first, stop) for group, first in given.again.items()]
            if given.ticket:
                self._open[given.ticket] = given.abort
                mine = {
                    group: some
                    for group, some in self._page_geometry.blocks(pages, start, stop).items()
                    if group in groups
                }
                stores.append(
                    Storing(r.prompt.id, given.group_token, given.ticket, start, mine, self._page_geometry.lasting)
                )
        for r, start in again:
            r.stored = min(r.stored, start)  # other groups may be further ahead
        while len(self._open) > _OPEN:
            self._open.popitem(last=False)
        return stores

    def quiet(self, work: Iterable[Work], requests: Mapping[str, RequestState]) -> Iterator[tuple[str, int]]:
        """For each request the token count before which its steps need no work here."""
        through = self._session_pool.dram > self._pool
        asked = {w.request.prompt.id for w in self._reserving[0]} if self._reserving is not None else ()
        for w in work:
            if (r := requests.get(w.id)) is None:
                continue
            if r.prompt.options.no_store:
                yield w.id, sys.maxsize
            elif w.id in asked or self._lacks(r):
                yield w.id, 0
            else:
                yield w.id, (r.due + 1) * self._page_geometry.block_tokens if through else w.upto + _LOOK

    def left(self, r: RequestState) -> None:
        """The engine takes a request's pages away and will allocate others later: no block of it is complete now."""
        r.stored = min([r.stored, *(start for _, start, _ in r.again)])
        r.again, r.due = [], 0

    def lost(self, tickets: Iterable[str]) -> None:
        """Called when some worker will not fill these tickets."""
        for ticket in tickets:
            if (abort := self._open.pop(ticket, None)) is not None:
                self._node_thread.ask(abort, None)

    # -- finished requests --------------------------------------------------------------------------------

    def finished(self, r: RequestState, pages: Pages) -> bool:
        """Called at the end of a request. Returns whether the engine is to keep these pages until every worker has
        reported that it no longer needs them: see ``closing``."""
        if self._waits(r):
            count = sum(1 for group in pages for page in group if page >= 0)
            if count and count + sum(kept.pages for kept in self._kept.values()) <= self._most:
                work = Work(r.prompt.id, 0, lambda: pages)
                self._kept[r.prompt.id] = _Kept(r, work, count, self._now() + _KEEP)
                return True
            self._lose(r, "pages" if count and self._most else "late")
        self._give_back()
        return False

    def closing(self) -> set[str]:
        """Kept requests that no longer need their pages, or have kept them too long. Each is returned once."""
        found = set()
        for id_, kept in self._kept.items():
            late = self._now() >= kept.until
            if not kept.closing and (late or not self._waits(kept.request)):
                if late:
                    self._lose(kept.request, "memory" if kept.request.again else "late")
                kept.closing = True
                found.add(id_)
        if found:
            self._give_back()
        return found

    def sent(self, request: str) -> bool:
        """The engine has taken a request's pages back. Returns whether it kept them for this connector."""
        return self._kept.pop(request, None) is not None

    @property
    def kept(self) -> set[str]:
        """Requests whose pages the engine keeps for the connector, and for which no closing order was sent yet."""
        return {id_ for id_, kept in self._kept.items() if not kept.closing}

    def _waits(self, r: RequestState) -> bool:
        """Whether a request has blocks that still need space, or whose space the workers do not know yet."""
        return bool(self._reserved(r)) or (not r.prompt.options.no_store and self._lacks(r))

    def _reserved(self, r: RequestState) -> list[_Wanted]:
        """Reservations for a request that the node has not answered yet."""
        wanted = self._reserving[0] if self._reserving is not None else ()
        return [w for w in wanted if w.request is r and w.life == r.life]

    def _lose(self, r: RequestState, why: DropReason) -> None:
        """Give up the blocks of a request that are not stored yet, and report them."""
        blocks = set(range(*self._next(r))).union(*(range(first, last) for _, first, last in r.again))
        blocks.update(*(range(w.start, w.stop) for w in self._reserved(r)))
        r.again, r.stored = [], max(r.stored, r.due)
        if blocks:
            self._node_thread.ask(partial(self._session_pool.dropped, why, len(blocks)), None)

    def _give_back(self) -> None:
        """If all requests of the pending reservation have finished, release its space when the answer arrives: no
        further step may follow."""
        if self._reserving is not None and all(self._is_gone(w.request) for w in self._reserving[0]):
            (_, answer), self._reserving = self._reserving, None
            self._node_thread.ask(partial(_abort, answer), None)

    def _is_gone(self, r: RequestState) -> bool:
        kept = self._kept.get(r.prompt.id)
        return r.over and (kept is None or kept.closing)

    # -- on the node thread -------------------------------------------------------------------------------

    def _reserve(self, wanted: Sequence[_Wanted]) -> list[_Given | None]:
        """Reserve space for blocks that are new, as far as there is any. An error with one entry does not affect the
        others."""
        found: list[_Given | None] = [None] * len(wanted)
        asked = [(i, one) for i, w in enumerate(wanted) if (one := attempt(partial(self._named, w), None)) is not None]
        for (i, one), made in zip(asked, delegate([one for _, one in asked]), strict=True):
            if made.ticket or made.again:
                found[i] = _Given(one.worker_group.token, made.ticket, made.abort, made.again)
        return found

    def _named(self, wanted: _Wanted) -> Wanted:
        r, _, tokens, groups, start, stop = wanted
        chain, tenant_sessions = r.named(self._session_pool, *tokens)
        options, layout = r.prompt.options, tenant_sessions.own.session.layout
        some = [layout.group(name) for name in groups]
        return Wanted(tenant_sessions.own.worker_group, chain, some, start, stop, options.ttl, options.priority)


def _abort(answer: Future[list[_Given | None]]) -> None:
    for given in answer.result():
        if given is not None and given.ticket:
            given.abort()
