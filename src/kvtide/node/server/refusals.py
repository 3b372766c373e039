"""Refusals of operations for which a caller's role does not suffice. Refused administrative operations are audited.

Any user that may connect can try repeatedly: the audit log must not grow with every attempt, and the node's loop must
not wait for the disk. So the first refusal is written at once, by a thread, and equal ones within a second become one
line with their number.
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
"""Seconds between equal lines."""


class Refusals:
    """Created and called in the node's loop."""

    def __init__(self, audit: Audit | None) -> None:
        self._audit = audit
        self._loop = asyncio.get_running_loop()
        self._waiting: Counter[tuple[str, str, str]] = Counter()
        self._busy = False

    def refuse(self, who: str, role: Role | None, what: str, needed: Role) -> AccessError:
        """The error for a caller whose role does not suffice. ``who`` must have few values: each gets lines of its
        own."""
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
        with contextlib.suppress(RuntimeError):  # the loop is closed: there will be no more refusals
            self._loop.call_soon_threadsafe(self._loop.call_later, _PAUSE, self._write)
