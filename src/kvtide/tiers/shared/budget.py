"""The byte budget of storage that many nodes write to: one node is elected *budget coordinator* and grants write
credits.

A node may not write without credit, and only the coordinator grants it: a number of bytes, for a short time. The
coordinator knows what is in storage by listing it, and what may still arrive by the credits it has granted; the sum of
both never exceeds the budget. To grant more it first removes the least recently used blocks. Without a coordinator
there is no credit: nothing is stored, and loads work as ever.

*When blocks are removed.* A node asks for the bytes of blocks that it has and could not write, and gives back what it
did not use (credits.py). The coordinator removes blocks only for such asks, and only as many bytes as are missing after
credit that was given back, or has expired, is counted as free. Without asks nothing is removed, unless storage holds
more than its budget. An ask that could not be met even by removing everything removes nothing.

All messages are the names of small blobs in the storage itself (``CoordinationBlobs``)::

    evictor.TERM.BEAT          heartbeat of the coordinator: a new one every few seconds; holds its statistics
    ask.TERM.WHO.N.BYTES       a node asks this coordinator for credit
    grant.TERM.WHO.N.BYTES     and gets it
    back.TERM.WHO.N.BYTES      a node has ended all writes under grant N, begins no more, and has not used these bytes
    used.WHO.N                 holds the names of blobs that a node has read or written
    evicted.TERM.N             holds the names of blobs that the coordinator removes; see eviction_log.py

*Election.* Of all nodes that create the first beat of a term, one succeeds. A node that sees the same last beat for a
whole lease, by its own clock, may try the next term. Clocks need not agree, only run equally fast.

*Why the budget holds when a coordinator dies, or is stopped and resumes long after.* A credit ends one lifetime after
the node *looked up* the coordinator, not after it was granted. A node that looks after the new term began sees it, and
asks the new coordinator. So one lifetime after its election all credits of its predecessors have ended, however late
those still write grants. Until then the new coordinator grants none, and then it lists the storage.

*Which bytes are counted.* What a listing finds, plus every credit that was not over when the listing began, in full: a
part of it may be in the listing already, and is then counted twice until the next one. A credit is over when its
lifetime has passed, or a third of a lifetime after its node wrote ``back`` (a filesystem's client may show the writes
of another host that much later). Between ``back`` and its end only the bytes that were used are counted. The credit of
a node that died counts in full until its lifetime has passed.

Coordination blobs and unfinished files count too, and a part of the budget is kept free for those that the coordinator
does not know of yet. A write that began under a credit and takes longer than its lifetime, on storage that hangs, is
not covered: that is at most as many blocks as a node writes at a time.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import msgspec

from kvtide.clock import Clock, SystemClock
from kvtide.tiers.format.scratch import Scratch
from kvtide.tiers.shared.blobs import Blobs
from kvtide.tiers.shared.eviction_log import PAGE, PAGE_BYTES, PAGES, names_in, publish

__all__ = [
    "LOGS",
    "RESIGNED",
    "BudgetCoordinator",
    "BudgetCoordinatorStatistics",
    "CoordinationBlob",
    "CoordinationBlobs",
    "coordination_reserve",
    "is_block",
    "largest_block",
    "largest_credit",
]

log = logging.getLogger("kvtide.steward")

_PATIENCE = 3600.0
"""Seconds that a listing may take: storage may be large."""
_PART = 16
"""One credit for several blocks is at most this fraction (1/n) of the budget."""
_RESERVE = 64
"""This fraction (1/n) of the budget is never granted: it leaves space for coordination blobs written since the last
listing."""
_LOOK = 60.0
"""Seconds after which storage is listed even without asks, in case the budget was lowered."""
_LITTER = 3600.0
"""Age in seconds after which an unfinished file is considered abandoned."""
LOGS = 256
"""Number of the latest usage logs that are kept for a successor."""
_TOGETHER = 32
"""Blobs that are deleted between two checks of the clock: slow storage must not make a coordinator seem dead."""
RESIGNED = 9_999_999_999
"""The beat of a coordinator that resigns."""
_BEATS = "evictor."
_STATISTICS_BYTES = 4096
"""The maximum size of a beat, in bytes."""
_DIGEST = 64
"""Characters in the name of a block."""


def is_block(name: str) -> bool:
    """Whether a blob is a block, not a coordination blob."""
    return len(name) == _DIGEST and "." not in name


def largest_credit(budget: int) -> int:
    """The maximum bytes of one credit for several blocks. A larger credit is for one large block."""
    return budget // _PART


def coordination_reserve(budget: int) -> int:
    """The bytes of a budget that are kept for coordination blobs."""
    return budget // _RESERVE


def largest_block(budget: int) -> int:
    """The largest block, in bytes, that can be written at all."""
    # A page and a beat must fit before anything is removed.
    return budget - coordination_reserve(budget) - PAGE_BYTES - _STATISTICS_BYTES


@dataclass(frozen=True, slots=True)
class CoordinationBlob:
    """A message in the name of a blob."""

    name: str
    term: int
    who: str = ""
    number: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class BudgetCoordinatorStatistics:
    """The state of a storage's byte budget, as its coordinator knows it; counts are since that process began."""

    who: str = ""
    """The coordinator: host and process id. Empty: there is none, or it is another process."""
    term: int = 0
    budget: int = 0
    blocks: int = 0
    bytes_used: int = 0
    """Bytes of all blobs at the last listing, less what was removed since."""
    bytes_unfinished: int = 0
    """Of these, bytes of files that are being written, or were left unfinished."""
    bytes_granted: int = 0
    """Credits that may still be used, or were not yet over at the last listing."""
    blocks_removed: int = 0
    leftovers_removed: int = 0
    """Unfinished files of writers that died."""
    terms_served: int = 0


def _beat(term: int, beat: int) -> str:
    return f"{_BEATS}{term:010d}.{beat:010d}"


def _beats(names: Iterable[str]) -> list[tuple[int, int]]:
    """Returns the beats among names; other names with that prefix were written by something else."""
    found: list[tuple[int, int]] = []
    for name in names:
        match name.split("."):
            case [_, term, beat] if term.isdecimal() and beat.isdecimal() and name == _beat(int(term), int(beat)):
                found.append((int(term), int(beat)))
    return sorted(found)


@dataclass(slots=True)
class _Grant:
    """A credit that may still be used, or was not yet over at the last listing."""

    made: float
    nbytes: int
    """Bytes that may be written under it or, once it was given back, that were."""
    given_back: float | None = None
    """When the coordinator saw the node's message that nothing more is written under it."""


class CoordinationBlobs:
    """Reads and writes coordination blobs. A coordinator may be silent for ``lease`` seconds, and a credit lasts for
    ``lifetime``."""

    def __init__(self, blobs: Blobs, lease: float) -> None:
        self.blobs = blobs
        self.lease = lease
        self.lifetime = 2 * lease
        self.timeout = lease

    def beats(self) -> list[tuple[int, int]]:
        """Terms and beats, the last one last."""
        return _beats(name for name, _, _ in self.blobs.list(self.timeout, _BEATS))

    def beats_and_pages(self) -> tuple[list[tuple[int, int]], list[str]]:
        """Terms and beats, and the names of the eviction log's pages."""
        names = [name for name, _, _ in self.blobs.list(self.timeout, "evict")]
        return _beats(names), [name for name in names if name.startswith(PAGES)]

    def beat(self, term: int, beat: int, about: BudgetCoordinatorStatistics) -> bool:
        try:
            return self.blobs.create(_beat(term, beat), msgspec.json.encode(about), self.timeout)
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # A full filesystem still takes an empty file; and the node that makes space in it must be elected.
            return self.blobs.create(_beat(term, beat), b"", self.timeout)

    def forget_beats(self, beats: list[tuple[int, int]]) -> None:
        self.blobs.delete([_beat(*beat) for beat in beats], self.timeout)

    def read_statistics(self, term: int, beat: int) -> BudgetCoordinatorStatistics | None:
        """The statistics in a coordinator's beat; None if it is gone, invalid, or cannot be read now."""
        data = Scratch().get(_STATISTICS_BYTES)
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            got = self.blobs.read_part(_beat(term, beat), data, 0, self.timeout)
            return msgspec.json.decode(bytes(data[: max(0, got)]), type=BudgetCoordinatorStatistics)
        return None

    def find(self, kind: str, term: int | None = None, who: str = "") -> list[CoordinationBlob]:
        """Asks, grants or returned credits: of one term, or all; of one node, or all."""
        prefix = f"{kind}." if term is None else f"{kind}.{term:010d}.{who}"
        found = []
        for name, _, _ in self.blobs.list(self.timeout, prefix):
            match name.split("."):
                case [_, of, whose, number, nbytes] if of.isdecimal() and number.isdecimal() and nbytes.isdecimal():
                    found.append(CoordinationBlob(name, int(of), whose, int(number), int(nbytes)))
        return found

    def create(self, kind: str, term: int, who: str, number: int, nbytes: int) -> CoordinationBlob:
        name = f"{kind}.{term:010d}.{who}.{number:010d}.{nbytes}"
        self.blobs.create(name, b"", self.timeout)
        return CoordinationBlob(name, term, who, number, nbytes)

    def delete(self, coordination: list[CoordinationBlob]) -> None:
        if coordination:
            self.blobs.delete([blob.name for blob in coordination], self.timeout)


class BudgetCoordinator:
    """Stands for election, and does the coordinator's work when elected. Call ``step`` a few times in a lease."""

    def __init__(self, coordination: CoordinationBlobs, budget: int, clock: Clock | None = None) -> None:
        self._coordination = coordination
        self._blobs = coordination.blobs
        self._budget = budget
        self._clock = clock or SystemClock()
        self._seen: tuple[int, int] = (0, 0)
        self._seen_at = self._clock.monotonic()
        self._term = self._beat = 0
        """Its own term and beat; 0: it is not coordinator."""
        self._pages = 0
        """Pages of the eviction log that it has written in this term."""
        self._beaten = self._gives_from = 0.0
        self._blocks: dict[str, tuple[int, float]] = {}
        """Of all blocks: bytes, and when they were written."""
        self._bytes = 0
        """Bytes of all blobs."""
        self._listed = -1.0
        """When the last listing began; negative: there was none in this term."""
        self._grants: dict[tuple[str, int], _Grant] = {}
        """By node and number; only those that were not over at the last listing."""
        self._asked: dict[str, float] = {}
        """When asks were first seen, by the names of their blobs."""
        self._order: list[tuple[tuple[float, float], str]] = []
        """Blocks with their rank when they were sorted, the next to remove last; empty: to be sorted again."""
        self._took = 0.0
        """Seconds that the last listing took."""
        self._used: dict[str, float] = {}
        self._folded: set[str] = set()
        self._who = f"{socket.gethostname()} {os.getpid()}"
        self._unfinished = 0
        self._removed = self._leftovers = self._served = 0

    def __repr__(self) -> str:
        return f"<BudgetCoordinator {f'of term {self._term}' if self._term else 'not elected'}>"

    def statistics(self) -> BudgetCoordinatorStatistics:
        done = BudgetCoordinatorStatistics(
            blocks_removed=self._removed, leftovers_removed=self._leftovers, terms_served=self._served
        )
        if not self._term:
            return done
        return replace(
            done,
            who=self._who,
            term=self._term,
            budget=self._budget,
            blocks=len(self._blocks),
            bytes_used=self._bytes,
            bytes_unfinished=self._unfinished,
            bytes_granted=self._granted,
        )

    def step(self) -> None:
        """Stand for election, or serve. Raises OSError if storage fails."""
        beats = self._coordination.beats()
        last = beats[-1] if beats else (0, 0)
        now = self._clock.monotonic()
        if self._term and last[0] > self._term:
            log.warning(
                "another process keeps the byte budget of %s now: this one was silent for too long", self._blobs
            )
            self._term = 0
        if self._term:
            self._live(beats)
            self._serve()
        elif last != self._seen:
            self._seen, self._seen_at = last, now
        elif not beats or last[1] == RESIGNED or now - self._seen_at >= self._coordination.lease:
            self._stand(last[0] + 1, beats)

    def resign(self) -> None:
        """Let another node be elected at once."""
        term, self._term = self._term, 0
        if term:
            self._coordination.beat(term, RESIGNED, self.statistics())

    def _stand(self, term: int, beats: list[tuple[int, int]]) -> None:
        if not self._coordination.beat(term, 0, BudgetCoordinatorStatistics(self._who, term, self._budget)):
            return
        now = self._clock.monotonic()
        log.info("this process keeps the byte budget of %s, term %d", self._blobs, term)
        self._term, self._beat, self._pages, self._beaten = term, 0, 0, now
        self._gives_from = now + (self._coordination.lifetime if beats else 0.0)
        self._listed, self._grants, self._blocks, self._bytes = -1.0, {}, {}, 0
        self._asked, self._order = {}, []
        self._served += 1
        self._coordination.forget_beats(beats)

    def _live(self, beats: list[tuple[int, int]] | None = None) -> None:
        """Write a heartbeat, if it is time for one."""
        now = self._clock.monotonic()
        if now - self._beaten >= self._coordination.lease / 3:
            self._coordination.beat(self._term, self._beat + 1, self.statistics())
            self._beat, self._beaten = self._beat + 1, now
            self._coordination.forget_beats(beats or [(self._term, self._beat - 1)])

    # -- serving ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        self._fold()
        self._take_back()
        asks = self._asks()
        now = self._clock.monotonic()
        if now < self._gives_from:
            return
        most = largest_credit(self._budget)
        wanted = sum(ask.nbytes for ask in asks)
        if self._listed < 0 or now - self._listed > self._listing_age(now, self._free < wanted):
            self._list()
        # An ask for more than a usual credit is for one block, for which a partial credit is useless.
        room = self._free + sum(nbytes for nbytes, _ in self._blocks.values())
        served: list[CoordinationBlob] = []
        for ask in asks:
            if ask.nbytes <= most or ask.nbytes <= room:
                served.append(ask)
                room -= ask.nbytes
        if served:
            # Credits counted twice, beyond a part of the budget, are not compensated by removing blocks: the next
            # listing ends the double count.
            twice = sum(grant.nbytes for grant in self._grants.values() if grant.made < self._listed)
            self._remove(sum(ask.nbytes for ask in served) - self._free - max(0, twice - most))
        # Credits may be in the listing already, so without an ask only the bytes certainly in storage count.
        self._remove(self._bytes + PAGE_BYTES + _STATISTICS_BYTES - self._budget)
        for n, ask in enumerate(served):
            nbytes = ask.nbytes if ask.nbytes <= self._free else 0
            if ask.nbytes <= most:
                nbytes = min(ask.nbytes, self._free // (len(served) - n))
            if nbytes > 0:
                self._grants[ask.who, ask.number] = _Grant(self._clock.monotonic(), nbytes)
                self._coordination.create("grant", self._term, ask.who, ask.number, nbytes)
                self._coordination.delete([ask])
            self._live()

    def _asks(self) -> list[CoordinationBlob]:
        """The asks that are to be served.

        A node withdraws an ask when it was not answered for half a lifetime, or when it no longer has the blocks. An
        ask that was seen for longer belongs to a node that died.
        """
        asks, now = self._coordination.find("ask"), self._clock.monotonic()
        self._asked = {ask.name: self._asked.get(ask.name, now) for ask in asks if ask.term == self._term}
        since = now - self._coordination.lifetime / 2
        largest = largest_block(self._budget)
        good: list[CoordinationBlob] = []
        bad: list[CoordinationBlob] = []
        for ask in asks:
            if ask.term > self._term:
                continue  # for a successor that this process has not seen yet
            fine = self._asked.get(ask.name, 0.0) >= since and 0 < ask.nbytes <= largest and ask.term == self._term
            (good if fine else bad).append(ask)
        self._coordination.delete(bad)
        return good

    def _take_back(self) -> None:
        """Count as free what nodes have not used of their credits."""
        coordination = [blob for blob in self._coordination.find("back") if blob.term <= self._term]
        for blob in coordination:
            grant = self._grants.get((blob.who, blob.number))
            if blob.term == self._term and grant is not None and grant.given_back is None:
                grant.nbytes = max(0, grant.nbytes - blob.nbytes)
                grant.given_back = self._clock.monotonic()
        self._coordination.delete(coordination)

    def _listing_age(self, now: float, short: bool) -> float:
        """Seconds that must pass after the last listing before the next."""
        if not short:
            return _LOOK
        often = 10 * self._took
        if any(grant.given_back is None and self._over(grant, now) for grant in self._grants.values()):
            return often  # a credit has expired: it is free, if nothing was written under it
        return max(self._coordination.lifetime / 2, often)

    def _over(self, grant: _Grant, when: float) -> bool:
        """Whether a listing that begins at ``when`` includes everything written under a credit before."""
        if grant.given_back is not None and grant.given_back + self._coordination.lifetime / 3 <= when:
            return True
        return grant.made + self._coordination.lifetime <= when

    @property
    def _granted(self) -> int:
        return sum(grant.nbytes for grant in list(self._grants.values()))

    @property
    def _free(self) -> int:
        """Bytes that may be granted; negative if stored and granted bytes exceed the budget."""
        return largest_block(self._budget) - self._bytes - self._granted

    def _list(self) -> None:
        """List the storage."""
        self._listed = self._clock.monotonic()
        blocks: dict[str, tuple[int, float]] = {}
        leftovers, unfinished = self._blobs.tidy(_LITTER, _PATIENCE, self._live)
        total = unfinished
        for name, nbytes, written in self._blobs.list(_PATIENCE):
            total += nbytes
            if is_block(name):
                blocks[name] = nbytes, written
            self._live()
        self._blocks, self._bytes, self._unfinished = blocks, total, unfinished
        self._leftovers += leftovers
        self._took = self._clock.monotonic() - self._listed
        self._grants = {whose: grant for whose, grant in self._grants.items() if not self._over(grant, self._listed)}
        self._order = []
        # Nodes delete the grant blobs they received, except nodes that died.
        grants = [blob for blob in self._coordination.find("grant") if blob.term <= self._term]
        self._coordination.delete([p for p in grants if p.term < self._term or (p.who, p.number) not in self._grants])
        self._used = {name: when for name, when in self._used.items() if name in blocks}

    def _remove(self, nbytes: int) -> None:
        """Remove the least recently used blocks, ``nbytes`` together."""
        victims = self._victims(nbytes)
        for i in range(0, len(victims), PAGE):
            self._delete(victims[i : i + PAGE])

    def _victims(self, nbytes: int) -> list[str]:
        victims: dict[str, None] = {}
        is_sorted = False
        while nbytes > 0:
            if not self._order:
                if is_sorted:
                    break
                self._order = sorted(
                    ((self._rank(name), name) for name in self._blocks if name not in victims), reverse=True
                )
                is_sorted = True
                continue
            rank, name = self._order.pop()
            if (
                name in self._blocks and self._rank(name) == rank
            ):  # else it was removed, or used, since they were sorted
                victims[name] = None
                nbytes -= self._blocks[name][0]
        return list(victims)

    def _rank(self, name: str) -> tuple[float, float]:
        """The block with the lowest rank is removed first."""
        written = self._blocks[name][1]
        # Of blocks used together, the last written goes first: it may be a child of the others.
        return max(self._used.get(name, 0.0), written), -written

    def _delete(self, names: Sequence[str]) -> None:
        with contextlib.suppress(OSError):  # full storage takes no page, but must be emptied all the same
            self._pages += 1
            self._bytes += publish(self._blobs, self._term, self._pages, names, self._coordination.timeout)
        for i in range(0, len(names), _TOGETHER):
            some = names[i : i + _TOGETHER]
            self._blobs.delete(some, _PATIENCE)
            for name in some:
                self._bytes -= self._blocks.pop(name)[0]
                self._used.pop(name, None)
            self._removed += len(some)
            self._live()

    def _fold(self) -> None:
        """Read the nodes' usage logs."""
        logs = sorted(self._blobs.list(self._coordination.timeout, "used."), key=itemgetter(2))
        for name, nbytes, when in logs:
            if name not in self._folded:
                for used in names_in(self._blobs, name, nbytes, self._coordination.timeout) or ():
                    self._used[used] = max(when, self._used.get(used, 0.0))
                self._folded.add(name)
                self._live()
        self._folded &= {name for name, _, _ in logs}
        if len(logs) > LOGS:
            self._blobs.delete([name for name, _, _ in logs[:-LOGS]], self._coordination.timeout)
