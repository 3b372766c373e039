"""An engine of several processes: a scheduler that decides, and workers that move the bytes.

The scheduler's session matches and reserves. Workers have connections of their own and join the session with its token
and a rank; then they may use what it holds. To *visit* a holding or a reservation is to be told its slots.

What a worker was told it may be using: its slots are given to nobody else before it has left, or its process is dead,
whatever the scheduler says or does meanwhile. A reservation for a team names its writers, each of which fills its
slice of every block. It is sealed when each has left it in good order. A worker that fails, dies or leaves the team
before it has done so ends those reservations that still wait for it; those that it has written already are whole
without it.

Numbers of holdings and reservations are never given twice in a node's life, so that they stand for the generations of
their slots too: a late acknowledgement finds nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from kvtide.errors import RightError
from kvtide.index.lease import Reservation
from kvtide.store.backend import LocalBackend, LocalPrefixLease

__all__ = ["GroupMember", "ServerWorkerGroup"]


class ServerWorkerGroup:
    """The workers of one session, and what they use."""

    def __init__(
        self, backend: LocalBackend, holdings: dict[int, LocalPrefixLease], token: str, ranks: int, domain: int
    ) -> None:
        self.backend = backend
        self.token = token
        self.ranks = ranks
        self.domain = domain
        self._holdings = holdings
        self._members: dict[int, GroupMember] = {}
        self._visitors: dict[int, Counter[GroupMember]] = {}
        """By right: how often each worker uses it at a time."""
        self._when_free: dict[int, Callable[[], None]] = {}
        self._pledged: dict[int, Reservation] = {}
        self._writers: dict[int, set[int]] = {}
        """By reservation: the ranks that have not written yet."""

    @property
    def rights(self) -> int:
        return len(self._pledged)

    # -- the scheduler ------------------------------------------------------------------------------------

    def delegate(self, number: int, reservation: Reservation, writers: Iterable[int]) -> None:
        """Let workers fill a reservation."""
        self._pledged[number] = reservation
        self._writers[number] = set(writers)

    def abort(self, number: int) -> bool:
        """Give a reservation of the team up; False if there is none of that number."""
        reservation = self._pledged.pop(number, None)
        if reservation is None:
            return False
        del self._writers[number]
        self.when_free(number, reservation.abort)
        return True

    def when_free(self, number: int, call: Callable[[], None]) -> None:
        """Call when nobody visits that right any more: now, or when the last has left."""
        if self._visitors.get(number):
            self._when_free[number] = call
        else:
            call()

    def fail(self) -> None:
        """Its scheduler is lost, or its session has ended: nothing that is open will be whole."""
        for number in list(self._pledged):
            self.abort(number)

    def fail_without(self, member: GroupMember) -> None:
        """A worker is lost, or leaves: what it was still to write, or is just writing, will not be whole."""
        for number, missing in list(self._writers.items()):
            if member.rank in missing or number in member.visits:
                self.abort(number)

    # -- the workers --------------------------------------------------------------------------------------

    def join(self, rank: int) -> GroupMember:
        if not 0 <= rank < self.ranks:
            raise RightError(f"rank {rank} is not one of this session's {self.ranks}")
        if rank in self._members:
            raise RightError(f"rank {rank} has joined already; it must leave first, or its process end")
        self._members[rank] = member = GroupMember(self, rank)
        return member

    def has(self, member: GroupMember) -> bool:
        """Whether it is the one of its rank, and not one that has left, or whose rank another has by now."""
        return self._members.get(member.rank) is member

    def left(self, member: GroupMember) -> None:
        if self._members.get(member.rank) is member:
            del self._members[member.rank]

    def holding(self, number: int) -> LocalPrefixLease:
        if number not in self._holdings:
            raise RightError(f"there is no holding {number}; it was released")
        return self._holdings[number]

    def reservation(self, number: int) -> Reservation:
        if number not in self._pledged:
            raise RightError(f"there is no reservation {number} for workers; it was given up")
        return self._pledged[number]

    def blocks_of(self, number: int) -> int:
        """Blocks of a reservation for workers; 0 if there is none of that number."""
        return len(self._pledged[number].keys) if number in self._pledged else 0

    def came(self, number: int, member: GroupMember) -> None:
        self._visitors.setdefault(number, Counter())[member] += 1

    def done(self, number: int, member: GroupMember, good: bool) -> None:
        """A worker has ended one of its uses of a right's slots."""
        visitors = self._visitors[number]
        visitors[member] -= 1
        if not visitors[member]:
            del visitors[member]
        if not visitors:
            del self._visitors[number]
        if number in self._pledged:
            if not good:
                self.abort(number)
            elif member not in visitors:
                self._wrote(number, member.rank)
        if not visitors and (call := self._when_free.pop(number, None)) is not None:
            call()

    def _wrote(self, number: int, rank: int) -> None:
        missing = self._writers[number]
        missing.discard(rank)
        if not missing and not self._visitors.get(number):
            del self._writers[number]
            self._pledged.pop(number).seal()


class GroupMember:
    """A worker of a team."""

    def __init__(self, worker_group: ServerWorkerGroup, rank: int) -> None:
        self.worker_group = worker_group
        self.rank = rank
        self.visits: Counter[int] = Counter()
        """Rights that it uses, and how often at a time."""
        self.visiting = 0
        """All of these together."""

    def visit(self, number: int) -> None:
        """It is about to be told the slots of a right."""
        self.visits[number] += 1
        self.visiting += 1
        self.worker_group.came(number, self)

    def leave(self, number: int, good: bool) -> None:
        """One of its visits is over."""
        if number in self.visits:
            self.visits[number] -= 1
            self.visiting -= 1
            if not self.visits[number]:
                del self.visits[number]
            self.worker_group.done(number, self, good)

    def lost(self) -> None:
        """It will write nothing more, though it may still be using what it visits."""
        if self.worker_group.has(self):
            self.worker_group.fail_without(self)

    def end(self) -> None:
        """It has left the team, or its process is dead."""
        self.lost()
        for number in list(self.visits.elements()):
            self.leave(number, good=False)
        self.worker_group.left(self)
