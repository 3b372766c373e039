"""The host names that a server without authentication answers to, against DNS rebinding.

A page in a browser may send requests to this host under a name of the attacker's, which the attacker lets point to
127.0.0.1 once the page is loaded, so that the browser takes the answers for those of the attacker's site. Such a
request has the attacker's name in its ``Host`` header. So the server answers only names that no other site can have:
those of loopback, the addresses that it listens on, this host's own name, and names that an administrator adds.
Authentication protects better, because such a page has no credentials.
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
        """Whether a ``Host`` header has one of these names."""
        return _name(header) in self._known


def _name(text: str) -> str:
    """A name or address without its port, in canonical spelling."""
    text = text.strip().lower()
    host = text[1:].partition("]")[0] if text.startswith("[") else text if text.count(":") > 1 else text.split(":")[0]
    try:
        return str(ipaddress.ip_address(host.partition("%")[0]))
    except ValueError:
        return host.removesuffix(".")
