"""The connector worker: it moves the bytes. Each worker process of the engine has one.

The orders of a step contain tickets. The node thread asks the node which memory a ticket stands for while the engine
computes, so the engine does not wait.

On a CPU the engine's thread makes the copies at the end of the step: raw, and finished before the pages can change. If
the node's answer for a store is late, the copy is made at the end of a later step, if the request still has its pages.

Copies of a GPU run on its own streams; pages that the engine is about to reassign are read first. Loads are polled at
every step. A separate thread waits for stores and makes the blocks readable as soon as they are copied: an engine that
has nothing to do makes no steps.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvtide import forks
from kvtide.block import Layout, Span
from kvtide.clock import Clock, SystemClock
from kvtide.engines.connector.node_access import NodeAccess
from kvtide.engines.connector.node_thread import NodeThread
from kvtide.engines.connector.orders import Loading, Orders, Storing
from kvtide.engines.paged.mover import Move, Mover
from kvtide.engines.paged.pages import Copy, Pages
from kvtide.errors import KvtideError
from kvtide.node.client.client import Client
from kvtide.node.client.workers import Filling, Step, Worker
from kvtide.serial_executor import SerialExecutor
from kvtide.store.match import Loaded

__all__ = ["ConnectorWorker", "Moved"]

log = logging.getLogger("kvtide.engines")

_Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]

_ANSWER = 1.0
"""Seconds that a finished request's pages are kept for an answer of the node."""
_CLOSING = 3.0
"""Seconds that closing waits for the thread that waits for copies."""
_GROUPS = 256
"""Maximum number of worker groups of a worker, which gets no notice when a group is no longer used."""


@dataclass(slots=True)
class Moved:
    """Work done since the last report."""

    loads: int = 0
    load_bytes: int = 0
    load_seconds: float = 0.0
    failed: int = 0
    stores: int = 0
    store_bytes: int = 0
    store_seconds: float = 0.0
    missed: int = 0
    """Stores that were abandoned, because the node did not answer while the pages were valid, or answered with an
    error."""


@dataclass(frozen=True, slots=True)
class _Visited:
    """The node's answer to orders."""

    worker: Worker
    views: Mapping[str, Pages]
    step: Step


@dataclass(slots=True)
class _Visit:
    """Orders for one worker group that are under way: a load, or stores."""

    group_token: str
    requests: set[str]
    loads: Sequence[Loading]
    stores: Sequence[Storing]
    answer: Future[_Visited | None]
    until: float
    """When the time limit of a load ends, or when pages to be stored may change."""
    moves: list[Move] = field(default_factory=list)
    nbytes: int = 0
    began: float = 0.0
    seconds: float = 0.0
    """Duration of the copies, once they have ended."""
    error: Exception | None = None
    sealed: bool = False
    """Whether the copies have ended and the node was informed."""


class ConnectorWorker:
    """For use by the thread of an engine's worker."""

    def __init__(
        self,
        dial: Callable[[], Client],
        rank: int,
        pages: Callable[[Layout], Mapping[str, Pages]],
        tokens: Mapping[str, int],
        mover: Mover,
        clock: Clock | None = None,
    ) -> None:
        """``pages`` maps the engine's memory to a layout; it raises LayoutError if that is impossible. ``tokens``:
        tokens of a page of each group as the scheduler counts pages; such a page may be several pages in memory."""
        clock = clock or SystemClock()
        self._now = clock.monotonic
        self._node_access = NodeAccess(dial, clock)
        self._rank = rank
        self._see = pages
        self._tokens = tokens
        self._mover = mover
        self._node_thread = NodeThread("kvtide-worker")
        self._copied = SerialExecutor("kvtide-copied")
        """Waits for the copies of stores."""
        self._begun = self._now()
        self._closing: dict[str, float] = {}
        """Finished requests of which no further store follows, with the time until which the node may answer."""
        self._workers: OrderedDict[str, Worker] = OrderedDict()
        self._views: dict[bytes, Mapping[str, Pages]] = {}
        self._visits: list[_Visit] = []
        self._done: set[str] = set()
        self._bad: set[str] = set()
        self._lost: list[str] = []
        self._moved = Moved()
        self._node_thread.ask(self._node_access.client, None)  # connect early, so that the first request finds a client
        self._origin = forks.here
        _alive.add(self)

    # -- a step -------------------------------------------------------------------------------------------

    def begin(self, orders: Orders) -> None:
        """Before the engine computes: request what the orders need, and finish reading pages that are about to
        change."""
        self._node_thread.step()
        self._begun = self._now()
        # first: the order is given only once
        self._closing.update(dict.fromkeys(orders.closing, self._begun + _ANSWER))
        before = [v for v in self._visits if v.stores and (v.until < math.inf or v.requests & orders.leaving)]
        for load in orders.loads:
            self._ask(load.group_token, {load.request}, [load], [])
        for visit in before:
            if not visit.moves:
                self._give_up(visit)  # the engine may already have zeroed the pages for their next request
            try:
                for move in visit.moves:
                    move.join()
            except Exception:
                log.debug("a store failed", exc_info=True)
        by_group: dict[str, list[Storing]] = {}
        for store in orders.stores:
            by_group.setdefault(store.group_token, []).append(store)
        for group_token, stores in by_group.items():
            self._ask(group_token, {s.request for s in stores}, [], stores)

    def _ask(self, group_token: str, requests: set[str], loads: Sequence[Loading], stores: Sequence[Storing]) -> None:
        tickets = [o.ticket for o in loads], [o.ticket for o in stores]
        busy = {group_token, *(v.group_token for v in self._visits)}
        answer = self._node_thread.ask(partial(self._visit, group_token, busy, *tickets), None)
        lasting = bool(stores) and all(store.lasting for store in stores)
        until = math.inf if lasting else self._now() + max((load.seconds for load in loads), default=0)
        self._visits.append(_Visit(group_token, requests, loads, stores, answer, until))

    def _visit(self, group_token: str, busy: set[str], loads: Sequence[str], stores: Sequence[str]) -> _Visited:
        """Ask the node for the blocks' addresses. Runs on the node thread."""
        lost = list(stores)
        try:
            worker = self._worker(group_token, busy)
            if worker.layout.digest not in self._views:
                self._views[worker.layout.digest] = self._see(worker.layout)
            if stores and not any(worker.writes(g.name) for g in worker.layout.groups):
                step = Step([], [None] * len(stores), lambda good: None)  # another rank has the same heads
                lost = []
            else:
                step = worker.step(loads, stores)
                lost = [ticket for ticket, filling in zip(stores, step.stores, strict=True) if filling is None]
        finally:
            self._lost += lost
        return _Visited(worker, self._views[worker.layout.digest], step)

    def lost(self) -> set[str]:
        """Tickets of stores, since the last call, that the node did not let this worker fill. The scheduler must abort
        them, or their blocks stay in the state of being written."""
        lost, self._lost = self._lost, []
        return set(lost)

    def _worker(self, group_token: str, busy: set[str]) -> Worker:
        """Join a worker group. Groups that are ``busy`` are not left: the node would reuse the memory of their
        blocks."""
        if group_token not in self._workers:
            self._workers[group_token] = self._node_access.client().join(group_token, self._rank)
            idle = [c for c in self._workers if c not in busy]
            for one in idle[: max(0, len(self._workers) - _GROUPS)]:
                self._workers.pop(one).close()
        self._workers.move_to_end(group_token)
        return self._workers[group_token]

    def finish(self) -> None:
        """After the engine has computed: make the copies that the orders ask for."""
        now = self._now()
        self._node_thread.takes(now - self._begun)
        for visit in list(self._visits):
            if visit.moves:
                continue
            over = max(self._closing.get(request, math.inf) for request in visit.requests)
            until = min(visit.until, over)  # other requests of the same step may still be running
            if self._node_thread.soon(visit.answer):
                self._move(visit, visit.answer.result())
            elif now >= until:
                self._give_up(visit)

    def _move(self, visit: _Visit, visited: _Visited | None) -> None:
        visit.began = time.perf_counter()
        try:
            if visited is None:
                raise KvtideError("the node could not be asked for it")
            worker, views, step = visited.worker, visited.views, visited.step
            for load, loaded in zip(visit.loads, step.loads, strict=True):
                if loaded is None or loaded.tokens < load.stop:
                    raise KvtideError("blocks that were promised are not there")
                for name, pages in views.items():
                    wanted = self._wide(load.pages[name], name, pages)
                    copies = list(_into(load.start // pages.tokens, wanted, loaded, name, pages))
                    if sum(len(c.pages) for c in copies) != np.count_nonzero(wanted >= 0):
                        raise KvtideError("blocks that are there leave some pages out")
                    visit.nbytes += _nbytes(copies, pages)
                    visit.moves.append(self._mover.load(pages, copies))
            by_group: dict[str, list[Copy]] = {}
            for store, filling in zip(visit.stores, step.stores, strict=True):
                for name, numbers in store.pages.items():
                    if filling is not None and worker.writes(name):
                        given = self._wide(numbers, name, views[name])
                        by_group.setdefault(name, []).extend(_out_of(store.start, given, filling, name, views[name]))
            for name, copies in by_group.items():  # one move for all requests: each costs the engine's thread some time
                visit.nbytes += _nbytes(copies, views[name])
                visit.moves.append(self._mover.store(views[name], copies))
        except Exception as e:  # noqa: BLE001 - whatever the error, the engine computes instead
            self._end(visit, e)
            return
        if not visit.moves:
            self._end(visit, None)
        elif visit.stores and all(move.at_once for move in visit.moves):
            self._seal(visit)
        elif visit.stores:
            self._copied.put(partial(self._seal, visit))

    def _seal(self, visit: _Visit) -> None:
        """Wait for the copies of stores, and make the blocks readable."""
        for move in visit.moves:  # all of them, even after an error: then the memory returns to the node
            try:
                move.wait()
            except Exception as e:  # noqa: BLE001 - whatever the error, the blocks are not stored
                visit.error = e
        visit.seconds = time.perf_counter() - visit.began
        self._part(visit, visit.error is None)
        visit.sealed = True

    def _wide(self, numbers: Sequence[int], group: str, pages: Pages) -> _Numbers:
        """Convert the scheduler's page numbers to those in memory; -1 for a page that does not exist."""
        found = np.array(numbers, np.int64)
        n = self._tokens[group] // pages.tokens
        return found if n == 1 else np.where(found >= 0, n * found + np.arange(n)[:, None], -1).T.ravel()

    def results(self) -> tuple[set[str], set[str], set[str]]:
        """Requests whose loads have ended since the last call, those of them that failed, and finished requests whose
        pages the engine need not keep any longer. Each is reported once."""
        for visit in [v for v in self._visits if v.moves]:
            if visit.stores:
                if visit.sealed:
                    self._end(visit, visit.error)
                continue
            try:
                if all(move.done() for move in visit.moves):
                    self._end(visit, None)
            except Exception as e:  # noqa: BLE001 - as above
                self._end(visit, e)
        done, bad = self._done, self._bad
        self._done, self._bad = set(), set()
        busy = {request for v in self._visits if v.stores for request in v.requests} if self._closing else set()
        sent = self._closing.keys() - busy
        for request in sent:
            del self._closing[request]
        return done, bad, sent

    def _end(self, visit: _Visit, error: Exception | None) -> None:
        self._visits.remove(visit)
        moved, seconds = self._moved, visit.seconds or time.perf_counter() - visit.began
        if visit.loads:
            self._done |= visit.requests
            if error is None:
                moved.loads, moved.load_bytes = moved.loads + 1, moved.load_bytes + visit.nbytes
                moved.load_seconds += seconds
            else:
                log.warning("kvtide could not load a prefix, which is computed instead: %s", error)
                self._bad |= visit.requests
                moved.failed += 1
        elif error is None and not visit.nbytes:
            pass  # another rank has the same heads, or the node refused: see ``lost``
        elif error is None:
            moved.stores, moved.store_bytes = moved.stores + 1, moved.store_bytes + visit.nbytes
            moved.store_seconds += seconds
        else:
            log.warning("kvtide could not store blocks: %s", error)
            moved.missed += 1
        if not visit.sealed:
            for move in visit.moves:
                _wait(move)  # even after an error: now its memory returns to the node
            self._part(visit, error is None)

    def _part(self, visit: _Visit, good: bool) -> None:
        """Tell the node that its memory is not used any more. May be called from any thread."""
        if visit.answer.done() and (visited := visit.answer.result()) is not None:
            self._node_thread.ask(partial(_leave, visited.step, good), None)

    def _give_up(self, visit: _Visit) -> None:
        """Abandon orders that the node did not answer in time."""
        self._visits.remove(visit)
        self._node_thread.ask(partial(_turn_away, visit.answer), None)
        if visit.loads:
            self._done |= visit.requests
            self._bad |= visit.requests
            self._moved.failed += 1
        else:
            self._moved.missed += 1
            if self._rank == 0:  # else each rank would count them
                tokens = sum(max(len(s.pages[g]) * self._tokens[g] for g in s.pages) for s in visit.stores)
                self._node_thread.ask(partial(self._dropped, visit.answer, tokens), None)

    def _dropped(self, answer: Future[_Visited | None], tokens: int) -> None:
        visited = answer.result()
        if visited is not None:
            self._node_access.client().dropped("late", tokens // visited.worker.layout.block_tokens)

    def take(self) -> Moved:
        moved, self._moved = self._moved, Moved()
        return moved

    def end(self) -> None:
        """Close at the end of the process, unless this is a forked child or the copies under way may never end."""
        deadline = time.monotonic() + _CLOSING
        while self._origin is forks.here and time.monotonic() < deadline:
            if all(_ended(move) for visit in list(self._visits) for move in visit.moves):
                self.close()
                return
            time.sleep(0.005)

    def close(self) -> None:
        """Finish what is under way, and disconnect."""
        _alive.discard(self)
        for visit in list(self._visits):
            for move in visit.moves:
                _wait(move)
        self._copied.close(_CLOSING)
        self.results()
        self._mover.close()
        self._node_thread.ask(self._hang_up, None)
        self._node_thread.close()

    def _hang_up(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._node_access.close()


_alive: weakref.WeakSet[ConnectorWorker] = weakref.WeakSet()


@atexit.register
def _end_in_order() -> None:
    """Close the workers of an engine that exits without closing them: a thread that is inside torch when the
    interpreter shuts down would abort the process."""
    for half in list(_alive):
        with contextlib.suppress(Exception):
            half.end()


def _into(first: int, wanted: _Numbers, loaded: Loaded, group: str, pages: Pages) -> Iterator[Copy]:
    """The copies of a load whose first page is number ``first`` of the prompt: for each block the wanted pages."""
    whole = wanted.min(initial=0) >= 0
    for depth, view in enumerate(loaded.views[group], loaded.first[group]):
        begin, end = max(depth * pages.each, first), min((depth + 1) * pages.each, first + len(wanted))
        if begin < end:
            yield from _there(view, wanted[begin - first : end - first], begin - depth * pages.each, whole)


def _out_of(start: int, given: _Numbers, filling: Filling, group: str, pages: Pages) -> Iterator[Copy]:
    """The copies of a store. Freed pages are written as zeros, because a slot may hold old data."""
    whole = given.min(initial=0) >= 0
    for name, depth, view in zip(filling.groups, filling.depths, filling.views, strict=True):
        if name == group:
            begin = (depth - start) * pages.each
            some = given[begin : begin + pages.each]
            if not whole:
                pages.block(view)[:, :, np.flatnonzero(some < 0)] = 0
            yield from _there(view, some, 0, whole)


def _there(view: Span, pages: _Numbers, at: int, whole: bool) -> Iterator[Copy]:
    """Runs of existing pages: a window has freed the pages that it has passed. If ``whole``, all pages exist."""
    if whole:
        yield Copy(view, pages, at)
        return
    edges = np.flatnonzero(np.diff(pages >= 0, prepend=False, append=False))
    for begin, end in edges.reshape(-1, 2).tolist():
        yield Copy(view, pages[begin:end], at + begin)


def _nbytes(copies: Sequence[Copy], pages: Pages) -> int:
    return sum(len(copy.pages) for copy in copies) * pages.atom * pages.heads * len(pages.sections)


def _ended(move: Move) -> bool:
    try:
        return move.done()
    except Exception:  # noqa: BLE001 - a move that failed has ended too; the error is reported with its visit
        return True


def _wait(move: Move) -> None:
    with contextlib.suppress(Exception):  # already logged where it happened
        move.wait()


def _leave(step: Step, good: bool) -> None:
    with contextlib.suppress(KvtideError), step:
        if not good:
            raise KvtideError("given up")


def _turn_away(answer: Future[_Visited | None]) -> None:
    """Discard an answer that came too late. Runs on the node thread, after the call."""
    visited = answer.result()
    if visited is not None:
        _leave(visited.step, False)
