"""Forgets a tenant, on a thread of its own, because it reads a page of every slot on disk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvtide.errors import KvtideError, UnknownTenantError
from kvtide.node.protocol import NO_TENANT
from kvtide.store.forget import Forgotten
from kvtide.store.store import Store

__all__ = ["erase"]

log = logging.getLogger("kvtide.node")


def erase(
    store: Store,
    soon: Callable[[Callable[[], None]], None],
    tenant: bytes,
    who: str,
    done: Callable[[Forgotten, str], None],
) -> None:
    """Destroy a tenant's keys and blocks; then call ``done`` in the loop, by way of ``soon``, with the result and the
    failure, if any."""

    def forget() -> None:
        forgotten, failure = Forgotten(0), ""
        try:
            forgotten = store.forget(tenant, who)
        except UnknownTenantError as e:
            forgotten, failure = Forgotten(NO_TENANT), str(e)
        except KvtideError as e:
            failure = str(e)
        except Exception as e:  # a bug of the node; the caller that waits must still be told
            log.exception("a tenant could not be forgotten")
            failure = f"{type(e).__name__}: {e}"
        soon(lambda: done(forgotten, failure))

    threading.Thread(target=forget, name="kvtide-forget", daemon=True).start()
