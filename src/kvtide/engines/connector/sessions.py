"""The sessions of the connector scheduler at the node: one per tenant and readable layout.

An engine stores blocks in its own packing. It reads that packing and others that it can convert. A layout with another
packing has a session of its own, because its blocks are different blocks. All of this talks to the node, so it runs on
the node thread (``node_thread.py``).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from kvtide.block import Kind
from kvtide.clock import Clock, SystemClock
from kvtide.engines.connector.node_access import NodeAccess
from kvtide.index.keys import DEFAULT_TENANT, Chain, Extra, Model, Tenant
from kvtide.node.client.backend import RemoteBackend, find_each
from kvtide.node.client.client import Client
from kvtide.node.client.workers import WorkerGroup
from kvtide.node.protocol import DropReason
from kvtide.plan.prefill import Prefill
from kvtide.store.match import Match
from kvtide.store.session import Session

__all__ = ["SessionPool", "TenantSessions"]

log = logging.getLogger("kvtide.engines")

_PINNED = 4
"""At most one in this many bytes of the node's DRAM may be pinned: else a few requests could take the space of all
others."""
_NEXT = 32
"""Blocks after the longest known prefix that are looked up in other layouts. One would tell whether a prefix is longer;
the node searches shared storage for all of them."""
_TENANTS, _MOST = 64, 512
"""Tenants with open sessions: above the first number only those in use or with pins remain, above the second only those
in use."""


@dataclass(slots=True)
class _LayoutSession:
    """A session and the worker group through which workers join it."""

    session: Session
    worker_group: WorkerGroup

    @property
    def backend(self) -> RemoteBackend:
        backend = self.session.backend
        assert isinstance(backend, RemoteBackend)
        return backend


@dataclass(slots=True)
class TenantSessions:
    """The sessions of one tenant; the first has the engine's own layout."""

    layout_sessions: Sequence[_LayoutSession]
    requests: set[str] = field(default_factory=set)
    """Requests that use these sessions now."""
    pinned: set[bytes] = field(default_factory=set)
    """Names of blocks that requests have pinned. The sessions stay open for them: pins end with their session."""

    @property
    def own(self) -> _LayoutSession:
        return self.layout_sessions[0]

    @property
    def _may_lack_first_blocks(self) -> bool:
        """Whether a prefix may lack all blocks but the last ones: those of a window or a state. With full attention it
        has all of them."""
        return any(group.kind in (Kind.WINDOW, Kind.STATE) for group in self.own.session.layout.groups)

    def longest(
        self, chain: Chain, extras: Sequence[Extra], have: int, prefill: Prefill | None, record: bool, request: str
    ) -> tuple[Match, WorkerGroup]:
        """The longest match of a prompt beyond ``have`` tokens over all layouts; the caller releases it. ``record``:
        whether this is the first lookup for the ``request``."""
        own = self.own
        best = own.session.match(chain, have=have, prefill=prefill, record=record, request=request)
        worker_group = own.worker_group
        try:
            for layout_session in self._others_with_more(
                chain, extras, min(have // chain.block_tokens, best.blocks), best.blocks
            ):
                other = layout_session.session.match(chain.named, extras, have=have, prefill=prefill, record=False)
                if other.tokens > best.tokens:
                    best, other, worker_group = other, best, layout_session.worker_group
                other.release()
                if best.blocks == chain.blocks:
                    break
        except BaseException:
            best.release()
            raise
        return best, worker_group

    def _others_with_more(
        self, chain: Chain, extras: Sequence[Extra], have: int, blocks: int
    ) -> Iterator[_LayoutSession]:
        """The sessions of other layouts that may have a longer prefix of the prompt than ``blocks`` blocks; the engine
        has ``have`` of them itself. Most prompts are in none of them, and the engine waits: one request for all is
        quicker than a match of each."""
        others = self.layout_sessions[1:]
        if not others or blocks >= chain.blocks:
            return
        whole = self._may_lack_first_blocks
        known = chain.named if whole else chain.named[: (blocks + _NEXT) * chain.block_tokens]
        chains = [other.session.chain(known, extras) for other in others]
        found = find_each([(o.backend, c.digests[have:]) for o, c in zip(others, chains, strict=True)])
        for other, there in zip(others, found, strict=True):
            if any(there[blocks - have :] if whole else there[blocks - have : blocks - have + 1]):
                yield other

    def names(self, chain: Chain, extras: Sequence[Extra]) -> Iterator[tuple[RemoteBackend, bytes]]:
        """The blocks of a prompt in each layout that tell whether it is absent; all of them in the first."""
        yield self.own.backend, chain.joined
        colder = self.own.backend.has_colder
        known = (
            chain.named if self._may_lack_first_blocks else chain.named[: (_NEXT if colder else 1) * chain.block_tokens]
        )
        for other in self.layout_sessions[1:]:
            yield other.backend, other.session.chain(known, extras).joined

    def close(self) -> None:
        for layout_session in self.layout_sessions:
            layout_session.session.close()


class SessionPool:
    """The sessions of all tenants and the node's client. For use by one thread."""

    def __init__(
        self, dial: Callable[[], Client], models: Sequence[Model], ranks: int, clock: Clock | None = None
    ) -> None:
        """``models`` differ in their layouts only; the engine's own layout comes first."""
        self.clock = clock or SystemClock()
        self._node_access = NodeAccess(dial, self.clock)
        self._models = models
        self._ranks = ranks
        self._session_pool: OrderedDict[bytes, TenantSessions] = OrderedDict()

    def prepare(self) -> None:
        """Do what the first request of the default tenant needs: connect, open its sessions, and hash a block. Raises
        NodeUnavailable if no node can be reached."""
        session = self.of(DEFAULT_TENANT).own.session
        session.chain(range(session.layout.block_tokens))

    def client(self) -> Client:
        """Raises NodeUnavailable if no node can be reached."""
        return self._node_access.client()

    @property
    def dram(self) -> int:
        """DRAM budget in bytes for the node's blocks; 0 until a node was reached. May be called from any thread."""
        return self._node_access.dram

    def dropped(self, reason: DropReason, blocks: int) -> None:
        """Report blocks that could not be stored: see ``Client``."""
        self.client().dropped(reason, blocks)

    def of(self, tenant: Tenant) -> TenantSessions:
        tag = tenant.tag
        if tag not in self._session_pool:
            self._make_room()
            client = self.client()
            with contextlib.ExitStack() as stack:
                sessions = [stack.enter_context(client.session(model, tenant)) for model in self._models]
                self._session_pool[tag] = TenantSessions(
                    [_LayoutSession(s, client.worker_group(s, self._ranks)) for s in sessions]
                )
                stack.pop_all()
        self._session_pool.move_to_end(tag)
        return self._session_pool[tag]

    def pin(self, tenant_sessions: TenantSessions, chain: Chain, request: str) -> None:
        """Pin the blocks of a request, as far as the limit allows."""
        each = sum(geometry.footprint for geometry in self._models[0].layout.geometry.values())
        left = most = self.dram // _PINNED // each
        left -= sum(len(one.pinned) for one in self._session_pool.values())
        stop = 0
        for name in chain.digests:
            left -= name not in tenant_sessions.pinned
            if left < 0:
                log.warning(
                    "kvtide pins %d of the %d blocks of request %s: all pins of an engine together may be %d blocks, "
                    "one in %d bytes of the node's DRAM; pin less, or raise dram.budget",
                    *(stop, chain.blocks, request, most, _PINNED),
                )
                break
            stop += 1
        if stop:
            tenant_sessions.own.session.pin(chain, stop=stop)
            tenant_sessions.pinned.update(chain.digests[:stop])

    def _make_room(self) -> None:
        idle = [tag for tag, tenant_sessions in self._session_pool.items() if not tenant_sessions.requests]
        free = [tag for tag in idle if not self._session_pool[tag].pinned]
        for tag in free[: max(0, len(self._session_pool) + 1 - _TENANTS)]:
            self._session_pool.pop(tag).close()
        pinned = [tag for tag in idle if tag in self._session_pool]
        for tag in pinned[: max(0, len(self._session_pool) + 1 - _MOST)]:
            log.warning("kvtide unpins the blocks of the least recently used tenant: %d tenants have pins", len(pinned))
            self._session_pool.pop(tag).close()

    def renew(self) -> None:
        """Switch to a new model identity that no other engine shares, because the new weights are unknown."""
        nonce = secrets.token_hex(16)
        self._models = [replace(m, config={**m.config, "renewed": nonce}) for m in self._models]
        past, self._session_pool = self._session_pool, OrderedDict()
        for tenant_sessions in past.values():
            tenant_sessions.close()

    def close(self) -> None:
        self._session_pool.clear()
        self._node_access.close()
