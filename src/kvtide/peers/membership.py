"""Keeps a node a member of its cluster, and knows the other members.

A thread joins, renews the lease three times before it would end, and fetches the list of members each time. When the
lease is lost, because Valkey was away for too long or has lost its data, it joins again under a new epoch.

**One address, one node.** A node that joins first takes the place of whoever has its address: that was an earlier
process of it. One that has to join again, because it lost its lease, does not: a member with its address is another
node then, which is alive. It says so, stays outside, and joins when the other one has gone.

**Without contact**, every member is believed until its lease would have ended, as far as that was heard: the snapshot
becomes empty within one lease, and so does ``own``. To believe a member for too long is safe: whoever reads from it
compares the name in its greeting, and every checksum. It costs a request that fails. Times are measured from before a
question was sent, so that no lease is believed for longer than the server's clock says, whatever its clock shows.

**Measurements.** With each renewal, a node also says what it has measured of the others (``measured``), so that one
command can show that of all. Nothing depends on it: if it fails, nothing is repeated before the next renewal.

**Scrubbing.** With each renewal, a node removes what the dead have published from some buckets of the directory. All
nodes together visit every bucket in half an hour, however many nodes there are, unless Valkey is too slow for that.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvtide import forks
from kvtide.clock import Clock, SystemClock, TurnedClock
from kvtide.tiers.peers.directory import AddressTaken, BlockDirectory, Leases
from kvtide.tiers.peers.directory_scripts import BUCKETS, PARTITIONS
from kvtide.tiers.peers.measurements import Measurement
from kvtide.tiers.peers.members import Member

__all__ = ["Membership", "MembershipStatistics"]

log = logging.getLogger("kvtide.peers")

_RENEWALS = 3
"""How often a lease is renewed before it would end."""
_RETRIES = 12
"""After a failure the next attempt is this part of a lease later."""
_PASS = 1800.0
"""Seconds in which all members together visit all buckets."""
_SLICE = 64
"""Buckets that are scrubbed with one message: the server does nothing else for about a millisecond."""
_LONGEST = 3600.0
"""Maximum sleep in seconds."""

_NOBODY: Mapping[int, Member] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class MembershipStatistics:
    """What a membership did."""

    members: int
    epoch: int
    """0: not a member now."""
    joins: int
    failures: int
    """Steps that failed: Valkey did not answer, refused, or answered nonsense."""
    scrubbed: int
    """Entries of dead members that were removed."""


class Membership:
    """Thread-safe; only ``step`` and ``close`` wait for Valkey."""

    def __init__(
        self,
        directory: BlockDirectory,
        name: bytes,
        address: str,
        *,
        lease: float = 15.0,
        measured: Callable[[], Mapping[str, Measurement]] = dict,
        clock: Clock | None = None,
    ) -> None:
        """``name`` is the store's. An empty ``address``: this node serves nobody, so it never joins, and only follows
        the members. ``measured`` returns what was measured of others, by their addresses."""
        self._directory = directory
        self._name = name
        self._address = address
        self._lease = lease
        self._measured = measured
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._stepping = threading.Lock()
        self._own: tuple[Member, float] | None = None
        """This node as a member, and until when that is known to hold. Written with the lock held."""
        self._last: Member | None = None
        """What this node joined as, if Valkey may still take it for that: also after ``rejoin``."""
        self._leases: Mapping[Member, float] = {}
        """Until when each member is believed."""
        self._snapshot: tuple[Mapping[int, Member], float] = (_NOBODY, math.inf)
        """What ``members`` returns, and until when."""
        self._told: tuple[Member | None, Mapping[int, Member]] = (None, _NOBODY)
        self._followers: tuple[Callable[[], None], ...] = ()
        self._due = self._joined = -math.inf
        self._joins = self._failures = self._scrubbed = 0
        self._failure: Exception | None = None
        """Of the last step; None: it succeeded."""
        self._perhaps = ("", -math.inf)
        """Why it is unknown whether the directory lists this node, after an attempt to join that failed: it may have
        failed in part, or its answer was lost. And until when."""
        self.listed = ""
        """After ``close``: why the directory may list this node until its lease ends; empty: it does not."""
        self._wake = threading.Event()
        self._closed = False
        self._origin = forks.here
        self._thread: threading.Thread | None = None
        if isinstance(self._clock, TurnedClock):
            self._clock.follow(self._wake.set)
        forks.tell(self)

    def __repr__(self) -> str:
        own = self.own
        return f"<Membership {'outside' if own is None else f'number {own.number}'}, {len(self.members())} members>"

    def forked(self) -> None:
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self._own, self._leases, self._snapshot, self._followers = None, {}, (_NOBODY, math.inf), ()

    # -- what is known ------------------------------------------------------------------------------------

    @property
    def own(self) -> Member | None:
        """This node as a member; None while it has no lease that is known to hold."""
        own = self._own
        return own[0] if own is not None and self._clock.monotonic() < own[1] else None

    def members(self) -> Mapping[int, Member]:
        """The live members by number, this node included, as far as known: see the module's docstring."""
        now = self._clock.monotonic()
        found, until = self._snapshot
        if now < until:
            return found
        with self._lock:
            return self._look_again(now)

    def _look_again(self, now: float) -> Mapping[int, Member]:
        """Make the snapshot anew. Call with the lock held."""
        live = {member.number: member for member, end in self._leases.items() if now < end}
        until = min((end for end in self._leases.values() if now < end), default=math.inf)
        found = MappingProxyType(live) if live else _NOBODY
        self._snapshot = (found, until)
        return found

    def statistics(self) -> MembershipStatistics:
        own = self.own
        return MembershipStatistics(
            len(self.members()), own.epoch if own is not None else 0, self._joins, self._failures, self._scrubbed
        )

    def on_change(self, called: Callable[[], None]) -> Callable[[], None]:
        """Call ``called`` whenever ``own`` or ``members()`` have changed, on the thread that noticed. It must not
        block. Call the returned function to stop."""

        def follower() -> None:  # a new object, because one may be added twice
            called()

        with self._lock:
            self._followers = (*self._followers, follower)

        def unfollow() -> None:
            with self._lock:
                self._followers = tuple(one for one in self._followers if one is not follower)

        return unfollow

    def rejoin(self, epoch: int) -> None:
        """Give up this epoch for a new one: what was published under the old one will not be believed any more.
        Nothing happens if this node has another epoch by now."""
        with self._lock:
            if self._own is None or self._own[0].epoch != epoch:
                return
            self._own = None
            # Not at once if it has just joined: something may be wrong that another epoch does not heal.
            self._due = self._joined + self._lease / _RETRIES
        self._wake.set()

    # -- the thread ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        thread = threading.Thread(target=self._run, name="kvtide-membership", daemon=True)
        thread.start()
        self._thread = thread

    def _run(self) -> None:
        while not self._closed:
            self._wake.clear()
            left = self.step()
            if not self._closed:
                self._wake.wait(min(left, _LONGEST))

    def step(self) -> float:
        """What the thread does: what is due now. Returns the seconds until the next is due."""
        with self._stepping:
            if self._closed or self._origin is not forks.here:
                return math.inf
            now = self._clock.monotonic()
            if now >= self._due:
                self._due = now + self._lease / _RENEWALS
                try:
                    self._work(now)
                    failure, self._failure = self._failure, None
                    if failure is not None:
                        log.info("the directory of the cluster can be used again")
                except Exception as e:  # noqa: BLE001 - whatever it is: without this thread the node is no member again
                    self._due = min(self._due, now + self._lease / _RETRIES)
                    self._failed(e)
        self._tell()
        now = self._clock.monotonic()
        own = self._own
        ends = [self._due, self._snapshot[1], *([own[1]] if own is not None and own[1] > now else [])]
        return max(0.0, min(ends) - now)

    def _failed(self, e: Exception) -> None:
        """Log a failure, if the last step has not failed for a like reason."""
        self._failures += 1
        said = self._failure is not None and isinstance(self._failure, AddressTaken) is isinstance(e, AddressTaken)
        self._failure = e
        if said:
            return
        if isinstance(e, AddressTaken):
            log.error("this node is not a member of its cluster: %s", e.strerror)
            return
        log.warning(
            "the directory of the cluster cannot be used: %s; it is tried again",
            self.problem,
            exc_info=None if isinstance(e, OSError) else e,
        )

    @property
    def problem(self) -> str:
        """What the last step failed for; empty: nothing."""
        return "" if self._failure is None else self._reason(self._failure)

    def _reason(self, e: Exception) -> str:
        """What a step failed for."""
        reason = getattr(e, "strerror", None) or repr(e)
        return reason if isinstance(e, AddressTaken) else f"{self._directory.where}: {reason}"

    def _work(self, now: float) -> None:
        try:
            if self._address:
                self._keep(now)
        finally:  # the others are members, whether this node is one or not
            leases = self._fetch()
        if (own := self._own) is not None:
            self._report(own[0], leases)
            self._scrub(leases)

    def _fetch(self) -> Leases:
        sent = self._clock.monotonic()
        leases = self._directory.leases()
        with self._lock:
            self._leases = {member: sent + left for member, left in leases.left.items()}
            self._look_again(sent)
        return leases

    def _keep(self, now: float) -> None:
        """Renew the lease, or join."""
        own = self._own
        if own is not None:
            if self._directory.renew(own[0], self._lease):
                with self._lock:
                    if self._own is own:  # otherwise, ``rejoin`` was called meanwhile
                        self._own = (own[0], now + self._lease)
                return
            log.warning(
                "the lease of this node in the cluster was lost: Valkey was away or lost data, or another node says "
                "that it serves at %s; it tries to join again",
                self._address,
            )
            with self._lock:
                self._own = self._last = None
        sent = self._clock.monotonic()
        try:
            member = self._directory.join(self._name, self._address, self._lease, again=self._joins > 0)
        except Exception as e:
            taken = isinstance(e, AddressTaken)
            self._perhaps = ("", -math.inf) if taken else (self._reason(e), self._clock.monotonic() + self._lease)
            raise
        self._perhaps = ("", -math.inf)
        self._joins += 1
        with self._lock:
            self._joined = sent
            self._own, self._last = (member, sent + self._lease), member
        log.info("this node is a member of its cluster now, number %d at %s", member.number, member.address)

    def _report(self, own: Member, leases: Leases) -> None:
        measured = self._measured()
        others = {member.epoch: measured[member.address] for member in leases.left if member.address in measured}
        others.pop(own.epoch, None)
        if others and self._clock.monotonic() < self._due:  # else there is no time for what need not be
            with contextlib.suppress(OSError):
                self._directory.report(own, others)

    def _scrub(self, leases: Leases) -> None:
        """Until the next renewal is due: a slow server is scrubbed more slowly."""
        left = math.ceil(PARTITIONS * BUCKETS * self._lease / _RENEWALS / _PASS / max(1, len(leases.left)))
        while left > 0 and not self._closed and self._clock.monotonic() < self._due:
            self._scrubbed += self._directory.scrub(min(left, _SLICE), leases)
            left -= _SLICE

    def _tell(self) -> None:
        state = (self.own, self.members())
        if state == self._told:
            return
        self._told = state
        for follower in self._followers:
            try:
                follower()
            except Exception:
                log.exception("a follower of the cluster's members failed")

    def close(self) -> None:
        """Leave, and end the thread. A second call, or one in a forked child, does nothing."""
        if self._origin is not forks.here:
            return
        self._closed = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._stepping:
            with self._lock:
                last, self._own, self._last = self._last, None, None
                self._leases = {}
                self._look_again(self._clock.monotonic())
            if last is not None:
                try:
                    self._directory.leave(last)
                except Exception as e:  # noqa: BLE001 - whatever it is: its lease ends by itself
                    self.listed = self._reason(e)
            elif self._clock.monotonic() < self._perhaps[1]:
                self.listed = self._perhaps[0]
