"""The sessions of an engine's scheduler at the node: one for each tenant and each layout that can be read here.

An engine stores in the packing that it has. It reads that one, and those that it can convert from; a layout with
another packing is another session, because its blocks are other blocks. All of this talks to the node, so all of it
runs on the thread for that (``errands``).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvtide.clock import Clock, SystemClock
from kvtide.engines.connector.node_connector import NodeConnector
from kvtide.index.keys import Chain, Extra, Model, Tenant
from kvtide.node.client.client import Client
from kvtide.node.client.workers import WorkerGroup
from kvtide.node.protocol import DropReason
from kvtide.plan.prefill import Prefill
from kvtide.store.match import Match
from kvtide.store.session import Session

__all__ = ["SessionPool", "TenantSessions"]

log = logging.getLogger("kvtide.engines")

_PINNED = 4
"""One in so many bytes of the node's DRAM may be pinned: else a few requests could leave no room for all others."""
_TENANTS, _MOST = 64, 512
"""That have sessions at a time: more only if they are in use or have pins, and still more only if they are in use."""


@dataclass(slots=True)
class _LayoutSession:
    """A session, with what the workers need to join it."""

    session: Session
    crew: WorkerGroup


@dataclass(slots=True)
class TenantSessions:
    """One tenant's sessions; the first is the engine's own layout."""

    layout_sessions: Sequence[_LayoutSession]
    requests: set[str] = field(default_factory=set)
    """That use it now."""
    pinned: set[bytes] = field(default_factory=set)
    """The names of blocks that requests have pinned. It is kept for them: pins end with their session."""

    @property
    def own(self) -> _LayoutSession:
        return self.layout_sessions[0]

    def longest(
        self, chain: Chain, extras: Sequence[Extra], have: int, prefill: Prefill | None, record: bool
    ) -> tuple[Match, WorkerGroup]:
        """What there is of a prompt beyond ``have`` tokens, in the layout that has most of it. Release it. ``record``:
        it is the first time that this request asks."""
        best, crew = self.own.session.match(chain, have=have, prefill=prefill, record=record), self.own.crew
        for layout_session in self.layout_sessions[1:]:
            if best.blocks == chain.blocks:
                break
            try:
                other = layout_session.session.match(chain.named, extras, have=have, prefill=prefill, record=False)
            except BaseException:
                best.release()
                raise
            if other.tokens > best.tokens:
                best, other, crew = other, best, layout_session.crew
            other.release()
        return best, crew

    def close(self) -> None:
        for layout_session in self.layout_sessions:
            layout_session.session.close()


class SessionPool:
    """Every tenant's sessions, and the node's client under them. For one thread."""

    def __init__(
        self, dial: Callable[[], Client], models: Sequence[Model], ranks: int, clock: Clock | None = None
    ) -> None:
        """``models`` differ in their layouts alone; the engine's own comes first."""
        self.clock = clock or SystemClock()
        self._connector = NodeConnector(dial, self.clock)
        self._models = models
        self._ranks = ranks
        self._session_pool: OrderedDict[bytes, TenantSessions] = OrderedDict()

    def client(self) -> Client:
        """Raises Lost where no node can be had."""
        return self._connector.client()

    @property
    def dram(self) -> int:
        """Bytes of DRAM that the node's blocks may take; 0 where there was none yet. From any thread."""
        return self._connector.dram

    def dropped(self, reason: DropReason, blocks: int) -> None:
        """So many blocks could not be stored: see ``Client``."""
        self.client().dropped(reason, blocks)

    def of(self, tenant: Tenant) -> TenantSessions:
        tag = tenant.tag
        if tag not in self._session_pool:
            self._make_room()
            client = self.client()
            with contextlib.ExitStack() as stack:
                sessions = [stack.enter_context(client.session(model, tenant)) for model in self._models]
                self._session_pool[tag] = TenantSessions(
                    [_LayoutSession(s, client.crew(s, self._ranks)) for s in sessions]
                )
                stack.pop_all()
        self._session_pool.move_to_end(tag)
        return self._session_pool[tag]

    def pin(self, tenant_sessions: TenantSessions, chain: Chain, request: str) -> None:
        """Keep the blocks of a request from eviction, as far as pins may go."""
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
            log.warning("kvtide unpins the blocks of the tenant that came longest ago: %d have pins", len(pinned))
            self._session_pool.pop(tag).close()

    def renew(self) -> None:
        """From now on it is another model: one that no other engine has, because nobody can tell which."""
        nonce = secrets.token_hex(16)
        self._models = [replace(m, config={**m.config, "renewed": nonce}) for m in self._models]
        past, self._session_pool = self._session_pool, OrderedDict()
        for tenant_sessions in past.values():
            tenant_sessions.close()

    def close(self) -> None:
        self._session_pool.clear()
        self._connector.close()
