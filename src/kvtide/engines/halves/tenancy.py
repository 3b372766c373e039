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
from kvtide.engines.halves.reach import Reach
from kvtide.index.keys import Chain, Extra, Model, Tenant
from kvtide.match import Match
from kvtide.node.client import Client
from kvtide.node.crew import Crew
from kvtide.node.protocol import DropReason
from kvtide.plan.prefill import Prefill
from kvtide.session import Session

__all__ = ["Tenancies", "Tenancy"]

log = logging.getLogger("kvtide.engines")

_PINNED = 4
"""One in so many bytes of the node's DRAM may be pinned: else a few requests could leave no room for all others."""
_TENANTS, _MOST = 64, 512
"""That have sessions at a time: more only if they are in use or have pins, and still more only if they are in use."""


@dataclass(slots=True)
class _Face:
    """A session, with what the workers need to join it."""

    session: Session
    crew: Crew


@dataclass(slots=True)
class Tenancy:
    """One tenant's sessions; the first is the engine's own layout."""

    faces: Sequence[_Face]
    requests: set[str] = field(default_factory=set)
    """That use it now."""
    pinned: set[bytes] = field(default_factory=set)
    """The names of blocks that requests have pinned. It is kept for them: pins end with their session."""

    @property
    def own(self) -> _Face:
        return self.faces[0]

    def longest(
        self, chain: Chain, extras: Sequence[Extra], have: int, prefill: Prefill | None, record: bool
    ) -> tuple[Match, Crew]:
        """What there is of a prompt beyond ``have`` tokens, in the layout that has most of it. Release it. ``record``:
        it is the first time that this request asks."""
        best, crew = self.own.session.match(chain, have=have, prefill=prefill, record=record), self.own.crew
        for face in self.faces[1:]:
            if best.blocks == chain.blocks:
                break
            try:
                other = face.session.match(chain.named, extras, have=have, prefill=prefill, record=False)
            except BaseException:
                best.release()
                raise
            if other.tokens > best.tokens:
                best, other, crew = other, best, face.crew
            other.release()
        return best, crew

    def close(self) -> None:
        for face in self.faces:
            face.session.close()


class Tenancies:
    """Every tenant's sessions, and the node's client under them. For one thread."""

    def __init__(
        self, dial: Callable[[], Client], models: Sequence[Model], ranks: int, clock: Clock | None = None
    ) -> None:
        """``models`` differ in their layouts alone; the engine's own comes first."""
        self.clock = clock or SystemClock()
        self._reach = Reach(dial, self.clock)
        self._models = models
        self._ranks = ranks
        self._tenancies: OrderedDict[bytes, Tenancy] = OrderedDict()

    def client(self) -> Client:
        """Raises Lost where no node can be had."""
        return self._reach.client()

    @property
    def dram(self) -> int:
        """Bytes of DRAM that the node's blocks may take; 0 where there was none yet. From any thread."""
        return self._reach.dram

    def dropped(self, reason: DropReason, blocks: int) -> None:
        """So many blocks could not be stored: see ``Client``."""
        self.client().dropped(reason, blocks)

    def of(self, tenant: Tenant) -> Tenancy:
        tag = tenant.tag
        if tag not in self._tenancies:
            self._make_room()
            client = self.client()
            with contextlib.ExitStack() as stack:
                sessions = [stack.enter_context(client.session(model, tenant)) for model in self._models]
                self._tenancies[tag] = Tenancy([_Face(s, client.crew(s, self._ranks)) for s in sessions])
                stack.pop_all()
        self._tenancies.move_to_end(tag)
        return self._tenancies[tag]

    def pin(self, tenancy: Tenancy, chain: Chain, request: str) -> None:
        """Keep the blocks of a request from eviction, as far as pins may go."""
        each = sum(geometry.footprint for geometry in self._models[0].layout.geometry.values())
        left = most = self.dram // _PINNED // each
        left -= sum(len(one.pinned) for one in self._tenancies.values())
        stop = 0
        for name in chain.digests:
            left -= name not in tenancy.pinned
            if left < 0:
                log.warning(
                    "kvtide pins %d of the %d blocks of request %s: all pins of an engine together may be %d blocks, "
                    "one in %d bytes of the node's DRAM; pin less, or raise dram.budget",
                    *(stop, chain.blocks, request, most, _PINNED),
                )
                break
            stop += 1
        if stop:
            tenancy.own.session.pin(chain, stop=stop)
            tenancy.pinned.update(chain.digests[:stop])

    def _make_room(self) -> None:
        idle = [tag for tag, tenancy in self._tenancies.items() if not tenancy.requests]
        free = [tag for tag in idle if not self._tenancies[tag].pinned]
        for tag in free[: max(0, len(self._tenancies) + 1 - _TENANTS)]:
            self._tenancies.pop(tag).close()
        pinned = [tag for tag in idle if tag in self._tenancies]
        for tag in pinned[: max(0, len(self._tenancies) + 1 - _MOST)]:
            log.warning("kvtide unpins the blocks of the tenant that came longest ago: %d have pins", len(pinned))
            self._tenancies.pop(tag).close()

    def renew(self) -> None:
        """From now on it is another model: one that no other engine has, because nobody can tell which."""
        nonce = secrets.token_hex(16)
        self._models = [replace(m, config={**m.config, "renewed": nonce}) for m in self._models]
        past, self._tenancies = self._tenancies, OrderedDict()
        for tenancy in past.values():
            tenancy.close()

    def close(self) -> None:
        self._tenancies.clear()
        self._reach.close()
