"""Who may connect to a node, what they may do, and what they see of it.

The node's own user, and root, are its administrators. Others come in by ``node.users``, by their user or a group of
theirs, each with a role (``roles.py``) and a *trust domain*: its blocks have names of their own in every tier and lie
in segments of their own, whose descriptors nobody outside the domain gets. One that may only read gets descriptors
that cannot be mapped for writing. Without a domain they share the node's own blocks.

The system's users are the border because it guards nothing finer: processes of one user can look into each other.
"""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvtide.block import BlockKey
from kvtide.errors import ConfigError
from kvtide.node.roles import Role

__all__ = ["Access", "AccessList", "seen"]

_MOST = 4000
_LETTERS = 8
"""Of a domain's name: it ends the keys of its blocks, and records have little room for them."""


@dataclass(frozen=True, slots=True)
class Access:
    """What a client may do, and where."""

    role: Role
    domain: int = 0
    """Its number, in this life of the node; 0 is the node's own."""
    tag: bytes = b""
    """What ends the names of its blocks, in every life."""


def seen(
    tag: bytes, keys: Sequence[BlockKey], identities: Sequence[int] = (), mine: Collection[int] | None = None
) -> tuple[BlockKey, ...]:
    """Those keys that are of the domain with that tag, as its clients know them.

    With ``mine``: of these those alone whose ``identities`` are among them.
    """
    if mine is not None:
        keys = [key for key, whose in zip(keys, identities, strict=False) if whose in mine]
    if not tag:
        return tuple(k for k in keys if b"\0" not in k[32:])
    return tuple(BlockKey(k.removesuffix(tag)) for k in keys if k[32:].endswith(tag))


class AccessList:
    """Those of ``node.users``: ``1001:blue 1002:blue:read alice:green @kvops::admin``."""

    def __init__(self, users: str) -> None:
        self._users: dict[int, Access] = {}
        self._groups: dict[int, Access] = {}
        """In the order in which they are given."""
        domains: dict[str, int] = {}
        self._members: dict[str, list[str]] = {}
        """By trust domain: who is in it, as the setting has it."""
        for text in users.replace(",", " ").split():
            who, _, rest = text.partition(":")
            name, _, role = rest.partition(":")
            if name and not (name.isidentifier() and name.isascii() and len(name) <= _LETTERS):
                raise ConfigError(f"node.users has {text!r}; a trust domain's name has at most {_LETTERS} letters")
            if not who or not rest or (role or "write").upper() not in Role.__members__:
                raise ConfigError(
                    f"node.users has {text!r}; it must be a user or a @group, a trust domain and a role (read, write "
                    "or admin), such as 1001:blue, 1002:blue:read, or @kvops::admin for one of the node's own domain"
                )
            given = Role[(role or "write").upper()]
            if name and given is Role.ADMIN:
                raise ConfigError(
                    f"node.users has {text!r}; an administrator acts on all domains: leave the domain out, {who}::admin"
                )
            number = domains.setdefault(name, len(domains) + 1) if name else 0
            kind, member = (self._groups, _group(who[1:])) if who[0] == "@" else (self._users, _user(who))
            if member in kind or (kind is self._users and member in (0, os.getuid())):
                raise ConfigError(f"node.users has {who}, who is there already: root and our own user always are")
            if given is not Role.ADMIN:
                self._members.setdefault(name, []).append(who)
            kind[member] = Access(given, number, b"\0" + name.encode() if name else b"")
        if len(domains) > _MOST:
            raise ConfigError(f"node.users has {len(domains)} trust domains; there can be {_MOST}")

    def __bool__(self) -> bool:
        """Whether anybody but ourselves may come."""
        return bool(self._users or self._groups)

    @property
    def warnings(self) -> list[str]:
        """What whoever runs the node should know of the domains that several share."""
        said = []
        for name, who in self._members.items():
            # A group may be several users; in the node's own domain its own user is one more.
            if len(who) > 1 or not name or who[0][0] == "@":
                others = f"the {'user' if len(who) == 1 else 'users'} {', '.join(who)}"
                domain = f"the trust domain {name!r}" if name else "the node's own trust domain, with its own user"
                said.append(
                    f"node.users puts {others} into {domain}: whoever is in it can read all blocks of the others in "
                    "memory, whatever their tenants. If they must not, give each a domain of its own in node.users, "
                    f"such as {who[0]}:{'first' if name != 'first' else 'one'}"
                )
        return said

    def of(self, user: int, groups: Collection[int] = ()) -> Access | None:
        """What a user of those groups may do; None: nothing. A user's own entry wins, then the first of a group."""
        if user in (0, os.getuid()):
            return Access(Role.ADMIN)
        return self._users.get(user) or next((t for group, t in self._groups.items() if group in groups), None)


def _user(text: str) -> int:
    try:
        return int(text) if text.isdecimal() else pwd.getpwnam(text).pw_uid
    except KeyError:
        raise ConfigError(
            f"node.users has {text!r}; there is no such user here. Give its number, or a @group"
        ) from None


def _group(text: str) -> int:
    try:
        return int(text) if text.isdecimal() else grp.getgrnam(text).gr_gid
    except KeyError:
        raise ConfigError(f"node.users has '@{text}'; there is no such group here. Give its number") from None
