"""Which users may connect to a node, what they may do, and which blocks they see.

The node's own user and root are its administrators. Other users are admitted by ``node.users``, by user or by group,
each with a role (``roles.py``) and a *trust domain*. The blocks of a domain have names of their own in every tier and
are stored in segments of their own, whose descriptors are given to no process outside the domain. A user that may only
read gets descriptors that cannot be mapped for writing. Users without a domain share the node's own blocks.

The boundary is the system user because the system protects nothing finer: processes of one user can read each other's
memory.
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
"""Maximum letters of a domain's name: it ends the keys of its blocks, and records have little space for them."""


@dataclass(frozen=True, slots=True)
class Access:
    """The role and the trust domain of a client."""

    role: Role
    domain: int = 0
    """The domain's number, in this run of the node; 0 is the node's own domain."""
    tag: bytes = b""
    """The suffix of the names of the domain's blocks, the same in every run."""


def seen(
    tag: bytes, keys: Sequence[BlockKey], identities: Sequence[int] = (), mine: Collection[int] | None = None
) -> tuple[BlockKey, ...]:
    """The keys that belong to the domain with this tag, as its clients know them.

    With ``mine``: only keys whose ``identities`` are among them.
    """
    if mine is not None:
        keys = [key for key, whose in zip(keys, identities, strict=False) if whose in mine]
    if not tag:
        return tuple(k for k in keys if b"\0" not in k[32:])
    return tuple(BlockKey(k.removesuffix(tag)) for k in keys if k[32:].endswith(tag))


class AccessList:
    """The users of ``node.users``: ``1001:blue 1002:blue:read alice:green @kvops::admin``."""

    def __init__(self, users: str) -> None:
        self._users: dict[int, Access] = {}
        self._groups: dict[int, Access] = {}
        """In the order of the setting."""
        domains: dict[str, int] = {}
        self._members: dict[str, list[str]] = {}
        """By trust domain: its users and groups, as the setting names them."""
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
                raise ConfigError(
                    f"node.users has {who}, which is listed twice: root and the node's own user are always included"
                )
            if given is not Role.ADMIN:
                self._members.setdefault(name, []).append(who)
            kind[member] = Access(given, number, b"\0" + name.encode() if name else b"")
        if len(domains) > _MOST:
            raise ConfigError(f"node.users has {len(domains)} trust domains; there can be {_MOST}")

    def __bool__(self) -> bool:
        """Whether users other than the node's own and root may connect."""
        return bool(self._users or self._groups)

    @property
    def warnings(self) -> list[str]:
        """Warnings for the node's administrator about trust domains that several users share."""
        said = []
        for name, who in self._members.items():
            # A group may have several users; in the node's own domain the node's own user is another member.
            if len(who) > 1 or not name or who[0][0] == "@":
                others = f"the {'user' if len(who) == 1 else 'users'} {', '.join(who)}"
                domain = f"the trust domain {name!r}" if name else "the node's own trust domain, with its own user"
                said.append(
                    f"node.users puts {others} into {domain}: each of its users can read all blocks of the others in "
                    "memory, whatever their tenants. If they must not, give each a domain of its own in node.users, "
                    f"such as {who[0]}:{'first' if name != 'first' else 'one'}"
                )
        return said

    def of(self, user: int, groups: Collection[int] = ()) -> Access | None:
        """The access of a user in those groups; None: no access. A user's own entry wins, then the first of a group."""
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
