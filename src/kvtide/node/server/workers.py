"""The node's side of an engine of several processes: a scheduler that decides, and workers that move the bytes.

The scheduler's session matches and reserves. Workers have connections of their own and join the session with its token
and a rank; then they may use its prefix leases and reservations. A worker *visits* a lease or a reservation to be told
its slots.

A worker may use the slots that it was told until it has left them or its process has exited. Until then they are given
to no other client, whatever the scheduler does meanwhile.

A reservation for a worker group names its writers, each of which fills its slice of every block. It is sealed when each
writer has left it in good order. A worker that fails, dies or leaves the group before that aborts the reservations that
still wait for it; those for which it has written its part stay valid without it.

Numbers of leases and reservations are never reused during a node's run, so they also distinguish the successive uses of
a slot: a late acknowledgement finds nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from kvtide.errors import RightError
from kvtide.index.lease import Reservation
from kvtide.store.backend import LocalBackend, LocalPrefixLease

__all__ = ["GroupMember", "ServerWorkerGroup"]


class ServerWorkerGroup:
    """The workers of one session, and the rights that they use."""

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
        """By right: how many uses of it each worker has at present."""
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
        """Give up a reservation of the group; False if there is none of that number."""
        reservation = self._pledged.pop(number, None)
        if reservation is None:
            return False
        del self._writers[number]
        self.when_free(number, reservation.abort)
        return True

    def when_free(self, number: int, call: Callable[[], None]) -> None:
        """Call ``call`` when no worker visits that right any more: now, or when the last one has left."""
        if self._visitors.get(number):
            self._when_free[number] = call
        else:
            call()

    def fail(self) -> None:
        """The scheduler disconnected, or its session has ended: abort all open reservations."""
        for number in list(self._pledged):
            self.abort(number)

    def fail_without(self, member: GroupMember) -> None:
        """A worker disconnected or left: abort the reservations that it still has to write, or is writing."""
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
        """Whether it is the current member of its rank, and has not left or been replaced."""
        return self._members.get(member.rank) is member

    def left(self, member: GroupMember) -> None:
        if self._members.get(member.rank) is member:
            del self._members[member.rank]

    def holding(self, number: int) -> LocalPrefixLease:
        if number not in self._holdings:
            raise RightError(f"there is no prefix lease {number}; it was released")
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
    """A worker of a group."""

    def __init__(self, worker_group: ServerWorkerGroup, rank: int) -> None:
        self.worker_group = worker_group
        self.rank = rank
        self.visits: Counter[int] = Counter()
        """Rights that it uses, with the number of uses of each."""
        self.visiting = 0
        """The sum of ``visits``."""

    def visit(self, number: int) -> None:
        """Register a use of a right, before the worker is told its slots."""
        self.visits[number] += 1
        self.visiting += 1
        self.worker_group.came(number, self)

    def leave(self, number: int, good: bool) -> None:
        """End one use of a right."""
        if number in self.visits:
            self.visits[number] -= 1
            self.visiting -= 1
            if not self.visits[number]:
                del self.visits[number]
            self.worker_group.done(number, self, good)

    def lost(self) -> None:
        """The worker will write nothing more, though it may still use what it visits."""
        if self.worker_group.has(self):
            self.worker_group.fail_without(self)

    def end(self) -> None:
        """The worker has left the group, or its process has exited."""
        self.lost()
        for number in list(self.visits.elements()):
            self.leave(number, good=False)
        self.worker_group.left(self)
