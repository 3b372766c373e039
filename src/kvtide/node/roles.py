"""The role that each operation needs: one of three, each of which includes the ones before it.

A reader looks up and loads, and gets memory that cannot be mapped for writing. A writer also stores, pins, drops and
expires. Both stay within their trust domain. An administrator acts on the whole node, and so belongs to the node's own
domain only.

Every operation is in this table, and permission is decided nowhere else: an operation that is not in it cannot be
answered. Inviting and joining a worker group needs only read, because workers may just read; filling a reservation
needs write.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from kvtide.node import protocol as p

__all__ = ["NEEDS", "Role"]


class Role(IntEnum):
    """The role of a user or caller. Larger ones include smaller ones."""

    READ = 1
    WRITE = 2
    ADMIN = 3

    def __str__(self) -> str:
        return self.name.lower()


NEEDS: Mapping[type, Role] = {
    p.Open: Role.READ,
    p.Close: Role.READ,
    p.Match: Role.READ,
    p.Find: Role.READ,
    p.Absent: Role.READ,
    p.Missed: Role.READ,
    p.Expect: Role.READ,
    p.Explain: Role.READ,
    p.Models: Role.READ,
    p.Load: Role.READ,
    p.Cancel: Role.READ,
    p.Collect: Role.READ,
    p.Release: Role.READ,
    p.Reserve: Role.WRITE,
    p.Describe: Role.WRITE,
    p.NotStored: Role.WRITE,
    p.Finish: Role.WRITE,
    p.Pin: Role.WRITE,
    p.Drop: Role.WRITE,
    p.Expire: Role.WRITE,
    p.Flush: Role.WRITE,
    p.ForgetTenant: Role.ADMIN,
    p.Drain: Role.ADMIN,
    p.Unmapped: Role.READ,
    p.Follow: Role.READ,
    p.EndEarlierRights: Role.READ,
    p.Statistics: Role.READ,
    p.Invite: Role.READ,
    p.Join: Role.READ,
    p.Visit: Role.READ,
    p.Fill: Role.WRITE,
    p.Leave: Role.READ,
    p.Resign: Role.READ,
}
