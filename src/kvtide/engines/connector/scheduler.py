"""The half of an engine's connector that decides: which prefix to load, and what to store.

The engine asks how much of a waiting request's prompt we have. It is told "ask again" until every block of the answer
is in DRAM, verified and held for us, and only then a number; so nothing but the node's death can break it, and that
only until the workers have asked where the blocks are. Then the load fails, and the prefix is computed. Engines ask at
every step while a request waits for pages: an offer is made once, kept, and given back whatever the engine does next.

Everything that talks to the node runs on a thread of its own (``errands``). The engine's loop waits milliseconds for
it at most. An answer that takes longer is "ask again" for a load, until the request's patience ends, and for a store is
used in a later step, if the pages are still there.

How fast the engine computes prompts is learned from its steps (plan/prefill.py), by the wall time from where a step
began, or the one before it ended, to its end. A step that decodes for others besides takes longer, and so it will for
the next prompt: nothing is subtracted.

What a step computes becomes whole blocks at the step's end. They are reserved before, and the tickets travel to the
workers with the step's orders.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial

from kvtide.engines.connector.node_thread import NodeThread, attempt
from kvtide.engines.connector.orders import Loading, Orders
from kvtide.engines.connector.request import PageGeometry, Pages, Prompt, TokenSource, Work
from kvtide.engines.connector.request_options import NOTHING
from kvtide.engines.connector.request_state import Offer, RequestState
from kvtide.engines.connector.sessions import SessionPool
from kvtide.engines.connector.store_planner import StorePlanner
from kvtide.plan.prefill import PrefillCost, PrefillFit, reach
from kvtide.store.match import Load, Match

__all__ = ["Scheduler"]

_ANSWER = 2.0
"""Seconds that a request waits to hear whether there is anything of it, but no longer than a quarter of what computing
all of it takes."""
_LOAD = 10.0
"""Seconds that it waits for blocks from colder tiers, where nobody knows how long computing them takes."""
_OTHERS = 4
"""Times its own patience that a request waits, while the node answers others."""
_ENOUGH = 128
"""Tokens of a step that tell how fast the engine computes: fewer take as long as one."""

_FIRST_STEP = 3.0
"""Seconds that a step is taken to last, as long as nobody knows: an engine's first ones do."""
_DECODING = 0.25
"""What part of a moment a step that decodes waits for the node: it is short, and its requests most often go on."""
_STEPS = 64
"""Steps that may be under way."""
_SKIP = 8
"""Questions of the engine for blocks that are just being written, between two that the node hears: an engine without
other work asks every 2 ms."""
_SHORTEST = 0.05
"""The least patience, where computing takes less; and the most, with blocks that are just being written."""


class Scheduler:
    """For the thread of an engine's scheduler."""

    def __init__(
        self,
        session_pool: SessionPool,
        page_geometry: PageGeometry,
        *,
        pool: float = 0,
        pages: int = 0,
        prefix_cache: bool = True,
    ) -> None:
        """``pool``, ``pages``: see ``StorePlanner``. ``prefix_cache``: what is loaded for one request the engine has
        for others."""
        self._session_pool = session_pool
        self._now = session_pool.clock.monotonic
        self._page_geometry = page_geometry
        self._tokens = page_geometry.block_tokens
        self._prefix_cache = prefix_cache
        self._node_thread = NodeThread("kvtide-scheduler")
        self._room = StorePlanner(self._node_thread, session_pool, page_geometry, pool, pages)
        self._requests: dict[str, RequestState] = {}
        self.quiet: dict[str, int] = {}
        """By request the number of tokens before which its steps have nothing for us. Most of an engine's steps decode,
        and complete no block: they should cost it next to nothing."""
        self._arriving: dict[bytes, str] = {}
        """Blocks on their way to some request's pages."""
        self._loads: list[Loading] = []
        self._leaving: set[str] = set()
        self._numbers = itertools.count(1)
        self._steps: OrderedDict[int, tuple[float, int, float]] = OrderedDict()
        """When steps that tell something began, with how many tokens of prompts, and the sum of their contexts."""
        self._last_end = 0.0
        """Of such a step."""
        self._fit = PrefillFit()
        self._node_thread.ask(self._session_pool.client, None)  # so that the first request finds it

    @property
    def prefill(self) -> PrefillCost | None:
        """What computing prompts costs the engine, as soon as that is known."""
        return self._fit.cost

    # -- loading ------------------------------------------------------------------------------------------

    def arrived(self, prompt: Prompt) -> None:
        self._requests[prompt.id] = RequestState(prompt, settled=prompt.options.no_load)

    def matched(self, request: str, have: int) -> int | None:
        """How many tokens beyond ``have`` there are to load; None: ask again."""
        r = self._requests.get(request)
        if r is None:
            return 0
        r.reused = max(r.reused, have)
        if r.settled or r.loading:
            return 0
        known = self._loadable(r)
        if known // self._tokens * self._tokens <= have:
            return self._settle(r)
        if r.offer is None:
            if r.skip and self._now() - r.since < _SHORTEST:
                r.skip -= 1
                return None
            if r.asked is None:
                r.since, r.heard = r.since or self._now(), 0.0
                r.asked = self._node_thread.ask(partial(self._find, r, r.unnamed(known), have, self.prefill), None)
            if not self._node_thread.soon(r.asked):
                return None if self._waits(r) else self._settle(r)
            r.offer, r.asked = r.asked.result(), None
            if r.pending and self._now() - r.since < self._patience(r):
                self._give_back(r)  # a little later there will be more
                r.skip = _SKIP
                return None
            r.since = 0.0
            if r.offer is None:
                return self._settle(r)
        if r.offer.match.have * self._tokens > have:
            self._give_back(r)  # the engine has lost pages that it had when we asked
            return None
        if not self._is_here(r.offer):
            return None
        block = have // self._tokens
        following = r.chain.digests[block : block + 1] if r.chain is not None else []
        if self._prefix_cache and any(name in self._arriving for name in following):
            return None  # soon the engine has it itself
        r.have, count = have, r.offer.tokens - have
        return count if count > 0 else self._settle(r)

    def _loadable(self, r: RequestState) -> int:
        """Tokens that may be loaded. An engine that has all of a prompt computes the last token again; a window has
        pages for what comes after it, and may lack the oldest of what the last token sees."""
        return len(r.prompt.tokens) - (not self._page_geometry.lasting)

    def _waits(self, r: RequestState) -> bool:
        """Whether a request waits on for an answer of the node. Questions are asked one after the other: what those of
        others take does not count, up to so many times its own patience, unless the request says how long it waits."""
        now, patience = self._now(), self._patience(r)
        longest = patience if r.prompt.options.max_load_ms is not None else min(_ANSWER, _OTHERS * patience)
        return now - (r.heard or now) < patience and now - r.since < longest

    def _patience(self, r: RequestState) -> float:
        """Seconds that a request waits to hear whether there is anything of it."""
        if r.prompt.options.max_load_ms is not None:
            return min(_ANSWER, r.prompt.options.max_load_ms / 1000)
        if (prefill := self.prefill) is None:
            return _ANSWER
        return min(_ANSWER, max(_SHORTEST, prefill.seconds(0, len(r.prompt.tokens)) / 4))

    def _find(
        self, r: RequestState, unnamed: tuple[int, Sequence[int]], have: int, prefill: PrefillCost | None
    ) -> Offer | None:
        """What there is of a prompt. On the thread that talks to the node."""
        if r.over:
            return None
        r.heard = self._now()
        chain, tenant_sessions = r.named(self._session_pool, *unnamed)
        first, r.matched = not r.matched, True
        match, crew = tenant_sessions.longest(chain, r.extras, have, prefill, record=first)
        r.pending = match.pending
        if not have < match.tokens <= self._loadable(r):
            match.release()
            return None
        wait = _LOAD if prefill is None else max(_SHORTEST, prefill.seconds(have, match.tokens))
        if r.prompt.options.max_load_ms is not None:
            wait = r.prompt.options.max_load_ms / 1000
        cold, until = match.held_tokens < match.tokens, self._now() + wait
        # What is optional, a draft's blocks, may be in a colder tier though all that counts is held.
        load = None if match.holding.ready else match.session.load(match, deadline=wait)
        own = crew is tenant_sessions.own.crew
        return Offer(match, crew.token, crew.ticket(match), load, match.held_tokens, cold, own, until)

    def _is_here(self, offer: Offer) -> bool:
        """Whether all of an offer is in DRAM. When its time is over, what is held by then is all of it."""
        load = offer.load
        if load is None:
            return True
        late = self._now() >= offer.deadline
        if offer.counted is None:
            if not load.transfer.ended and not late:
                return False
            load.cancel()
            offer.counted = self._node_thread.ask(partial(_arrived, offer.match, load), 0)
        if not self._node_thread.soon(offer.counted) and not late:
            return False
        # A node that is late with its answer has said before what was held then, and holds it still.
        offer.tokens = offer.counted.result() if offer.counted.done() else offer.match.held_tokens
        offer.load = None
        return True

    def _settle(self, r: RequestState) -> int:
        """Nothing is loaded for it, from now on."""
        r.settled, r.since = True, 0.0
        self._give_back(r)
        return 0

    def _give_back(self, r: RequestState) -> None:
        """Whatever was, or will be, found for it is not held any more."""
        asked, offer = r.asked, r.offer
        r.asked = r.offer = None
        if asked is not None:
            self._node_thread.ask(partial(_drop, asked), None)
        if offer is not None:
            self._node_thread.ask(offer.match.release, None)

    def bind(self, request: str, pages: Pages, count: int) -> Sequence[bytes]:
        """The engine has pages for ``count`` tokens of what it was offered, or wants none of it. Answers the names of
        blocks that are held for it."""
        r = self._requests.get(request)
        if r is None or r.loading or r.offer is None:
            if count:  # it waits for us, so somebody must tell it
                self._loads.append(Loading(request, "", "none/0", 0, 0, {}, 0.0))
            return ()
        if not count:
            self._settle(r)
            return ()
        offer, have = r.offer, r.have
        assert r.chain is not None
        coming = range(have // self._tokens, -(-(have + count) // self._tokens))
        r.kept, r.converted = (coming, 0) if offer.own else (range(0), coming.stop)
        r.loading = r.chain.digests[coming.start : coming.stop]
        for name in r.loading:
            self._arriving.setdefault(name, request)
        r.source = TokenSource(disk=count) if offer.cold else TokenSource(dram=count)
        left = max(1.0, offer.deadline - self._now())
        mine = self._page_geometry.tokens(pages, have, have + count)
        self._loads.append(Loading(request, offer.crew, offer.ticket, have, have + count, mine, left))
        return r.loading if offer.own else ()

    def loaded(self, done: Iterable[str], failed: Iterable[str]) -> None:
        """Workers are through with what they were to load."""
        bad = set(failed)
        for request in [*done, *bad]:
            r = self._requests.get(request)
            if r is None:
                continue
            for name in r.loading:
                if self._arriving.get(name) == request:
                    del self._arriving[name]
            r.loading = []
            self._give_back(r)
            if request in bad:
                r.settled = r.failed = True
                r.source, r.kept, r.converted = TokenSource(), range(0), 0
            if r.over:
                self._end(r)

    def source(self, request: str) -> TokenSource:
        r = self._requests.get(request)
        return r.source if r is not None else TokenSource()

    # -- storing ------------------------------------------------------------------------------------------

    def step(self, work: Iterable[Work], prompts: Iterable[tuple[int, int]] = ()) -> Orders:
        """The orders of a step in which the engine does so much of each request, and computes ``prompts``: of each
        from which token to which. Requests that are ``quiet`` may be left out."""
        orders = Orders(loads=self._loads, leaving=self._leaving)
        self._loads, self._leaving = [], set()
        parts = list(prompts)
        if (tokens := sum(stop - start for start, stop in parts)) >= _ENOUGH:
            orders.number = next(self._numbers)
            self._steps[orders.number] = self._now(), tokens, sum(reach(*part) for part in parts)
            while len(self._steps) > _STEPS:
                self._steps.popitem(last=False)
            cost = self.prefill
            self._node_thread.takes(_FIRST_STEP if cost is None else sum(cost.seconds(*part) for part in parts))
        now = {w.id: w for w in work}
        share = 1.0 if parts or not self._page_geometry.lasting else _DECODING
        orders.stores = attempt(lambda: self._room.stores(now, self._requests, share), [])
        orders.closing = self._room.closing()
        self.quiet.update(self._room.quiet(now.values(), self._requests))
        self._node_thread.step()
        return orders

    def lost(self, tickets: Iterable[str]) -> None:
        """Some worker will not store what these stand for."""
        self._room.lost(tickets)

    def computed(self, number: int) -> None:
        """The engine has computed the step of that number."""
        began, tokens, reached = self._steps.pop(number, (0.0, 0, 0.0))
        if tokens:
            now = self._now()
            # An engine that plans ahead begins a step while it still computes the one before.
            self._fit.add(tokens, reached, now - max(began, self._last_end))
            self._last_end = now

    def forget(self) -> None:
        """The model's weights may be others from now on: nothing of before answers, and nothing under way is stored."""
        for r in self._requests.values():
            r.prompt.options = NOTHING
            if not r.loading:
                self._settle(r)
        self._node_thread.ask(self._session_pool.renew, None)

    # -- the end ------------------------------------------------------------------------------------------

    def left(self, request: str) -> None:
        """The engine takes a request's pages away, to give them back later."""
        self._leaving.add(request)
        r = self._requests.get(request)
        self.quiet.pop(request, None)
        if r is not None:
            r.life += 1
            self._room.left(r)
        if r is not None and not r.loading:
            self._give_back(r)
            r.since = 0.0
            r.settled = r.failed or r.prompt.options.no_load  # by now there may be more of it

    def finished(self, request: str, pages: Pages = ()) -> bool:
        """A request is over. Whether the engine is to keep its ``pages`` for us, until each worker has said that it is
        through with it."""
        r = self._requests.get(request)
        if r is not None:
            r.over = True
            if self._room.finished(r, () if r.loading else pages):
                return True
        self._leaving.add(request)
        if r is not None and not r.loading:
            self._end(r)
        return False

    def sent(self, requests: Iterable[str]) -> None:
        """The engine has the pages of these back, which it kept."""
        for request in requests:  # another connector beside ours may have kept them
            if self._room.sent(request) and (r := self._requests.get(request)) is not None:
                self._end(r)

    @property
    def kept(self) -> set[str]:
        """Requests whose pages the engine keeps for us, of which no orders told the workers yet."""
        return self._room.kept

    def _end(self, r: RequestState) -> None:
        del self._requests[r.prompt.id]
        self.quiet.pop(r.prompt.id, None)
        self._give_back(r)
        self._node_thread.ask(partial(_part, self._session_pool, r), None)

    def close(self) -> None:
        """Let everything go that is held at the node."""
        self._node_thread.ask(self._session_pool.close, None)
        self._node_thread.close()


# What follows runs on the thread that talks to the node, after what it was put behind.


def _arrived(match: Match, load: Load) -> int:
    """The tokens of a match that are held, when its load has ended or was given up. If all are, the node has said so at
    its end; to ask it for less maps the memory that they are in, which only workers need."""
    held = match.held_tokens
    return held if held == match.tokens else load.wait().tokens


def _drop(asked: Future[Offer | None]) -> None:
    """Nobody waits for this answer any more."""
    offer = asked.result()
    if offer is not None:
        offer.match.release()


def _part(session_pool: SessionPool, r: RequestState) -> None:
    if r.tenant_sessions is not None:
        r.tenant_sessions.requests.discard(r.prompt.id)
        if r.prompt.options.pin and r.chain is not None:
            session_pool.pin(r.tenant_sessions, r.chain, r.prompt.id)
        options = r.prompt.options
        if r.chain is not None and (options.turn is not None or options.returns_in is not None):
            r.tenant_sessions.own.session.expect(r.chain, turn=options.turn, returns_in=options.returns_in)
