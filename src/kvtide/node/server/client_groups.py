"""The worker groups that one client has joined, in which it uses rights of other clients' sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from kvtide.errors import ClosedError, RightError
from kvtide.node import protocol as p
from kvtide.node import work_limits
from kvtide.node.server.access import Access
from kvtide.node.server.segments import SegmentExporter
from kvtide.node.server.workers import GroupMember, ServerWorkerGroup

__all__ = ["ClientGroups"]

_MOST = 1024
"""Maximum number of worker groups that one process may have joined at a time."""
_VISITS = 4096
"""Maximum number of uses of other clients' rights by a worker: when it disconnects, all of them end in one turn."""

Charge = Callable[[int], None]
"""Counts the units of work of an operation before it is executed, and raises if they are too many; see
``work_limits.py``."""


class ClientGroups:
    """All worker groups that one client has joined."""

    def __init__(
        self,
        worker_groups: Mapping[str, ServerWorkerGroup],
        exporter: SegmentExporter,
        numbers: Iterator[int],
        access: Access,
    ) -> None:
        self._worker_groups = worker_groups
        self._exporter = exporter
        self._numbers = numbers
        self._access = access
        self._members: dict[int, GroupMember] = {}

    @property
    def visits(self) -> int:
        """Number of other clients' rights that this client uses."""
        return sum(len(m.visits) for m in self._members.values())

    def join(self, o: p.Join, charge: Charge) -> p.Joined:
        worker_group = self._worker_groups.get(o.token)
        if worker_group is None or worker_group.domain != self._access.domain:
            raise RightError("no session has this token; its scheduler is not connected, or has closed the session")
        charge(len(worker_group.backend.layout.groups) * work_limits.GROUP + len(self._members))
        for number in [n for n, m in self._members.items() if self._stale(m) and not m.visits]:
            del self._members[number]
        if len(self._members) >= _MOST:
            raise RightError(f"this process has joined {_MOST} times; resign some")
        number = next(self._numbers)
        self._members[number] = worker_group.join(o.rank)
        layout = worker_group.backend.layout
        return p.Joined(number, worker_group.ranks, p.describe(layout), layout.block_tokens)

    def _stale(self, member: GroupMember) -> bool:
        return self._worker_groups.get(member.worker_group.token) is not member.worker_group

    def _member(self, number: int) -> GroupMember:
        try:
            return self._members[number]
        except KeyError:
            raise RightError(f"there is no worker {number}") from None

    def _current(self, number: int) -> GroupMember:
        member = self._member(number)
        if self._stale(member):
            raise ClosedError("its session has ended, or continues on another connection; join again")
        return member

    def visit(self, o: p.Visit, charge: Charge) -> p.Collected:
        member = self._current(o.member)
        holding = member.worker_group.holding(o.holding)
        charge(len(holding.part.all))
        self._check_visits(member)
        member.visit(o.holding)
        return self._exporter.slots(member.worker_group.backend, holding)

    def fill(self, o: p.Fill, charge: Charge) -> p.Reserved:
        member = self._current(o.member)
        made = member.worker_group.reservation(o.reservation)
        charge(len(made.keys))
        self._check_visits(member)
        member.visit(o.reservation)
        return self._exporter.reserved(o.reservation, made, member.worker_group.backend)

    @staticmethod
    def _check_visits(member: GroupMember) -> None:
        if member.visiting >= _VISITS:
            raise RightError(f"this worker uses leases and reservations {_VISITS} times at once; leave some")

    def leave(self, o: p.Leave) -> int:
        """Returns the units of work that it took."""
        member, units = self._member(o.member), len(o.rights)
        for number in o.rights:
            units += member.worker_group.blocks_of(number) * work_limits.MOVE
            member.leave(number, o.good)
        return units

    def resign(self, o: p.Resign) -> None:
        self._member(o.member).end()
        del self._members[o.member]

    def lost(self) -> None:
        """The connection is closed; the rights in use are kept until the client's process has exited."""
        for member in self._members.values():
            member.lost()

    def end(self) -> None:
        """The client's process has exited, or does not use any rights any more."""
        for member in self._members.values():
            member.end()
        self._members.clear()
