"""The connector scheduler: it decides which prefix to load and which blocks to store.

The engine asks how much of a waiting request's prompt is in the store. The reply is "ask again" until every block of
the prefix is in DRAM, verified and leased; only then is it a number. After that only the death of the node can break
the offer, and only until the workers have asked for the blocks' addresses: if the node dies before that, the load
fails, and the prefix is computed. Engines ask at every step while a request waits for pages: an offer is made once,
kept, and released whatever the engine does next.

Prompts that arrive together are first searched for together, in one request: those of which the store has nothing need
no lookup of their own. If each needed one, an engine could not fill its first step with them in time.

All communication with the node runs on the node thread (``node_thread.py``). The engine's loop waits at most
milliseconds for it. A late answer means "ask again" for a load, until the request's time limit ends; for a store it is
used in a later step, if the pages are still there.

The engine's prefill speed is learned from its steps (plan/prefill.py): from the wall time between the start of a step,
or the end of the one before it, and its end. A step that also decodes for other requests takes longer; the next prompt
will be slowed in the same way, so nothing is subtracted.

The tokens of a step form complete blocks at the step's end. Space for them is reserved before, and the tickets travel
to the workers with the step's orders.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from kvtide.engines.connector.node_thread import NodeThread, attempt
from kvtide.engines.connector.orders import Loading, Orders
from kvtide.engines.connector.request import PageGeometry, Pages, Prompt, TokenSource, Work
from kvtide.engines.connector.request_options import NOTHING
from kvtide.engines.connector.request_state import Offer, RequestState, SearchResult
from kvtide.engines.connector.sessions import SessionPool
from kvtide.engines.connector.store_planner import StorePlanner
from kvtide.node.client.backend import RemoteBackend, absent_each
from kvtide.plan.prefill import PrefillCost, PrefillFit, reach
from kvtide.store.match import Load, Match

__all__ = ["Scheduler"]

_ANSWER = 2.0
"""Seconds that a request waits for a lookup, but no longer than a quarter of the time to compute its prompt."""
_LOAD = 10.0
"""Seconds that a request waits for blocks from colder tiers while the cost of computing them is unknown."""
_OTHERS = 4
"""A request may wait this many times its own limit while the node answers other requests."""
_ENOUGH = 128
"""Minimum tokens of a step used to measure the engine's speed: fewer take as long as one."""

_FIRST_STEP = 3.0
"""Assumed duration in seconds of a step while the speed is unknown: an engine's first steps take that long."""
_DECODING = 0.25
"""Share of the wait limit for a step that only decodes: it is short, and its requests usually continue."""
_STEPS = 64
"""Maximum number of measured steps under way."""
_SKIP = 8
"""Calls of the engine between two lookups of blocks that are just being written: an engine without other work asks
every 2 ms."""
_SEARCH_TOKENS = 16384
"""Tokens of prompts that are searched for together: about as many as an engine computes in one step, or two."""
_SEARCH_REQUESTS = 64
"""Most requests that are considered for one search."""
_SEARCH_VALID = 0.05
"""Seconds for which a prompt that was not found is taken to be absent: others may store it."""
_SHORTEST = 0.05
"""Shortest time limit of a request, where computing takes less; and the longest for blocks that are just being
written."""


class Scheduler:
    """For use by the thread of an engine's scheduler."""

    def __init__(
        self,
        session_pool: SessionPool,
        page_geometry: PageGeometry,
        *,
        pool: float = 0,
        pages: int = 0,
        prefix_cache: bool = True,
    ) -> None:
        """``pool``, ``pages``: see ``StorePlanner``. ``prefix_cache``: whether the engine shares pages loaded for one
        request with others."""
        self._session_pool = session_pool
        self._now = session_pool.clock.monotonic
        self._page_geometry = page_geometry
        self._tokens = page_geometry.block_tokens
        self._prefix_cache = prefix_cache
        self._node_thread = NodeThread("kvtide-scheduler")
        self._room = StorePlanner(self._node_thread, session_pool, page_geometry, pool, pages)
        self._requests: dict[str, RequestState] = {}
        self._unsearched: dict[str, RequestState] = {}
        """Requests with at least one block that were neither searched for nor looked up yet."""
        self.quiet: dict[str, int] = {}
        """For each request the token count before which its steps need no work here. Most steps of an engine decode and
        complete no block: they should cost next to nothing."""
        self._arriving: dict[bytes, str] = {}
        """Blocks being loaded, with the request whose pages they are loaded into."""
        self._loads: list[Loading] = []
        self._leaving: set[str] = set()
        self._numbers = itertools.count(1)
        self._steps: OrderedDict[int, tuple[float, int, float]] = OrderedDict()
        """Start time of each measured step, its number of prompt tokens, and the sum of their context lengths."""
        self._last_end = 0.0
        """End time of the last measured step."""
        self._fit = PrefillFit()
        # Connect and open the sessions that most requests use before the first of them: it would wait for all of this
        # within the time limit of its lookup, on a starved machine in vain.
        self._node_thread.ask(self._session_pool.prepare, None)

    @property
    def prefill(self) -> PrefillCost | None:
        """Prefill cost of the engine; None until it is known."""
        return self._fit.cost

    # -- loading ------------------------------------------------------------------------------------------

    def arrived(self, prompt: Prompt) -> None:
        r = self._requests[prompt.id] = RequestState(prompt, settled=prompt.options.no_load)
        if not r.settled and not prompt.slow_extras and self._loadable(r) >= self._tokens:
            self._unsearched[prompt.id] = r

    def matched(self, request: str, have: int) -> int | None:
        """How many tokens beyond ``have`` can be loaded; None: ask again."""
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
            r.since = r.since or self._now()
            if r.asked is None and not have and (searched := self._search_with_others(r)) is not None:
                if not self._node_thread.soon(searched, in_turn=True):
                    return None if self._waits(r) else self._settle(r)
                count_miss = searched.result().get(request)
                if count_miss is not None and self._now() - r.searched_at < _SEARCH_VALID:
                    self._node_thread.ask(count_miss, None)
                    r.matched, r.explained = True, False
                    return self._settle(r)
            if r.asked is None:
                self._unsearched.pop(request, None)
                if r.searched is not None:  # the lookup has a time limit of its own
                    r.searched, r.since = None, self._now()
                r.heard = 0.0
                find, r.explained = partial(self._find, r, r.unnamed(known), have, self.prefill), False
                # Stores of this step must not wait for the lookups of all prompts that arrived together.
                r.asked = self._node_thread.ask_in_turn(find, None)
            if not self._node_thread.soon(r.asked, in_turn=True):
                return None if self._waits(r) else self._settle(r)
            r.offer, r.asked = r.asked.result(), None
            if r.pending and self._now() - r.since < self._patience(r):
                self._give_back(r)  # more blocks will be there shortly
                r.skip = _SKIP
                return None
            r.since = 0.0
            if r.offer is None:
                return self._settle(r)
        if r.offer.match.have * self._tokens > have:
            self._give_back(r)  # the engine has freed pages that it had at the lookup
            return None
        if not self._is_here(r.offer):
            return None
        block = have // self._tokens
        following = r.chain.digests[block : block + 1] if r.chain is not None else []
        if self._prefix_cache and any(name in self._arriving for name in following):
            return None  # the engine will soon have these pages itself
        r.have, count = have, r.offer.tokens - have
        return count if count > 0 else self._settle(r)

    def _search_with_others(self, r: RequestState) -> Future[SearchResult] | None:
        """The search for this request and others of its tenant. There is at most one for each request, and none if
        there are no others: a lookup tells more."""
        if self._unsearched.pop(r.prompt.id, None) is None:
            return r.searched
        together, tokens = [r], len(r.prompt.tokens)
        for other in itertools.islice(self._unsearched.values(), _SEARCH_REQUESTS):
            length = len(other.prompt.tokens)
            if tokens + length <= _SEARCH_TOKENS and other.prompt.tenant == r.prompt.tenant:
                together.append(other)
                tokens += length
        if len(together) == 1:
            return None
        for one in together:
            self._unsearched.pop(one.prompt.id, None)
            one.searched_at, one.heard = self._now(), 0.0
        unnamed = [(one, one.unnamed(self._loadable(one))) for one in together]
        nothing: SearchResult = {}
        searched = self._node_thread.ask_in_turn(partial(self._search, unnamed), nothing)
        for one in together:
            one.searched = searched
        return searched

    def _search(self, together: Sequence[tuple[RequestState, tuple[int, Sequence[int]]]]) -> SearchResult:
        """The requests of which the store has nothing. Runs on the node thread."""
        left, names = list[RequestState](), list[list[tuple[RemoteBackend, bytes]]]()
        for r, unnamed in together:
            if r.over or r.settled:
                continue
            with contextlib.suppress(Exception):  # its own lookup reports the error
                chain, tenant_sessions = r.named(self._session_pool, *unnamed)
                names.append(list(tenant_sessions.names(chain, r.extras)))
                left.append(r)
        absent: dict[str, Callable[[], None]] = {}
        for r in left:
            r.heard = self._now()
        for r, (own, *_), none in zip(left, names, absent_each(names), strict=True):
            if none and r.chain is not None:
                backend, digests = own
                absent[r.prompt.id] = partial(backend.missed, digests, r.chain.tokens, r.prompt.id)
        return absent

    def _loadable(self, r: RequestState) -> int:
        """Tokens that may be loaded. An engine that has a whole prompt computes the last token again; a window has
        pages only for what comes after it, and may lack the oldest tokens that the last one sees."""
        return len(r.prompt.tokens) - (not self._page_geometry.lasting)

    def _waits(self, r: RequestState) -> bool:
        """Whether a request continues to wait for the node's answer. Lookups run one after the other: time spent on
        those of other requests does not count, up to ``_OTHERS`` times the limit, unless the request sets its own
        limit."""
        now, patience = self._now(), self._patience(r)
        longest = patience if r.prompt.options.max_load_ms is not None else min(_ANSWER, _OTHERS * patience)
        return now - (r.heard or now) < patience and now - r.since < longest

    def _patience(self, r: RequestState) -> float:
        """Seconds that a request waits for its lookup."""
        if r.prompt.options.max_load_ms is not None:
            return min(_ANSWER, r.prompt.options.max_load_ms / 1000)
        if (prefill := self.prefill) is None:
            return _ANSWER
        return min(_ANSWER, max(_SHORTEST, prefill.seconds(0, len(r.prompt.tokens)) / 4))

    def _find(
        self, r: RequestState, unnamed: tuple[int, Sequence[int]], have: int, prefill: PrefillCost | None
    ) -> Offer | None:
        """Look up a prompt. Runs on the node thread."""
        if r.over or r.settled:
            return None
        r.heard = self._now()
        chain, tenant_sessions = r.named(self._session_pool, *unnamed)
        first, r.matched = not r.matched, True
        match, worker_group = tenant_sessions.longest(chain, r.extras, have, prefill, first, r.prompt.id)
        r.pending = match.pending
        if not have < match.tokens <= self._loadable(r):
            match.release()
            return None
        wait = _LOAD if prefill is None else max(_SHORTEST, prefill.seconds(have, match.tokens))
        if r.prompt.options.max_load_ms is not None:
            wait = r.prompt.options.max_load_ms / 1000
        cold, until = match.held_tokens < match.tokens, self._now() + wait
        # Optional groups, such as a draft model's, may be in a colder tier although all required blocks are leased.
        load = None if match.holding.ready else match.session.load(match, deadline=wait)
        own = worker_group is tenant_sessions.own.worker_group
        return Offer(match, worker_group.token, worker_group.ticket(match), load, match.held_tokens, cold, own, until)

    def _is_here(self, offer: Offer) -> bool:
        """Whether all of an offer is in DRAM. At its deadline the offer is reduced to the tokens leased by then."""
        load = offer.load
        if load is None:
            return True
        late = self._now() >= offer.deadline
        if offer.counted is None:
            if not load.transfer.ended and not late:
                return False
            load.cancel()
            offer.counted = self._node_thread.ask(partial(_held_tokens, offer.match, load), 0)
        if not self._node_thread.soon(offer.counted) and not late:
            return False
        # If this answer is late too, use the count that the node gave before: it still holds those blocks.
        offer.tokens = offer.counted.result() if offer.counted.done() else offer.match.held_tokens
        offer.load = None
        return True

    def _settle(self, r: RequestState) -> int:
        """Load nothing for the request from now on."""
        r.settled, r.since, r.searched = True, 0.0, None
        self._unsearched.pop(r.prompt.id, None)
        self._give_back(r)
        self._explain(r)
        return 0

    def _explain(self, r: RequestState) -> None:
        """Let the node be asked why the request's blocks were hits or misses, if it wants to know. Called when its last
        lookup has ended, and what was found is in use: the engine does not wait for it."""
        if r.prompt.options.explain and not r.explained:
            r.explained = True
            self._node_thread.ask_in_turn(r.explain, None)

    def _give_back(self, r: RequestState) -> None:
        """Release the request's offer, or the one that a running lookup will return."""
        asked, offer = r.asked, r.offer
        r.asked = r.offer = None
        if asked is not None:
            self._node_thread.ask_in_turn(partial(_drop, asked), None)
        if offer is not None:
            self._node_thread.ask(offer.match.release, None)

    def bind(self, request: str, pages: Pages, count: int) -> Sequence[bytes]:
        """The engine has allocated pages for ``count`` tokens of the offer, or wants none of it. Returns the names of
        the blocks that are leased for it."""
        r = self._requests.get(request)
        if r is None or r.loading or r.offer is None:
            if count:  # the engine waits for a result, so order a load that fails
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
        self._loads.append(Loading(request, offer.group_token, offer.ticket, have, have + count, mine, left))
        self._explain(r)
        return r.loading if offer.own else ()

    def loaded(self, done: Iterable[str], failed: Iterable[str]) -> None:
        """Called when workers have finished loads."""
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

    def explanation(self, request: str) -> Mapping[str, object] | None:
        """Why blocks of a request were hits or misses; None if it did not ask, or if that is not known yet."""
        r = self._requests.get(request)
        return r.explanation if r is not None else None

    # -- storing ------------------------------------------------------------------------------------------

    def step(self, work: Iterable[Work], prompts: Iterable[tuple[int, int]] = ()) -> Orders:
        """The orders of a step. ``work``: the progress of each request; requests before their ``quiet`` count may be
        left out. ``prompts``: ranges of prompt tokens that the step computes."""
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
        """Called when some worker will not store the blocks of these tickets."""
        self._room.lost(tickets)

    def computed(self, number: int) -> None:
        """Called when the engine has computed the step of that number."""
        began, tokens, reached = self._steps.pop(number, (0.0, 0, 0.0))
        if tokens:
            now = self._now()
            # An engine that plans ahead begins a step while it still computes the one before.
            self._fit.add(tokens, reached, now - max(began, self._last_end))
            self._last_end = now

    def forget(self) -> None:
        """The model's weights may have changed: nothing stored before is used, and nothing under way is stored."""
        for r in self._requests.values():
            r.prompt.options = NOTHING
            if not r.loading:
                self._settle(r)
        self._node_thread.ask(self._session_pool.renew, None)

    # -- end of requests ----------------------------------------------------------------------------------

    def left(self, request: str) -> None:
        """The engine takes a request's pages away and will allocate others later."""
        self._leaving.add(request)
        r = self._requests.get(request)
        self.quiet.pop(request, None)
        if r is not None:
            r.life += 1
            self._room.left(r)
        if r is not None and not r.loading:
            self._give_back(r)
            r.since = 0.0
            r.settled = r.failed or r.prompt.options.no_load  # there may be more of it in the store by then

    def finished(self, request: str, pages: Pages = ()) -> bool:
        """Called at the end of a request. Returns whether the engine is to keep its ``pages`` until each worker has
        reported that it no longer needs them."""
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
        """Called when the engine has taken back the pages that it kept for these requests."""
        for request in requests:  # another connector in the same engine may have kept them
            if self._room.sent(request) and (r := self._requests.get(request)) is not None:
                self._end(r)

    @property
    def kept(self) -> set[str]:
        """Requests whose pages the engine keeps for this connector, and for which the workers got no closing order
        yet."""
        return self._room.kept

    def _end(self, r: RequestState) -> None:
        del self._requests[r.prompt.id]
        self.quiet.pop(r.prompt.id, None)
        self._unsearched.pop(r.prompt.id, None)
        self._give_back(r)
        self._node_thread.ask(partial(_part, self._session_pool, r), None)

    def close(self) -> None:
        """Release everything that is held at the node."""
        self._node_thread.ask(self._session_pool.close, None)
        self._node_thread.close()


# The functions below run on the node thread, after the calls queued before them.


def _held_tokens(match: Match, load: Load) -> int:
    """Tokens of a match that are leased when its load has ended or was cancelled. If all are, the node has reported so
    at the end of the load; asking it for fewer maps the blocks' memory, which only workers need."""
    held = match.held_tokens
    return held if held == match.tokens else load.wait().tokens


def _drop(asked: Future[Offer | None]) -> None:
    """Release the result of a lookup that is not needed any more."""
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
