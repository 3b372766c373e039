"""By which names a server is asked for, where it does not ask who asks.

A page in a browser may send requests to this host: to a name of its author's that he lets point to 127.0.0.1 once the
page is loaded, so that the browser takes our answers for his. Such a request has his name in its header ``Host``. So
only names are answered that nobody else can have: those of loopback, the addresses that are listened on, this host's
own name, and what an administrator adds. A credential does the same better, because such a page has none.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

__all__ = ["HostNames"]


class HostNames:
    """The names of loopback and of this host, and ``more``; each with any port."""

    def __init__(self, more: Iterable[str] = ()) -> None:
        own = socket.gethostname()
        self._known = {_name(name) for name in ("localhost", "127.0.0.1", "::1", own, own.partition(".")[0], *more)}
        self._known.discard("")

    def knows(self, header: str) -> bool:
        """Whether a header ``Host`` is of those."""
        return _name(header) in self._known


def _name(text: str) -> str:
    """A name or address without its port, in one spelling."""
    text = text.strip().lower()
    host = text[1:].partition("]")[0] if text.startswith("[") else text if text.count(":") > 1 else text.split(":")[0]
    try:
        return str(ipaddress.ip_address(host.partition("%")[0]))
    except ValueError:
        return host.removesuffix(".")
