"""A paged engine of one scheduler and some workers that drives both halves, call for call as vLLM does.

It computes no attention: what it writes into its pages follows from the tokens before, so that every byte that a
request ends with can be checked. Pages are handed out at random and overwritten as soon as they are free.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from kvtide.block import Layout
from kvtide.engines.halves.request import Cut, Prompt, Source, Work
from kvtide.engines.halves.scheduler import Scheduler
from kvtide.engines.halves.tenancy import Tenancies
from kvtide.engines.halves.wishes import Wishes
from kvtide.engines.halves.worker import WorkerHalf
from kvtide.engines.paged import Pages, mover
from kvtide.index.keys import DEFAULT_TENANT, Model, Tenant
from kvtide.node.client import Client

__all__ = ["LAYOUT", "Request", "Toy"]

LAYOUT = Layout.attention(layers=2, heads=4, head_dim=8, block_tokens=64)


@dataclass
class Request:
    id: str
    tokens: list[int]
    wishes: Wishes = field(default_factory=Wishes)
    tenant: Tenant = DEFAULT_TENANT
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    loading: bool = False
    cached: int = 0
    """Tokens that came from the store."""
    source: Source = field(default_factory=Source)


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
        device: str = "cpu",
    ) -> None:
        self.page, self.chunk, self.layout = 16, chunk, layout
        self._free = list(range(1, pages))
        self._random = random.Random(1)
        models = [Model(one, "given:toy") for one in (layout, *others)]
        self.scheduler = Scheduler(Tenancies(dial, models, ranks), Cut(["full"], [self.page], layout.block_tokens))
        self.workers, self.memory = [], []
        group = layout.group("full")
        for rank in range(ranks):
            share = group.share(rank, ranks)
            heads = share.stop - share.start
            shape = (2 * group.layers, pages, heads, self.page, group.head_dim)
            tensor = torch.zeros(shape, dtype=torch.int16, device=device).view(torch.bfloat16)
            self.memory.append((share, tensor.view(torch.int16)))

            def see(one: Layout, tensor: torch.Tensor = tensor, rank: int = rank) -> dict[str, Pages]:
                mine = one.group("full").share(rank, ranks)
                return {"full": Pages(one, "full", tensor.unbind(0), mine, group.packing)}

            self.workers.append(WorkerHalf(dial, rank, see, {"full": self.page}, mover(torch.device(device))))
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._done: list[Request] = []
        self._received: dict[str, int] = {}
        self._failed: set[str] = set()

    # -- what KV is -----------------------------------------------------------------------------------------

    def truth(self, tokens: Sequence[int]) -> torch.Tensor:
        """The KV of a prompt: ``[section, head, token, dim]``."""
        group = self.layout.group("full")
        prefix = np.cumsum(np.asarray(tokens, np.int64) * 7919 + 13) * np.arange(1, len(tokens) + 1)
        shape = (2 * group.layers, group.heads, len(tokens), group.head_dim)
        section, head, _, dim = np.ogrid[tuple(slice(n) for n in shape)]
        mixed = prefix[None, None, :, None] * 31 + section * 101 + head * 17 + dim * 3
        return torch.from_numpy((mixed % 32000).astype(np.int16))

    def held(self, request: Request) -> torch.Tensor:
        """What the pages of a request hold: ``[section, head, token, dim]``, of all ranks."""
        group = self.layout.group("full")
        whole = torch.zeros(2 * group.layers, group.heads, len(request.pages) * self.page, group.head_dim).to(
            torch.int16
        )
        for share, memory in self.memory:
            mine = memory[:, request.pages].permute(0, 2, 1, 3, 4)
            whole[:, share.start : share.stop] = mine.reshape(len(memory), mine.shape[1], -1, group.head_dim).cpu()
        return whole[:, :, : len(request.tokens)]

    def _compute(self, request: Request, stop: int) -> None:
        truth = self.truth(request.tokens[:stop])
        for at in range(request.computed, stop):
            page, slot = request.pages[at // self.page], at % self.page
            for share, memory in self.memory:
                memory[:, page, :, slot] = truth[:, share.start : share.stop, at].to(memory.device)
        request.computed = stop

    # -- a step ---------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        self.scheduler.arrived(Prompt(request.id, request.tokens, list, request.tenant, request.wishes))
        self._waiting.append(request)

    def step(self) -> None:
        self._admit()
        work = {r.id: min(len(r.tokens), r.computed + self.chunk) for r in self._running}
        orders = self.scheduler.step([Work(r.id, work[r.id], partial(self._table, r)) for r in self._running])
        self.scheduler.began(sum(work[r.id] - r.computed for r in self._running))
        for worker in self.workers:
            worker.begin(orders)
        for request in self._running:
            self._compute(request, work[request.id])
        for worker in self.workers:
            worker.finish()
            done, failed = worker.results()
            self._failed |= failed
            for id_ in done:
                self._received[id_] = self._received.get(id_, 0) + 1
        self._update()

    def _table(self, request: Request) -> list[list[int]]:
        return [request.pages]

    def _admit(self) -> None:
        for request in [r for r in self._waiting if not r.loading]:
            need = -(-len(request.tokens) // self.page) - len(request.pages)
            count = 0
            if not request.computed:
                found = self.scheduler.matched(request.id, 0)
                if found is None:
                    continue
                count = found
            if need > len(self._free):
                continue
            self._random.shuffle(self._free)
            request.pages += [self._free.pop() for _ in range(need)]
            self.scheduler.bind(request.id, [request.pages], count)
            if count:
                request.loading, request.cached = True, count
            else:
                self._waiting.remove(request)
                self._running.append(request)

    def _update(self) -> None:
        whole = {id_ for id_, n in self._received.items() if n == len(self.workers)}
        failed, self._failed = self._failed & whole, self._failed - whole
        self.scheduler.loaded(whole - failed, failed)
        self.scheduler.computed()
        for request in [r for r in self._waiting if r.id in whole]:
            request.loading = False
            if request.id in failed:
                self._scrap(request)
                request.cached = 0
            else:
                request.computed = min(request.cached, len(request.tokens) - 1)
        for id_ in whole:
            del self._received[id_]
        for request in [r for r in self._running if r.computed == len(r.tokens)]:
            self._running.remove(request)
            self._done.append(request)

    def preempt(self, request: Request) -> None:
        """Take a running request's pages away."""
        self._running.remove(request)
        self._waiting.append(request)
        self._scrap(request)
        self.scheduler.left(request.id)

    def _scrap(self, request: Request) -> None:
        for _, memory in self.memory:
            memory[:, request.pages] = -1
        self._free += request.pages
        request.pages, request.computed = [], 0

    def run(self, *requests: Request, limit: int = 20_000) -> None:
        """Serve requests; every byte that each ends with is right."""
        for request in requests:
            self.add(request)
        for _ in range(limit):
            self.step()
            for request in self._done:
                assert torch.equal(self.held(request), self.truth(request.tokens)), request.id
                request.source = self.scheduler.source(request.id)
                self.scheduler.finished(request.id)
                self._scrap(request)
            self._done.clear()
            if not self._waiting and not self._running:
                break
        else:
            raise AssertionError(f"requests are stuck: {self._waiting} {self._running}")
        self.step()  # an engine makes one more when a request has ended

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()
