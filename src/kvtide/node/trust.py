"""Who may connect to a node, and what they see of it.

The node's own user, and root, see the node's own blocks. Other users come in by ``node.users``, each into a *trust
domain*: its blocks have names of their own in every tier and lie in segments of their own, whose descriptors nobody
outside the domain gets. One that may only read gets descriptors that cannot be mapped for writing.

The system's users are the border because it guards nothing finer: processes of one user can look into each other.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.block import BlockKey
from kvtide.errors import ConfigError

__all__ = ["Trust", "Trusted", "seen"]

_MOST = 4000
_LETTERS = 8
"""Of a domain's name: it ends the keys of its blocks, and records have little room for them."""


@dataclass(frozen=True, slots=True)
class Trust:
    """What a client may do, and where."""

    domain: int = 0
    """Its number, in this life of the node."""
    tag: bytes = b""
    """What ends the names of its blocks, in every life."""
    stores: bool = True


def seen(tag: bytes, keys: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
    """Those keys that are of the domain with that tag, as its clients know them."""
    if not tag:
        return tuple(k for k in keys if b"\0" not in k[32:])
    return tuple(BlockKey(k.removesuffix(tag)) for k in keys if k[32:].endswith(tag))


class Trusted:
    """The users of ``node.users``: ``1001:blue 1002:blue:read 1003:green``."""

    def __init__(self, users: str) -> None:
        self._users: dict[int, Trust] = {}
        domains: dict[str, int] = {}
        for text in users.replace(",", " ").split():
            user, _, rest = text.partition(":")
            name, _, right = rest.partition(":")
            good = name.isidentifier() and name.isascii() and len(name) <= _LETTERS
            if not user.isdecimal() or not good or right not in ("", "read"):
                raise ConfigError(
                    f"node.users has {text!r}; it must be a user's number and a trust domain of at most {_LETTERS} "
                    "letters, such as 1001:blue, or 1001:blue:read for one that may not store"
                )
            if int(user) in (0, os.getuid()) or int(user) in self._users:
                raise ConfigError(f"node.users has user {user}, who is there already: root and our own user always are")
            number = domains.setdefault(name, len(domains) + 1)
            self._users[int(user)] = Trust(number, b"\0" + name.encode(), right != "read")
        if len(domains) > _MOST:
            raise ConfigError(f"node.users has {len(domains)} trust domains; there can be {_MOST}")

    def __bool__(self) -> bool:
        """Whether anybody but ourselves may come."""
        return bool(self._users)

    def of(self, user: int) -> Trust | None:
        """What a user may do; None: nothing."""
        return Trust() if user in (0, os.getuid()) else self._users.get(user)
