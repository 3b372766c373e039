"""The half of an engine's connector that moves bytes, one in each worker process.

The orders of a step name tickets. What a ticket stands for is asked of the node on a thread of its own, while the
engine computes; so the engine waits for nobody. Copies on a CPU are made in the engine's thread, at the end of the
step: raw, and finished before the pages can change. A store whose answer is late is made at the end of a later step, if
the request has kept its pages. Copies of a GPU run on its own streams; pages that the engine is about to give to others
are read first. Loads are looked at again at every step. Stores are waited for by a thread of their own, which lets
others read the blocks as soon as they are there: an engine that has nothing to do makes no steps.
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
from kvtide.engines.connector.node_connector import NodeConnector
from kvtide.engines.connector.node_thread import NodeThread
from kvtide.engines.connector.orders import Loading, Orders, Storing
from kvtide.engines.paged.mover import Move, Mover
from kvtide.engines.paged.pages import Copy, Pages
from kvtide.errors import KvtideError
from kvtide.node.client.client import Client
from kvtide.node.client.workers import Filling, Step, Worker
from kvtide.store.match import Loaded
from kvtide.tiers.callback_thread import CallbackThread

__all__ = ["ConnectorWorker", "Moved"]

log = logging.getLogger("kvtide.engines")

_Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]

_ANSWER = 1.0
"""Seconds that the pages of a request that is over are kept for an answer of the node."""
_CLOSING = 3.0
"""Seconds that an engine's end waits for the thread that waits for copies."""
_CREWS = 256
"""That a worker belongs to at a time, at most. Those of tenants that are gone are not heard of again."""


@dataclass(slots=True)
class Moved:
    """What a worker did since it was last asked."""

    loads: int = 0
    load_bytes: int = 0
    load_seconds: float = 0.0
    failed: int = 0
    stores: int = 0
    store_bytes: int = 0
    store_seconds: float = 0.0
    missed: int = 0
    """Stores that were given up, because the node did not answer while the pages were there, or not in good order."""


@dataclass(frozen=True, slots=True)
class _Visited:
    """What the node told of orders."""

    worker: Worker
    views: Mapping[str, Pages]
    step: Step


@dataclass(slots=True)
class _Visit:
    """Orders for one crew under way: a load, or stores."""

    crew: str
    requests: set[str]
    loads: Sequence[Loading]
    stores: Sequence[Storing]
    answer: Future[_Visited | None]
    until: float
    """When a request that is to be loaded has waited enough, or pages that are to be stored may change."""
    moves: list[Move] = field(default_factory=list)
    nbytes: int = 0
    began: float = 0.0
    seconds: float = 0.0
    """That its copies took, when they have ended."""
    error: Exception | None = None
    sealed: bool = False
    """Whether its copies have ended, and the node was told."""


class ConnectorWorker:
    """For the thread of an engine's worker."""

    def __init__(
        self,
        dial: Callable[[], Client],
        rank: int,
        pages: Callable[[Layout], Mapping[str, Pages]],
        tokens: Mapping[str, int],
        mover: Mover,
        clock: Clock | None = None,
    ) -> None:
        """``pages`` sees the engine's memory as a layout has it; raises LayoutError for one that it cannot be.
        ``tokens``: of a page of each group, as the scheduler counts pages. In memory one may be several."""
        clock = clock or SystemClock()
        self._now = clock.monotonic
        self._connector = NodeConnector(dial, clock)
        self._rank = rank
        self._see = pages
        self._tokens = tokens
        self._mover = mover
        self._node_thread = NodeThread("kvtide-worker")
        self._copied = CallbackThread("kvtide-copied")
        """Waits for the copies of stores."""
        self._begun = self._now()
        self._closing: dict[str, float] = {}
        """Requests that are over, of which no further store comes, with until when the node may answer."""
        self._workers: OrderedDict[str, Worker] = OrderedDict()
        self._views: dict[bytes, Mapping[str, Pages]] = {}
        self._visits: list[_Visit] = []
        self._done: set[str] = set()
        self._bad: set[str] = set()
        self._lost: list[str] = []
        self._moved = Moved()
        self._node_thread.ask(self._connector.client, None)  # so that the first request finds it
        self._origin = forks.here
        _alive.add(self)

    # -- a step -------------------------------------------------------------------------------------------

    def begin(self, orders: Orders) -> None:
        """Before the engine computes: ask for what the orders need, and read what is about to change."""
        self._node_thread.step()
        self._begun = self._now()
        self._closing.update(dict.fromkeys(orders.closing, self._begun + _ANSWER))  # first: it is said once
        before = [v for v in self._visits if v.stores and (v.until < math.inf or v.requests & orders.leaving)]
        for load in orders.loads:
            self._ask(load.crew, {load.request}, [load], [])
        for visit in before:
            if not visit.moves:
                self._give_up(visit)  # the engine may have zeroed the pages already, for whoever has them now
            try:
                for move in visit.moves:
                    move.join()
            except Exception:
                log.debug("a store failed", exc_info=True)
        by_crew: dict[str, list[Storing]] = {}
        for store in orders.stores:
            by_crew.setdefault(store.crew, []).append(store)
        for crew, stores in by_crew.items():
            self._ask(crew, {s.request for s in stores}, [], stores)

    def _ask(self, crew: str, requests: set[str], loads: Sequence[Loading], stores: Sequence[Storing]) -> None:
        tickets = [o.ticket for o in loads], [o.ticket for o in stores]
        busy = {crew, *(v.crew for v in self._visits)}
        answer = self._node_thread.ask(partial(self._visit, crew, busy, *tickets), None)
        lasting = bool(stores) and all(store.lasting for store in stores)
        until = math.inf if lasting else self._now() + max((load.seconds for load in loads), default=0)
        self._visits.append(_Visit(crew, requests, loads, stores, answer, until))

    def _visit(self, crew: str, busy: set[str], loads: Sequence[str], stores: Sequence[str]) -> _Visited:
        """Ask the node where the blocks are. On the thread that talks to it."""
        lost = list(stores)
        try:
            worker = self._worker(crew, busy)
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
        """Tickets of stores that this worker will not fill, since the last call: the node did not let it. Unless the
        scheduler gives them up, their blocks stay as if they were just being written."""
        lost, self._lost = self._lost, []
        return set(lost)

    def _worker(self, crew: str, busy: set[str]) -> Worker:
        """Us as one of a crew. We leave none of those that are ``busy``: the node would give our blocks to others."""
        if crew not in self._workers:
            self._workers[crew] = self._connector.client().join(crew, self._rank)
            idle = [c for c in self._workers if c not in busy]
            for one in idle[: max(0, len(self._workers) - _CREWS)]:
                self._workers.pop(one).close()
        self._workers.move_to_end(crew)
        return self._workers[crew]

    def finish(self) -> None:
        """After the engine has computed: copy what is asked for."""
        now = self._now()
        self._node_thread.takes(now - self._begun)
        for visit in list(self._visits):
            if visit.moves:
                continue
            over = max(self._closing.get(request, math.inf) for request in visit.requests)
            until = min(visit.until, over)  # others of the same step may go on
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
            for store, filling in zip(visit.stores, step.stores, strict=True):
                if filling is None:
                    continue
                for name, numbers in store.pages.items():
                    if worker.writes(name):
                        pages = views[name]
                        given = self._wide(numbers, name, pages)
                        copies = list(_out_of(store.start, given, filling, name, pages))
                        visit.nbytes += _nbytes(copies, pages)
                        visit.moves.append(self._mover.store(pages, copies))
        except Exception as e:  # noqa: BLE001 - whatever it is, the engine computes instead
            self._end(visit, e)
            return
        if not visit.moves:
            self._end(visit, None)
        elif visit.stores and all(move.at_once for move in visit.moves):
            self._seal(visit)
        elif visit.stores:
            self._copied.put(partial(self._seal, visit))

    def _seal(self, visit: _Visit) -> None:
        """Wait for the copies of stores, and let others read the blocks."""
        for move in visit.moves:  # all of them, even after an error: the memory is the node's again then
            try:
                move.wait()
            except Exception as e:  # noqa: BLE001 - whatever it is, the blocks are not stored
                visit.error = e
        visit.seconds = time.perf_counter() - visit.began
        self._part(visit, visit.error is None)
        visit.sealed = True

    def _wide(self, numbers: Sequence[int], group: str, pages: Pages) -> _Numbers:
        """The scheduler's pages as those in memory; -1 for one that is not there."""
        found = np.array(numbers, np.int64)
        n = self._tokens[group] // pages.tokens
        return found if n == 1 else np.where(found >= 0, n * found + np.arange(n)[:, None], -1).T.ravel()

    def results(self) -> tuple[set[str], set[str], set[str]]:
        """Requests whose loads have ended since the last call: all of them, and those that failed. And those that are
        over, whose pages the engine has kept, and need keep no longer: each once."""
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
            pass  # another rank has the same heads, or the node did not let us: see ``lost``
        elif error is None:
            moved.stores, moved.store_bytes = moved.stores + 1, moved.store_bytes + visit.nbytes
            moved.store_seconds += seconds
        else:
            log.warning("kvtide could not store blocks: %s", error)
            moved.missed += 1
        if not visit.sealed:
            for move in visit.moves:
                _wait(move)  # even after an error: its memory is the node's again now
            self._part(visit, error is None)

    def _part(self, visit: _Visit, good: bool) -> None:
        """Tell the node that its memory is not used any more. From any thread."""
        if visit.answer.done() and (visited := visit.answer.result()) is not None:
            self._node_thread.ask(partial(_leave, visited.step, good), None)

    def _give_up(self, visit: _Visit) -> None:
        """The node does not answer."""
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
            self._connector.client().dropped("late", tokens // visited.worker.layout.block_tokens)

    def take(self) -> Moved:
        moved, self._moved = self._moved, Moved()
        return moved

    def end(self) -> None:
        """Close at the end of the process, unless we are another one's, or what is under way may never end."""
        deadline = time.monotonic() + _CLOSING
        while self._origin is forks.here and time.monotonic() < deadline:
            if all(move.done() for visit in list(self._visits) for move in visit.moves):
                self.close()
                return
            time.sleep(0.005)

    def close(self) -> None:
        """Finish what is under way, and hang up."""
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
        self._connector.close()


_alive: weakref.WeakSet[ConnectorWorker] = weakref.WeakSet()


@atexit.register
def _end_in_order() -> None:
    """An engine that ends without a word: a thread of ours that is in the middle of torch's code when the interpreter
    goes would abort the process."""
    for half in list(_alive):
        with contextlib.suppress(Exception):
            half.end()


def _into(first: int, wanted: _Numbers, loaded: Loaded, group: str, pages: Pages) -> Iterator[Copy]:
    """The copies of a load whose first page is number ``first`` of the prompt: of each block the pages wanted."""
    whole = wanted.min(initial=0) >= 0
    for depth, view in enumerate(loaded.views[group], loaded.first[group]):
        begin, end = max(depth * pages.each, first), min((depth + 1) * pages.each, first + len(wanted))
        if begin < end:
            yield from _there(view, wanted[begin - first : end - first], begin - depth * pages.each, whole)


def _out_of(start: int, given: _Numbers, filling: Filling, group: str, pages: Pages) -> Iterator[Copy]:
    """The copies of a store. A slot may still have what was there before, so pages that are gone become zeros."""
    whole = given.min(initial=0) >= 0
    for name, depth, view in zip(filling.groups, filling.depths, filling.views, strict=True):
        if name == group:
            begin = (depth - start) * pages.each
            some = given[begin : begin + pages.each]
            if not whole:
                pages.block(view)[:, :, np.flatnonzero(some < 0)] = 0
            yield from _there(view, some, 0, whole)


def _there(view: Span, pages: _Numbers, at: int, whole: bool) -> Iterator[Copy]:
    """Runs of pages that are there: a window has none for what it has passed over. All are there if it is ``whole``."""
    if whole:
        yield Copy(view, pages, at)
        return
    edges = np.flatnonzero(np.diff(pages >= 0, prepend=False, append=False))
    for begin, end in edges.reshape(-1, 2).tolist():
        yield Copy(view, pages[begin:end], at + begin)


def _nbytes(copies: Sequence[Copy], pages: Pages) -> int:
    return sum(len(copy.pages) for copy in copies) * pages.atom * pages.heads * len(pages.sections)


def _wait(move: Move) -> None:
    with contextlib.suppress(Exception):  # it was said where it happened
        move.wait()


def _leave(step: Step, good: bool) -> None:
    with contextlib.suppress(KvtideError), step:
        if not good:
            raise KvtideError("given up")


def _turn_away(answer: Future[_Visited | None]) -> None:
    """An answer that came too late. On the thread that got it, afterwards."""
    visited = answer.result()
    if visited is not None:
        _leave(visited.step, False)
