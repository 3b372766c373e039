"""A paged engine of one scheduler and some workers that drives a connector, call for call as vLLM does.

It computes no attention: what it writes into its pages follows from the tokens before, so that every byte that a
request ends with can be checked. Pages are handed out at random. Without a prefix cache they are overwritten as soon as
they are free; with one, when they are handed out again. Groups have pages of their own, and one with a window gives
back what the window has passed over, before each step. Time stands still but for ``idle`` seconds in each step that
computes nothing, so that patience ends only where a test wants it to.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from kvtide.block import Group, Layout
from kvtide.engines.connector.request import PageGeometry, Prompt, TokenSource, Work
from kvtide.engines.connector.request_options import RequestOptions
from kvtide.engines.connector.scheduler import Scheduler
from kvtide.engines.connector.sessions import SessionPool
from kvtide.engines.connector.worker import ConnectorWorker
from kvtide.engines.paged import Pages, mover
from kvtide.engines.paged.packing import pack, unpack
from kvtide.index.keys import DEFAULT_TENANT, Model, Tenant
from kvtide.node.client.client import Client
from kvtide.testing.clock import FakeClock

__all__ = ["LAYOUT", "Request", "Toy"]

LAYOUT = Layout.attention(layers=2, heads=4, head_dim=8, block_tokens=64)


@dataclass
class Request:
    id: str
    tokens: list[int]
    new: list[int] = field(default_factory=list)
    """Tokens that it generates, one in a step."""
    options: RequestOptions = field(default_factory=RequestOptions)
    tenant: Tenant = DEFAULT_TENANT
    pages: list[list[int]] = field(default_factory=list)
    """Of each group; -1: a window has passed over it."""
    computed: int = 0
    loading: bool = False
    cached: int = 0
    """Tokens that came from the store."""
    own: int = 0
    """Tokens that the engine had itself when it was last admitted."""
    source: TokenSource = field(default_factory=TokenSource)
    explanation: Mapping[str, object] | None = None


class Toy:
    """One engine."""

    def __init__(
        self,
        dial: Callable[[], Client],
        *,
        ranks: int = 1,
        pages: int = 64,
        chunk: int = 100,
        layout: Layout = LAYOUT,
        others: Sequence[Layout] = (),
        prefix_cache: bool = False,
        pool: float = 0,
        idle: float = 0.0,
        keep: int = 0,
        device: str = "cpu",
    ) -> None:
        """``keep``: pages that requests which are over may keep until their stores are through."""
        self.page, self.chunk, self.layout, self.idle = 16, chunk, layout, idle
        self.clock = FakeClock()
        self.clock.advance(1)
        self._count, self._free = pages, list(range(1, pages))
        self._users: Counter[int] = Counter()
        self._cached: dict[tuple[str, tuple[int, ...]], int] | None = {} if prefix_cache else None
        """By group and the tokens up to its end: a page."""
        self._random = random.Random(1)
        models = [Model(one, "given:toy") for one in (layout, *others)]
        session_pool = SessionPool(dial, models, ranks, self.clock)
        names = [group.name for group in layout.groups]
        cut = PageGeometry(
            names, [self.page] * len(names), layout.block_tokens, [group.window for group in layout.groups]
        )
        self.scheduler = Scheduler(session_pool, cut, pool=pool, pages=20 * keep)
        self.workers: list[ConnectorWorker] = []
        self.memory: list[dict[str, torch.Tensor]] = []
        """Of each rank and group: ``[section, page, head, token, dim]``."""
        for rank in range(ranks):
            mine = {}
            for group in layout.groups:
                share = group.share(rank, ranks)
                heads = share.stop - share.start
                shape = (group.layers * group.parts, pages, heads, self.page, group.head_dim)
                mine[group.name] = torch.zeros(shape, dtype=torch.int16, device=device)
            self.memory.append(mine)

            def see(one: Layout, mine: dict[str, torch.Tensor] = mine, rank: int = rank) -> dict[str, Pages]:
                seen = {}
                for g in one.groups:
                    sections = mine[g.name].view(torch.bfloat16).unbind(0)
                    seen[g.name] = Pages(one, g.name, sections, g.share(rank, ranks), layout.group(g.name).packing)
                return seen

            tokens = dict.fromkeys(names, self.page)
            half = ConnectorWorker(dial, rank, see, tokens, mover(torch.device(device)), self.clock)
            self.workers.append(half)
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._received: dict[str, int] = {}
        self._failed: set[str] = set()
        self._aborted: dict[str, Request] = {}
        """Requests whose pages are still being loaded."""
        self.kept: dict[str, Request] = {}
        """Requests that are over, whose pages are still being stored."""
        self._sent: Counter[str] = Counter()

    @property
    def requests(self) -> list[Request]:
        return self._waiting + self._running

    @property
    def running(self) -> list[Request]:
        return list(self._running)

    @property
    def free(self) -> int:
        return len(self._free)

    # -- what KV is -----------------------------------------------------------------------------------------

    def truth(self, group: Group, tokens: Sequence[int]) -> torch.Tensor:
        """The KV of a prompt: ``[section, head, token, dim]``."""
        prefix = np.cumsum(np.asarray(tokens, np.int64) * 7919 + 13) * np.arange(1, len(tokens) + 1)
        shape = (group.layers * group.parts, group.heads, len(tokens), group.head_dim)
        section, head, _, dim = np.ogrid[tuple(slice(n) for n in shape)]
        mixed = prefix[None, None, :, None] * 31 + section * 101 + head * 17 + dim * 3 + len(group.name) * 7
        return torch.from_numpy((mixed % 32000).astype(np.int16))

    def held(self, group: Group, pages: Sequence[int]) -> torch.Tensor:
        """What pages hold: ``[section, head, token, dim]``, of all ranks."""
        shape = (group.layers * group.parts, group.heads, len(pages) * self.page, group.head_dim)
        whole = torch.zeros(shape).to(torch.int16)
        for rank, mine in enumerate(self.memory):
            share, memory = group.share(rank, len(self.memory)), mine[group.name]
            packed = memory[:, pages].transpose(1, 2)
            for section in range(len(memory)):
                plain = unpack(packed[section], group.packing, bool(section % 2))
                whole[section, share.start : share.stop] = plain.reshape(len(plain), -1, group.head_dim).cpu()
        return whole

    def _compute(self, request: Request, stop: int) -> None:
        """Write the KV of tokens that the request has pages for, page by page, in the layout's packing."""
        for group, pages in zip(self.layout.groups, request.pages, strict=True):
            truth = self.truth(group, request.tokens[:stop])
            for first in range(request.computed // self.page * self.page, stop, self.page):
                start, last = max(first, request.computed), min(first + self.page, stop)
                page = pages[first // self.page]
                for rank, mine in enumerate(self.memory):
                    share, memory = group.share(rank, len(self.memory)), mine[group.name]
                    for section in range(len(memory)):
                        value = bool(section % 2)
                        plain = unpack(memory[section, page], group.packing, value)
                        fresh = truth[section, share.start : share.stop, start:last]
                        plain[:, start - first : last - first] = fresh.to(memory.device)
                        memory[section, page] = pack(plain, group.packing, value)
        request.computed = stop

    # -- a step ---------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        self.scheduler.arrived(Prompt(request.id, request.tokens, list, request.tenant, request.options))
        self._waiting.append(request)

    def step(self) -> None:
        self._admit()
        for request in self._running:
            self._pass_over(request)
        work = {r.id: min(len(r.tokens), r.computed + self.chunk) for r in self._running}
        loud = [r for r in self._running if work[r.id] >= self.scheduler.quiet.get(r.id, 0)]
        orders = self.scheduler.step([Work(r.id, work[r.id], partial(getattr, r, "pages")) for r in loud])
        for worker in self.workers:
            worker.begin(orders)
        for request in self._running:
            self._compute(request, work[request.id])
        for worker in self.workers:
            worker.finish()
            done, failed, sent = worker.results()
            assert sent <= self.kept.keys(), "a worker says it once, of those that are kept"
            self._sent.update(sent)
            self.scheduler.lost(worker.lost())
            self._failed |= failed
            for id_ in done:
                self._received[id_] = self._received.get(id_, 0) + 1
        if not self._running:
            self.clock.advance(self.idle)
            time.sleep(0.0005)  # as an idle engine does
        self._update()

    def _admit(self) -> None:
        for request in [r for r in self._waiting if not r.loading]:
            count = 0
            if not request.pages:
                own, known = self._known(request)
                found = self.scheduler.matched(request.id, own)
                if found is None or not self._place(request, known, own + found):
                    continue
                count, request.own, request.computed = found, own, own
            self.scheduler.bind(request.id, request.pages, count)
            if count:
                request.loading, request.cached = True, count
            else:
                self._waiting.remove(request)
                self._running.append(request)

    def _update(self) -> None:
        whole = {id_ for id_, n in self._received.items() if n == len(self.workers)}
        failed, self._failed = self._failed & whole, self._failed - whole
        self.scheduler.loaded(whole - failed, failed)
        for id_ in [id_ for id_, n in self._sent.items() if n == len(self.workers)]:
            self.scheduler.sent([id_])
            del self._sent[id_]
            self._scrap(self.kept.pop(id_))
        for request in [r for r in self._waiting if r.id in whole]:
            request.loading = False
            if request.id in failed:
                self._scrap(request)
                request.cached = 0
            else:
                request.computed = request.own + request.cached
                self._check(request)
                self._remember(request)
                request.computed = min(request.computed, len(request.tokens) - 1)
        for id_ in whole:
            del self._received[id_]
            if id_ in self._aborted:
                self._scrap(self._aborted.pop(id_))
        for request in list(self._running):
            if request not in self._running:
                continue  # preempted for one before it
            self._remember(request)
            if request.computed < len(request.tokens):
                continue
            if not request.new:
                self._finish(request)
            elif self._room(request):
                if not request.computed % self.page:
                    for table in request.pages:
                        table += self._allocate(1)
                request.tokens.append(request.new.pop(0))
            else:
                self.preempt(request)

    def _room(self, request: Request) -> bool:
        """Whether there is a page for its next token, if need be of those that came last: so the first gets on."""
        if request.computed % self.page:
            return True
        while self.free < len(request.pages) and self._running[-1] is not request:
            self.preempt(self._running[-1])
        return self.free >= len(request.pages)

    def _finish(self, request: Request) -> None:
        self._check(request)
        self._running.remove(request)
        request.source = self.scheduler.source(request.id)
        request.explanation = self.scheduler.explanation(request.id)
        self._end(request)

    def _end(self, request: Request) -> None:
        if self.scheduler.finished(request.id, request.pages):
            self.kept[request.id] = request
        else:
            self._scrap(request)

    def _check(self, request: Request) -> None:
        """Every byte that a request has is right, as far as the next token sees."""
        for group, pages in zip(self.layout.groups, request.pages, strict=True):
            first = self._seen(group, request.computed)
            held = self.held(group, pages[first : -(-request.computed // self.page)])
            true = self.truth(group, request.tokens[: request.computed])[:, :, first * self.page :]
            assert torch.equal(held[:, :, : true.shape[2]], true), (request.id, group.name)

    def preempt(self, request: Request) -> None:
        """Take a running request's pages away."""
        self._running.remove(request)
        self._waiting.append(request)
        self._scrap(request)
        self.scheduler.left(request.id)

    def abort(self, request: Request) -> None:
        """Its client has gone. Pages that are just being loaded stay what they are until the workers are through."""
        for some in (self._waiting, self._running):
            if request in some:
                some.remove(request)
        if request.loading:
            self.scheduler.finished(request.id)
            self._aborted[request.id] = request
        else:
            self._end(request)

    # -- pages ----------------------------------------------------------------------------------------------

    def _seen(self, group: Group, computed: int) -> int:
        """The first page of a group that the next token sees."""
        return max(0, computed - group.window + 1) // self.page if group.window else 0

    def _known(self, request: Request) -> tuple[int, list[list[int]]]:
        """How many tokens the engine has of a prompt, but for its last, which is always computed; and where."""
        for count in range((len(request.tokens) - 1) // self.page, 0, -1) if self._cached else ():
            first = [self._seen(group, count * self.page) for group in self.layout.groups]
            tables = [
                [-1] * start + [self._find(group, request.tokens[: i * self.page]) for i in range(start + 1, count + 1)]
                for group, start in zip(self.layout.groups, first, strict=True)
            ]
            if all(min(t[start:], default=0) >= 0 for t, start in zip(tables, first, strict=True)):
                return count * self.page, tables
        return 0, [[] for _ in self.layout.groups]

    def _find(self, group: Group, tokens: Sequence[int]) -> int:
        assert self._cached is not None
        return self._cached.get((group.name, tuple(tokens)), -1)

    def _remember(self, request: Request) -> None:
        if self._cached is not None:
            for group, pages in zip(self.layout.groups, request.pages, strict=True):
                for stop in range(self.page, request.computed + 1, self.page):
                    if (page := pages[stop // self.page - 1]) >= 0:
                        self._cached.setdefault((group.name, tuple(request.tokens[:stop])), page)

    def _place(self, request: Request, known: list[list[int]], computed: int) -> bool:
        """Pages for all of a request, with those that are ``known``; none for what windows have passed over when so
        many tokens are there. False if there are too few."""
        tables = []
        for group, table in zip(self.layout.groups, known, strict=True):
            first = self._seen(group, computed)
            tables.append([-1] * first + table[first:])
        own = [page for table in tables for page in table if page >= 0]
        need = [-(-len(request.tokens) // self.page) - len(table) for table in tables]
        if sum(need) > len([page for page in self._free if page not in own]):
            return False
        self._take(own)
        request.pages = [table + self._allocate(count) for table, count in zip(tables, need, strict=True)]
        return True

    def _pass_over(self, request: Request) -> None:
        """Give back what no token to come will see."""
        for group, pages in zip(self.layout.groups, request.pages, strict=True):
            first = self._seen(group, request.computed)
            self._release(pages[:first])
            pages[:first] = [-1] * first

    def forget(self) -> None:
        """Lose what is cached."""
        if self._cached is not None:
            self._cached.clear()
        self._overwrite(self._free)

    def _take(self, pages: Sequence[int]) -> None:
        self._users.update(pages)
        self._free = [page for page in self._free if page not in pages]

    def _allocate(self, count: int) -> list[int]:
        self._random.shuffle(self._free)
        pages = self._free[:count]
        self._take(pages)
        if self._cached is not None:
            self._cached = {key: page for key, page in self._cached.items() if page not in pages}
        self._overwrite(pages)
        return pages

    def _scrap(self, request: Request) -> None:
        for pages in request.pages:
            self._release(pages)
        request.pages, request.computed = [], 0

    def _release(self, pages: Sequence[int]) -> None:
        mine = [page for page in pages if page >= 0]
        self._users.subtract(mine)
        mine = [page for page in mine if not self._users[page]]
        self._free += mine
        if self._cached is None:
            self._overwrite(mine)

    def _overwrite(self, pages: Sequence[int]) -> None:
        for mine in self.memory:
            for memory in mine.values():
                memory[:, pages] = -1

    # -- serving --------------------------------------------------------------------------------------------

    def run(self, *requests: Request) -> None:
        """Serve requests; every byte that each ends with is right."""
        for request in requests:
            self.add(request)
        end = time.monotonic() + 120
        while self._waiting or self._running or self._aborted:
            self.step()
            assert time.monotonic() < end, f"requests are stuck: {self._waiting} {self._running}"
        self.step()  # an engine makes one more when a request has ended

    def flush(self) -> None:
        """Wait until the threads of scheduler and workers have done their work."""
        for node_thread in [w._node_thread for w in self.workers] + [self.scheduler._node_thread]:
            node_thread.ask(lambda: None, None).result()

    def at_rest(self) -> None:
        """No request is left, and nothing of any that there was."""
        assert not self.requests
        assert sorted(self._free) == list(range(1, self._count)), "pages are lost"
        self.flush()
        half = self.scheduler
        assert not half._requests
        assert not half._arriving
        assert not any(worker._visits for worker in self.workers)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()
