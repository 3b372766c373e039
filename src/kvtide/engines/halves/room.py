"""Room at the node for blocks that a step of the engine will complete.

It is asked for when the step is planned, and the tickets travel with the step's orders. If the node takes longer than a
moment, its answer is used in a later step, as long as the pages are still there; until then nothing more is asked for.

Groups are stored each as far as its pages are there. Where a window has passed over a request's first blocks, those of
full attention are stored all the same: together with the last blocks of the window they are a prefix.
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
from kvtide.node.work import RESERVED

__all__ = ["Room"]

_OPEN = 1024
"""Tickets that are remembered. Workers say within a step or two that they cannot use one."""


class _Wanted(NamedTuple):
    """Blocks of a request that will be whole, in these groups."""

    request: State
    life: int
    tokens: tuple[int, Sequence[int]]
    groups: Sequence[str]
    start: int
    stop: int


class _Given(NamedTuple):
    """Room for blocks, and who may fill it."""

    crew: str
    ticket: str
    abort: Callable[[], None]


class Room:
    """For the thread of an engine's scheduler."""

    def __init__(self, errands: Errands, tenancies: Tenancies, cut: Cut, pool: float) -> None:
        """``pool``: where the node has more bytes of DRAM than this, a block is stored as soon as it is computed;
        otherwise, when the engine has used it again."""
        self._errands = errands
        self._tenancies = tenancies
        self._cut = cut
        self._pool = pool
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
        through = self._tenancies.dram > self._pool
        for w in work.values():
            r = requests.get(w.id)
            if r is None or r.prompt.wishes.no_store:
                continue
            start, stop = r.stored, (w.upto if through else min(w.upto, self._reused(r))) // tokens
            if stop <= r.converted:
                continue
            if start in r.kept:
                start = r.kept.stop
            elif start < r.kept.start < stop:
                stop = r.kept.start
            if start < stop:
                found, named = self._cut.whole(w.pages(), start, stop), r.unnamed(stop * tokens)
                for first in sorted({first for first in found.values() if first < stop}):
                    groups = [group for group, its in found.items() if its == first]
                    most = max(1, RESERVED // len(groups))  # the node reserves no more at a time
                    for begin in range(first, stop, most):
                        wanted.append(_Wanted(r, r.life, named, groups, begin, min(stop, begin + most)))
        if wanted:
            nothing: list[_Given | None] = [None] * len(wanted)
            self._reserving = wanted, self._errands.ask(partial(self._reserve, wanted), nothing)

    def _reused(self, r: State) -> int:
        """Tokens of a request that are to be stored, because the engine had them of others. With a window two blocks
        more: of what the engine had its first pages are gone, so that the next prefix that is whole ends there."""
        return r.reused if self._cut.lasting else r.reused and r.reused + 2 * self._cut.block_tokens

    def _placed(self, work: Mapping[str, Work]) -> list[Storing]:
        """What there is room for by now, as far as its pages are still there: the answer may be of an earlier step."""
        if self._reserving is None or not self._errands.soon(self._reserving[1]):
            return []
        (wanted, answer), self._reserving = self._reserving, None
        stores, again = [], []
        for (r, life, _, groups, start, stop), given in zip(wanted, answer.result(), strict=True):
            if given is None:
                r.stored = max(r.stored, stop)
                continue
            w = work.get(r.prompt.id) if life == r.life and not r.over else None
            pages = w.pages() if w is not None else ()
            found = self._cut.whole(pages, start, stop) if w is not None else {}
            if w is None or any(found[group] > start for group in groups):
                self._errands.ask(given.abort, None)
                again.append((r, start))
            else:
                r.stored = max(r.stored, stop)
                self._open[given.ticket] = given.abort
                mine = {group: some for group, some in self._cut.blocks(pages, start, stop).items() if group in groups}
                stores.append(Storing(r.prompt.id, given.crew, given.ticket, start, mine, self._cut.lasting))
        for r, start in again:
            r.stored = min(r.stored, start)  # other groups may have got further
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
        r, _, tokens, groups, start, stop = wanted
        chain, tenancy = r.named(self._tenancies, *tokens)
        crew, wishes = tenancy.own.crew, r.prompt.wishes
        made = crew.delegate(chain, groups=groups, start=start, stop=stop, ttl=wishes.ttl, priority=wishes.priority)
        return _Given(crew.token, made.ticket, made.abort) if made.ticket else None


def _abort(answer: Future[list[_Given | None]]) -> None:
    for given in answer.result():
        if given is not None:
            given.abort()
