"""What is said to those whose role does not suffice; and administrative acts among it, written down in the audit log.

Whoever may connect may try, and as often as he likes: the log must not grow with every attempt, and the node's loop
must not wait for the disk. So the first is written at once, by a thread, and those alike that come within a second are
one line, which says how many they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import Counter

from kvtide.errors import AccessError, AuditError
from kvtide.node.roles import Role
from kvtide.security.audit import Audit

__all__ = ["Refusals"]

log = logging.getLogger("kvtide.node")

_PAUSE = 1.0
"""Seconds between lines that are alike."""


class Refusals:
    """Made and called in the node's loop."""

    def __init__(self, audit: Audit | None) -> None:
        self._audit = audit
        self._loop = asyncio.get_running_loop()
        self._waiting: Counter[tuple[str, str, str]] = Counter()
        self._busy = False

    def refuse(self, who: str, role: Role | None, what: str, needed: Role) -> AccessError:
        """What to say to somebody whose role does not suffice. ``who`` is one of few: each has lines of his own."""
        why = f"{what} needs the role {needed}, and {who} has {'none' if role is None else role}"
        if needed is Role.ADMIN:
            self._waiting[who, what, why] += 1
            if not self._busy:
                self._write()
        return AccessError(f"{why}; the node's configuration gives roles")

    def _write(self) -> None:
        some, self._waiting = self._waiting, Counter()
        self._busy = bool(some)
        if some:
            threading.Thread(target=self._record, args=(some,), name="kvtide-refusals", daemon=True).start()

    def _record(self, some: Counter[tuple[str, str, str]]) -> None:
        for (who, what, why), times in some.items():
            log.warning("refused, %d times: %s", times, why)
            if self._audit is not None:
                try:
                    self._audit.record(what, f"refused: {why}", who, times=times)
                except AuditError as e:
                    log.error("%s", e)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody can be refused any more
            self._loop.call_soon_threadsafe(self._loop.call_later, _PAUSE, self._write)
