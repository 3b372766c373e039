"""Room at the node for blocks that a step of the engine will complete.

It is asked for when the step is planned, and the tickets travel with the step's orders. If the node takes longer than a
moment, its answer is used in a later step, as long as the pages are still there; until then nothing more is asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from kvtide.engines.halves.errands import Errands, attempt
from kvtide.engines.halves.orders import Storing
from kvtide.engines.halves.request import Cut, Work
from kvtide.engines.halves.state import State
from kvtide.engines.halves.tenancy import Tenancies

__all__ = ["Room"]

_OPEN = 1024
"""Tickets that are remembered. Workers say within a step or two that they cannot use one."""


class _Wanted(NamedTuple):
    """Blocks of a request that will be whole."""

    request: State
    life: int
    tokens: tuple[int, Sequence[int]]
    start: int
    stop: int


class _Given(NamedTuple):
    """Room for blocks, and who may fill it."""

    crew: str
    ticket: str
    abort: Callable[[], None]


class Room:
    """For the thread of an engine's scheduler."""

    def __init__(self, errands: Errands, tenancies: Tenancies, cut: Cut, through: bool) -> None:
        """``through``: a block is stored as soon as it is computed; otherwise, when the engine has used it again."""
        self._errands = errands
        self._tenancies = tenancies
        self._cut = cut
        self._through = through
        self._reserving: tuple[list[_Wanted], Future[list[_Given | None]]] | None = None
        self._open: OrderedDict[str, Callable[[], None]] = OrderedDict()
        """How to give up what was last given to the workers. Nobody says when they are through."""

    def stores(self, work: Mapping[str, Work], requests: Mapping[str, State]) -> list[Storing]:
        """What the workers are to store after the step with that work."""
        found = self._placed(work)
        if self._reserving is None:
            self._ask(work, requests)
            found += self._placed(work)
        return found

    def _ask(self, work: Mapping[str, Work], requests: Mapping[str, State]) -> None:
        """For blocks that will be whole after this step."""
        wanted, tokens = [], self._cut.block_tokens
        for w in work.values():
            r = requests.get(w.id)
            if r is None or r.prompt.wishes.no_store:
                continue
            start, stop = r.stored, (w.upto if self._through else min(w.upto, r.reused)) // tokens
            pages = w.pages() if stop > start else ()
            while start < stop and _gone(self._cut.blocks(pages, start, start + 1)):
                start += 1
            if start < stop:
                wanted.append(_Wanted(r, r.life, r.unnamed(stop * tokens), start, stop))
        if wanted:
            nothing: list[_Given | None] = [None] * len(wanted)
            self._reserving = wanted, self._errands.ask(partial(self._reserve, wanted), nothing)

    def _placed(self, work: Mapping[str, Work]) -> list[Storing]:
        """What there is room for by now, as far as its pages are still there: the answer may be of an earlier step."""
        if self._reserving is None or not self._errands.soon(self._reserving[1]):
            return []
        (wanted, answer), self._reserving = self._reserving, None
        stores = []
        for (r, life, _, start, stop), given in zip(wanted, answer.result(), strict=True):
            if given is None:
                r.stored = max(r.stored, stop)
                continue
            w = work.get(r.prompt.id) if life == r.life and not r.over else None
            pages = self._cut.blocks(w.pages(), start, stop) if w is not None else {}
            if w is None or _gone(pages):
                self._errands.ask(given.abort, None)
            else:
                r.stored = max(r.stored, stop)
                self._open[given.ticket] = given.abort
                stores.append(Storing(r.prompt.id, given.crew, given.ticket, start, pages, self._cut.lasting))
        while len(self._open) > _OPEN:
            self._open.popitem(last=False)
        return stores

    def lost(self, tickets: Iterable[str]) -> None:
        """Some worker will not fill these."""
        for ticket in tickets:
            if (abort := self._open.pop(ticket, None)) is not None:
                self._errands.ask(abort, None)

    def finished(self) -> None:
        """A request is over. Room for none but such is given back, when it comes: there may be no further step."""
        if self._reserving is not None and all(w.request.over for w in self._reserving[0]):
            (_, answer), self._reserving = self._reserving, None
            self._errands.ask(partial(_abort, answer), None)

    def _reserve(self, wanted: Sequence[_Wanted]) -> list[_Given | None]:
        """On the thread that talks to the node. What goes wrong for one is no loss of the others' room."""
        return [attempt(partial(self._reserve_one, w), None) for w in wanted]

    def _reserve_one(self, wanted: _Wanted) -> _Given | None:
        """Room for blocks, where they are new and there is any."""
        r, _, tokens, start, stop = wanted
        chain, tenancy = r.named(self._tenancies, *tokens)
        crew, wishes = tenancy.own.crew, r.prompt.wishes
        made = crew.delegate(chain, start=start, stop=stop, ttl=wishes.ttl, priority=wishes.priority)
        return _Given(crew.token, made.ticket, made.abort) if made.ticket else None


def _abort(answer: Future[list[_Given | None]]) -> None:
    for given in answer.result():
        if given is not None:
            given.abort()


def _gone(pages: Mapping[str, Sequence[int]]) -> bool:
    """Whether a window has passed over some of them."""
    return any(page < 0 for some in pages.values() for page in some)
