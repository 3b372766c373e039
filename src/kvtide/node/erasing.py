"""A node forgets a tenant: on a thread of its own, for it reads a page of every slot on disk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvtide.errors import KvtideError, UnknownTenantError
from kvtide.node.host import Host
from kvtide.node.protocol import NO_TENANT

__all__ = ["erase"]

log = logging.getLogger("kvtide.node")


def erase(host: Host, tenant: bytes, who: str, done: Callable[[int, str], None]) -> None:
    """Destroy a tenant's keys and blocks; then call, in the loop, with how many there were and what went wrong."""

    def forget() -> None:
        count, failure = 0, ""
        try:
            count = host.store.forget(tenant, who)
        except UnknownTenantError as e:
            count, failure = NO_TENANT, str(e)
        except KvtideError as e:
            failure = str(e)
        except Exception as e:  # a fault of ours; whoever waits must be told all the same
            log.exception("a tenant could not be forgotten")
            failure = f"{type(e).__name__}: {e}"
        host.soon(lambda: done(count, failure))

    threading.Thread(target=forget, name="kvtide-forget", daemon=True).start()
